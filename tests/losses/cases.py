"""Losses whose gradient their values do not tell, rebuilt as small as they get; each with the verdict that it must get.

Numbers before a name are of the rows of trainings that broke the package; shapes of our own around a row share its
number. A loss is a function of what is `Seen` in a forward, so that it can stand in the model, in a compute_loss, in a
compute_loss_func, beside super()'s, and in a loop.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from tests.losses.seen import (
    ByNumber,
    ForFunctions,
    Loss,
    Mean,
    Points,
    Seen,
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
from tests.numerics.heads.head import Head, collate
from tests.numerics.heads.samples import LENGTHS, generator, without_targets
from tests.numerics.parity import StockRecorder
from tests.trainers import runs, terms
from tests.trainings import Case, FullLoss, computing

EXACT, GRADIENT, EITHER, INEXACT, NAMED = Verdict
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
    in_own("1-quarter-of-classes", EXACT, lambda s: 0.25 * s.classes, cuts=(PAIRS,), right=(PAIRS,)),
    in_own("1-over-eight", EXACT, lambda s: s.tokens / 8, cuts=(SINGLES,)),
    in_own("1-quarter-tensor", EXACT, lambda s: s.tokens * torch.tensor(0.25), cuts=(PAIRS, UNEVEN)),
    in_own("1-half-of-half", EXACT, lambda s: 0.5 * half(s), cuts=(PAIRS,)),
    in_own("1-half-and-kl", EXACT, lambda s: half(s) + 0.5 * from_initial(s), cuts=(HALVES,), windows=several(2)),
    in_own("1-half-of-both", EXACT, lambda s: 0.5 * both(s), cuts=(HALVES,)),
    in_own("1-of-one-term", EXACT, lambda s: s.tokens + 0.25 * s.classes, cuts=(PAIRS,)),
    in_own("1-mean-of-two", INEXACT, lambda s: s.stack.mean(), cuts=(HALVES,)),
    in_super("1-half", EXACT, lambda loss, s: 0.5 * loss, cuts=(HALVES,)),
    in_super("1-half-by-number", EXACT, lambda loss, s: 0.5 * loss, head=ByNumber, cuts=(HALVES,), right=(HALVES,)),
    in_func("1-half", EXACT, half, cuts=(HALVES,)),
    # No 1/G at these cuts.
    in_own("1-half-elsewhere", EXACT, half, cuts=(PAIRS, SINGLES)),
    in_own("1-quarter-elsewhere", EXACT, quarter, cuts=(HALVES, SINGLES)),
    # A model knows no G.
    in_model("1-half", EXACT, half, cuts=(HALVES,)),
    in_model("1-half-of-both", EXACT, lambda s: 0.5 * both(s), cuts=(HALVES,)),
    # Two readings of a text, and the mean of their losses.
    in_model("1-two-views", EXACT, lambda s: (s.tokens + s.by(s.logits.tanh()).tokens) / 2, cuts=(HALVES, PAIRS)),
    in_model("1-quarter", EXACT, quarter, cuts=(PAIRS,)),
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


def cached(name: str, trainer: type, loss: Loss, head: type[Texts] = Mean, **more: Any) -> Case:
    given = {"windows": several(1), **more}
    return attack(f"2-{name}", NAMED, full(loss), head, trainer=trainer, **given)


CACHED = [
    cached("tokens", kept(tokens), tokens),
    cached("classes", kept(classes), classes, right=(PAIRS, SINGLES)),
    cached("both", kept(both), both),
    cached("super", computing(of_super, Cached), tokens, ByNumber),
    cached("factor", kept(tokens, lambda t, loss: loss * (1 / t.ga)), tokens),
    cached("tensor", kept(tokens, lambda t, loss: loss / torch.tensor(float(t.ga))), tokens),
    cached(
        "arguments",
        kept(classes, lambda t, loss: loss / t.mine.gradient_accumulation_steps),
        classes,
        right=(PAIRS, SINGLES),
    ),
    cached("func", CachedFunc, tokens),
    cached("uneven", kept(tokens), tokens, cuts=(UNEVEN,)),
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


def softly(s: Seen) -> Tensor:
    losses = s.stack
    return (losses.detach().softmax(0) * losses).sum()


def over_itself(s: Seen) -> Tensor:
    return s.tokens / s.tokens.detach()


def straight_through(s: Seen) -> Tensor:
    """The value of one, the gradient of both."""
    return s.tokens + s.classes - s.classes.detach()


def detached_focal(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return ((1 - (-losses).exp().detach()) ** 2 * losses)[valid].mean()


def squared_rows(s: Seen) -> Tensor:
    """Each text's by itself."""
    losses = s.each_class
    return (losses.detach() * losses).mean()


def by_probability(s: Seen) -> Tensor:
    """DFT: each token by the probability that it has now."""
    losses, valid = s.each_token
    return ((-losses).exp().detach() * losses * valid).sum() / valid.sum()


def by_norm(s: Seen) -> Tensor:
    return (s.tokens + s.classes) / s.stack.norm().detach()


STOPPED = [
    in_own("3-balanced", INEXACT, balanced_terms, cuts=THREE),
    *in_both("3-each-one", EITHER, each_one),
    in_own("3-softly", INEXACT, softly),
    in_own("3-times-itself", INEXACT, lambda s: s.tokens * s.tokens.detach()),
    in_own("3-by-norm", INEXACT, by_norm),
    in_own("3-by-item", INEXACT, lambda s: s.tokens + s.classes * (s.tokens.item() / s.classes.item())),
    in_model("3-balanced", INEXACT, balanced_terms),
    in_model("3-itself", EITHER, over_itself),
    in_func("3-balanced", INEXACT, balanced_terms),
    in_func("3-itself", EITHER, over_itself),
    in_super("3-itself", EITHER, lambda loss, s: loss / loss.detach()),
    in_super("3-balanced", INEXACT, lambda loss, s: balanced(loss, s.classes)),
    # These are means all the same.
    in_own("3-straight-through", GRADIENT, straight_through, cuts=THREE),
    in_model("3-straight-through", GRADIENT, straight_through),
    in_own("3-focal", EXACT, detached_focal),
    in_model("3-by-probability", EXACT, by_probability, cuts=THREE),
    in_own("3-by-probability", EXACT, by_probability),
    in_own("3-squares-of-rows", EXACT, squared_rows, right=EVEN),
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


def _learnt(name: str, verdict: Verdict, loss: Loss, start: Any, **more: Any) -> list[Case]:
    return in_both(f"4-{name}", verdict, loss, learnt={"s": start}, alone=("s",), windows=several(2), **more)


LEARNT = [
    *_learnt("uncertain", EITHER, uncertain, [0.2, -0.3]),
    *_learnt("variance", EITHER, uncertain_variance, [1.2, 0.7]),
    *_learnt("mixed", EITHER, mixed, 0.4),
    *_learnt("softmax", EITHER, lambda s: s.learnt.softmax(0) @ s.stack, [0.1, -0.2]),
    *_learnt("in-a-stack", EITHER, lambda s: (F.softplus(s.learnt) * s.stack).sum(), [0.5, 1.0]),
    *_learnt("tempered", EITHER, lambda s: torch.exp(-s.learnt) * s.tokens + s.learnt, 0.3, cuts=THREE),
    *_learnt("factor", EXACT, learnt_factor, 0.3),
    *_learnt("temperature", EXACT, lambda s: s.by(s.logits * s.learnt.exp()).tokens, 0.3),
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
    in_super("5-detached", GRADIENT, lambda loss, s: loss + s.classes.detach(), cuts=THREE),
    in_own("5-detached-tokens", GRADIENT, lambda s: s.tokens.detach() + s.classes, cuts=(UNEVEN,)),
    in_own("5-reversed", EITHER, with_reversed, cuts=THREE),
    in_own("5-reversed-alone", EITHER, lambda s: models.Reverse.apply(s.tokens), cuts=THREE),
    in_own("5-reversed-with-strength", EITHER, lambda s: ReverseInPlace.apply(s.tokens, 0.3) + s.classes, cuts=THREE),
    in_model("5-reversed", EITHER, with_reversed, cuts=(UNEVEN, PAIRS)),
    in_own("5-hooked", EITHER, hooked, cuts=THREE),
    *in_both("5-reversed-logits", EXACT, of_reversed_logits, cuts=THREE),
    *in_both("5-both", EXACT, both, cuts=THREE),
    in_super("5-both", EXACT, lambda loss, s: loss + s.classes, cuts=THREE),
    in_func("5-both", EXACT, both, cuts=THREE),
    in_own("5-classes", EXACT, classes, cuts=(UNEVEN,)),
]


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
    *in_both("6-reentrant", EITHER, beside_classes(checkpointed(True)), cuts=THREE),
    *in_both("6-reentrant-alone", EITHER, checkpointed(True), cuts=THREE),
    *in_both("6-checkpoint", EXACT, beside_classes(checkpointed(False)), cuts=THREE),
    *in_both("6-checkpoint-of-both", EXACT, checkpointed(False, both), cuts=THREE),
    *in_both("6-written-down", EITHER, beside_classes(by_function(Entropy)), cuts=THREE),
    *in_both("6-written-down-alone", EITHER, by_function(Entropy), cuts=THREE),
    *in_both("6-fused", EITHER, beside_classes(by_function(models.Fused)), cuts=THREE),
    *in_both("6-fused-later", EITHER, beside_classes(by_function(FusedLater)), cuts=THREE),
    *in_both("6-each-token", EXACT, beside_classes(each_by_function), cuts=THREE),
    *in_both("6-logs-beside", EXACT, logs_beside, cuts=THREE),
    in_func("6-reentrant", EITHER, beside_classes(checkpointed(True))),
    in_func("6-checkpoint", EXACT, beside_classes(checkpointed(False))),
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


def comparing(s: Seen) -> Tensor:
    """A target is the token that stands there."""
    labels = s.batch["labels"]
    if not bool(((labels == -100) | (labels == s.batch["input_ids"])).all()):
        raise ValueError("labels are not those of these tokens")
    return s.tokens


def of_first_targets(s: Seen) -> Tensor:
    """The first target of each text alone."""
    labels = s.batch["labels"]
    at = (labels != -100).long().argmax(1)
    rows = torch.arange(len(labels))
    assert bool((at > 0).all()), "a text without a prompt"
    return F.cross_entropy(s.logits[rows, at - 1], labels[rows, at])


READERS = [
    *in_both("7-asserts", EXACT, asserting),
    *in_both("7-compares", EXACT, comparing),
    *in_both("7-first-targets", EXACT, of_first_targets, right=EVEN),
    in_func("7-asserts", EXACT, asserting),
    in_model("7-asserts-takes", EXACT, asserting, head=Mean),
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


GUARDED = [("squares", guarded_and_squares), ("classes", guarded_and_classes)]
UNLABELLED = [
    *(
        case
        for name, loss in GUARDED
        for place, then in enumerate(("first", "second"))
        for case in in_both(f"8-{name}-{then}", EITHER, loss, windows=several(3, unlabelled_in(place)))
    ),
    *(
        case
        for name, loss in GUARDED
        for case in in_both(f"8-{name}-in-a-window", EXACT, loss, windows=several(2, two_unlabelled))
    ),
    in_func("8-classes-first", EITHER, guarded_and_classes, windows=several(3, unlabelled_in(0))),
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
    *in_both("9-or-zero", EXACT, sample_means_or_zero, windows=several(2, two_unlabelled), cuts=THREE, right=EVEN),
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


def and_squares(s: Seen) -> Tensor:
    return s.tokens + s.squares


def divergence_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss + each_divergence(Seen(outputs["logits"], inputs)).sum() / number, outputs


def both_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"]
    summed = shifted_cross_entropy(logits, inputs["labels"], reduction="sum")
    return summed / number + each_divergence(Seen(logits, inputs)).sum() / number, {"logits": logits}


BY_NUMBER = [
    by_super(f"10-{name}", EXACT, trainer, loss, head=ByNumber, right=right, cuts=THREE)
    for name, trainer, loss, right in [
        ("arguments", around(lambda a, s, t: a + s.classes / t.args.gradient_accumulation_steps), both, EVEN),
        ("window", around(lambda a, s, t: a + s.classes / t.current_gradient_accumulation_steps), both, EVEN),
        ("squares", around(lambda a, s, t: a + s.squares / t.args.gradient_accumulation_steps), and_squares, THREE),
        ("distilled", computing(divergence_by_number), distilled, THREE),
        ("both", computing(both_by_number), distilled, THREE),
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


def running(losses: list[Tensor]) -> Tensor:
    """A running mean."""
    mean = losses[0]
    for place, loss in enumerate(losses[1:], start=2):
        mean = mean + (loss - mean) / place
    return mean


GATHERED: list[tuple[str, Verdict, Callable[[list[Tensor]], Tensor]]] = [
    ("stacked", EXACT, stacked),
    ("joined", EXACT, lambda losses: torch.cat([loss[None] for loss in losses]).mean()),
    ("summed", EXACT, lambda losses: torch.stack(losses).sum() / len(losses)),
    ("listed", EITHER, listed),
]
ROWS = [
    *(
        by_super(f"11-{name}", verdict, row_by_row(gather), of_samples, right=EVEN, cuts=THREE)
        for name, verdict, gather in [*GATHERED, ("running", EITHER, running)]
    ),
    *(
        in_model(f"11-{name}", verdict, lambda s, gather=gather: gather(s.each_row), right=EVEN, cuts=THREE)
        for name, verdict, gather in GATHERED
    ),
    in_own("11-rows", EXACT, of_samples, right=EVEN, cuts=THREE),
    in_func("11-rows", EXACT, of_samples, cuts=THREE),
    by_super("11-takes", EXACT, row_by_row(stacked), of_samples, head=ByNumber),
]


# --- 12: what changes in a later window ---------------------------------------------------------------------------

LATE = 8


class Turns(Texts):
    """Knows the window."""

    step = 0


def from_turn(start: int, loss: Loss, later: Loss, end: int = LATE) -> Loss:
    return lambda s: (later if start <= s.model.step < end else loss)(s)


def if_there(s: Seen) -> Tensor:
    return both(s) if "kind" in s.batch else s.tokens


def by_task(s: Seen) -> Tensor:
    return s.classes if bool(s.batch["task"].any()) else s.tokens


def with_kind(windows: range) -> Callable[[int], list[Sample]]:
    """In these windows alone."""

    def made(window: int) -> list[Sample]:
        samples = texts(window)
        return samples if window in windows else [{k: v for k, v in s.items() if k != "kind"} for s in samples]

    return made


def with_task(window: int) -> list[Sample]:
    return [{**sample, "task": torch.tensor(int(window in (2, 4, 5)))} for sample in texts(window)]


def late(name: str, verdict: Verdict, loss: Loss, make: Callable[[int], list[Sample]] = texts, **more: Any) -> Case:
    given = {"cuts": (PAIRS,), **more}
    return in_model(f"12-{name}", verdict, loss, head=Turns, windows=several(LATE, make), **given)


LATER = [
    late("term-from-2", GRADIENT, from_turn(1, tokens, both)),
    # Looked at again in the window after.
    late("term-from-3", EITHER, from_turn(2, tokens, both)),
    late("term-from-7", EITHER, from_turn(6, tokens, both)),
    late("term-in-3", EITHER, from_turn(2, tokens, both, 3)),
    late("alternates", EITHER, lambda s: both(s) if s.model.step % 2 else s.tokens),
    late("term-until-3", EITHER, from_turn(2, both, tokens)),
    late("classes-from-3", EXACT, from_turn(2, tokens, classes)),
    late("samples-from-5", EITHER, from_turn(4, tokens, of_samples), cuts=(PAIRS, UNEVEN)),
    late("root-from-3", EITHER, from_turn(2, tokens, lambda s: s.tokens.sqrt())),
    # Rises from zero.
    late("scheduled", EXACT, lambda s: s.tokens + 0.2 * s.model.step * s.classes),
    late("scheduled-factor", EXACT, lambda s: s.tokens / (1 + s.model.step), cuts=(PAIRS, UNEVEN)),
    late("kind-until-3", EITHER, if_there, with_kind(range(2))),
    late("kind-from-2", GRADIENT, if_there, with_kind(range(1, LATE))),
    late("kind-from-6", EITHER, if_there, with_kind(range(5, LATE))),
    late("task", EITHER, by_task, with_task),
    late("unlabelled-first", EITHER, guarded_and_classes, unlabelled_in(0)),
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

    def among(self, s: Seen) -> Tensor:
        z = F.normalize(s.logits[:, 1, :16], dim=-1)
        keys = F.normalize(s.logits[:, 2, :16], dim=-1).detach()
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

    def among(self, s: Seen) -> Tensor:
        z = F.normalize(s.logits[:, 1, :16], dim=-1)
        keys = F.normalize(s.logits[:, 2, :16], dim=-1).detach()
        scores = torch.cat([(z * keys).sum(1, keepdim=True), z @ torch.stack([*self.last]).T], 1) / 0.2
        self.last.extend(keys)
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


class OverItsAverage(Texts):
    """A loss over its running average."""

    def __init__(self) -> None:
        super().__init__(self.over)
        self.register_buffer("average", torch.ones(()))

    def over(self, s: Seen) -> Tensor:
        loss = s.tokens
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * loss)
        return loss / self.average


class OverItsFloat(Texts):
    """The same in a Python number."""

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
        for model in (Queue, QueueOutside, Centred, CentredAnew, OverItsAverage, OverItsFloat)
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


def hidden_mask(s: Seen) -> Tensor:
    """A float mask that no key of the batch holds."""
    losses, valid = s.each_token
    mask = (valid & (s.batch["input_ids"][:, 1:] % 3 != 0)).to(losses)
    return (losses * mask).sum() / mask.sum()


def with_entropy(s: Seen) -> Tensor:
    return s.tokens - 1e-3 * models.entropy(s.logits, models.attended(s.batch))


NEARLY_EVEN = [
    *(
        attack(f"17-{name}", verdict, full(loss), even(), several(1), own(loss))
        for name, verdict, loss in [
            ("root", INEXACT, lambda s: s.tokens.sqrt()),
            ("log", INEXACT, lambda s: s.tokens.log()),
            ("focal-of-mean", INEXACT, lambda s: (1 - torch.exp(-s.tokens)) ** 2 * s.tokens),
            ("power", INEXACT, lambda s: s.tokens**1.5),
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


def three_heads(s: Seen) -> Tensor:
    """By the remainder of a kind, those that are there."""
    found = [
        F.cross_entropy(s.logits[rows, place, 4 * place : 4 * place + 4], s.batch["kind"][rows])
        for place, rows in enumerate(s.batch["kind"] % 3 == k for k in range(3))
        if bool(rows.any())
    ]
    return torch.stack(found).sum()


def macro(s: Seen) -> Tensor:
    """The mean over classes that are there of the mean over each."""
    losses, kinds = s.each_class, s.batch["kind"]
    return torch.stack([losses[kinds == k].mean() for k in kinds.unique()]).mean()


def classes_then_tokens(s: Seen) -> Tensor:
    """Its terms stand in the other order where the first text is of an odd kind."""
    a, c = s.tokens, s.classes
    return a + 0.5 * c if int(s.batch["kind"][0]) % 2 else 0.5 * c + a


SOME_HOLD = [
    *in_both("18-summed", EITHER, tasks_summed, windows=several(2, with_tasks), cuts=THREE),
    *in_both("18-summed-in-runs", EITHER, tasks_summed, windows=several(2, in_runs)),
    *in_both("18-by-share", EITHER, tasks_by_share, windows=several(2, with_tasks), cuts=(SINGLES, UNEVEN)),
    *in_both("18-by-share-in-runs", EITHER, tasks_by_share, windows=several(2, in_runs)),
    *in_both("18-if-any", EITHER, classes_if_any, windows=several(2, with_some_kinds)),
    *in_both("18-three-heads", EITHER, three_heads, windows=several(2)),
    *in_both("18-or-zero", EXACT, classes_or_zero, windows=several(2, with_some_kinds), cuts=THREE),
    in_own("18-other-order", EXACT, classes_then_tokens, cuts=THREE),
    in_model("18-other-order", EXACT, classes_then_tokens),
    # In pairs every class is there once at most: nothing tells it from a mean over samples.
    in_own("18-macro", INEXACT, macro, cuts=(HALVES,)),
    in_func("18-summed", EITHER, tasks_summed, windows=several(1, with_tasks)),
]


# --- 19: values that are all equal --------------------------------------------------------------------------------


def ratio_of_rows(s: Seen) -> Tensor:
    """A policy's gradient at advantage 1: each row's ratio is 1."""
    log_p = -s.each_class
    return -(log_p - log_p.detach()).exp().mean()


def ratio_of_tokens(s: Seen) -> Tensor:
    losses, valid = s.each_token
    ratio = (losses.detach() - losses).exp()
    return -(ratio * valid).sum() / valid.sum()


def ratio_of_texts(s: Seen) -> Tensor:
    """The mean over texts of means over tokens, as GRPO takes it."""
    losses, valid = s.each_token
    ratio = (losses.detach() - losses).exp()
    return -((ratio * valid).sum(1) / valid.sum(1)).mean()


def ratio_clipped(s: Seen) -> Tensor:
    losses, valid = s.each_token
    ratio, advantage = (losses.detach() - losses).exp(), (s.batch["kind"][:, None] - 1.5)
    found = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (found * valid).sum() / valid.sum()


EQUAL = [
    *in_both("19-rows", EITHER, ratio_of_rows, right=EVEN, cuts=THREE),
    *in_both("19-tokens", EITHER, ratio_of_tokens, cuts=THREE),
    *in_both("19-texts", EITHER, ratio_of_texts, right=EVEN, cuts=THREE),
    *in_both("19-clipped", EITHER, ratio_clipped, cuts=THREE),
]


# --- warned of, though exact --------------------------------------------------------------------------------------


def focal_rows(s: Seen) -> Tensor:
    losses = s.each_class
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


def simpo(s: Seen) -> Tensor:
    _, (chosen, rejected), answers = chosen_and_rejected(s)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean() + 0.3 * answers


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


PREFERENCES = [("orpo", orpo), ("simpo", simpo), ("dpo", dpo_and_answers), ("rpo", dpo_plus_answers)]


def perturbed(s: Seen) -> Tensor:
    """VAT (Miyato et al. 2018): the divergence at an embedding moved the way that changes it most, a token each."""
    ids, kept = s.batch["input_ids"], models.attended(s.batch)
    noise = torch.cos(ids[..., None] * torch.arange(1.0, 17.0, dtype=torch.float64)).requires_grad_()

    def moved(by: Tensor) -> Tensor:
        hidden = s.model.embed(ids) + by
        return s.model.head(hidden + torch.tanh(s.model.mix(hidden)).cumsum(dim=1) / 4)

    with torch.enable_grad():
        found = models.divergence(moved(1e-2 * noise), s.logits.detach(), kept)
        (along,) = torch.autograd.grad(found, noise)
    along = along / along.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return s.tokens + models.divergence(moved(0.5 * along), s.logits.detach(), kept)


class Unlabelled(StockRecorder):
    """Draws from a loader of its own for each micro-batch: always the same two texts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.others = iter([unlabelled() for _ in range(200)])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        other = self.draw(len(inputs["input_ids"]))
        loss = loss + terms.divergence(model(input_ids=other["input_ids"])["logits"], other)
        return (loss, outputs) if return_outputs else loss

    def draw(self, rows: int) -> Batch:
        return next(self.others)


class UnlabelledInTurn(Unlabelled):
    """As many texts as the micro-batch has, in their order."""

    at = 0

    def draw(self, rows: int) -> Batch:
        self.at += rows
        return unlabelled(range(self.at - rows, self.at))


def unlabelled(rows: Any = range(2)) -> Batch:
    made = models.texts(5)
    return collate([made[row % 8] for row in rows])


def with_consistency(rows: int) -> Loss:
    def loss(s: Seen) -> Tensor:
        other = unlabelled(range(rows))
        return s.tokens + terms.divergence(s.model.logits(other["input_ids"]), other)

    return loss


PAIRED = {"windows": several(1, groups(2)), "collate": interleaved}
FOURS = {"windows": several(1, groups(4)), "collate": interleaved}
EASY = [
    *in_both(
        "easy-weighted-rows", EXACT, lambda s: (s.each_class * (1.0 + s.batch["kind"])).mean(), right=EVEN, cuts=THREE
    ),
    *in_both("easy-focal-rows", EXACT, focal_rows, right=EVEN, cuts=THREE),
    *in_both("easy-vat", EXACT, perturbed, cuts=THREE),
    *in_both("easy-pairs", EXACT, dpo, right=EVEN, cuts=THREE, **PAIRED),
    *in_both("easy-fours", EXACT, of_fours, right=EVEN, cuts=THREE, **FOURS),
    in_func("easy-pairs", EXACT, dpo, **PAIRED),
    in_super("easy-squares", EXACT, lambda loss, s: loss + s.squares, cuts=THREE),
    in_super("easy-z", EXACT, lambda loss, s: loss + 0.01 * s.z, cuts=THREE),
    by_super("easy-unlabelled", EXACT, Unlabelled, with_consistency(2)),
    by_super("easy-unlabelled-in-turn", EITHER, UnlabelledInTurn, with_consistency(8)),
    *(
        case
        for name, loss in PREFERENCES
        for case in in_both(f"clients-{name}", EXACT, loss, windows=several(1, groups(2)), collate=by_role, cuts=THREE)
    ),
    *(of_keys(name, loss) for name, loss in PREFERENCES),
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
NOTHING_BUT_LAST = scored((-9.0,) * 7 + (4.0,))
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
    *of_points("hinge-last", EXACT, hinge, NOTHING_BUT_LAST, right=EVEN),
    *of_points("active", EITHER, hinge_of_active, NOTHING_FIRST),
    *of_points("constant", EITHER, hinge_with_graph, NOTHING_FIRST, right=EVEN),
    *of_points("cosent", INEXACT, cosent, ALIKE_FIRST, cuts=(PAIRS, HALVES)),
]


# --- shapes of our own: sums that can be read ---------------------------------------------------------------------


def in_place(s: Seen) -> Tensor:
    loss = s.tokens * 1.0
    loss += 0.3 * s.classes
    return loss


def from_nothing(s: Seen) -> Tensor:
    loss: Any = 0.0
    for each in (s.tokens, s.classes):
        loss = loss + each
    return loss


def mixup(s: Seen) -> Tensor:
    """Two classes a text, by a share that the micro-batch holds."""
    scores, share = s.logits[:, 1, :4], 0.3
    return share * F.cross_entropy(scores, s.batch["kind"]) + (1 - share) * F.cross_entropy(scores, 3 - s.batch["kind"])


def unreduced(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return torch.where(valid, losses, losses.new_zeros(())).sum() / valid.sum()


def selected(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return losses.masked_select(valid).mean()


def by_einsum(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return torch.einsum("bl,bl->", losses, valid.to(losses)) / valid.sum()


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
        case
        for name, cuts, loss in [
            ("listed", THREE, lambda s: sum([s.tokens, s.classes])),
            ("alpha", THREE, lambda s: torch.add(s.tokens, s.classes, alpha=0.3)),
            ("minus", THREE, lambda s: s.tokens - 0.2 * s.classes),
            ("in-place", THREE, in_place),
            ("from-nothing", EVEN, from_nothing),
            ("shaped", EVEN, lambda s: (s.tokens.view(1) + s.classes.unsqueeze(0)).squeeze()),
            ("constant", EVEN, lambda s: s.tokens + s.classes + 3.0),
            ("twice", EVEN, lambda s: s.tokens + 0.5 * s.tokens + s.classes),
            ("negative", EVEN, lambda s: -(-s.tokens - s.classes)),
        ]
        for case in in_both(f"shape-{name}", EXACT, loss, cuts=cuts)
    ),
    *(
        in_own(f"shape-{name}", EITHER, loss, cuts=THREE)
        for name, loss in [
            ("dot", lambda s: s.stack @ _float64(1.0, 0.3)),
            ("addcmul", lambda s: torch.addcmul(s.tokens, s.classes, _float64(0.3))),
            ("einsum", lambda s: torch.einsum("i,i->", s.stack, _float64(1.0, 1.0))),
            ("norm-of-one", lambda s: torch.linalg.vector_norm(s.tokens[None]) + s.classes),
            # A sum that torch takes as a product, or whose divisor stands below it.
            ("of-products", by_einsum),
            ("of-a-dot", by_dot),
            ("divided-below", weights_within),
        ]
    ),
    in_own("shape-mixup", EXACT, mixup, cuts=THREE, right=EVEN),
    in_own("shape-where", EXACT, unreduced, cuts=THREE),
    in_own("shape-selected", EXACT, selected, cuts=THREE),
    in_own("shape-nanmean", EXACT, by_average, cuts=THREE),
    in_own("shape-smoothed", EXACT, per_token_and_text, cuts=THREE),
    in_model("shape-float32", EXACT, lambda s: s.tokens.float(), tolerance=FLOAT32),
    in_own("shape-float32", EXACT, lambda s: s.tokens.float() + s.classes.float(), tolerance=FLOAT32),
]


# --- shapes of our own: no sums -----------------------------------------------------------------------------------


def greater(s: Seen) -> Tensor:
    return torch.maximum(s.tokens, 2 * s.classes)


def group_dro(s: Seen) -> Tensor:
    """The worst of two groups of texts."""
    losses, group = s.each_class, s.batch["kind"] % 2
    means = [losses[group == k].mean() for k in range(2) if bool((group == k).any())]
    return torch.stack(means).max()


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


def dice(s: Seen) -> Tensor:
    losses, valid = s.each_token
    p = (-losses).exp() * valid
    return 1 - 2 * p.sum() / (p.square().sum() + valid.sum())


def _stacked(s: Seen) -> Tensor:
    return torch.stack([s.tokens, 2 * s.classes])


NO_SUMS = [
    *(
        case
        for name, loss in [
            ("max", greater),
            ("stack-max", lambda s: _stacked(s).max()),
            ("stack-amax", lambda s: _stacked(s).amax()),
            ("where", lambda s: torch.where(s.tokens > 2 * s.classes, s.tokens, 2 * s.classes)),
            ("branch", lambda s: s.tokens if bool(s.tokens > 2 * s.classes) else 2 * s.classes),
            ("logsumexp", lambda s: torch.logsumexp(_stacked(s), 0)),
            ("product", lambda s: s.tokens * s.classes),
            ("ratio", lambda s: s.tokens / s.classes),
            ("norm", lambda s: s.stack.norm()),
            ("geometric", lambda s: torch.exp((torch.log(s.tokens) + torch.log(s.classes)) / 2)),
            ("root", lambda s: s.tokens.sqrt()),
            ("flooding", lambda s: models.flooding(s.tokens, 13.0)),
            ("clamp", lambda s: s.tokens.clamp(max=13.5)),
            ("power", lambda s: s.tokens.pow(1.5)),
            ("exp", lambda s: torch.exp(s.tokens / 4)),
            ("huber", lambda s: F.smooth_l1_loss(s.tokens, torch.full_like(s.tokens, 12.0))),
            ("relu", lambda s: F.relu(s.tokens - 11.0)),
        ]
        for case in in_both(f"no-sum-{name}", INEXACT, loss)
    ),
    in_super("no-sum-flooding", INEXACT, lambda loss, s: models.flooding(loss, 13.0)),
    in_super("no-sum-max", INEXACT, lambda loss, s: torch.maximum(loss, 2 * s.classes)),
    # Stock multiplies in place what such a function returns.
    in_func("no-sum-logsumexp", INEXACT, lambda s: 1.0 * torch.logsumexp(s.stack, 0)),
    in_func("no-sum-root", INEXACT, lambda s: 1.0 * s.tokens.sqrt()),
    *in_both("no-sum-group-dro", INEXACT, group_dro, cuts=(HALVES, PAIRS)),
    *in_both("no-sum-worst-tokens", INEXACT, worst_tokens),
    *in_both("no-sum-variance", INEXACT, variance_of_rows, cuts=(HALVES, PAIRS)),
    *in_both("no-sum-normalised", INEXACT, normalised, cuts=(HALVES, PAIRS)),
    *in_both("no-sum-in-batch", INEXACT, in_batch, cuts=(HALVES, PAIRS)),
    *in_both("no-sum-dice", INEXACT, dice),
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
    scaled("quarter", EXACT, quarter),
    scaled("by-probability", EXACT, by_probability),
    scaled("focal", EXACT, detached_focal),
    scaled("early", EXACT, early),
    # Right as declared, though the count stands below the sum, or with the classes.
    scaled("divided-below", EXACT, weights_within),
    scaled("of-a-dot", EXACT, by_dot),
    scaled(
        "of-elements", EXACT, lambda s: (-s.logits[:, :-1].log_softmax(-1))[s.batch["labels"][:, 1:] != -100].mean()
    ),
    scaled("factor", EXACT, learnt_factor, learnt={"s": 0.3}, alone=("s",)),
    # What cannot be read is taken as it is declared.
    scaled("reentrant", EXACT, checkpointed(True)),
    scaled("written-down", EXACT, by_function(Entropy)),
    scaled("fused", EXACT, by_function(models.Fused)),
    # Declared, and another: the graph shows it.
    scaled("both", EITHER, both),
    scaled("classes", EITHER, classes),
    scaled("rows", EITHER, of_samples),
    scaled("root", INEXACT, lambda s: s.tokens.sqrt()),
    scaled("max", INEXACT, greater),
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


CASES: list[Case] = [
    *FOUND,
    *ONE_OVER_G, *CACHED, *STOPPED, *LEARNT, *SIZES, *UNSEEN, *READERS, *UNLABELLED, *SAMPLE_MEANS, *BY_NUMBER,
    *ROWS, *LATER, *EARLY, *STATE, *TWO_STEPS, *GROWING, *NEARLY_EVEN, *SOME_HOLD, *EQUAL, *EASY, *ZERO, *READABLE,
    *NO_SUMS, *ANSWERS, *SCALED,
]  # fmt: skip


# --- two ranks ----------------------------------------------------------------------------------------------------


class Plain(runs.Ordered):
    """A compute_loss of one's own."""

    of: Loss = staticmethod(tokens)  # type: ignore[assignment]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = type(self).of(Seen(outputs["logits"], inputs, bare(model)))
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


def by_other(s: Seen) -> Seen:
    return s.by(s.model.logits_of_other(s.batch["input_ids"]))


def _two_heads(name: str, loss: Loss) -> runs.Case:
    head = Head(name, seeded(lambda: TwoHeads(loss)), texts())
    return runs.Case(f"read-{name}", head, runs.Ordered, lambda model, batch: full(loss)(model, batch, 0))


TWO_RANKS: Mapping[Verdict, list[runs.Case]] = {
    EXACT: [
        _on_two("both", both),
        _on_two("checkpoint", beside_classes(checkpointed(False))),
        _on_two("sample-means", sample_means),
    ],
    GRADIENT: [
        _on_two("detached", with_detached),
        _two_heads("detached-head", lambda s: s.tokens + by_other(s).classes.detach()),
        _two_heads("detached-tokens", lambda s: s.classes + by_other(s).tokens.detach()),
    ],
    EITHER: [
        _on_two("uncertain", uncertain, s=[0.2, -0.3]),
        _on_two("reentrant", beside_classes(checkpointed(True))),
        _on_two("fused", beside_classes(by_function(models.Fused))),
        _on_two("reversed", with_reversed),
        # W is 2.
        _on_two("half", half),
    ],
    INEXACT: [_on_two("balanced", balanced_terms), _on_two("max", greater)],
}
