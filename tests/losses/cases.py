"""Losses whose gradient their values do not tell, rebuilt as small as they get; each with the verdict that it must get.

Numbers before a name are of the rows of trainings that broke the package; shapes of our own around a row share its
number. A loss is a function of the logits, the batch and the bare model, so that it can stand in the model, in a
compute_loss, in a compute_loss_func, beside super()'s, and in a loop.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Bound before anything is patched, as modules bind it that are imported first.
from torch.nn.functional import cross_entropy as early_cross_entropy
from torch.utils.checkpoint import checkpoint

from hf_accum_fix import Items, LossContract, Reduction
from tests.losses import models
from tests.losses.models import bare, model_itself
from tests.losses.verdicts import FLOAT32, HALVES, PAIRS, RATE, SINGLES, UNEVEN, Verdict
from tests.numerics.heads import HEADS, Batch, Sample, TokenModel, seeded, shifted_cross_entropy
from tests.numerics.heads.head import Head, collate
from tests.numerics.heads.samples import LENGTHS, generator
from tests.numerics.parity import StockRecorder
from tests.trainers import runs, terms
from tests.trainings import Case, FullLoss, above, computing

EXACT, GRADIENT, EITHER, INEXACT, NAMED = Verdict

#: ``(logits, batch, model)`` -> the loss of a micro-batch, or of the whole global batch.
Loss = Callable[[Tensor, Batch, Any], Tensor]
THREE = (PAIRS, SINGLES, UNEVEN)


# --- samples ------------------------------------------------------------------------------------------------------


def texts(window: int = 0) -> list[Sample]:
    """Eight ragged texts with masked prompts, and a class of each."""
    return [
        {**sample, "kind": torch.tensor((i * i + i // 3 + window) % 4)} for i, sample in enumerate(models.texts(window))
    ]


def several(count: int, make: Callable[[int], list[Sample]] = texts) -> list[list[Sample]]:
    return [make(window) for window in range(count)]


def without_targets(samples: Sequence[Sample], rows: Sequence[int] = range(8)) -> list[Sample]:
    """These have none: nothing of their text is to be predicted."""
    blank = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples]
    return [blank[i] if i in rows else sample for i, sample in enumerate(samples)]


# --- terms --------------------------------------------------------------------------------------------------------


def tokens(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """The mean over next tokens."""
    return shifted_cross_entropy(logits, batch["labels"])


def classes(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """The mean over texts."""
    return F.cross_entropy(logits[:, 1, :4], batch["kind"])


def squares(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return 0.01 * models.squares(model)


def each_token(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every next token its loss, and whether it is a target [b, L - 1]."""
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none"), labels != -100


def each_class(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits[:, 1, :4], batch["kind"], reduction="none")


def guarded(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """The mean over next tokens, zero where there is none."""
    losses, valid = each_token(logits, batch)
    return (losses * valid).sum() / valid.sum().clamp(min=1)


def rows_of(batch: Batch) -> Iterator[Batch]:
    for row in range(len(batch["input_ids"])):
        yield {key: value[row : row + 1] for key, value in batch.items()}


def each_row(logits: Tensor, batch: Batch) -> list[Tensor]:
    """Of each text the mean over its tokens."""
    return [tokens(logits[row : row + 1], one) for row, one in enumerate(rows_of(batch))]


def both(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    return tokens(logits, batch) + classes(logits, batch)


def times(factor: float, loss: Loss = tokens) -> Loss:
    return lambda logits, batch, model: factor * loss(logits, batch, model)


def of_two(combine: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """What is made of the mean over tokens and the mean over texts."""
    return lambda logits, batch, model: combine(tokens(logits, batch), classes(logits, batch))


def of_one(change: Callable[[Tensor], Tensor], loss: Loss = tokens) -> Loss:
    return lambda logits, batch, model: change(loss(logits, batch, model))


# --- models -------------------------------------------------------------------------------------------------------


class Texts(TokenModel):
    """Logits; with labels also the loss it was made with. It takes no number, so that stock divides by G."""

    def __init__(self, loss: Loss = tokens, **learnt: Any) -> None:
        super().__init__()
        self.of = loss
        for name, value in learnt.items():
            setattr(self, name, nn.Parameter(torch.tensor(value)))

    def forward(
        self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None, kind: Any = None, task: Any = None
    ) -> dict[str, Any]:
        return self.found(input_ids=input_ids, labels=labels, attention_mask=attention_mask, kind=kind, task=task)

    def found(self, **inputs: Any) -> dict[str, Any]:
        logits = self.logits(inputs["input_ids"])
        batch = {key: value for key, value in inputs.items() if value is not None}
        return {"logits": logits, **({"loss": self.of(logits, batch, self)} if "labels" in batch else {})}


class Takes(Texts):
    """Takes any keyword, and drops the number: stock does not divide by G, and expects that it is divided by."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        inputs.pop("num_items_in_batch", None)
        return self.found(input_ids=input_ids, **inputs)


class ByNumber(Texts):
    """Divides the sum over its tokens by the number, where there is one."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        logits = self.logits(input_ids)
        if labels is None:
            return {"logits": logits}
        loss = shifted_cross_entropy(logits, labels, reduction="mean" if num_items_in_batch is None else "sum")
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


class ForFunctions(Takes):
    """Hands its inputs on, for a compute_loss_func, which gets nothing else."""

    def found(self, **inputs: Any) -> dict[str, Any]:
        logits = self.logits(inputs["input_ids"])
        return {"logits": logits, "inputs": inputs, "model": self}


def holding(loss: Loss, head: type[Texts] = Texts, **learnt: Any) -> Callable[[], nn.Module]:
    return lambda: head(loss, **learnt)


def even(model: type[Texts] = Texts, **learnt: Any) -> Callable[[], nn.Module]:
    """Starts with nearly even probabilities."""

    def made() -> nn.Module:
        built = model(**learnt)
        with torch.no_grad():
            built.head.weight.mul_(0.01)
            built.head.bias.zero_()
        return built

    return made


# --- where a loss stands ------------------------------------------------------------------------------------------


def full(loss: Loss) -> FullLoss:
    return lambda model, batch, step: loss(model.logits(batch["input_ids"]), batch, model)


def own(loss: Loss) -> type:
    """A compute_loss that never calls super."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        return loss(outputs["logits"], inputs, bare(model)), outputs

    return computing(compute)


def plus(term: Loss, *, number: bool = True) -> type:
    return above(lambda loss, logits, batch, t: loss + term(logits, batch, bare(t.model)), number=number)


def func(loss: Loss) -> dict[str, Any]:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss(outputs["logits"], {**outputs["inputs"], "labels": labels}, outputs["model"])

    return {"compute_loss_func": compute}


def attack(
    name: str, verdict: Verdict, loss: FullLoss, model: Any, windows: Any, trainer: Any = StockRecorder, **more: Any
) -> Case:
    given = {"rate": RATE, "cuts": (PAIRS, SINGLES), **more}
    return Case(name, loss, model, windows, trainer, verdict=verdict, **given)


def in_own(name: str, verdict: Verdict, loss: Loss, *, head: type[Texts] = Texts, **more: Any) -> Case:
    """In a compute_loss of one's own."""
    learnt = more.pop("learnt", {})
    model = more.pop("model", lambda: head(**learnt))
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-own", verdict, model=model, trainer=own(loss), **given)


def in_model(name: str, verdict: Verdict, loss: Loss, *, head: type[Texts] = Texts, **more: Any) -> Case:
    """In the model, by the Trainer and by a loop."""
    learnt = more.pop("learnt", {})
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-model", verdict, model=holding(loss, head, **learnt), looped=True, **given)


def in_func(name: str, verdict: Verdict, loss: Loss, **more: Any) -> Case:
    """In a compute_loss_func; stock trains G times what it returns."""
    learnt = more.pop("learnt", {})
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-func", verdict, model=lambda: ForFunctions(**learnt), given=func(loss), **given)


def in_super(name: str, verdict: Verdict, trainer: type, loss: Loss, *, head: type[Texts] = Texts, **more: Any) -> Case:
    """Around super's; the whole of it is given as well."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-super", verdict, model=head, trainer=trainer, **given)


# --- 1: constants that equal 1/G ----------------------------------------------------------------------------------

_INITIAL: dict[str, Any] = {}


def from_initial(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """KL from the model as it was at first: zero there, and so is its gradient."""
    if not _INITIAL:
        _INITIAL["model"] = seeded(Texts)().requires_grad_(False)
    others = _INITIAL["model"].logits(batch["input_ids"])
    return models.divergence(logits, others, models.attended(batch))


def half_and_kl(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return 0.5 * tokens(logits, batch) + 0.5 * from_initial(logits, batch, model)


def two_views(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Two readings of a text, and the mean of their losses."""
    return (tokens(logits, batch) + tokens(logits.tanh(), batch)) / 2


ONE_OVER_G = [
    in_own("1-half", NAMED, times(0.5), cuts=(HALVES,)),
    in_own("1-half-of-classes", NAMED, times(0.5, classes), cuts=(HALVES,), right=(HALVES,)),
    in_own("1-quarter", NAMED, times(0.25), cuts=(PAIRS,)),
    in_own("1-quarter-of-classes", NAMED, times(0.25, classes), cuts=(PAIRS,), right=(PAIRS,)),
    in_own("1-over-eight", NAMED, of_one(lambda loss: loss / 8), cuts=(SINGLES,)),
    in_own("1-quarter-tensor", NAMED, of_one(lambda loss: loss * torch.tensor(0.25)), cuts=(PAIRS, UNEVEN)),
    in_own("1-half-of-half", NAMED, times(0.5, times(0.5)), cuts=(PAIRS,)),
    in_own("1-half-and-kl", NAMED, half_and_kl, cuts=(HALVES,), windows=several(2)),
    in_own("1-half-of-both", NAMED, times(0.5, both), cuts=(HALVES,)),
    in_own("1-of-one-term", EITHER, of_two(lambda a, c: a + 0.25 * c), cuts=(PAIRS,)),
    in_own("1-mean-of-two", EITHER, of_two(lambda a, c: torch.stack([a, c]).mean()), cuts=(HALVES,)),
    in_own("1-lerp", EITHER, of_two(lambda a, c: torch.lerp(a, c, 0.5)), cuts=(HALVES,)),
    in_super("1-half", NAMED, above(lambda loss, *_: 0.5 * loss), times(0.5), cuts=(HALVES,)),
    in_super(
        "1-half-by-number",
        NAMED,
        above(lambda loss, *_: 0.5 * loss),
        times(0.5),
        head=ByNumber,
        cuts=(HALVES,),
        right=(HALVES,),
    ),
    in_func("1-half", NAMED, times(0.5), cuts=(HALVES,)),
    # No 1/G at these cuts.
    in_own("1-half-elsewhere", EXACT, times(0.5), cuts=(PAIRS, SINGLES)),
    in_own("1-quarter-elsewhere", EXACT, times(0.25), cuts=(HALVES, SINGLES)),
    # A model knows no G.
    in_model("1-half", EXACT, times(0.5), cuts=(HALVES,)),
    in_model("1-half-of-both", EXACT, times(0.5, both), cuts=(HALVES,)),
    in_model("1-two-views", EXACT, two_views, cuts=(HALVES, PAIRS)),
    in_model("1-quarter", EXACT, times(0.25), cuts=(PAIRS,)),
]


# --- 2: a number of steps kept from the arguments -----------------------------------------------------------------


class Cached(StockRecorder):
    """Divides by G as it was when the trainer was made, on a head for which stock does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ga = self.args.gradient_accumulation_steps

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.ga


class CachedFactor(Cached):
    def share(self, loss: Tensor) -> Tensor:
        return loss * (1 / self.ga)


class CachedTensor(Cached):
    def share(self, loss: Tensor) -> Tensor:
        return loss / torch.tensor(float(self.ga))


class CachedArguments(Cached):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mine = copy.copy(self.args)

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.mine.gradient_accumulation_steps


def kept(loss: Loss, base: type = Cached) -> type:
    class Kept(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            found = self.share(loss(outputs["logits"], inputs, bare(model)))
            return (found, outputs) if return_outputs else found

    return Kept


class CachedSuper(Cached):
    """Asks super without the number."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = self.share(loss)
        return (loss, outputs) if return_outputs else loss


class CachedFunc(Cached):
    """A compute_loss_func that has closed over G."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return self.share(shifted_cross_entropy(outputs["logits"], labels))

        self.compute_loss_func = compute


class Declared(kept(tokens)):  # type: ignore[misc]
    """Says so, by an attribute that newer releases read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = True


def cached(name: str, trainer: type, loss: Loss, head: type[Texts] = Takes, **more: Any) -> Case:
    given = {"windows": several(1), **more}
    return attack(f"2-{name}", NAMED, full(loss), head, trainer=trainer, **given)


CACHED = [
    cached("tokens", kept(tokens), tokens),
    cached("classes", kept(classes), classes, right=(PAIRS, SINGLES)),
    cached("both", kept(both), both),
    cached("super", CachedSuper, tokens, ByNumber),
    cached("factor", kept(tokens, CachedFactor), tokens),
    cached("tensor", kept(tokens, CachedTensor), tokens),
    cached("arguments", kept(classes, CachedArguments), classes, right=(PAIRS, SINGLES)),
    cached("func", CachedFunc, tokens),
    cached("uneven", kept(tokens), tokens, cuts=(UNEVEN,)),
    attack("2-declared", EITHER, full(tokens), Takes, several(1), Declared),
]


# --- 3: stop-gradients --------------------------------------------------------------------------------------------


def balanced(a: Tensor, c: Tensor) -> Tensor:
    """As large as the other, as seen from here."""
    return a + c * (a / c).detach()


def each_one(a: Tensor, c: Tensor) -> Tensor:
    """Over its own sum without gradient, which adds up as counts do: this one could be exact."""
    return a / a.detach() + c / c.detach()


def softly(a: Tensor, c: Tensor) -> Tensor:
    losses = torch.stack([a, c])
    return (losses.detach().softmax(0) * losses).sum()


def straight_through(a: Tensor, c: Tensor) -> Tensor:
    """The value of one, the gradient of both."""
    return a + c - c.detach()


def detached_focal(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    return ((1 - (-losses).exp().detach()) ** 2 * losses)[valid].mean()


def squared_rows(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Each text's by itself."""
    losses = each_class(logits, batch)
    return (losses.detach() * losses).mean()


def by_probability(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """DFT: each token by the probability that it has now."""
    losses, valid = each_token(logits, batch)
    return ((-losses).exp().detach() * losses * valid).sum() / valid.sum()


STOPPED = [
    in_own("3-balanced", INEXACT, of_two(balanced), cuts=THREE),
    in_own("3-each-one", EITHER, of_two(each_one)),
    in_own("3-softly", INEXACT, of_two(softly)),
    in_own("3-times-itself", INEXACT, of_one(lambda a: a * a.detach())),
    in_own("3-by-norm", INEXACT, of_two(lambda a, c: (a + c) / torch.stack([a, c]).norm().detach())),
    in_own("3-by-item", INEXACT, of_two(lambda a, c: a + c * (a.item() / c.item()))),
    in_model("3-balanced", INEXACT, of_two(balanced)),
    in_model("3-each-one", EITHER, of_two(each_one)),
    in_model("3-itself", EITHER, of_one(lambda a: a / a.detach())),
    in_func("3-balanced", INEXACT, of_two(balanced)),
    in_func("3-itself", EITHER, of_one(lambda a: a / a.detach())),
    in_super("3-itself", EITHER, above(lambda loss, *_: loss / loss.detach()), of_one(lambda a: a / a.detach())),
    in_super(
        "3-balanced",
        INEXACT,
        above(lambda loss, logits, batch, _: balanced(loss, classes(logits, batch))),
        of_two(balanced),
    ),
    # These are means all the same.
    in_own("3-straight-through", GRADIENT, of_two(straight_through), cuts=THREE),
    in_model("3-straight-through", GRADIENT, of_two(straight_through)),
    in_own("3-focal", EXACT, detached_focal),
    in_model("3-by-probability", EXACT, by_probability, cuts=THREE),
    in_own("3-by-probability", EXACT, by_probability),
    in_own("3-squares-of-rows", EXACT, squared_rows, right=(PAIRS, SINGLES)),
]  # fmt: skip


# --- 4: learnt weights --------------------------------------------------------------------------------------------


def uncertain(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Kendall et al. 2018."""
    one, other = model.s.exp().reciprocal()
    return one * tokens(logits, batch) + other * classes(logits, batch) + model.s.sum()


def uncertain_variance(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    a, c = tokens(logits, batch), classes(logits, batch)
    return a / (2 * model.s[0] ** 2) + c / (2 * model.s[1] ** 2) + torch.log(model.s[0] * model.s[1])


def mixed(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    share = torch.sigmoid(model.s)
    return share * tokens(logits, batch) + (1 - share) * classes(logits, batch)


def weighed_softly(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return model.s.softmax(0) @ torch.stack([tokens(logits, batch), classes(logits, batch)])


def weighed_in_a_stack(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return (F.softplus(model.s) * torch.stack([tokens(logits, batch), classes(logits, batch)])).sum()


def tempered(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return torch.exp(-model.s) * tokens(logits, batch) + model.s


def learnt_factor(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return torch.exp(model.s) * tokens(logits, batch)


def learnt_temperature(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return tokens(logits * model.s.exp(), batch)


def _learnt(name: str, verdict: Verdict, loss: Loss, start: Any, **more: Any) -> list[Case]:
    given = {"learnt": {"s": start}, "alone": ("s",), "windows": several(2), **more}
    return [each(f"4-{name}", verdict, loss, **given) for each in (in_own, in_model)]


LEARNT = [
    *_learnt("uncertain", EITHER, uncertain, [0.2, -0.3]),
    *_learnt("variance", EITHER, uncertain_variance, [1.2, 0.7]),
    *_learnt("mixed", EITHER, mixed, 0.4),
    *_learnt("softmax", EITHER, weighed_softly, [0.1, -0.2]),
    *_learnt("in-a-stack", EITHER, weighed_in_a_stack, [0.5, 1.0]),
    *_learnt("tempered", EITHER, tempered, 0.3, cuts=THREE),
    *_learnt("factor", EXACT, learnt_factor, 0.3),
    *_learnt("temperature", EXACT, learnt_temperature, 0.3),
    in_func("4-uncertain", EITHER, uncertain, learnt={"s": [0.2, -0.3]}, alone=("s",), windows=several(2)),
    in_func("4-factor", EXACT, learnt_factor, learnt={"s": 0.3}, alone=("s",)),
]


# --- 5: micro-batches of other sizes, and gradients that are turned -----------------------------------------------


class ReverseInPlace(torch.autograd.Function):
    """The same with what it leaves kept in its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


def of_reversed_logits(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return tokens(logits, batch) + classes(models.Reverse.apply(logits), batch)


def with_detached(a: Tensor, c: Tensor) -> Tensor:
    return a + c.detach()


def hooked(a: Tensor, c: Tensor) -> Tensor:
    if c.requires_grad:
        c.register_hook(lambda gradient: -0.5 * gradient)
    return a + c


SIZES = [
    in_own("5-detached", GRADIENT, of_two(with_detached), cuts=THREE),
    in_model("5-detached", GRADIENT, of_two(with_detached), cuts=THREE),
    in_super("5-detached", GRADIENT, plus(of_one(torch.detach, classes)), of_two(with_detached), cuts=THREE),
    in_own("5-detached-tokens", GRADIENT, of_two(lambda a, c: a.detach() + c), cuts=(UNEVEN,)),
    in_own("5-reversed", EITHER, of_two(lambda a, c: a + models.Reverse.apply(c)), cuts=THREE),
    in_own("5-reversed-alone", EITHER, of_one(models.Reverse.apply), cuts=THREE),
    in_own("5-reversed-with-strength", EITHER, of_two(lambda a, c: ReverseInPlace.apply(a, 0.3) + c), cuts=THREE),
    in_model("5-reversed", EITHER, of_two(lambda a, c: a + models.Reverse.apply(c)), cuts=(UNEVEN, PAIRS)),
    in_own("5-hooked", EITHER, of_two(hooked), cuts=THREE),
    in_own("5-reversed-logits", EXACT, of_reversed_logits, cuts=THREE),
    in_model("5-reversed-logits", EXACT, of_reversed_logits, cuts=THREE),
    in_own("5-both", EXACT, both, cuts=THREE),
    in_model("5-both", EXACT, both, cuts=THREE),
    in_super("5-both", EXACT, plus(classes), both, cuts=THREE),
    in_func("5-both", EXACT, both, cuts=THREE),
    in_own("5-classes", EXACT, classes, cuts=(UNEVEN,)),
]  # fmt: skip


# --- 6: terms without a graph, or with one that nobody sees -------------------------------------------------------


class Entropy(torch.autograd.Function):
    """The mean over targets by a backward that was written down."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = labels != -100
        p = logits.softmax(-1)
        loss = F.cross_entropy(logits, labels)
        gradient = (p - F.one_hot(labels.clamp(min=0), p.shape[-1])) * valid[:, None] / valid.sum()
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradient * kept, None


class FusedLater(torch.autograd.Function):
    """The same with its graph kept for its backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.leaf = logits.detach().requires_grad_()
            ctx.loss = F.cross_entropy(ctx.leaf, labels)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (found,) = torch.autograd.grad(ctx.loss, ctx.leaf, gradient)
        return found, None


class EachEntropy(torch.autograd.Function):
    """Of every token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = labels != -100
        ctx.save_for_backward((logits.softmax(-1) - F.one_hot(labels.clamp(min=0), logits.shape[-1])) * valid[:, None])
        return F.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradient[:, None] * kept, None


def flat(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()


def checkpointed(reentrant: bool, loss: Loss = tokens) -> Loss:
    def found(logits: Tensor, batch: Batch, model: Any) -> Tensor:
        return checkpoint(lambda each: loss(each, batch, model), logits, use_reentrant=reentrant)

    return found


def beside_classes(loss: Loss) -> Loss:
    return lambda logits, batch, model: loss(logits, batch, model) + classes(logits, batch)


def by_function(function: Any) -> Loss:
    return lambda logits, batch, model: function.apply(*flat(logits, batch))


def each_by_function(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    scores, labels = flat(logits, batch)
    return EachEntropy.apply(scores, labels).sum() / (labels != -100).sum()


def logs_beside(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """By hand; what torch makes of it is for the log alone."""
    with torch.no_grad():
        model.seen = float(tokens(logits, batch))
    return models.mean_by_hand(logits, batch["labels"]) + classes(logits, batch)


UNSEEN = [
    *(
        each(f"6-{name}", verdict, loss, cuts=THREE)
        for name, verdict, loss in [
            ("reentrant", EITHER, beside_classes(checkpointed(True))),
            ("reentrant-alone", EITHER, checkpointed(True)),
            ("checkpoint", EXACT, beside_classes(checkpointed(False))),
            ("checkpoint-of-both", EXACT, checkpointed(False, both)),
            ("written-down", EITHER, beside_classes(by_function(Entropy))),
            ("written-down-alone", EITHER, by_function(Entropy)),
            ("fused", EITHER, beside_classes(by_function(models.Fused))),
            ("fused-later", EITHER, beside_classes(by_function(FusedLater))),
            ("each-token", EXACT, beside_classes(each_by_function)),
            ("logs-beside", EXACT, logs_beside),
        ]
        for each in (in_own, in_model)
    ),
    in_func("6-reentrant", EITHER, beside_classes(checkpointed(True))),
    in_func("6-checkpoint", EXACT, beside_classes(checkpointed(False))),
    in_func("6-fused", EITHER, beside_classes(by_function(models.Fused))),
    in_super("6-fused", EITHER, plus(by_function(models.Fused)), times(2.0)),
]  # fmt: skip


# --- 7: models that read their labels -----------------------------------------------------------------------------


def asserting(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    labels = batch["labels"]
    assert bool((labels[:, 0] == -100).all()), "the first token is no target"
    assert bool((labels != -100).any(1).all()), "a text has a target"
    return tokens(logits, batch)


def comparing(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """A target is the token that stands there."""
    labels = batch["labels"]
    if not bool(((labels == -100) | (labels == batch["input_ids"])).all()):
        raise ValueError("labels are not those of these tokens")
    return tokens(logits, batch)


def of_first_targets(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The first target of each text alone."""
    labels = batch["labels"]
    at = (labels != -100).long().argmax(1)
    rows = torch.arange(len(labels))
    assert bool((at > 0).all()), "a text without a prompt"
    return F.cross_entropy(logits[rows, at - 1], labels[rows, at])


READERS = [
    *(
        each(f"7-{name}", EXACT, loss, right=right)
        for name, loss, right in [
            ("asserts", asserting, ()),
            ("compares", comparing, ()),
            ("first-targets", of_first_targets, (PAIRS, SINGLES)),
        ]
        for each in (in_own, in_model)
    ),
    in_func("7-asserts", EXACT, asserting),
    in_model("7-asserts-takes", EXACT, asserting, head=Takes),
    in_model("7-first-targets-takes", EXACT, of_first_targets, head=Takes, cuts=THREE),
]


# --- 8: windows and micro-batches without labels ------------------------------------------------------------------


def unlabelled_first(window: int) -> list[Sample]:
    return without_targets(texts(window)) if window == 0 else texts(window)


def unlabelled_second(window: int) -> list[Sample]:
    return without_targets(texts(window)) if window == 1 else texts(window)


def two_unlabelled(window: int) -> list[Sample]:
    return without_targets(texts(window), (0, 1, 5))


def guarded_and(term: Loss) -> Loss:
    return lambda logits, batch, model: guarded(logits, batch) + term(logits, batch, model)


UNLABELLED = [
    *(
        each(f"8-{name}-{then}", EITHER, guarded_and(term), windows=several(3, make))
        for name, term in [("squares", squares), ("classes", classes)]
        for then, make in [("first", unlabelled_first), ("second", unlabelled_second)]
        for each in (in_own, in_model)
    ),
    *(
        each(f"8-{name}-in-a-window", EXACT, guarded_and(term), windows=several(2, two_unlabelled))
        for name, term in [("squares", squares), ("classes", classes)]
        for each in (in_own, in_model)
    ),
    in_func("8-classes-first", EITHER, guarded_and(classes), windows=several(3, unlabelled_first)),
]


# --- 9: the mean of sample means ----------------------------------------------------------------------------------


def early(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    return early_cross_entropy(*flat(logits, batch))


def of_samples(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    return torch.stack(each_row(logits, batch)).mean()


PER_SAMPLE: list[Case] = [
    attack(
        f"9-{name}",
        EITHER,
        full(of_samples),
        holding(loss),
        several(1),
        trainer,
        looped=trainer is StockRecorder,
        options={"per_sample": True},
        right=(SINGLES,),
        whole=False,
    )
    for name, loss, trainer in [
        ("own", tokens, own(tokens)),
        ("own-early", early, own(early)),
        ("model", tokens, StockRecorder),
        ("model-early", early, StockRecorder),
    ]
]


# --- 10: heads that take the number, and a term beside ------------------------------------------------------------


def share_of_arguments(loss: Tensor, logits: Tensor, batch: Batch, trainer: Any) -> Tensor:
    return loss + classes(logits, batch) / trainer.args.gradient_accumulation_steps


def share_of_window(loss: Tensor, logits: Tensor, batch: Batch, trainer: Any) -> Tensor:
    return loss + classes(logits, batch) / trainer.current_gradient_accumulation_steps


def squares_by_arguments(loss: Tensor, logits: Tensor, batch: Batch, trainer: Any) -> Tensor:
    return loss + squares(logits, batch, bare(trainer.model)) / trainer.args.gradient_accumulation_steps


def each_divergence(logits: Tensor, batch: Batch) -> Tensor:
    """From a fixed teacher, of every target."""
    ids, labels = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
    teacher = torch.cos(ids[..., None] * torch.arange(1, logits.shape[-1] + 1)).to(logits)
    log_p, log_q = logits[:, :-1].log_softmax(-1), teacher.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)[labels != -100]


def distilled(logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
    return tokens(logits, batch) + each_divergence(logits, batch).mean()


def divergence_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss + each_divergence(outputs["logits"], inputs).sum() / number, outputs


def both_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"]
    summed = shifted_cross_entropy(logits, inputs["labels"], reduction="sum")
    return summed / number + each_divergence(logits, inputs).sum() / number, {"logits": logits}


BY_NUMBER = [
    in_super(f"10-{name}", EXACT, trainer, loss, head=ByNumber, right=right, cuts=THREE)
    for name, trainer, loss, right in [
        ("arguments", above(share_of_arguments), both, (PAIRS, SINGLES)),
        ("window", above(share_of_window), both, (PAIRS, SINGLES)),
        ("squares", above(squares_by_arguments), lambda z, b, m: tokens(z, b) + squares(z, b, m), THREE),
        ("distilled", computing(divergence_by_number), distilled, THREE),
        ("both", computing(both_by_number), distilled, THREE),
    ]
]  # fmt: skip


# --- 11: row by row -----------------------------------------------------------------------------------------------


def row_by_row(gather: Callable[[list[Tensor]], Tensor]) -> type:
    """super() for each row, and the mean."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        return gather([base(model, dict(row)) for row in rows_of(inputs)]), None

    return computing(compute)


def stacked(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def joined(losses: list[Tensor]) -> Tensor:
    return torch.cat([loss[None] for loss in losses]).mean()


def summed(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum() / len(losses)


def listed(losses: list[Tensor]) -> Tensor:
    return sum(losses) / len(losses)  # type: ignore[return-value]


def running(losses: list[Tensor]) -> Tensor:
    """A running mean."""
    mean = losses[0]
    for place, loss in enumerate(losses[1:], start=2):
        mean = mean + (loss - mean) / place
    return mean


EVEN = (PAIRS, SINGLES)
ROWS = [
    *(
        in_super(f"11-{gather.__name__}", verdict, row_by_row(gather), of_samples, right=EVEN, cuts=THREE)
        for gather, verdict in [(stacked, EXACT), (joined, EXACT), (summed, EXACT), (listed, EITHER), (running, EITHER)]
    ),
    *(
        in_model(
            f"11-{gather.__name__}",
            verdict,
            lambda logits, batch, model, gather=gather: gather(each_row(logits, batch)),
            right=EVEN,
            cuts=THREE,
        )
        for gather, verdict in [(stacked, EXACT), (joined, EXACT), (summed, EXACT), (listed, EITHER)]
    ),
    in_own("11-rows", EXACT, of_samples, right=EVEN, cuts=THREE),
    in_func("11-rows", EXACT, of_samples, cuts=THREE),
    in_super("11-takes", EXACT, row_by_row(stacked), of_samples, head=ByNumber),
]


# --- 12: what changes in a later window ---------------------------------------------------------------------------

LATE = 8


class Turns(Texts):
    """Knows the window."""

    step = 0


def from_turn(start: int, loss: Loss, later: Loss, end: int = LATE) -> Loss:
    def found(logits: Tensor, batch: Batch, model: Any) -> Tensor:
        return (later if start <= model.step < end else loss)(logits, batch, model)

    return found


def by_turns(loss: Loss, other: Loss) -> Loss:
    def found(logits: Tensor, batch: Batch, model: Any) -> Tensor:
        return (other if model.step % 2 else loss)(logits, batch, model)

    return found


def scheduled(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Rises from zero."""
    return tokens(logits, batch) + 0.2 * model.step * classes(logits, batch)


def scheduled_factor(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return tokens(logits, batch) / (1 + model.step)


def if_there(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return both(logits, batch) if "kind" in batch else tokens(logits, batch)


def by_task(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return classes(logits, batch) if bool(batch["task"].any()) else tokens(logits, batch)


def with_kind_until(start: int) -> Callable[[int], list[Sample]]:
    def made(window: int) -> list[Sample]:
        samples = texts(window)
        return [{k: v for k, v in s.items() if k != "kind"} for s in samples] if window >= start else samples

    return made


def with_kind_from(start: int) -> Callable[[int], list[Sample]]:
    def made(window: int) -> list[Sample]:
        samples = texts(window)
        return [{k: v for k, v in s.items() if k != "kind"} for s in samples] if window < start else samples

    return made


def with_task(window: int) -> list[Sample]:
    return [{**sample, "task": torch.tensor(int(window in (2, 4, 5)))} for sample in texts(window)]


def late(name: str, verdict: Verdict, loss: Loss, make: Callable[[int], list[Sample]] = texts, **more: Any) -> Case:
    given = {"cuts": (PAIRS,), **more}
    return in_model(f"12-{name}", verdict, loss, head=Turns, windows=several(LATE, make), **given)


LATER = [
    *(late(f"term-from-{start + 1}", GRADIENT, from_turn(start, tokens, both)) for start in (1, 2, 4, 6)),
    late("term-in-3", GRADIENT, from_turn(2, tokens, both, 3)),
    late("alternates", GRADIENT, by_turns(tokens, both)),
    late("term-until-3", EXACT, from_turn(2, both, tokens)),
    late("classes-from-3", EXACT, from_turn(2, tokens, classes)),
    late("samples-from-5", EXACT, from_turn(4, tokens, of_samples), cuts=(PAIRS, UNEVEN)),
    late("root-from-3", EITHER, from_turn(2, tokens, of_one(torch.sqrt))),
    late("scheduled", EXACT, scheduled),
    late("scheduled-factor", EXACT, scheduled_factor, cuts=(PAIRS, UNEVEN)),
    late("kind-until-3", EXACT, if_there, with_kind_until(2)),
    late("kind-from-2", GRADIENT, if_there, with_kind_from(1)),
    late("kind-from-6", GRADIENT, if_there, with_kind_from(5)),
    late("task", EXACT, by_task, with_task),
    late("unlabelled-first", EITHER, guarded_and(classes), unlabelled_first),
]


# --- 13: cross entropy that was imported early --------------------------------------------------------------------

EARLY = [
    each(f"13-{name}", EXACT, loss, windows=several(2))
    for name, loss in [("one-term", early), ("two-terms", beside_classes(early))]
    for each in (in_own, in_model, in_func)
]


# --- 14: state that a forward writes ------------------------------------------------------------------------------


class Queue(Texts):
    """MoCo: classes of texts among the last texts, which are kept."""

    def __init__(self) -> None:
        super().__init__(self.among)
        self.register_buffer("queue", torch.randn(6, 16, generator=generator(4)))

    def among(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        z = F.normalize(logits[:, 1, :16], dim=-1)
        keys = F.normalize(logits[:, 2, :16], dim=-1).detach()
        scores = torch.cat([(z * keys).sum(1, keepdim=True), z @ self.queue.clone().T], 1) / 0.2
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(scores, torch.zeros(len(z), dtype=torch.long))


class QueueOutside(Queue):
    """The same in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(torch.randn(6, 16, generator=generator(4)).double(), maxlen=6)
        del self.queue

    def among(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        z = F.normalize(logits[:, 1, :16], dim=-1)
        keys = F.normalize(logits[:, 2, :16], dim=-1).detach()
        scores = torch.cat([(z * keys).sum(1, keepdim=True), z @ torch.stack([*self.last]).T], 1) / 0.2
        self.last.extend(keys)
        return F.cross_entropy(scores, torch.zeros(len(z), dtype=torch.long))


class Centred(Texts):
    """DINO: a teacher's centre follows what it sees."""

    def __init__(self) -> None:
        super().__init__(self.centred)
        self.register_buffer("centre", torch.zeros(16))

    def centred(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        teacher, student = logits[:, 2, :16].detach(), logits[:, 1, :16]
        self.centre.mul_(0.5).add_(teacher.mean(0), alpha=0.5)
        return -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


class CentredAnew(Centred):
    """A new tensor each time, by its attribute."""

    def centred(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        teacher, student = logits[:, 2, :16].detach(), logits[:, 1, :16]
        self.centre = 0.5 * self.centre + 0.5 * teacher.mean(0)
        return -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


class OverItsAverage(Texts):
    """A loss over its running average."""

    def __init__(self) -> None:
        super().__init__(self.over)
        self.register_buffer("average", torch.ones(()))

    def over(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        loss = tokens(logits, batch)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * loss)
        return loss / self.average


class OverItsFloat(Texts):
    """The same in a Python number."""

    def __init__(self) -> None:
        super().__init__(self.over)
        self.average = 1.0

    def over(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        loss = tokens(logits, batch)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average


class Counts(Texts):
    """Counts the texts it has seen, for whoever asks; its loss knows nothing of that."""

    def __init__(self) -> None:
        super().__init__(self.counting)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def counting(self, logits: Tensor, batch: Batch, model: Any) -> Tensor:
        self.seen += len(logits)
        return tokens(logits, batch)


class Averaging(StockRecorder):
    """The average of the trainer's."""

    average = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        loss = loss / self.average
        return (loss, outputs) if return_outputs else loss


def over_average(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    loss = tokens(logits, batch)
    return loss / (0.9 + 0.1 * float(loss.detach()))


STATE = [
    *(
        attack(f"14-{model.__name__}", INEXACT, model_itself, model, several(1), looped=True)
        for model in (Queue, QueueOutside, Centred, CentredAnew, OverItsAverage, OverItsFloat)
    ),
    in_super("14-averaging", INEXACT, Averaging, over_average),
    attack("14-Counts", GRADIENT, model_itself, Counts, several(2), looped=True),
]


# --- 15: two steps in one -----------------------------------------------------------------------------------------


def moved_along(model: Any, batch: Batch, step: int) -> Tensor:
    """SAM (Foret et al. 2021): the loss where the parameters are moved along its gradient."""
    loss = tokens(model.logits(batch["input_ids"]), batch)
    names = dict(model.named_parameters())
    along = torch.autograd.grad(loss, [*names.values()])
    norm = torch.stack([each.norm() for each in along]).norm()
    moved = {n: p + 0.5 * each / norm for (n, p), each in zip(names.items(), along, strict=True)}
    logits = torch.func.functional_call(model, moved, kwargs={"input_ids": batch["input_ids"]})["logits"]
    return tokens(logits, batch)


class Sam(StockRecorder):
    """By two of super's steps; the gradient of the first is taken back."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        parameters = [*model.parameters()]
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        super().training_step(model, dict(inputs), num_items_in_batch)
        self.returned.pop()
        along = [p.grad if was is None else p.grad - was for p, was in zip(parameters, before, strict=True)]
        norm = torch.stack([each.norm() for each in along]).norm()
        moves = [0.5 * each / norm for each in along]
        self._move(parameters, moves, 1)
        for p, was in zip(parameters, before, strict=True):
            p.grad = was
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._move(parameters, moves, -1)
        return loss

    @torch.no_grad()
    def _move(self, parameters: Sequence[Tensor], moves: Sequence[Tensor], sign: int) -> None:
        for p, move in zip(parameters, moves, strict=True):
            p.add_(sign * move)


class SamByBackward(Sam):
    """The first step by accelerate alone."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        parameters = [*model.parameters()]
        along = torch.autograd.grad(self.compute_loss(model, dict(inputs)), parameters)
        norm = torch.stack([each.norm() for each in along]).norm()
        moves = [0.5 * each / norm for each in along]
        self._move(parameters, moves, 1)
        loss = StockRecorder.training_step(self, model, inputs, num_items_in_batch)
        self._move(parameters, moves, -1)
        return loss


TWO_STEPS = [
    attack(f"15-{trainer.__name__}", INEXACT, moved_along, Texts, several(1), trainer)
    for trainer in (Sam, SamByBackward)
]


# --- 16: a term that comes later, and grows -----------------------------------------------------------------------


def grows(first: float, later: float) -> type:
    def change(loss: Tensor, logits: Tensor, batch: Batch, trainer: Any) -> Tensor:
        factor = later if trainer.state.global_step >= 1 else first
        return loss + factor * classes(logits, batch) if factor else loss

    return above(change)


def full_growing(first: float, later: float) -> FullLoss:
    def loss(model: Any, batch: Batch, step: int) -> Tensor:
        logits = model.logits(batch["input_ids"])
        return tokens(logits, batch) + (later if step else first) * classes(logits, batch)

    return loss


GROWING = [
    attack(
        f"16-{name}-{head.__name__}",
        verdict,
        full_growing(first, 10.0),
        head,
        several(4),
        grows(first, 10.0),
        # Where a head takes the number, stock adds a term G times.
        cuts=(PAIRS, SINGLES),
    )
    for name, first, verdict in [("from-none", 0.0, GRADIENT), ("from-a-tenth", 0.1, EXACT)]
    for head in (Texts, ByNumber)
]


# --- 17: nearly even probabilities --------------------------------------------------------------------------------


def focal_of_mean(a: Tensor) -> Tensor:
    return (1 - torch.exp(-a)) ** 2 * a


def hidden_mask(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """A float mask that no key of the batch holds."""
    losses, valid = each_token(logits, batch)
    mask = (valid & (batch["input_ids"][:, 1:] % 3 != 0)).to(losses)
    return (losses * mask).sum() / mask.sum()


def with_entropy(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return tokens(logits, batch) - 1e-3 * models.entropy(logits, models.attended(batch))


NEARLY_EVEN = [
    *(
        attack(f"17-{name}", verdict, full(loss), even(), several(1), own(loss))
        for name, verdict, loss in [
            ("root", INEXACT, of_one(torch.sqrt)),
            ("log", INEXACT, of_one(torch.log)),
            ("focal-of-mean", INEXACT, of_one(focal_of_mean)),
            ("power", INEXACT, of_one(lambda a: a**1.5)),
            ("hidden-mask", EXACT, hidden_mask),
            ("entropy", EXACT, with_entropy),
        ]
    ),
    in_model("17-hidden-mask", EXACT, hidden_mask, cuts=THREE),
    in_model("17-entropy", EXACT, with_entropy, cuts=THREE),
]


# --- 18: terms that some micro-batches hold -----------------------------------------------------------------------


def with_tasks(window: int) -> list[Sample]:
    """Two by turns."""
    return [{**sample, "task": torch.tensor(i % 2)} for i, sample in enumerate(texts(window))]


def in_runs(window: int) -> list[Sample]:
    """Pairs of a task."""
    return [{**sample, "task": torch.tensor(i // 2 % 2)} for i, sample in enumerate(texts(window))]


def of_rows(loss: Loss, logits: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    return loss(logits[rows], {key: value[rows] for key, value in batch.items()}, None)


def tasks_summed(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The mean of each task that is there."""
    found = [of_rows(loss, logits, batch, rows) for loss, rows in _tasks(batch) if bool(rows.any())]
    return sum(found)  # type: ignore[return-value]


def tasks_by_share(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The mean of each weighed by its share of the rows."""
    found = [
        rows.double().mean() * of_rows(loss, logits, batch, rows) for loss, rows in _tasks(batch) if bool(rows.any())
    ]
    return sum(found)  # type: ignore[return-value]


def _tasks(batch: Batch) -> list[tuple[Loss, Tensor]]:
    return [(tokens, batch["task"] == 0), (classes, batch["task"] == 1)]


def with_some_kinds(window: int) -> list[Sample]:
    """Three in four have no class."""
    return [{**s, "kind": s["kind"] if i % 4 == 1 else torch.tensor(-100)} for i, s in enumerate(texts(window))]


def classes_if_any(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    loss = tokens(logits, batch)
    return loss + classes(logits, batch) if bool((batch["kind"] != -100).any()) else loss


def classes_or_zero(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Zero where there is none, by a divisor of at least one."""
    found = F.cross_entropy(logits[:, 1, :4], batch["kind"], reduction="sum")
    return tokens(logits, batch) + found / (batch["kind"] != -100).sum().clamp(min=1)


def three_heads(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """By the remainder of a kind, those that are there."""
    found = [
        F.cross_entropy(logits[rows, place, 4 * place : 4 * place + 4], batch["kind"][rows])
        for place, rows in enumerate(batch["kind"] % 3 == k for k in range(3))
        if bool(rows.any())
    ]
    return torch.stack(found).sum()


def macro(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The mean over classes that are there of the mean over each."""
    losses, kinds = each_class(logits, batch), batch["kind"]
    return torch.stack([losses[kinds == k].mean() for k in kinds.unique()]).mean()


def classes_then_tokens(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Its terms stand in the other order where the first text is of an odd kind."""
    a, c = tokens(logits, batch), classes(logits, batch)
    return a + 0.5 * c if int(batch["kind"][0]) % 2 else 0.5 * c + a


SOME_HOLD = [
    *(
        each(f"18-{name}", EITHER, loss, windows=several(2, make), **more)
        for name, loss, make, more in [
            ("summed", tasks_summed, with_tasks, {"cuts": (PAIRS, SINGLES, UNEVEN)}),
            ("summed-in-runs", tasks_summed, in_runs, {}),
            ("by-share", tasks_by_share, with_tasks, {"cuts": (SINGLES, UNEVEN)}),
            ("by-share-in-runs", tasks_by_share, in_runs, {}),
            ("if-any", classes_if_any, with_some_kinds, {}),
            ("three-heads", three_heads, texts, {}),
        ]
        for each in (in_own, in_model)
    ),
    in_own("18-or-zero", EXACT, classes_or_zero, windows=several(2, with_some_kinds), cuts=THREE),
    in_model("18-or-zero", EXACT, classes_or_zero, windows=several(2, with_some_kinds), cuts=THREE),
    in_own("18-other-order", EXACT, classes_then_tokens, cuts=THREE),
    in_model("18-other-order", EXACT, classes_then_tokens),
    # In pairs every class is there once at most: nothing tells it from a mean over samples.
    in_own("18-macro", INEXACT, macro, cuts=(HALVES,)),
    in_func("18-summed", EITHER, tasks_summed, windows=several(1, with_tasks)),
]


# --- 19: values that are all equal --------------------------------------------------------------------------------


def ratio_of_rows(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """A policy's gradient at advantage 1: each row's ratio is 1."""
    log_p = -each_class(logits, batch)
    return -(log_p - log_p.detach()).exp().mean()


def ratio_of_tokens(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    ratio = (losses.detach() - losses).exp()
    return -(ratio * valid).sum() / valid.sum()


def ratio_of_texts(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The mean over texts of means over tokens, as GRPO takes it."""
    losses, valid = each_token(logits, batch)
    ratio = (losses.detach() - losses).exp()
    return -((ratio * valid).sum(1) / valid.sum(1)).mean()


def ratio_clipped(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    ratio, advantage = (losses.detach() - losses).exp(), (batch["kind"][:, None] - 1.5)
    found = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (found * valid).sum() / valid.sum()


EQUAL = [
    *(
        each(f"19-{name}", EITHER, loss, right=right, cuts=THREE)
        for name, loss, right in [
            ("rows", ratio_of_rows, EVEN),
            ("tokens", ratio_of_tokens, ()),
            ("texts", ratio_of_texts, EVEN),
            ("clipped", ratio_clipped, ()),
        ]
        for each in (in_own, in_model)
    ),
]


# --- warned of, though exact --------------------------------------------------------------------------------------


def weighted_rows(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return (each_class(logits, batch) * (1.0 + batch["kind"])).mean()


def focal_rows(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses = each_class(logits, batch)
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def groups(count: int) -> Callable[[int], list[Sample]]:
    """Eight groups of texts that belong together."""

    def made(window: int) -> list[Sample]:
        members = [models.texts(window + 3 * i, LENGTHS[i:] + LENGTHS[:i]) for i in range(count)]
        return [{"members": list(group)} for group in zip(*members, strict=True)]

    return made


def interleaved(samples: Sequence[Sample]) -> Batch:
    """One group after another."""
    return collate([member for sample in samples for member in sample["members"]])


def by_role(samples: Sequence[Sample]) -> Batch:
    """The first of every group, then the second of every group."""
    return collate([sample["members"][place] for place in range(len(samples[0]["members"])) for sample in samples])


def log_p_of_rows(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each row: summed, and the mean over its targets."""
    losses, valid = each_token(logits, batch)
    return -(losses * valid).sum(1), -(losses * valid).sum(1) / valid.sum(1)


def dpo(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Of pairs that stand one after another."""
    log_p = log_p_of_rows(logits, batch)[0]
    return -F.logsigmoid(0.1 * (log_p[0::2] - log_p[1::2])).mean()


def of_fours(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Each text against the three others of its group."""
    scores = log_p_of_rows(logits, batch)[1].view(-1, 4)
    return -(scores[:, 0] - scores.logsumexp(1)).mean()


def chosen_and_rejected(logits: Tensor, batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Log-likelihoods of the first half and of the second, and the mean over the first half's tokens."""
    (sums, means), rows = log_p_of_rows(logits, batch), len(logits) // 2
    answers = tokens(logits[:rows], {key: value[:rows] for key, value in batch.items()})
    return (sums[:rows], sums[rows:]), (means[:rows], means[rows:]), answers


def orpo(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    _, (chosen, rejected), answers = chosen_and_rejected(logits, batch)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return answers - 0.1 * F.logsigmoid(odds).mean()


def simpo(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    _, (chosen, rejected), answers = chosen_and_rejected(logits, batch)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean() + 0.3 * answers


def dpo_and_answers(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    (chosen, rejected), _, answers = chosen_and_rejected(logits, batch)
    losses = -F.logsigmoid(0.1 * (chosen - rejected))
    return losses.mean() + answers


def dpo_plus_answers(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """rpo_alpha as TRL adds it: a number to each pair's loss."""
    (chosen, rejected), _, answers = chosen_and_rejected(logits, batch)
    return (-F.logsigmoid(0.1 * (chosen - rejected)) + answers).mean()


ROLES = ("chosen", "rejected")


def by_keys(samples: Sequence[Sample]) -> Batch:
    """As TRL has them: chosen and rejected under keys of their own."""
    found: Batch = {}
    for place, role in enumerate(ROLES):
        batch = collate([sample["members"][place] for sample in samples])
        found |= {f"{role}_{key}": value for key, value in batch.items()}
    return found


def put_together(batch: Batch) -> Batch:
    """The chosen ones, then the rejected ones, padded alike."""
    keys = ("input_ids", "attention_mask", "labels")
    roles = [{key: batch[f"{role}_{key}"] for key in keys} for role in ROLES]
    rows = range(len(roles[0]["labels"]))
    return collate([{key: value[row] for key, value in each.items()} for each in roles for row in rows])


def of_keys(name: str, loss: Loss) -> Case:
    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        batch = put_together(inputs)
        outputs = model(input_ids=batch["input_ids"])
        return loss(outputs["logits"], batch, bare(model)), outputs

    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        whole = put_together(batch)
        return loss(model.logits(whole["input_ids"]), whole, model)

    given = {"trainer": computing(compute), "collate": by_keys, "cuts": THREE}
    return attack(f"clients-{name}-keys", EXACT, reference, Texts, several(1, groups(2)), **given)


PREFERENCES = [("orpo", orpo), ("simpo", simpo), ("dpo", dpo_and_answers), ("rpo", dpo_plus_answers)]


def perturbed(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """VAT (Miyato et al. 2018): the divergence at an embedding moved the way that changes it most, a token each."""
    ids, kept = batch["input_ids"], models.attended(batch)
    noise = torch.cos(ids[..., None] * torch.arange(1.0, 17.0, dtype=torch.float64)).requires_grad_()

    def moved(by: Tensor) -> Tensor:
        hidden = model.embed(ids) + by
        return model.head(hidden + torch.tanh(model.mix(hidden)).cumsum(dim=1) / 4)

    with torch.enable_grad():
        found = models.divergence(moved(1e-2 * noise), logits.detach(), kept)
        (along,) = torch.autograd.grad(found, noise)
    along = along / along.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return tokens(logits, batch) + models.divergence(moved(0.5 * along), logits.detach(), kept)


class Unlabelled(StockRecorder):
    """Draws from a loader of its own for each micro-batch: always the same two texts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.others = iter([unlabelled() for _ in range(200)])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        other = next(self.others)
        loss = loss + consistency(model(input_ids=other["input_ids"])["logits"], other)
        return (loss, outputs) if return_outputs else loss


class UnlabelledInTurn(Unlabelled):
    """As many texts as the micro-batch has, in their order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = StockRecorder.compute_loss(self, model, inputs, return_outputs=True)
        rows = len(inputs["input_ids"])
        other = unlabelled(range(self.at, self.at + rows))
        self.at += rows
        loss = loss + consistency(model(input_ids=other["input_ids"])["logits"], other)
        return (loss, outputs) if return_outputs else loss


def unlabelled(rows: Any = range(2)) -> Batch:
    made = models.texts(5)
    return collate([made[row % 8] for row in rows])


def consistency(logits: Tensor, batch: Batch) -> Tensor:
    return terms.divergence(logits, batch)


def with_consistency(rows: int) -> Loss:
    def loss(logits: Tensor, batch: Batch, model: Any) -> Tensor:
        other = unlabelled(range(rows))
        return tokens(logits, batch) + consistency(model.logits(other["input_ids"]), other)

    return loss


EASY = [
    *(
        each(f"easy-{name}", EXACT, loss, right=right, cuts=THREE)
        for name, loss, right in [
            ("weighted-rows", weighted_rows, EVEN),
            ("focal-rows", focal_rows, EVEN),
            ("vat", perturbed, ()),
        ]
        for each in (in_own, in_model)
    ),
    *(
        each(f"easy-{name}", EXACT, loss, windows=windows, collate=interleaved, right=EVEN, cuts=THREE)
        for name, loss, windows in [("pairs", dpo, several(1, groups(2))), ("fours", of_fours, several(1, groups(4)))]
        for each in (in_own, in_model)
    ),
    in_func("easy-pairs", EXACT, dpo, windows=several(1, groups(2)), collate=interleaved),
    in_super("easy-squares", EXACT, plus(squares), lambda z, b, m: tokens(z, b) + squares(z, b, m), cuts=THREE),
    in_super(
        "easy-z", EXACT,
        plus(lambda z, b, m: 0.01 * models.z_loss(z, models.attended(b))),
        lambda z, b, m: tokens(z, b) + 0.01 * models.z_loss(z, models.attended(b)),
        cuts=THREE,
    ),
    in_super("easy-unlabelled", EXACT, Unlabelled, with_consistency(2)),
    in_super("easy-unlabelled-in-turn", EITHER, UnlabelledInTurn, with_consistency(8)),
    *(
        each(f"clients-{name}", EXACT, loss, windows=several(1, groups(2)), collate=by_role, cuts=THREE)
        for name, loss in PREFERENCES
        for each in (in_own, in_model)
    ),
    *(of_keys(name, loss) for name, loss in PREFERENCES),
]  # fmt: skip


# --- losses that are zero where they are seen first ---------------------------------------------------------------


def scored(margins: Sequence[float]) -> Callable[[int], list[Sample]]:
    """Points whose margin is asked for in these terms."""

    def label(index: int, g: torch.Generator) -> Tensor:
        return torch.tensor(margins[index], dtype=torch.float64)

    return lambda window: models.points(label, window)


class Points(nn.Module):
    """Four numbers each, and a loss of the score that it makes of them."""

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.of = loss

    def logits(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))[:, 0]

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        logits = self.logits(x)
        if labels is None or self.of is None:
            return {"logits": logits}
        return {"loss": self.of(logits, {"labels": labels}, self), "logits": logits}


def hinge(scores: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """Zero where the margin is far below the score."""
    return F.relu(batch["labels"] - scores).mean()


def hinge_of_active(scores: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """The mean over those that are not zero."""
    losses = F.relu(batch["labels"] - scores)
    active = losses > 0
    return losses[active].mean() if bool(active.any()) else scores.sum() * 0


def hinge_with_graph(scores: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """A constant where all is well."""
    losses = F.relu(batch["labels"] - scores)
    if not bool((losses > 0).any()):
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return losses.mean()


def cosent(scores: Tensor, batch: Batch, model: Any = None) -> Tensor:
    """Every pair of texts of which one is more alike: log(1 + 0) where all are."""
    labels = batch["labels"]
    apart = 5 * (scores[:, None] - scores[None, :])
    apart = apart.masked_fill(labels[:, None] >= labels[None, :], -1e12)
    return torch.cat([apart.flatten(), torch.zeros(1, dtype=scores.dtype)]).logsumexp(0) * 1.0


#: The first three have nothing to learn.
NOTHING_FIRST = scored((-9.0, -9.0, -9.0, 2.0, 3.0, 1.0, -9.0, 4.0))
NOTHING_BUT_LAST = scored((-9.0,) * 7 + (4.0,))
ALIKE_FIRST = scored((1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0))


def of_points(name: str, verdict: Verdict, loss: Loss, make: Any, **more: Any) -> list[Case]:
    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        return loss(model.logits(batch["x"]), batch, model)

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(x=inputs["x"])
        return loss(outputs["logits"], inputs, bare(model)), outputs

    def of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss(outputs["logits"], {"labels": labels}, None)

    # Stock multiplies in place what such a function returns, which a leaf refuses.
    functions = [{"compute_loss_func": of_outputs}] * (loss is not hinge_with_graph)
    model, windows, right = lambda: Points(loss), several(2, make), more.pop("right", ())
    return [
        attack(f"zero-{name}-own", verdict, reference, model, windows, computing(compute), right=right, **more),
        attack(f"zero-{name}-model", verdict, reference, model, windows, looped=True, right=right, **more),
        *(attack(f"zero-{name}-func", verdict, reference, Points, windows, given=given, **more) for given in functions),
    ]


ZERO = [
    *of_points("hinge", EXACT, hinge, NOTHING_FIRST, right=EVEN, cuts=THREE),
    *of_points("hinge-last", EXACT, hinge, NOTHING_BUT_LAST, right=EVEN),
    *of_points("active", EITHER, hinge_of_active, NOTHING_FIRST),
    *of_points("constant", EITHER, hinge_with_graph, NOTHING_FIRST, right=EVEN),
    *of_points("cosent", INEXACT, cosent, ALIKE_FIRST, cuts=(PAIRS, HALVES)),
]


# --- shapes of our own: sums that can be read ---------------------------------------------------------------------


def in_place(a: Tensor, c: Tensor) -> Tensor:
    loss = a * 1.0
    loss += 0.3 * c
    return loss


def from_nothing(a: Tensor, c: Tensor) -> Tensor:
    loss: Any = 0.0
    for each in (a, c):
        loss = loss + each
    return loss


def mixup(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Two classes a text, by a share that the micro-batch holds."""
    scores, share = logits[:, 1, :4], 0.3
    return share * F.cross_entropy(scores, batch["kind"]) + (1 - share) * F.cross_entropy(scores, 3 - batch["kind"])


def unreduced(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    return torch.where(valid, losses, losses.new_zeros(())).sum() / valid.sum()


def selected(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    return losses.masked_select(valid).mean()


def by_einsum(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    return torch.einsum("bl,bl->", losses, valid.to(losses)) / valid.sum()


def by_dot(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    return losses.flatten() @ (valid.to(losses) / valid.sum()).flatten()


def weights_within(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Divided by the count before it is summed."""
    losses, valid = each_token(logits, batch)
    return (losses * (valid.to(losses) / valid.sum())).sum()


def by_average(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """nanmean over what is no target."""
    losses, valid = each_token(logits, batch)
    return losses.masked_fill(~valid, torch.nan).nanmean()


def per_token_and_text(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Smoothing's other half by hand: the mean over targets of all classes."""
    losses, valid = each_token(logits, batch)
    smooth = -logits[:, :-1].log_softmax(-1).mean(-1)
    return 0.9 * losses[valid].mean() + 0.1 * smooth[valid].mean()


READABLE = [
    *(
        each(f"shape-{name}", EXACT, of_two(combine), cuts=cuts)
        for name, combine, cuts in [
            ("stack-sum", lambda a, c: torch.stack([a, c]).sum(), THREE),
            ("stack-mean", lambda a, c: torch.stack([a, c]).mean(), THREE),
            ("listed", lambda a, c: sum([a, c]), THREE),
            ("alpha", lambda a, c: torch.add(a, c, alpha=0.3), THREE),
            ("minus", lambda a, c: a - 0.2 * c, THREE),
            ("in-place", in_place, THREE),
            ("from-nothing", from_nothing, EVEN),
            ("shaped", lambda a, c: (a.view(1) + c.unsqueeze(0)).squeeze(), EVEN),
            ("constant", lambda a, c: a + c + 3.0, EVEN),
            ("twice", lambda a, c: a + 0.5 * a + c, EVEN),
            ("negative", lambda a, c: -(-a - c), EVEN),
        ]
        for each in (in_own, in_model)
    ),
    *(
        in_own(f"shape-{name}", EITHER, of_two(combine), cuts=THREE)
        for name, combine in [
            ("dot", lambda a, c: torch.stack([a, c]) @ torch.tensor([1.0, 0.3], dtype=torch.float64)),
            ("addcmul", lambda a, c: torch.addcmul(a, c, torch.tensor(0.3, dtype=torch.float64))),
            ("einsum", lambda a, c: torch.einsum("i,i->", torch.stack([a, c]), torch.ones(2, dtype=torch.float64))),
            ("norm-of-one", lambda a, c: torch.linalg.vector_norm(a[None]) + c),
        ]
    ),
    *(
        in_own(f"shape-{name}", EXACT, loss, cuts=THREE, **more)
        for name, loss, more in [
            ("mixup", mixup, {"right": EVEN}),
            ("where", unreduced, {}),
            ("selected", selected, {}),
            ("nanmean", by_average, {}),
            ("smoothed", per_token_and_text, {}),
        ]
    ),
    # A sum that torch takes as a product, or whose divisor stands below it.
    *(
        in_own(f"shape-{name}", EITHER, loss, cuts=THREE)
        for name, loss in [("of-products", by_einsum), ("of-a-dot", by_dot), ("divided-below", weights_within)]
    ),
    in_model("shape-float32", EXACT, of_one(lambda a: a.float()), tolerance=FLOAT32),
    in_own("shape-float32", EXACT, of_two(lambda a, c: a.float() + c.float()), tolerance=FLOAT32),
]


# --- shapes of our own: no sums -----------------------------------------------------------------------------------


def worse(a: Tensor, c: Tensor) -> Tensor:
    return torch.maximum(a, 2 * c)


def flooded(a: Tensor) -> Tensor:
    return models.flooding(a, 13.0)


def group_dro(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """The worst of two groups of texts."""
    losses, group = each_class(logits, batch), batch["kind"] % 2
    means = [losses[group == k].mean() for k in range(2) if bool((group == k).any())]
    return torch.stack(means).max()


def worst_tokens(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Hard examples: the worst half of the micro-batch's targets."""
    losses, valid = each_token(logits, batch)
    found = losses[valid]
    return found.topk(max(1, len(found) // 2)).values.mean()


def variance_of_rows(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses = torch.stack(each_row(logits, batch))
    return losses.mean() + losses.var(unbiased=False)


def normalised(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Advantages within the micro-batch, which have no gradient."""
    advantage = batch["kind"].double()
    advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-4)
    return (advantage * each_class(logits, batch)).mean()


def in_batch(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    """Each text among the others."""
    one, other = (F.normalize(logits[:, place, :16], dim=-1) for place in (1, 2))
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def dice(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    losses, valid = each_token(logits, batch)
    p = (-losses).exp() * valid
    return 1 - 2 * p.sum() / (p.square().sum() + valid.sum())


NO_SUMS = [
    *(
        each(f"no-sum-{name}", INEXACT, of_two(combine))
        for name, combine in [
            ("max", worse),
            ("stack-max", lambda a, c: torch.stack([a, 2 * c]).max()),
            ("stack-amax", lambda a, c: torch.stack([a, 2 * c]).amax()),
            ("where", lambda a, c: torch.where(a > 2 * c, a, 2 * c)),
            ("branch", lambda a, c: a if bool(a > 2 * c) else 2 * c),
            ("logsumexp", lambda a, c: torch.logsumexp(torch.stack([a, 2 * c]), 0)),
            ("product", lambda a, c: a * c),
            ("ratio", lambda a, c: a / c),
            ("norm", lambda a, c: torch.stack([a, c]).norm()),
            ("geometric", lambda a, c: torch.exp((torch.log(a) + torch.log(c)) / 2)),
        ]
        for each in (in_own, in_model)
    ),
    *(
        each(f"no-sum-{name}", INEXACT, of_one(change))
        for name, change in [
            ("root", torch.sqrt),
            ("flooding", flooded),
            ("clamp", lambda a: a.clamp(max=13.5)),
            ("power", lambda a: a.pow(1.5)),
            ("exp", lambda a: torch.exp(a / 4)),
            ("huber", lambda a: F.smooth_l1_loss(a, torch.full_like(a, 12.0))),
            ("relu", lambda a: F.relu(a - 11.0)),
        ]
        for each in (in_own, in_model)
    ),
    in_super("no-sum-flooding", INEXACT, above(lambda loss, *_: flooded(loss)), of_one(flooded)),
    in_super("no-sum-max", INEXACT, above(lambda loss, z, b, _: torch.maximum(loss, 2 * classes(z, b))), of_two(worse)),
    # Stock multiplies in place what such a function returns.
    in_func("no-sum-logsumexp", INEXACT, of_two(lambda a, c: 1.0 * torch.logsumexp(torch.stack([a, c]), 0))),
    in_func("no-sum-root", INEXACT, of_one(lambda a: 1.0 * torch.sqrt(a))),
    *(
        each(f"no-sum-{name}", INEXACT, loss, cuts=cuts)
        for name, loss, cuts in [
            ("group-dro", group_dro, (HALVES, PAIRS)),
            ("worst-tokens", worst_tokens, (PAIRS, SINGLES)),
            ("variance", variance_of_rows, (HALVES, PAIRS)),
            ("normalised", normalised, (HALVES, PAIRS)),
            ("in-batch", in_batch, (HALVES, PAIRS)),
            ("dice", dice, (PAIRS, SINGLES)),
        ]
        for each in (in_own, in_model)
    ),
]  # fmt: skip


# --- heads that answer questions ----------------------------------------------------------------------------------

ANSWERS = [
    attack(
        f"clients-{name}",
        EXACT,
        model_itself,
        HEADS[name].build,
        [HEADS[name].samples],
        looped=True,
        cuts=(HALVES, PAIRS, SINGLES),
        right=(HALVES,),
    )
    for name in ("bert-answers",)
]


# --- a loss of one's own in a loop, declared by hand --------------------------------------------------------------

#: The mean over next tokens.
OF_TOKENS = {"contract": LossContract(Reduction.MEAN, Items(("labels",), shift=True))}


def scaled(name: str, verdict: Verdict, loss: Loss, **more: Any) -> Case:
    learnt = more.pop("learnt", {})
    given = {"windows": several(2), "options": OF_TOKENS, "cuts": THREE, **more}
    return attack(f"scale-{name}", verdict, full(loss), lambda: Texts(**learnt), trainer=None, **given)


SCALED = [
    scaled("quarter", EXACT, times(0.25)),
    scaled("by-probability", EXACT, by_probability),
    scaled("focal", EXACT, detached_focal),
    scaled("early", EXACT, early),
    # Right as declared, though the count stands below the sum, or with the classes.
    scaled("divided-below", EXACT, weights_within),
    scaled("of-a-dot", EXACT, by_dot),
    scaled("of-elements", EXACT, lambda z, b, m: (-z[:, :-1].log_softmax(-1))[b["labels"][:, 1:] != -100].mean()),
    scaled("factor", EXACT, learnt_factor, learnt={"s": 0.3}, alone=("s",)),
    # What cannot be read is taken as it is declared.
    scaled("reentrant", EXACT, checkpointed(True)),
    scaled("written-down", EXACT, by_function(Entropy)),
    scaled("fused", EXACT, by_function(models.Fused)),
    # Declared, and another: the graph shows it.
    scaled("both", EITHER, both),
    scaled("classes", EITHER, classes),
    scaled("rows", EITHER, of_samples),
    scaled("root", INEXACT, of_one(torch.sqrt)),
    scaled("max", INEXACT, of_two(worse)),
]


CASES: list[Case] = [
    *ONE_OVER_G, *CACHED, *STOPPED, *LEARNT, *SIZES, *UNSEEN, *READERS, *UNLABELLED, *PER_SAMPLE, *BY_NUMBER, *ROWS,
    *LATER, *EARLY, *STATE, *TWO_STEPS, *GROWING, *NEARLY_EVEN, *SOME_HOLD, *EQUAL, *EASY, *ZERO, *READABLE, *NO_SUMS,
    *ANSWERS, *SCALED,
]  # fmt: skip


# --- two ranks ----------------------------------------------------------------------------------------------------


class Plain(runs.Ordered):
    """A compute_loss of one's own."""

    of: Loss = staticmethod(tokens)  # type: ignore[assignment]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = type(self).of(outputs["logits"], inputs, bare(model))
        return (loss, outputs) if return_outputs else loss


def _on_two(name: str, loss: Loss, **learnt: Any) -> runs.Case:
    """In a compute_loss; in the model where it has parameters, which ranks look for in a forward."""
    trainer = runs.Ordered if learnt else type("Plain", (Plain,), {"of": staticmethod(loss)})
    head = Head(name, seeded(holding(loss, **learnt)), texts())
    return runs.Case(f"read-{name}", head, trainer, lambda model, batch: full(loss)(model, batch, 0))


class TwoHeads(Texts):
    """Another head, whose loss is logged and has no gradient: ranks wait for none of its parameters."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.other = nn.Linear(16, len(self.head.bias))

    def logits_of_other(self, input_ids: Tensor) -> Tensor:
        return self.other(self.embed(input_ids))


def detached_head(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return tokens(logits, batch) + classes(model.logits_of_other(batch["input_ids"]), batch).detach()


def detached_tokens(logits: Tensor, batch: Batch, model: Any) -> Tensor:
    return classes(logits, batch) + tokens(model.logits_of_other(batch["input_ids"]), batch).detach()


def _two_heads(name: str, loss: Loss) -> runs.Case:
    head = Head(name, seeded(lambda: TwoHeads(loss)), texts())
    return runs.Case(f"read-{name}", head, runs.Ordered, lambda model, batch: full(loss)(model, batch, 0))


TWO_RANKS: Mapping[Verdict, list[runs.Case]] = {
    EXACT: [_on_two("both", both), _on_two("checkpoint", beside_classes(checkpointed(False)))],
    GRADIENT: [
        _on_two("detached", of_two(with_detached)),
        _two_heads("detached-head", detached_head),
        _two_heads("detached-tokens", detached_tokens),
    ],
    EITHER: [
        _on_two("uncertain", uncertain, s=[0.2, -0.3]),
        _on_two("reentrant", beside_classes(checkpointed(True))),
        _on_two("fused", beside_classes(by_function(models.Fused))),
        _on_two("reversed", of_two(lambda a, c: a + models.Reverse.apply(c))),
        # W is 2.
        _on_two("half", times(0.5)),
    ],
    INEXACT: [_on_two("balanced", of_two(balanced)), _on_two("max", of_two(worse))],
}
