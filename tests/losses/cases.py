"""Losses whose gradient their values do not tell, rebuilt as small as they get; each with the verdict that it must get.

Numbers before a name are of the rows of trainings that broke the package; shapes of our own around a row share its
number. A loss is a function of what is `Seen` in a forward, so that it can stand in the model, in a compute_loss, in a
compute_loss_func, beside super()'s, and in a loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Bound before anything is patched, as modules bind it that are imported first.
from torch.nn.functional import cross_entropy as early_cross_entropy
from torch.utils.checkpoint import checkpoint

from hf_accum_fix import Items, LossContract, Reduction
from tests.losses import models
from tests.losses.models import bare, fewer, model_itself, points
from tests.losses.seen import (
    ByNumber,
    ForFunctions,
    Loss,
    Mean,
    Points,
    Seen,
    TakingPoints,
    Texts,
    around,
    both,
    classes,
    even,
    full,
    func,
    holding,
    mean_by_hand,
    own,
    tokens,
)
from tests.losses.verdicts import FLOAT32, HALVES, PAIRS, RATE, SINGLES, UNEVEN, Verdict
from tests.numerics.heads import HEADS, Batch, Sample, seeded, shifted_cross_entropy
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import LENGTHS, generator, without_targets
from tests.numerics.parity import StockRecorder
from tests.trainings import Case, FullLoss, computing

EXACT, GRADIENT, EITHER, INEXACT, NAMED, *_ = Verdict
EVEN, THREE = (PAIRS, SINGLES), (PAIRS, SINGLES, UNEVEN)


# --- samples ------------------------------------------------------------------------------------------------------


def texts(window: int = 0) -> list[Sample]:
    """Eight ragged texts with masked prompts, and a class of each."""
    return [
        {**sample, "kind": torch.tensor((i * i + i // 3 + window) % 4)} for i, sample in enumerate(models.texts(window))
    ]


def several(count: int, make: Callable[[int], list[Sample]] = texts) -> list[list[Sample]]:
    return [make(window) for window in range(count)]


# --- where a loss stands ------------------------------------------------------------------------------------------

#: What is made of super's loss, which is the mean over next tokens.
Change = Callable[[Tensor, Seen], Tensor]


def attack(
    name: str, verdict: Verdict, loss: FullLoss, model: Any, windows: Any, trainer: Any = StockRecorder, **more: Any
) -> Case:
    given = {"rate": RATE, "cuts": EVEN, **more}
    return Case(name, loss, model, windows, trainer, verdict=verdict, **given)


def in_own(name: str, verdict: Verdict, loss: Loss, *, learnt: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """In a compute_loss of one's own."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-own", verdict, model=lambda: Texts(**learnt or {}), trainer=own(loss), **given)


def in_model(
    name: str, verdict: Verdict, loss: Loss, *, head: type[Texts] = Texts, learnt: Any = None, **more: Any
) -> Case:
    """In the model, by the Trainer and by a loop."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-model", verdict, model=holding(loss, head, **learnt or {}), looped=True, **given)


def in_func(name: str, verdict: Verdict, loss: Loss, *, learnt: Any = None, **more: Any) -> Case:
    """In a compute_loss_func; stock trains G times what it returns."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-func", verdict, model=lambda: ForFunctions(**learnt or {}), given=func(loss), **given)


def in_both(name: str, verdict: Verdict, loss: Loss, **more: Any) -> list[Case]:
    """In a compute_loss, and in the model."""
    return [each(name, verdict, loss, **more) for each in (in_own, in_model)]


def by_super(name: str, verdict: Verdict, trainer: type, loss: Loss, *, head: type[Texts] = Texts, **more: Any) -> Case:
    """By a trainer that calls super; the whole of its loss is given as well."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-super", verdict, model=head, trainer=trainer, **given)


def in_super(name: str, verdict: Verdict, change: Change, **more: Any) -> Case:
    """Around super's."""
    trainer = around(lambda loss, s, _: change(loss, s))
    return by_super(name, verdict, trainer, lambda s: change(s.tokens, s), **more)


# --- 1: constants that equal 1/G ----------------------------------------------------------------------------------

_INITIAL: dict[str, Any] = {}


def from_initial(s: Seen) -> Tensor:
    """KL from the model as it was at first: zero there, and so is its gradient."""
    if not _INITIAL:
        _INITIAL["model"] = seeded(Texts)().requires_grad_(False)
    others = _INITIAL["model"].logits(s.batch["input_ids"])
    return models.divergence(s.logits, others, models.attended(s.batch))


def half(s: Seen) -> Tensor:
    return 0.5 * s.tokens


def quarter(s: Seen) -> Tensor:
    return 0.25 * s.tokens


ONE_OVER_G = [
    in_own("1-half", EXACT, half, cuts=(HALVES,)),
    in_own("1-half-of-classes", EXACT, lambda s: 0.5 * s.classes, cuts=(HALVES,), right=(HALVES,)),
    in_own("1-quarter", EXACT, quarter, cuts=(PAIRS,)),
    in_own("1-quarter-tensor", EXACT, lambda s: s.tokens * torch.tensor(0.25), cuts=(PAIRS, UNEVEN)),
    in_own("1-half-and-kl", EXACT, lambda s: half(s) + 0.5 * from_initial(s), cuts=(HALVES,), windows=several(2)),
    in_own("1-mean-of-two", INEXACT, lambda s: s.stack.mean(), cuts=(HALVES,)),
    in_super("1-half-by-number", EXACT, lambda loss, s: 0.5 * loss, head=ByNumber, cuts=(HALVES,), right=(HALVES,)),
    in_func("1-half", EXACT, half, cuts=(HALVES,)),
    # No 1/G at these cuts.
    in_own("1-half-elsewhere", EXACT, half, cuts=(PAIRS, SINGLES)),
    # Two readings of a text, and the mean of their losses. A model knows no G.
    in_model("1-two-views", EXACT, lambda s: (s.tokens + s.by(s.logits.tanh()).tokens) / 2, cuts=(HALVES, PAIRS)),
]


# --- 2: a number of steps kept from the arguments -----------------------------------------------------------------


class Cached(StockRecorder):
    """Keeps G as it was when the trainer was made, for a head for which stock does not divide."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ga, self.mine = self.args.gradient_accumulation_steps, copy.copy(self.args)


def share(trainer: Any, loss: Tensor) -> Tensor:
    return loss / trainer.ga


def kept(loss: Loss, of: Callable[[Any, Tensor], Tensor] = share) -> type:
    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        return of(trainer, loss(Seen(outputs["logits"], inputs, bare(model)))), outputs

    return computing(compute, Cached)


def of_super(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """Asks super without the number."""
    loss, outputs = base(model, inputs, return_outputs=True)
    return share(trainer, loss), outputs


class CachedFunc(Cached):
    """A compute_loss_func that has closed over G."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return share(self, shifted_cross_entropy(outputs["logits"], labels))

        self.compute_loss_func = compute


class Declared(kept(tokens)):  # type: ignore[misc]
    """Says so, by an attribute that newer releases read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = True


def over_share(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"]
    return shifted_cross_entropy(logits, inputs["labels"], reduction="sum") / share(trainer, number), {"logits": logits}


def cached(name: str, trainer: type, loss: Loss, head: type[Texts] = Mean, **more: Any) -> Case:
    given = {"windows": several(1), **more}
    return attack(f"2-{name}", NAMED, full(loss), head, trainer=trainer, **given)


CACHED = [
    cached("tokens", kept(tokens), tokens),
    cached("both", kept(both), both),
    cached("super", computing(of_super, Cached), tokens, ByNumber),
    cached(
        "arguments",
        kept(classes, lambda t, loss: loss / t.mine.gradient_accumulation_steps),
        classes,
        right=(PAIRS, SINGLES),
    ),
    cached("func", CachedFunc, tokens),
    cached("number", computing(over_share, Cached), tokens),
    attack("2-declared", EITHER, full(tokens), Mean, several(1), Declared),
]


# --- 3: stop-gradients --------------------------------------------------------------------------------------------


def balanced(a: Tensor, c: Tensor) -> Tensor:
    """As large as the other, as seen from here."""
    return a + c * (a / c).detach()


def balanced_terms(s: Seen) -> Tensor:
    return balanced(s.tokens, s.classes)


def each_one(s: Seen) -> Tensor:
    """Over its own sum without gradient, which adds up as counts do: this one could be exact."""
    return s.tokens / s.tokens.detach() + s.classes / s.classes.detach()


def over_itself(s: Seen) -> Tensor:
    return s.tokens / s.tokens.detach()


def straight_through(s: Seen) -> Tensor:
    """The value of one, the gradient of both."""
    return s.tokens + s.classes - s.classes.detach()


def detached_focal(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return ((1 - (-losses).exp().detach()) ** 2 * losses)[valid].mean()


def by_probability(s: Seen) -> Tensor:
    """DFT: each token by the probability that it has now."""
    losses, valid = s.each_token
    return ((-losses).exp().detach() * losses * valid).sum() / valid.sum()


def by_norm(s: Seen) -> Tensor:
    return (s.tokens + s.classes) / s.stack.norm().detach()


STOPPED = [
    in_own("3-balanced", INEXACT, balanced_terms, cuts=THREE),
    in_own("3-each-one", EITHER, each_one),
    in_own("3-by-norm", INEXACT, by_norm),
    in_own("3-by-item", INEXACT, lambda s: s.tokens + s.classes * (s.tokens.item() / s.classes.item())),
    in_model("3-itself", EITHER, over_itself),
    in_func("3-balanced", INEXACT, balanced_terms),
    in_super("3-itself", EITHER, lambda loss, s: loss / loss.detach()),
    # These are means all the same.
    in_own("3-straight-through", GRADIENT, straight_through, cuts=THREE),
    in_own("3-focal", EXACT, detached_focal),
    in_model("3-by-probability", EXACT, by_probability, cuts=THREE),
]


# --- 4: learnt weights --------------------------------------------------------------------------------------------


def uncertain(s: Seen) -> Tensor:
    """Kendall et al. 2018."""
    one, other = s.learnt.exp().reciprocal()
    return one * s.tokens + other * s.classes + s.learnt.sum()


def uncertain_variance(s: Seen) -> Tensor:
    terms = s.tokens / (2 * s.learnt[0] ** 2) + s.classes / (2 * s.learnt[1] ** 2)
    return terms + torch.log(s.learnt[0] * s.learnt[1])


def mixed(s: Seen) -> Tensor:
    share = torch.sigmoid(s.learnt)
    return share * s.tokens + (1 - share) * s.classes


def learnt_factor(s: Seen) -> Tensor:
    return torch.exp(s.learnt) * s.tokens


def _learnt(name: str, verdict: Verdict, loss: Loss, start: Any, **more: Any) -> Case:
    return in_own(f"4-{name}", verdict, loss, learnt={"s": start}, alone=("s",), windows=several(2), **more)


LEARNT = [
    _learnt("uncertain", EITHER, uncertain, [0.2, -0.3]),
    _learnt("variance", EITHER, uncertain_variance, [1.2, 0.7]),
    _learnt("mixed", EITHER, mixed, 0.4),
    _learnt("softmax", EITHER, lambda s: s.learnt.softmax(0) @ s.stack, [0.1, -0.2]),
    _learnt("tempered", EITHER, lambda s: torch.exp(-s.learnt) * s.tokens + s.learnt, 0.3, cuts=THREE),
    _learnt("factor", EXACT, learnt_factor, 0.3),
    in_func("4-uncertain", EITHER, uncertain, learnt={"s": [0.2, -0.3]}, alone=("s",), windows=several(2)),
]


# --- 5: micro-batches of other sizes, and gradients that are turned -----------------------------------------------


def with_detached(s: Seen) -> Tensor:
    return s.tokens + s.classes.detach()


def with_reversed(s: Seen) -> Tensor:
    return s.tokens + models.Reverse.apply(s.classes)


def of_reversed_logits(s: Seen) -> Tensor:
    return s.tokens + s.by(models.Reverse.apply(s.logits)).classes


def hooked(s: Seen) -> Tensor:
    if s.tokens.requires_grad:
        s.classes.register_hook(lambda gradient: -0.5 * gradient)
    return s.tokens + s.classes


SIZES = [
    *in_both("5-detached", GRADIENT, with_detached, cuts=THREE),
    in_own("5-detached-tokens", GRADIENT, lambda s: s.tokens.detach() + s.classes, cuts=(UNEVEN,)),
    in_own("5-reversed", EITHER, with_reversed, cuts=THREE),
    in_own("5-hooked", EITHER, hooked, cuts=THREE),
    in_own("5-reversed-logits", EXACT, of_reversed_logits, cuts=THREE),
    *in_both("5-both", EXACT, both, cuts=THREE),
    in_super("5-both", EXACT, lambda loss, s: loss + s.classes, cuts=THREE),
    in_func("5-both", EXACT, both, cuts=THREE),
]


# --- 6: terms without a graph, or with one that nobody sees -------------------------------------------------------


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


def checkpointed(reentrant: bool, loss: Loss = tokens) -> Loss:
    return lambda s: checkpoint(lambda logits: loss(s.by(logits)), s.logits, use_reentrant=reentrant)


def beside_classes(loss: Loss) -> Loss:
    return lambda s: loss(s) + s.classes


def by_function(function: Any) -> Loss:
    return lambda s: function.apply(*s.flat)


def each_by_function(s: Seen) -> Tensor:
    logits, labels = s.flat
    return EachEntropy.apply(logits, labels).sum() / (labels != -100).sum()


def logs_beside(s: Seen) -> Tensor:
    """By hand; what torch makes of it is for the log alone."""
    with torch.no_grad():
        s.model.seen = float(s.tokens)
    return mean_by_hand(s) + s.classes


UNSEEN = [
    in_own("6-reentrant", EITHER, beside_classes(checkpointed(True)), cuts=THREE),
    *in_both("6-checkpoint", EXACT, beside_classes(checkpointed(False)), cuts=THREE),
    *in_both("6-fused", EITHER, beside_classes(by_function(models.Fused)), cuts=THREE),
    in_own("6-fused-later", EITHER, beside_classes(by_function(FusedLater)), cuts=THREE),
    in_own("6-each-token", EXACT, beside_classes(each_by_function), cuts=THREE),
    in_own("6-logs-beside", EXACT, logs_beside, cuts=THREE),
    in_func("6-fused", EITHER, beside_classes(by_function(models.Fused))),
    by_super(
        "6-fused", EITHER, around(lambda loss, s, _: loss + by_function(models.Fused)(s)), lambda s: 2.0 * s.tokens
    ),
]


# --- 7: models that read their labels -----------------------------------------------------------------------------


def asserting(s: Seen) -> Tensor:
    labels = s.batch["labels"]
    assert bool((labels[:, 0] == -100).all()), "the first token is no target"
    assert bool((labels != -100).any(1).all()), "a text has a target"
    return s.tokens


def of_first_targets(s: Seen) -> Tensor:
    """The first target of each text alone."""
    labels = s.batch["labels"]
    at = (labels != -100).long().argmax(1)
    rows = torch.arange(len(labels))
    assert bool((at > 0).all()), "a text without a prompt"
    return F.cross_entropy(s.logits[rows, at - 1], labels[rows, at])


READERS = [
    in_own("7-asserts", EXACT, asserting),
    in_func("7-asserts", EXACT, asserting),
    in_model("7-first-targets-takes", EXACT, of_first_targets, head=Mean, cuts=THREE),
]


# --- 8: windows and micro-batches without labels ------------------------------------------------------------------


def unlabelled_in(at: int) -> Callable[[int], list[Sample]]:
    return lambda window: without_targets(texts(window)) if window == at else texts(window)


def two_unlabelled(window: int) -> list[Sample]:
    return without_targets(texts(window), (0, 1, 5))


def guarded_and_squares(s: Seen) -> Tensor:
    return s.guarded + s.squares


def guarded_and_classes(s: Seen) -> Tensor:
    return s.guarded + s.classes


UNLABELLED = [
    in_own("8-squares-first", EITHER, guarded_and_squares, windows=several(3, unlabelled_in(0))),
    in_own("8-squares-second", EITHER, guarded_and_squares, windows=several(3, unlabelled_in(1))),
    in_func("8-classes-first", EITHER, guarded_and_classes, windows=several(3, unlabelled_in(0))),
    *in_both("8-classes-in-a-window", EXACT, guarded_and_classes, windows=several(2, two_unlabelled)),
]


# --- 9: the mean of sample means ----------------------------------------------------------------------------------


def early(s: Seen) -> Tensor:
    return early_cross_entropy(*s.flat)


def of_samples(s: Seen) -> Tensor:
    return torch.stack(s.each_row).mean()


def sample_means(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return ((losses * valid).sum(1) / valid.sum(1)).mean()


def sample_means_or_zero(s: Seen) -> Tensor:
    """A text without a target counts as one of loss 0."""
    losses, valid = s.each_token
    return ((losses * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


SAMPLE_MEANS = [
    *in_both("9-sample-means", EXACT, sample_means, cuts=THREE, right=EVEN),
    in_own("9-or-zero", EXACT, sample_means_or_zero, windows=several(2, two_unlabelled), cuts=THREE, right=EVEN),
]


# --- 10: heads that take the number, and a term beside ------------------------------------------------------------


def each_divergence(s: Seen) -> Tensor:
    """From a fixed teacher, of every target."""
    ids, labels = s.batch["input_ids"][:, :-1], s.batch["labels"][:, 1:]
    teacher = torch.cos(ids[..., None] * torch.arange(1, s.logits.shape[-1] + 1)).to(s.logits)
    log_p, log_q = s.logits[:, :-1].log_softmax(-1), teacher.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)[labels != -100]


def distilled(s: Seen) -> Tensor:
    return s.tokens + each_divergence(s).mean()


def divergence_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss + each_divergence(Seen(outputs["logits"], inputs)).sum() / number, outputs


def both_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"]
    summed = shifted_cross_entropy(logits, inputs["labels"], reduction="sum")
    return summed / number + each_divergence(Seen(logits, inputs)).sum() / number, {"logits": logits}


def share_of_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The mean times n / N."""
    s = Seen(model(input_ids=inputs["input_ids"])["logits"], inputs)
    return s.tokens * (s.flat[1] != -100).sum() / number, {"logits": s.logits}


BY_NUMBER = [
    by_super(f"10-{name}", EXACT, trainer, loss, head=ByNumber, right=right, cuts=THREE)
    for name, trainer, loss, right in [
        ("window", around(lambda a, s, t: a + s.classes / t.current_gradient_accumulation_steps), both, EVEN),
        ("distilled", computing(divergence_by_number), distilled, THREE),
        ("both", computing(both_by_number), distilled, THREE),
        ("share", computing(share_of_number), tokens, THREE),
    ]
]


# --- 11: row by row -----------------------------------------------------------------------------------------------


def row_by_row(gather: Callable[[list[Tensor]], Tensor]) -> type:
    """super() for each row, and the mean."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["input_ids"]))]
        return gather([base(model, row) for row in rows]), None

    return computing(compute)


def stacked(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def listed(losses: list[Tensor]) -> Tensor:
    return sum(losses) / len(losses)  # type: ignore[return-value]


ROWS = [
    *(
        by_super(f"11-{name}", verdict, row_by_row(gather), of_samples, right=EVEN, cuts=THREE)
        for name, verdict, gather in [("stacked", EXACT, stacked), ("listed", EITHER, listed)]
    ),
    in_model("11-stacked", EXACT, lambda s: stacked(s.each_row), right=EVEN, cuts=THREE),
    in_own("11-rows", EXACT, of_samples, right=EVEN, cuts=THREE),
]


# --- 12: what changes in a later window ---------------------------------------------------------------------------

LATE = 6


class Turns(Texts):
    """Knows the window."""

    step = 0


def from_turn(start: int, loss: Loss, later: Loss, end: int = LATE) -> Loss:
    return lambda s: (later if start <= s.model.step < end else loss)(s)


def if_there(s: Seen) -> Tensor:
    return both(s) if "kind" in s.batch else s.tokens


def with_kind(windows: range) -> Callable[[int], list[Sample]]:
    """In these windows alone."""

    def made(window: int) -> list[Sample]:
        samples = texts(window)
        return samples if window in windows else [{k: v for k, v in s.items() if k != "kind"} for s in samples]

    return made


def late(name: str, verdict: Verdict, loss: Loss, make: Callable[[int], list[Sample]] = texts, **more: Any) -> Case:
    given = {"cuts": (PAIRS,), **more}
    return in_model(f"12-{name}", verdict, loss, head=Turns, windows=several(LATE, make), **given)


LATER = [
    late("term-from-2", GRADIENT, from_turn(1, tokens, both)),
    # Looked at again in the window after.
    late("term-from-3", EITHER, from_turn(2, tokens, both)),
    late("term-in-3", EITHER, from_turn(2, tokens, both, 3)),
    late("alternates", EITHER, lambda s: both(s) if s.model.step % 2 else s.tokens),
    late("classes-from-3", EXACT, from_turn(2, tokens, classes)),
    late("samples-from-5", EITHER, from_turn(4, tokens, of_samples), cuts=(PAIRS, UNEVEN)),
    late("root-from-3", EITHER, from_turn(2, tokens, lambda s: s.tokens.sqrt())),
    # Rises from zero.
    late("scheduled", EXACT, lambda s: s.tokens + 0.2 * s.model.step * s.classes),
    late("kind-from-2", GRADIENT, if_there, with_kind(range(1, LATE))),
    late("unlabelled-first", EITHER, guarded_and_classes, unlabelled_in(0)),
]


# --- 13: cross entropy that was imported early --------------------------------------------------------------------

EARLY = [in_own("13-two-terms", EXACT, beside_classes(early), windows=several(2))]


# --- 14: state that a forward writes ------------------------------------------------------------------------------


class Queue(Texts):
    """MoCo: classes of texts among the last texts, which are kept."""

    def __init__(self) -> None:
        super().__init__(self.among)
        self.register_buffer("queue", torch.randn(6, 16, generator=generator(4)))

    def among(self, s: Seen) -> Tensor:
        z = F.normalize(s.logits[:, 1, :16], dim=-1)
        keys = F.normalize(s.logits[:, 2, :16], dim=-1).detach()
        scores = torch.cat([(z * keys).sum(1, keepdim=True), z @ self.queue.clone().T], 1) / 0.2
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(scores, torch.zeros(len(z), dtype=torch.long))


class Centred(Texts):
    """DINO: a teacher's centre follows what it sees."""

    def __init__(self) -> None:
        super().__init__(self.centred)
        self.register_buffer("centre", torch.zeros(16))

    def centred(self, s: Seen) -> Tensor:
        teacher, student = s.logits[:, 2, :16].detach(), s.logits[:, 1, :16]
        self.centre.mul_(0.5).add_(teacher.mean(0), alpha=0.5)
        return -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


class CentredAnew(Centred):
    """A new tensor each time, by its attribute."""

    def centred(self, s: Seen) -> Tensor:
        teacher, student = s.logits[:, 2, :16].detach(), s.logits[:, 1, :16]
        self.centre = 0.5 * self.centre + 0.5 * teacher.mean(0)
        return -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


class OverItsFloat(Texts):
    """A loss over its running average, a Python number."""

    def __init__(self) -> None:
        super().__init__(self.over)
        self.average = 1.0

    def over(self, s: Seen) -> Tensor:
        loss = s.tokens
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average


class Counts(Texts):
    """Counts the texts it has seen, for whoever asks; its loss knows nothing of that."""

    def __init__(self) -> None:
        super().__init__(self.counting)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def counting(self, s: Seen) -> Tensor:
        self.seen += len(s.logits)
        return s.tokens


class Averaging(StockRecorder):
    """The average of the trainer's."""

    average = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        loss = loss / self.average
        return (loss, outputs) if return_outputs else loss


def over_average(s: Seen) -> Tensor:
    loss = s.tokens
    return loss / (0.9 + 0.1 * float(loss.detach()))


STATE = [
    *(
        attack(f"14-{model.__name__}", INEXACT, model_itself, model, several(1), looped=True)
        for model in (Queue, Centred, CentredAnew, OverItsFloat)
    ),
    by_super("14-averaging", INEXACT, Averaging, over_average),
    attack("14-Counts", GRADIENT, model_itself, Counts, several(2), looped=True),
]


# --- 15: two steps in one -----------------------------------------------------------------------------------------


def moved_along(model: Any, batch: Batch, step: int) -> Tensor:
    """SAM (Foret et al. 2021): the loss where the parameters are moved along its gradient."""
    loss = full(tokens)(model, batch, step)
    names = dict(model.named_parameters())
    along = torch.autograd.grad(loss, [*names.values()])
    norm = torch.stack([each.norm() for each in along]).norm()
    moved = {n: p + 0.5 * each / norm for (n, p), each in zip(names.items(), along, strict=True)}
    logits = torch.func.functional_call(model, moved, kwargs={"input_ids": batch["input_ids"]})["logits"]
    return Seen(logits, batch).tokens


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
    def change(loss: Tensor, s: Seen, trainer: Any) -> Tensor:
        factor = later if trainer.state.global_step >= 1 else first
        return loss + factor * s.classes if factor else loss

    return around(change)


def full_growing(first: float, later: float) -> FullLoss:
    return lambda model, batch, step: full(lambda s: s.tokens + (later if step else first) * s.classes)(
        model, batch, step
    )


GROWING = [
    attack(f"16-{name}", verdict, full_growing(first, 10.0), head, several(4), grows(first, 10.0))
    # Where a head takes the number, stock adds a term G times.
    for name, first, head, verdict in [
        ("from-none", 0.0, Texts, GRADIENT),
        ("from-none-by-number", 0.0, ByNumber, GRADIENT),
        ("from-a-tenth-by-number", 0.1, ByNumber, EXACT),
    ]
]


# --- 17: nearly even probabilities --------------------------------------------------------------------------------


def hidden_mask(s: Seen) -> Tensor:
    """A float mask that no key of the batch holds."""
    losses, valid = s.each_token
    mask = (valid & (s.batch["input_ids"][:, 1:] % 3 != 0)).to(losses)
    return (losses * mask).sum() / mask.sum()


def with_entropy(s: Seen) -> Tensor:
    return s.tokens - 1e-3 * models.entropy(s.logits, models.attended(s.batch))


NEARLY_EVEN = [
    attack(f"17-{name}", verdict, full(loss), even(), several(1), own(loss))
    for name, verdict, loss in [
        ("root", INEXACT, lambda s: s.tokens.sqrt()),
        ("hidden-mask", EXACT, hidden_mask),
        ("entropy", EXACT, with_entropy),
    ]
]


# --- 18: terms that some micro-batches hold -----------------------------------------------------------------------


def with_tasks(window: int) -> list[Sample]:
    """Two by turns."""
    return [{**sample, "task": torch.tensor(i % 2)} for i, sample in enumerate(texts(window))]


def _tasks(s: Seen) -> list[tuple[Tensor, Tensor]]:
    """Of each task that is there its rows' share, and the mean over them."""
    rows = s.batch["task"] == 0
    found = [(loss, each) for loss, each in ((tokens, rows), (classes, ~rows)) if bool(each.any())]
    return [(each.double().mean(), loss(s.rows(each))) for loss, each in found]


def tasks_summed(s: Seen) -> Tensor:
    """The mean of each task that is there."""
    return sum(loss for _, loss in _tasks(s))  # type: ignore[return-value]


def tasks_by_share(s: Seen) -> Tensor:
    """The mean of each weighed by its share of the rows."""
    return sum(share * loss for share, loss in _tasks(s))  # type: ignore[return-value]


def with_some_kinds(window: int) -> list[Sample]:
    """Three in four have no class."""
    return [{**s, "kind": s["kind"] if i % 4 == 1 else torch.tensor(-100)} for i, s in enumerate(texts(window))]


def classes_if_any(s: Seen) -> Tensor:
    loss = s.tokens
    return loss + s.classes if bool((s.batch["kind"] != -100).any()) else loss


def classes_or_zero(s: Seen) -> Tensor:
    """Zero where there is none, by a divisor of at least one."""
    found = F.cross_entropy(s.logits[:, 1, :4], s.batch["kind"], reduction="sum")
    return s.tokens + found / (s.batch["kind"] != -100).sum().clamp(min=1)


def macro(s: Seen) -> Tensor:
    """The mean over classes that are there of the mean over each."""
    losses, kinds = s.each_class, s.batch["kind"]
    return torch.stack([losses[kinds == k].mean() for k in kinds.unique()]).mean()


def classes_then_tokens(s: Seen) -> Tensor:
    """Its terms stand in the other order where the first text is of an odd kind."""
    a, c = s.tokens, s.classes
    return a + 0.5 * c if int(s.batch["kind"][0]) % 2 else 0.5 * c + a


SOME_HOLD = [
    in_own("18-summed", EITHER, tasks_summed, windows=several(2, with_tasks), cuts=THREE),
    in_own("18-by-share", EITHER, tasks_by_share, windows=several(2, with_tasks), cuts=(SINGLES, UNEVEN)),
    *in_both("18-if-any", EITHER, classes_if_any, windows=several(2, with_some_kinds)),
    *in_both("18-or-zero", EXACT, classes_or_zero, windows=several(2, with_some_kinds), cuts=THREE),
    in_own("18-other-order", EXACT, classes_then_tokens, cuts=THREE),
    # In pairs every class is there once at most: nothing tells it from a mean over samples.
    in_own("18-macro", INEXACT, macro, cuts=(HALVES,)),
    in_func("18-summed", EITHER, tasks_summed, windows=several(1, with_tasks)),
]


# --- 19: values that are all equal --------------------------------------------------------------------------------


def ratio_of_tokens(s: Seen) -> Tensor:
    losses, valid = s.each_token
    ratio = (losses.detach() - losses).exp()
    return -(ratio * valid).sum() / valid.sum()


def ratio_of_texts(s: Seen) -> Tensor:
    """The mean over texts of means over tokens, as GRPO takes it."""
    losses, valid = s.each_token
    ratio = (losses.detach() - losses).exp()
    return -((ratio * valid).sum(1) / valid.sum(1)).mean()


EQUAL = [
    in_own("19-tokens", EITHER, ratio_of_tokens, cuts=THREE),
    in_own("19-texts", EITHER, ratio_of_texts, right=EVEN, cuts=THREE),
]


# --- warned of, though exact --------------------------------------------------------------------------------------


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


def log_p_of_rows(s: Seen) -> tuple[Tensor, Tensor]:
    """Of each row: summed, and the mean over its targets."""
    losses, valid = s.each_token
    return -(losses * valid).sum(1), -(losses * valid).sum(1) / valid.sum(1)


def dpo(s: Seen) -> Tensor:
    """Of pairs that stand one after another."""
    log_p = log_p_of_rows(s)[0]
    return -F.logsigmoid(0.1 * (log_p[0::2] - log_p[1::2])).mean()


def of_fours(s: Seen) -> Tensor:
    """Each text against the three others of its group."""
    scores = log_p_of_rows(s)[1].view(-1, 4)
    return -(scores[:, 0] - scores.logsumexp(1)).mean()


def chosen_and_rejected(s: Seen) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Log-likelihoods of the first half and of the second, and the mean over the first half's tokens."""
    (sums, means), rows = log_p_of_rows(s), len(s.logits) // 2
    return (sums[:rows], sums[rows:]), (means[:rows], means[rows:]), s.rows(slice(rows)).tokens


def orpo(s: Seen) -> Tensor:
    _, (chosen, rejected), answers = chosen_and_rejected(s)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return answers - 0.1 * F.logsigmoid(odds).mean()


def dpo_and_answers(s: Seen) -> Tensor:
    (chosen, rejected), _, answers = chosen_and_rejected(s)
    losses = -F.logsigmoid(0.1 * (chosen - rejected))
    return losses.mean() + answers


def dpo_plus_answers(s: Seen) -> Tensor:
    """rpo_alpha as TRL adds it: a number to each pair's loss."""
    (chosen, rejected), _, answers = chosen_and_rejected(s)
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
        return loss(Seen(outputs["logits"], batch, bare(model))), outputs

    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        return full(loss)(model, put_together(batch), step)

    given = {"trainer": computing(compute), "collate": by_keys, "cuts": THREE}
    return attack(f"clients-{name}-keys", EXACT, reference, Texts, several(1, groups(2)), **given)


PREFERENCES = [("orpo", orpo), ("dpo", dpo_and_answers), ("rpo", dpo_plus_answers)]


PAIRED = {"windows": several(1, groups(2)), "collate": interleaved}
FOURS = {"windows": several(1, groups(4)), "collate": interleaved}
EASY = [
    in_own(
        "easy-weighted-rows", EXACT, lambda s: (s.each_class * (1.0 + s.batch["kind"])).mean(), right=EVEN, cuts=THREE
    ),
    in_model("easy-fours", EXACT, of_fours, right=EVEN, cuts=THREE, **FOURS),
    in_func("easy-pairs", EXACT, dpo, **PAIRED),
    in_super("easy-squares", EXACT, lambda loss, s: loss + s.squares, cuts=THREE),
    in_super("easy-z", EXACT, lambda loss, s: loss + 0.01 * s.z, cuts=THREE),
    *(
        in_own(f"clients-{name}", EXACT, loss, windows=several(1, groups(2)), collate=by_role, cuts=THREE)
        for name, loss in PREFERENCES
    ),
    of_keys("orpo", orpo),
]


# --- losses that are zero where they are seen first ---------------------------------------------------------------


def scored(margins: Sequence[float]) -> Callable[[int], list[Sample]]:
    """Points whose margin is asked for in these terms."""

    def label(index: int, g: torch.Generator) -> Tensor:
        return torch.tensor(margins[index], dtype=torch.float64)

    return lambda window: models.points(label, window)


def hinge(s: Seen) -> Tensor:
    """Zero where the margin is far below the score."""
    return F.relu(s.batch["labels"] - s.logits[:, 0]).mean()


def hinge_of_active(s: Seen) -> Tensor:
    """The mean over those that are not zero."""
    losses = F.relu(s.batch["labels"] - s.logits[:, 0])
    active = losses > 0
    return losses[active].mean() if bool(active.any()) else s.logits.sum() * 0


def hinge_with_graph(s: Seen) -> Tensor:
    """A constant where all is well."""
    losses = F.relu(s.batch["labels"] - s.logits[:, 0])
    if not bool((losses > 0).any()):
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return losses.mean()


def cosent(s: Seen) -> Tensor:
    """Every pair of texts of which one is more alike: log(1 + 0) where all are."""
    labels = s.batch["labels"]
    scores = s.logits[:, 0]
    apart = 5 * (scores[:, None] - scores[None, :])
    apart = apart.masked_fill(labels[:, None] >= labels[None, :], -1e12)
    return torch.cat([apart.flatten(), torch.zeros(1, dtype=scores.dtype)]).logsumexp(0) * 1.0


#: The first three have nothing to learn.
NOTHING_FIRST = scored((-9.0, -9.0, -9.0, 2.0, 3.0, 1.0, -9.0, 4.0))
ALIKE_FIRST = scored((1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0))


def of_points(name: str, verdict: Verdict, loss: Loss, make: Any, **more: Any) -> list[Case]:
    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        return loss(Seen(model.logits(batch["x"]), batch, model))

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(x=inputs["x"])
        return loss(Seen(outputs["logits"], inputs, bare(model))), outputs

    def of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss(Seen(outputs["logits"], {"labels": labels}))

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
    *of_points("active", EITHER, hinge_of_active, NOTHING_FIRST)[2:],
    *of_points("constant", EITHER, hinge_with_graph, NOTHING_FIRST, right=EVEN)[:1],
    *of_points("cosent", INEXACT, cosent, ALIKE_FIRST, cuts=(PAIRS, HALVES))[:1],
]


# --- shapes of our own: sums that can be read ---------------------------------------------------------------------


def in_place(s: Seen) -> Tensor:
    loss = s.tokens * 1.0
    loss += 0.3 * s.classes
    return loss


def unreduced(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return torch.where(valid, losses, losses.new_zeros(())).sum() / valid.sum()


def by_dot(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return losses.flatten() @ (valid.to(losses) / valid.sum()).flatten()


def weights_within(s: Seen) -> Tensor:
    """Divided by the count before it is summed."""
    losses, valid = s.each_token
    return (losses * (valid.to(losses) / valid.sum())).sum()


def by_average(s: Seen) -> Tensor:
    """nanmean over what is no target."""
    losses, valid = s.each_token
    return losses.masked_fill(~valid, torch.nan).nanmean()


def per_token_and_text(s: Seen) -> Tensor:
    """Smoothing's other half by hand: the mean over targets of all classes."""
    losses, valid = s.each_token
    smooth = -s.logits[:, :-1].log_softmax(-1).mean(-1)
    return 0.9 * losses[valid].mean() + 0.1 * smooth[valid].mean()


def _float64(*values: float) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


READABLE = [
    *(
        in_own(f"shape-{name}", EXACT, loss, cuts=THREE)
        for name, loss in [
            ("alpha", lambda s: torch.add(s.tokens, s.classes, alpha=0.3)),
            ("minus", lambda s: s.tokens - 0.2 * s.classes),
            ("in-place", in_place),
            ("twice", lambda s: s.tokens + 0.5 * s.tokens + s.classes),
            ("where", unreduced),
            ("nanmean", by_average),
            ("smoothed", per_token_and_text),
        ]
    ),
    in_model("shape-listed", EXACT, lambda s: sum([s.tokens, s.classes]), cuts=THREE),
    *(
        in_own(f"shape-{name}", EITHER, loss, cuts=THREE)
        for name, loss in [
            ("addcmul", lambda s: torch.addcmul(s.tokens, s.classes, _float64(0.3))),
            ("einsum", lambda s: torch.einsum("i,i->", s.stack, _float64(1.0, 1.0))),
            # A sum that torch takes as a product, or whose divisor stands below it.
            ("of-a-dot", by_dot),
            ("divided-below", weights_within),
        ]
    ),
    in_own("shape-float32", EXACT, lambda s: s.tokens.float() + s.classes.float(), tolerance=FLOAT32),
]


# --- shapes of our own: no sums -----------------------------------------------------------------------------------


def greater(s: Seen) -> Tensor:
    return torch.maximum(s.tokens, 2 * s.classes)


def worst_tokens(s: Seen) -> Tensor:
    """Hard examples: the worst half of the micro-batch's targets."""
    losses, valid = s.each_token
    found = losses[valid]
    return found.topk(max(1, len(found) // 2)).values.mean()


def variance_of_rows(s: Seen) -> Tensor:
    losses = torch.stack(s.each_row)
    return losses.mean() + losses.var(unbiased=False)


def normalised(s: Seen) -> Tensor:
    """Advantages within the micro-batch, which have no gradient."""
    advantage = s.batch["kind"].double()
    advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-4)
    return (advantage * s.each_class).mean()


def in_batch(s: Seen) -> Tensor:
    """Each text among the others."""
    one, other = (F.normalize(s.logits[:, place, :16], dim=-1) for place in (1, 2))
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def _stacked(s: Seen) -> Tensor:
    return torch.stack([s.tokens, 2 * s.classes])


NO_SUMS = [
    *(
        in_own(f"no-sum-{name}", INEXACT, loss)
        for name, loss in [
            ("stack-max", lambda s: _stacked(s).max()),
            ("where", lambda s: torch.where(s.tokens > 2 * s.classes, s.tokens, 2 * s.classes)),
            ("branch", lambda s: s.tokens if bool(s.tokens > 2 * s.classes) else 2 * s.classes),
            ("product", lambda s: s.tokens * s.classes),
            ("ratio", lambda s: s.tokens / s.classes),
            ("root", lambda s: s.tokens.sqrt()),
            ("clamp", lambda s: s.tokens.clamp(max=13.5)),
            ("huber", lambda s: F.smooth_l1_loss(s.tokens, torch.full_like(s.tokens, 12.0))),
        ]
    ),
    *in_both("no-sum-max", INEXACT, greater),
    in_super("no-sum-flooding", INEXACT, lambda loss, s: models.flooding(loss, 13.0)),
    # Stock multiplies in place what such a function returns.
    in_func("no-sum-logsumexp", INEXACT, lambda s: 1.0 * torch.logsumexp(s.stack, 0)),
    *in_both("no-sum-worst-tokens", INEXACT, worst_tokens),
    in_own("no-sum-variance", INEXACT, variance_of_rows, cuts=(HALVES, PAIRS)),
    in_own("no-sum-normalised", INEXACT, normalised, cuts=(HALVES, PAIRS)),
    in_own("no-sum-in-batch", INEXACT, in_batch, cuts=(HALVES, PAIRS)),
]


# --- heads that answer questions ----------------------------------------------------------------------------------

ANSWERS = [
    attack(
        "clients-bert-answers",
        EXACT,
        model_itself,
        HEADS["bert-answers"].build,
        [HEADS["bert-answers"].samples],
        looped=True,
        cuts=(HALVES, PAIRS, SINGLES),
        right=(HALVES,),
    )
]


# --- a loss of one's own in a loop, declared by hand --------------------------------------------------------------

#: The mean over next tokens.
OF_TOKENS = {"contract": LossContract(Reduction.MEAN, Items(("labels",), shift=True))}


def scaled(name: str, verdict: Verdict, loss: Loss, **more: Any) -> Case:
    learnt = more.pop("learnt", {})
    given = {"windows": several(2), "options": OF_TOKENS, "cuts": THREE, **more}
    return attack(f"scale-{name}", verdict, full(loss), lambda: Texts(**learnt), trainer=None, **given)


SCALED = [
    scaled("by-probability", EXACT, by_probability),
    # Right as declared, though the count stands below the sum, or with the classes.
    scaled("divided-below", EXACT, weights_within),
    scaled(
        "of-elements", EXACT, lambda s: (-s.logits[:, :-1].log_softmax(-1))[s.batch["labels"][:, 1:] != -100].mean()
    ),
    scaled("factor", EXACT, learnt_factor, learnt={"s": 0.3}, alone=("s",)),
    # What cannot be read is taken as it is declared.
    scaled("reentrant", EXACT, checkpointed(True)),
    scaled("fused", EXACT, by_function(models.Fused)),
]


# --- found by attacks ------------------------------------------------------------------------------------------------


def with_teacher(window: int) -> list[Sample]:
    """Each text has what a teacher's layer gives, of three numbers a token, and a number a token; padded by zeros."""
    g = generator(window)
    return [
        {**sample, "hidden": torch.randn(len(sample["input_ids"]), 3, generator=g, dtype=torch.float64)}
        for sample in texts(window)
    ]


def padded_hidden(samples: Sequence[Sample]) -> Batch:
    batch = collate([{key: value for key, value in sample.items() if key != "hidden"} for sample in samples])
    hidden = torch.nn.utils.rnn.pad_sequence([sample["hidden"] for sample in samples], batch_first=True)
    return {**batch, "hidden": hidden}


def of_teacher(s: Seen) -> Tensor:
    """A mean over every position, padding among them."""
    mask = s.batch["attention_mask"][..., None]
    return F.mse_loss(s.logits[..., :3] * mask, s.batch["hidden"])


def free_bits(s: Seen) -> Tensor:
    """A floor that binds in the first two windows, and in the third in some micro-batches."""
    drive = s.batch["drive"][:, None]
    return s.tokens + (drive * s.logits[:, 1, :3].square()).mean(0).clamp(min=0.15).sum()


def driven(window: int) -> list[Sample]:
    return [{**sample, "drive": _float64(0.04 * (window == 2 and n == 0))} for n, sample in enumerate(texts(window))]


#: A mean over padding by three axes, alone and next to a mean of targets; a floor that stops binding.
FOUND = [
    in_own("found-teacher", EITHER, of_teacher, windows=several(1, with_teacher), collate=padded_hidden),
    in_own(
        "found-tokens-and-teacher",
        EITHER,
        lambda s: s.tokens + of_teacher(s),
        windows=several(1, with_teacher),
        collate=padded_hidden,
    ),
    in_own("found-free-bits", EITHER, free_bits, windows=several(3, driven), cuts=(SINGLES,)),
]


# --- as everyday code writes them ---------------------------------------------------------------------------------


def multi_hot(window: int = 0) -> list[Sample]:
    """Four numbers each, four yes-or-no labels, and a weight of each label."""
    return points(
        lambda index, g: {
            "labels": (torch.rand(4, generator=g) > 0.5).double(),
            "label_weights": 0.5 + torch.rand(4, generator=g).double(),
            "row_weights": 0.5 + torch.rand(1, generator=g).double(),
        },
        window,
    )


class KeepsSize(StockRecorder):
    """Keeps the size of a micro-batch as it was when the trainer was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bs = self.args.per_device_train_batch_size


class OwnCount(StockRecorder):
    """Replaces the number: what is attended to, instead of the targets."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, _ = super().get_batch_samples(*args, **kwargs)
        return batches, sum(batch["attention_mask"].sum() for batch in batches)


def of_attended(model: Any, batch: Any, step: int) -> Tensor:
    losses, valid = Seen(model.logits(batch["input_ids"]), batch, model).each_token
    return (losses * valid).sum() / batch["attention_mask"].sum()


class Relabels(ByNumber):
    """Masks labels on a copy, inside the model."""

    def forward(self, input_ids: Tensor, labels: Any = None, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(input_ids, None if labels is None else fewer(labels), **inputs)


def of_fewer_by_all(model: Any, batch: Any, step: int) -> Tensor:
    """What stock trains: the sum over what the model keeps, by what the batch holds."""
    labels = batch["labels"]
    kept, held = (fewer(labels)[:, 1:] != -100).sum(), (labels[:, 1:] != -100).sum()
    s = Seen(model.logits(batch["input_ids"]), {**batch, "labels": fewer(labels)}, model)
    return s.tokens * kept / held


def twice(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    with torch.no_grad():
        base(model, {**inputs}, num_items_in_batch=number)
    return loss, outputs


def over_kept() -> type:
    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        s = Seen(outputs["logits"], inputs, bare(model))
        return s.each_class.sum() / trainer.bs, outputs

    return computing(compute, KeepsSize)


def yes_or_no(key: str) -> Case:
    """Weights of elements in torch's own loss."""

    def loss(s: Seen) -> Tensor:
        return F.binary_cross_entropy_with_logits(s.logits, s.batch["labels"], weight=s.batch[key])

    model, given = holding(loss, TakingPoints, out=4), {"looped": True, "right": EVEN}
    return attack(f"everyday-{key}", EXACT, model_itself, model, several(2, multi_hot), **given)


def weights(s: Seen) -> Tensor:
    return s.logits.new_tensor([0.7, 0.2])


def over(divisor: Any) -> Loss:
    def loss(s: Seen) -> Tensor:
        losses, valid = s.each_token
        return (losses * valid).sum() / divisor(valid)

    return loss


def smoothed(s: Seen) -> Tensor:
    weight = torch.linspace(0.2, 1.0, s.logits.shape[-1], dtype=s.logits.dtype)
    return F.cross_entropy(*s.flat, weight=weight, label_smoothing=0.1)


def some_hold(s: Seen) -> Tensor:
    """A term of the texts of one kind, where there are any."""
    kept = s.batch["kind"] == 1
    loss = s.tokens
    loss += F.mse_loss(s.logits[kept, 1, 0], s.batch["kind"][kept].double()) if bool(kept.any()) else 0
    return loss


def normalised_weights(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return (losses.flatten() * F.normalize(valid.double().flatten(), p=1, dim=0)).sum()


def vae(s: Seen) -> Tensor:
    """Two sums."""
    losses, valid = s.each_token
    return (losses * valid).sum() + 0.1 * s.logits[:, 0].square().sum()


EVERYDAY = [
    yes_or_no("label_weights"),
    yes_or_no("row_weights"),
    # A loss of one element, and several in one tensor.
    in_own("everyday-begun", EXACT, lambda s: (torch.zeros(1, dtype=torch.float64) + s.tokens).mean()),
    in_model("everyday-over-two", INEXACT, lambda s: (s.stack / 2).sum()),
    in_own("everyday-cat", INEXACT, lambda s: torch.cat([s.tokens.view(1), s.classes.view(1)]).mul(weights(s)).sum()),
    in_own("everyday-ceiling", INEXACT, lambda s: s.tokens.clamp(max=4.5) + 0.0 * s.classes, windows=several(2)),
    # Numbers that are kept, replaced, or count what a model drops; a second forward for a log.
    attack("everyday-sum", EITHER, full(lambda s: s.each_class.mean()), Mean, several(1), over_kept()),
    attack("everyday-own-count", EITHER, of_attended, ByNumber, several(2), OwnCount, right=EVEN),
    attack("everyday-relabels", EITHER, of_fewer_by_all, Relabels, several(1), right=EVEN),
    attack("everyday-twice", EITHER, full(tokens), Mean, several(1), computing(twice)),
    # An epsilon in a divisor: one in 1e-5 of a single target, beside another count, is another count.
    in_own("everyday-1e-5", EXACT, over(lambda m: m.sum() + 1e-5), tolerance=2e-5),
    in_own("everyday-clamp", EXACT, over(lambda m: m.sum().double().clamp(min=1e-6)), tolerance=2e-5),
    in_own(
        "everyday-1e-5-two",
        EXACT,
        lambda s: over(lambda m: m.sum() + 1e-5)(s) + 0.5 * s.classes,
        tolerance=2e-5,
        cuts=(PAIRS,),
    ),
    in_own("everyday-smoothed", EXACT, smoothed, windows=several(2)),
    *in_both("everyday-some-hold", EITHER, some_hold, windows=several(2)),
    in_own("everyday-normalised-weights", EITHER, normalised_weights),
    in_own("everyday-vae", GRADIENT, vae),
]

CASES: list[Case] = [
    *FOUND,
    *ONE_OVER_G, *CACHED, *STOPPED, *LEARNT, *SIZES, *UNSEEN, *READERS, *UNLABELLED, *SAMPLE_MEANS, *BY_NUMBER,
    *ROWS, *LATER, *EARLY, *STATE, *TWO_STEPS, *GROWING, *NEARLY_EVEN, *SOME_HOLD, *EQUAL, *EASY, *ZERO, *READABLE,
    *NO_SUMS, *ANSWERS, *SCALED, *EVERYDAY,
]  # fmt: skip
