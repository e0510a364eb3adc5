"""Parts that random trainings are put together from: heads, overrides, collators, data, all found by name.

Every part knows its full batch: a head returns its loss without a number, an override is computed from the whole batch
as by a Trainer of one rank and one micro-batch. What a forward writes into its model is, for a full batch, as its
window found it, and written once. Labels are of one level for each head: "next" tokens, classes of a "token", numbers
of a "token value", or a class, a number or three flags of a "sample".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as imported_early
from torch.utils.checkpoint import checkpoint

from tests.losses.models import Fused, Reverse, bare, divergence, flooding, squares, z_loss
from tests.numerics.heads import Batch, Sample, seeded
from tests.numerics.parity import StockRecorder
from tests.trainings import as_prepared, computing, in_step

VOCABULARY, HIDDEN = 12, 8
#: A class of its own for tokens whose labels are masked in the midst of a training.
MASKED_CLASS = 3
#: A loss of the first step is about that.
FLOOD = 2.5
#: Keys that are remembered.
QUEUE = 8
SENTENCE = "next_sentence_label"

TOKENS = ("next", "token")
CLASSES = (*TOKENS, "sample")
LEVELS = (*CLASSES, "number", "flags", "token value")


# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Logits [b, L, V], or [b, V] of a sample, their labels, and the head that defines a loss of both."""

    scores: Tensor
    labels: Tensor
    head: Head

    def rows(self, rows: Any) -> Scored:
        return Scored(self.scores[rows], self.labels[rows], self.head)


@dataclass(frozen=True)
class Seen(Scored):
    """What a head computes its loss from.

    Attributes:
        logits: [b, L, V]; ``pooled`` and ``first`` [b, V], ``kept`` and ``ids`` [b, L].
        model: with its step, what it learns beside its weights, and what its forward writes.
        columns: further inputs.
        number: of items; None: a whole batch's loss is asked for.
    """

    logits: Tensor
    pooled: Tensor
    first: Tensor
    kept: Tensor
    ids: Tensor
    model: Tiny
    columns: Mapping[str, Tensor]
    number: Any

    def of_level(self, head: Head) -> Tensor:
        return self.logits if head.of_tokens else self.pooled


class Tiny(nn.Module):
    """Whatever the padding and its side, a text has the same logits; dropout, where drawn, is a text's own.

    Attributes:
        step: optimizer steps taken, as who trains it says.
        learnt: two factors; None: it has none.
    """

    #: Stock looks for one where it smooths labels.
    config = None

    def __init__(self, head: Head, seed: int = 0, *, learns: bool = False, even: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, VOCABULARY)
        self.of, self.seed, self.even, self.step = head, seed, even, 0
        self.learnt = nn.Parameter(torch.tensor([0.3, -0.2])) if learns or head.learns else None
        for name, first in head.state.items():
            self.register_buffer(name, first())
        if even:
            with torch.no_grad():
                self.last.weight.mul_(0.01)
                self.last.bias.zero_()

    def see(
        self,
        input_ids: Tensor,
        draw: int = 0,
        labels: Any = None,
        columns: Mapping[str, Any] | None = None,
        number: Any = None,
    ) -> Seen:
        kept = input_ids != 0
        hidden = self.embed(input_ids) * kept[..., None]
        hidden = hidden + (torch.tanh(self.mix(hidden)) * kept[..., None]).cumsum(dim=1) / 4
        if draw:
            hidden = hidden * torch.stack([self._dropped(ids, draw) for ids in input_ids])[:, None]
        length = kept.sum(1)
        pooled = self.last((hidden * kept[..., None]).sum(1) / length[:, None])
        begin = kept.long().argmax(dim=1)
        first = self.last(hidden[torch.arange(len(hidden)), begin])
        logits = self.last(hidden)
        scores = logits if self.of.of_tokens else pooled
        return Seen(scores, labels, self.of, logits, pooled, first, kept, input_ids, self, columns or {}, number)

    def _dropped(self, ids: Tensor, draw: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2 * int(ids.sum()) + draw)
            return F.dropout(torch.ones(1, HIDDEN, dtype=self.last.weight.dtype), 0.2, self.training)[0]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        draw: int = 0,
        num_items_in_batch: Any = None,
        **columns: Any,
    ) -> dict[str, Tensor]:
        seen = self.see(input_ids, draw, labels, columns, num_items_in_batch)
        outputs = {"logits": seen.scores}
        return outputs if labels is None else {"loss": self.of.loss(seen), **outputs}


def built(head: Head, seed: int, kind: type[Tiny] = Tiny, **given: bool) -> Tiny:
    """The same every time.

    Args:
        given: that it learns factors, or begins with even probabilities.
    """
    torch.manual_seed(seed)
    return kind(head, seed, **given).double()


# --- losses of logits and labels ------------------------------------------------------------------------------------


def aligned(of: Scored) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and labels [n], after the shift of a causal model."""
    logits, labels = of.scores, of.labels.long()
    if of.head.level == "next":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def usual(of: Scored, reduction: str = "mean") -> Tensor:
    """Torch's own function for this level of labels."""
    if of.head.level == "number":
        return F.mse_loss(of.scores[:, 0], of.labels.to(of.scores), reduction=reduction)
    if of.head.level == "flags":
        return F.binary_cross_entropy_with_logits(of.scores[:, :3], of.labels.to(of.scores), reduction=reduction)
    return F.cross_entropy(*aligned(of), reduction=reduction, ignore_index=of.head.ignore)


def by_hand(of: Scored, reduction: str = "mean") -> Tensor:
    """The same without a loss function of torch, of classes."""
    losses, valid = token_losses(of)
    return (losses * valid).sum() / (1 if reduction == "sum" else valid.sum())


def token_losses(of: Scored) -> tuple[Tensor, Tensor]:
    """Of every label [n], and whether it is a target."""
    logits, labels = aligned(of)
    losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return losses, labels != of.head.ignore


def text_losses(of: Scored) -> tuple[Tensor, Tensor]:
    """The same [b, labels of a text]."""
    losses, valid = token_losses(of)
    return losses.view(len(of.labels), -1), valid.view(len(of.labels), -1)


def mean_of_rows(of: Scored, function: Callable[[Scored], Tensor] = usual) -> Tensor:
    """Of every row its loss, and of those the mean; what has no target is left out."""
    rows = [of.rows(slice(row, row + 1)) for row in range(len(of.labels))]
    found = [function(row) for row in rows if has_target(row.labels, of.head)]
    return torch.stack(found).mean() if found else 0.0 * of.scores.sum()


def has_target(labels: Tensor, head: Head) -> bool:
    if labels.is_floating_point():
        return not bool(labels.isnan().all())
    return bool(((labels[:, 1:] if head.level == "next" else labels) != head.ignore).any())


def recomputed(of: Scored, *, reentrant: bool) -> Tensor:
    """Computed once more in the backward."""
    return checkpoint(lambda scores: usual(replace(of, scores=scores)), of.scores, use_reentrant=reentrant)


def imported(of: Scored) -> Tensor:
    return imported_early(*aligned(of), ignore_index=of.head.ignore)


def fused(of: Scored) -> Tensor:
    return Fused.apply(*aligned(of))


# --- heads --------------------------------------------------------------------------------------------------------

#: The loss of a head; without a number that of a whole batch.
HeadLoss = Callable[[Seen], Tensor]


@dataclass(frozen=True)
class Head:
    """One kind of loss.

    Attributes:
        level: of its labels.
        loss: without a number the loss of a whole batch.
        columns: its further inputs.
        ignore: the label of what is no target.
        float32: it computes in float32.
        by_number: it divides by the number, where one comes.
        learns: two factors beside its weights.
        state: what its forward writes, and how that begins.
        unlabelled: a window may have no target at all.
        windows: that a training needs to show how it changes.
    """

    name: str
    level: str
    loss: HeadLoss
    columns: tuple[str, ...] = ()
    ignore: int = -100
    float32: bool = False
    by_number: bool = False
    learns: bool = False
    state: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict, hash=False)
    unlabelled: bool = False
    windows: int = 1

    @property
    def of_tokens(self) -> bool:
        return self.level not in ("sample", "number", "flags")


def kind(s: Seen, key: str = "kind") -> Tensor:
    """The mean over texts of a column's classes."""
    return F.cross_entropy(s.pooled[:, :4], s.columns[key].long())


def number(s: Seen, function: Callable[..., Tensor] = usual) -> Tensor:
    """The sum over the number, where one comes."""
    return function(s) if s.number is None else function(s, "sum") / s.number


def in_float32(s: Seen) -> Seen:
    return replace(s, scores=s.scores.float())


def class_weights(s: Seen) -> Tensor:
    return F.cross_entropy(*aligned(s), weight=torch.linspace(0.2, 1.0, VOCABULARY, dtype=s.scores.dtype))


def element_weights(s: Seen) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=s.pooled.dtype)
    return F.binary_cross_entropy_with_logits(s.pooled[:, :3], s.labels.to(s.pooled), weight=weight)


def weights_column(s: Seen) -> Tensor:
    losses, valid = token_losses(s)
    weights = s.columns["weights"][:, 1:].reshape(-1)
    return (losses * weights * valid).sum() / (weights * valid).sum()


def weighted_elements(s: Seen) -> Tensor:
    """Torch's own weighted mean of numbers."""
    values = s.logits[..., 0]
    return F.mse_loss(values, s.labels.nan_to_num().to(values), weight=s.columns["weights"] * ~s.labels.isnan())


def with_z(s: Seen, loss: Tensor) -> Tensor:
    return loss + 0.1 * z_loss(s.logits, s.kept)


def indexed(s: Seen) -> Tensor:
    logits, labels = aligned(s)
    return F.cross_entropy(logits[labels >= 0], labels[labels >= 0])


def without_nan(s: Seen) -> Tensor:
    kept = ~s.labels.isnan()
    return F.mse_loss(s.logits[..., 0][kept], s.labels[kept].to(s.logits))


def chosen(s: Seen) -> Tensor:
    losses, valid = token_losses(s)
    found = valid & (aligned(s)[1] < VOCABULARY // 2)
    return (losses * found).sum() / found.sum().clamp(min=1)


def focal(s: Seen) -> Tensor:
    losses, valid = token_losses(s)
    return ((1 - (-losses).exp()) ** 2 * losses * valid).sum() / valid.sum()


def in_batch_negatives(s: Seen) -> Tensor:
    one, other = F.normalize(s.pooled, dim=-1), F.normalize(s.first, dim=-1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def mean_of_texts(s: Seen) -> Tensor:
    """Of every text the mean over its targets, and of those the mean."""
    losses, valid = text_losses(s)
    return ((losses * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


def logged(s: Seen) -> Tensor:
    """Another loss is computed for the log alone."""
    with torch.no_grad():
        kind(s)
    return usual(s)


def imported_kind(s: Seen) -> Tensor:
    return imported_early(s.pooled[:, :4], s.columns["kind"].long())


# Heads that write into their model.


def random_keys() -> Tensor:
    return F.normalize(torch.randn(QUEUE, VOCABULARY), dim=-1)


def queue(s: Seen) -> Tensor:
    """Momentum contrast (He et al. 2020): the keys of batches before are the negatives."""
    model: Any = s.model
    one, other = F.normalize(s.pooled, dim=-1), F.normalize(s.first, dim=-1).detach()
    held = model.queue.clone()
    logits = torch.cat([(one * other).sum(-1, keepdim=True), one @ held.T], 1) / 0.5
    if model.training:
        model.queue.copy_(torch.cat([other, held])[:QUEUE])
    return usual(s) + F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))


def centre(s: Seen) -> Tensor:
    """Self-distillation against a centred teacher (DINO, Caron et al. 2021)."""
    model: Any = s.model
    wanted = ((s.first - model.centre) / 0.5).softmax(-1).detach()
    if model.training:
        model.centre.mul_(0.5).add_(0.5 * s.first.detach().mean(0))
    return -(wanted * s.pooled.log_softmax(-1)).sum(-1).mean()


def over_average(s: Seen) -> Tensor:
    """Over its own running mean."""
    model: Any = s.model
    loss = usual(s)
    if model.training:
        model.average.mul_(0.5).add_(0.5 * loss.detach())
    return loss / model.average.clone()


def counting(s: Seen) -> Tensor:
    """What is written changes nothing."""
    model: Any = s.model
    if model.training:
        model.calls.add_(1)
    return usual(s)


# Heads whose terms come and go.


def no_term(s: Seen) -> Tensor:
    return 0.0 * s.logits.sum()


def tasks(s: Seen) -> Tensor:
    """A row's task says which of two losses it has; one that no row has is left out."""
    loss, task = no_term(s), s.columns["task"]
    if bool((task == 0).any()):
        loss = loss + usual(s.rows(task == 0))
    if bool((task == 1).any()):
        loss = loss + F.cross_entropy(s.pooled[task == 1], s.ids[task == 1].amax(1))
    return loss


def class_by_class(s: Seen) -> Tensor:
    """A term for each class that is there."""
    of = s.columns["kind"].long()
    found = [F.cross_entropy(s.pooled[of == each, :4], of[of == each]) for each in of[of >= 0].unique()]
    return usual(s) + sum(found, no_term(s))


def kind_where_labelled(s: Seen) -> Tensor:
    loss = usual(s)
    return loss + kind(s) if bool((s.columns["kind"] != -100).any()) else loss


def where_labelled(s: Seen) -> Tensor:
    """A penalty on the weights, and the rest where there is any target."""
    loss = 0.01 * squares(s.model)
    return loss + usual(s) if bool((aligned(s)[1] != s.head.ignore).any()) else loss


# Heads whose items are counted by hand.


def weights_by_hand(s: Seen, *, over_targets: bool = False) -> Tensor:
    """A weight of each class; the mean is over the weights, or over the targets."""
    losses, valid = token_losses(s)
    classes = aligned(s)[1].clamp(min=0)
    weights = torch.linspace(0.2, 1.0, VOCABULARY, dtype=losses.dtype)[classes] * valid
    return (losses * weights).sum() / (valid if over_targets else weights).sum()


def first_target(s: Seen) -> Tensor:
    """Of each text its first target alone."""
    losses, valid = text_losses(s)
    first = losses.gather(1, valid.long().argmax(1, keepdim=True))[:, 0]
    return (first * valid.any(1)).sum() / valid.any(1).sum().clamp(min=1)


def asserts(s: Seen) -> Tensor:
    if not bool(((s.labels == s.ids) | (s.labels == s.head.ignore)).all()):
        raise ValueError("labels are no copy of the ids")
    return usual(s)


def ratio(s: Seen, advantage: str = "") -> Tensor:
    """A policy gradient's first step: every token's value is its advantage, whatever its gradient is."""
    losses, valid = token_losses(s)
    times = s.columns[advantage][:, 1:].reshape(-1) if advantage else 1.0
    return -((losses.detach() - losses).exp() * times * valid).sum() / valid.sum()


def hinge(s: Seen) -> Tensor:
    """Zero for many samples."""
    valid = s.labels != s.head.ignore
    right = s.pooled.gather(1, s.labels.long().clamp(min=0)[:, None])[:, 0]
    return (F.relu(s.pooled.mean(1) - right) * valid).sum() / valid.sum().clamp(min=1)


# Heads of two losses.

#: ``(model, a, c)`` -> one loss of two, on a whole batch as on a micro-batch.
Mixing = Callable[[Tiny, Tensor, Tensor], Tensor]


def _uncertain(model: Tiny, a: Tensor, c: Tensor) -> Tensor:
    """Kendall et al. 2018."""
    assert model.learnt is not None
    s, t = model.learnt
    return (-s).exp() * a + (-t).exp() * c + s + t


def _gated(model: Tiny, a: Tensor, c: Tensor) -> Tensor:
    assert model.learnt is not None
    gate = model.learnt[0].sigmoid()
    return gate * a + (1 - gate) * c


def _learnt_factor(model: Tiny, a: Tensor) -> Tensor:
    assert model.learnt is not None
    return (-model.learnt[0]).exp() * a + model.learnt[0]


MIXINGS: dict[str, Mixing] = {
    "detached": lambda model, a, c: a + c.detach(),
    "stop-gradient": lambda model, a, c: a + c * (a / c).detach(),
    "normalised": lambda model, a, c: a / a.detach() + c / c.detach(),
    "reversed": lambda model, a, c: a + Reverse.apply(c),
    "uncertain": _uncertain,
    "gated": _gated,
    "greatest": lambda model, a, c: torch.maximum(a, c),
    "product": lambda model, a, c: a * c,
    "flooded": lambda model, a, c: flooding(a, FLOOD) + c,
    "log": lambda model, a, c: a.log() + c,
    "later": lambda model, a, c: a + 10 * c if model.step >= 2 else a,
    "scheduled": lambda model, a, c: a + (0.1 + 0.4 * model.step) * c,
    "alternating": lambda model, a, c: c if model.step % 2 else a,
    "zero-first": lambda model, a, c: min(model.step, 1) * (a + c),
}


def _as_mixed(name: str) -> dict[str, Any]:
    """Whether a mixing learns, and the windows it needs."""
    changes = name in ("later", "scheduled", "alternating", "zero-first")
    return {"learns": name in ("uncertain", "gated"), "windows": 3 if changes else 1}


def _mixed_head(name: str, base: HeadLoss, prefix: str, **more: Any) -> Head:
    mixing = MIXINGS[name]
    return Head(
        f"{prefix}-and-kind-{name}",
        "next",
        lambda s: mixing(s.model, base(s), kind(s)),
        ("kind",),
        **_as_mixed(name),
        **more,
    )


HEADS: dict[str, Head] = {
    head.name: head
    for head in [
        Head("mean", "next", usual),
        Head("mean-of-tokens", "token", usual),
        Head("mean-of-classes", "sample", usual),
        Head("mean-by-hand", "next", by_hand),
        Head("mean-of-classes-by-hand", "sample", by_hand),
        Head("mean-in-float32", "next", lambda s: usual(in_float32(s)), float32=True),
        Head("number", "next", number, by_number=True),
        Head("number-of-classes", "sample", number, by_number=True),
        Head("number-by-hand", "next", lambda s: number(s, by_hand), by_number=True),
        Head("number-in-float32", "next", lambda s: number(in_float32(s)), float32=True, by_number=True),
        Head("class-weights", "next", class_weights),
        Head("class-weights-of-classes", "sample", class_weights),
        Head("element-weights", "flags", element_weights),
        Head("weights-column", "next", weights_column, ("weights",)),
        Head("weighted-elements", "token value", weighted_elements, ("weights",)),
        Head("regression", "number", usual),
        Head("multi-label", "flags", usual),
        Head("two-terms-kind", "next", lambda s: usual(s) + kind(s), ("kind",)),
        Head("two-terms-sentence", "token", lambda s: usual(s) + kind(s, SENTENCE), (SENTENCE,)),
        Head("two-terms-number", "next", lambda s: number(s) + kind(s), ("kind",), by_number=True),
        Head("mean-and-z", "next", lambda s: with_z(s, usual(s))),
        Head("number-and-z", "next", lambda s: with_z(s, number(s)), by_number=True),
        Head("indexed", "token", indexed, ignore=-1),
        Head("without-nan", "token value", without_nan),
        Head("chosen", "next", chosen),
        Head("focal", "next", focal),
        Head("sum", "next", lambda s: usual(s, "sum")),
        Head("sum-of-classes", "sample", lambda s: usual(s, "sum")),
        Head("in-batch-negatives", "sample", in_batch_negatives),
        Head("mean-of-texts", "next", mean_of_texts),
        *(_mixed_head(name, usual, "mean") for name in MIXINGS),
        *(_mixed_head(name, number, "number", by_number=True) for name in ("detached", "later", "uncertain")),
        Head("learnt-factor", "next", lambda s: _learnt_factor(s.model, usual(s)), learns=True),
        Head("half", "next", lambda s: 0.5 * usual(s)),
        Head("quarter", "next", lambda s: 0.25 * usual(s)),
        Head("over-itself", "next", lambda s: over_itself(usual(s))),
        Head("flooded", "next", lambda s: flooding(usual(s), FLOOD)),
        Head("root-of-tokens", "next", lambda s: 2 * usual(s).sqrt()),
        Head("zero-first", "next", lambda s: min(s.model.step, 1) * usual(s), windows=3),
        Head("imported-kind", "next", lambda s: imported(s) + imported_kind(s), ("kind",)),
        Head("checkpointed", "next", lambda s: recomputed(s, reentrant=False)),
        Head("checkpointed-kind", "next", lambda s: recomputed(s, reentrant=False) + kind(s), ("kind",)),
        Head("reentrant", "next", lambda s: recomputed(s, reentrant=True)),
        Head("reentrant-kind", "next", lambda s: recomputed(s, reentrant=True) + kind(s), ("kind",)),
        Head("fused", "next", fused),
        Head("fused-kind", "next", lambda s: fused(s) + kind(s), ("kind",)),
        Head("logged-kind", "next", logged, ("kind",)),
        Head("queue", "next", queue, state={"queue": random_keys}),
        Head("centre", "sample", centre, state={"centre": lambda: torch.zeros(VOCABULARY)}),
        Head("over-average", "next", over_average, state={"average": lambda: torch.ones(())}),
        Head("counting", "next", counting, state={"calls": lambda: torch.zeros((), dtype=torch.long)}),
        Head("tasks", "next", tasks, ("task",)),
        Head("class-by-class", "next", class_by_class, ("kind",)),
        Head("kind-where-labelled", "next", kind_where_labelled, ("kind",)),
        Head("where-labelled", "next", where_labelled, unlabelled=True),
        Head("stack-of-rows", "next", mean_of_rows),
        Head("weights-by-hand", "next", weights_by_hand),
        Head("weights-by-hand-over-targets", "next", lambda s: weights_by_hand(s, over_targets=True)),
        Head("weights-by-hand-of-classes", "sample", weights_by_hand),
        Head("focal-of-classes", "sample", focal),
        Head("first-target", "next", first_target),
        Head("asserts", "next", asserts),
        Head("ratio", "next", ratio),
        Head("ratio-times", "next", lambda s: ratio(s, "weights"), ("weights",)),
        Head("hinge", "sample", hinge),
    ]
}


# --- overrides ----------------------------------------------------------------------------------------------------

#: ``(trainer, base, model, inputs, number)`` -> a micro-batch's loss and outputs.
Loss = Callable[[Any, Any, Any, Any, Any], tuple[Tensor, Any]]
Full = Callable[[Tiny, Batch], Tensor]


@dataclass(frozen=True)
class Override:
    """What a Trainer subclass, or its arguments, make of the head's loss.

    Attributes:
        trainer: of the head.
        full: the loss of a whole batch.
        given: further arguments of the Trainer, of the head.
        arguments: further TrainingArguments.
        levels: of labels that it knows.
        plain: only of heads whose padding is the ignored index of the library.
        float32: upstream computes it in float32.
        learns: two factors of the model, outside of its forward.
        windows: that a training needs to show how it changes.
        number: only of heads that divide by the number.
        loss: of a micro-batch, where a model's own forward can compute it, too, for a loop.
    """

    name: str
    trainer: Callable[[Head], type]
    full: Full
    given: Callable[[Head], Mapping[str, Any]] = lambda head: {}
    arguments: Mapping[str, Any] = field(default_factory=dict)
    levels: Sequence[str] = LEVELS
    plain: bool = False
    float32: bool = False
    learns: bool = False
    windows: int = 1
    number: bool = False
    loss: Loss | None = None

    def suits(self, head: Head) -> bool:
        if (self.plain and head.ignore != -100) or (self.number and not head.by_number):
            return False
        return head.level in self.levels

    def data(self, head: Head) -> tuple[str, ...]:
        """Kinds of data that it can be trained on."""
        return (*DATA, UNLABELLED) if head.unlabelled and self.full is full_base else DATA


class _Inside:
    """The head of a model whose own forward makes more of its loss."""

    def __init__(self, module: Tiny) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> dict[str, Tensor]:
        return Tiny.forward(self.module, **inputs)

    def parameters(self) -> Any:
        return self.module.parameters()


#: The Trainer of a whole batch: one rank, and one micro-batch a window.
ALONE = SimpleNamespace(args=SimpleNamespace(world_size=1, gradient_accumulation_steps=1))


def in_forward(loss: Loss) -> type[Tiny]:
    """A model whose own forward computes what an override does."""

    class InForward(Tiny):
        def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> dict[str, Tensor]:  # type: ignore[override]
            found, outputs = loss(ALONE, _base, _Inside(self), inputs, num_items_in_batch)
            return {**outputs, "loss": found}

    return InForward


def _base(model: Any, inputs: Batch, return_outputs: bool = True, num_items_in_batch: Any = None) -> Any:
    """As a Trainer's ``compute_loss``."""
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    return outputs["loss"], outputs


def full_base(model: Tiny, batch: Batch) -> Tensor:
    return model(**batch)["loss"]


def whole(loss: Loss) -> Full:
    """The loss of a whole batch, as a Trainer of one micro-batch computes it."""
    return lambda model, batch: loss(ALONE, _base, model, batch, None)[0]


@dataclass(frozen=True)
class Made(Scored):
    """What an override computes its loss from.

    Attributes:
        loss: super's, or the model's own.
        inputs: of the micro-batch.
        model: the bare one.
        trainer: who trains it.
        number: of items.
    """

    loss: Tensor
    inputs: Batch
    model: Tiny
    trainer: Any
    number: Any

    @property
    def kept(self) -> Tensor:
        """Attended tokens [b, L], or all samples [b]."""
        of_tokens = self.head.of_tokens
        return self.inputs["input_ids"] != 0 if of_tokens else torch.ones(len(self.scores), dtype=torch.bool)

    def seen_by(self, other: Tiny) -> Tensor:
        """The logits of another model, as these are."""
        return other.see(self.inputs["input_ids"]).of_level(self.head)


Of = Callable[[Made], Tensor]


def _made(of: Of, outputs: Any, loss: Any, trainer: Any, model: Any, inputs: Batch, number: Any) -> tuple[Tensor, Any]:
    head = bare(model).of
    return of(Made(outputs["logits"], inputs["labels"], head, loss, inputs, bare(model), trainer, number)), outputs


def by_super(of: Of = lambda m: m.loss) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
        return _made(of, outputs, found, trainer, model, inputs, number)

    return loss


def by_model(of: Of = lambda m: m.loss) -> Loss:
    """Of the model's own loss, without a number."""

    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        outputs = model(**inputs)
        return _made(of, outputs, outputs["loss"], trainer, model, inputs, number)

    return loss


def own(of: Of) -> Loss:
    """Of a model that gets no labels."""

    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        outputs = without_labels(model, inputs)
        return _made(of, outputs, None, trainer, model, inputs, number)

    return loss


def without_labels(model: Any, inputs: Batch) -> Any:
    return model(**{key: value for key, value in inputs.items() if key != "labels"})


def _without_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = base(model, inputs, return_outputs=True)
    return loss, outputs


def _outputs_loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    _, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return outputs["loss"], outputs


def by_steps(m: Made) -> Tensor:
    return m.loss / m.trainer.args.gradient_accumulation_steps


def where_number(m: Made) -> Tensor:
    return by_steps(m) if m.number is not None and m.trainer.model_accepts_loss_kwargs else m.loss


def own_number(m: Made, function: Callable[..., Tensor] = usual) -> Tensor:
    if m.number is None:
        return function(m)
    # As upstream documents: the number counts all ranks, whose gradients are averaged.
    return function(m, "sum") * m.trainer.args.world_size / m.number


@cache
def _teacher() -> Tiny:
    return built(HEADS["mean"], 999).requires_grad_(False)


def far(m: Made) -> Tensor:
    """KL(teacher || logits), the mean over attended tokens, or over samples."""
    return divergence(m.scores, m.seen_by(_teacher()), m.kept)


def far_by_number(m: Made) -> Tensor:
    """KL(teacher || logits) over the targets: the mean, or the sum over the number."""
    logits, labels = aligned(m)
    others, _ = aligned(replace(m, scores=m.seen_by(_teacher())))
    valid = labels != m.head.ignore
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    summed = ((log_q.exp() * (log_q - log_p)).sum(-1) * valid).sum()
    return summed / valid.sum() if m.number is None else m.trainer.args.world_size * summed / m.number


@lru_cache(maxsize=8)
def _at_first(head: Head, seed: int, even: bool) -> Tiny:
    return seeded(lambda: built(head, seed, even=even))().requires_grad_(False)


def from_start(m: Made) -> Tensor:
    """KL from the model as it began, which is zero at first, and so is its gradient."""
    return divergence(m.scores, m.seen_by(_at_first(m.model.of, m.model.seed, m.model.even)), m.kept)


def _r_drop(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    def of(m: Made) -> Tensor:
        other = model(**inputs, draw=1)
        one, two = m.scores, other["logits"]
        both = divergence(one, two, m.kept) + divergence(two, one, m.kept)
        return (m.loss + other["loss"]) / 2 + both / 2

    return by_super(of)(trainer, base, model, inputs, number)


def masked(batch: Batch, head: Head) -> Batch:
    """A copy without the labels of one class in four."""
    labels = batch["labels"]
    return {**batch, "labels": labels.masked_fill(labels % 4 == MASKED_CLASS, head.ignore)}


def _masked_in_loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return by_super()(trainer, base, model, masked(inputs, bare(model).of), number)


def _masking(place: Callable[..., type], *how: str) -> Callable[[Head], type]:
    """A trainer that masks labels in one place or another."""
    return lambda head: place(lambda batch: masked(batch, head), *how)


def _func(of: Callable[[Scored], Tensor]) -> Callable[[Head], dict[str, Any]]:
    """A compute_loss_func."""
    return _func_number(lambda scored, number: of(scored))


def _func_number(of: Callable[[Scored, Any], Tensor]) -> Callable[[Head], dict[str, Any]]:
    def given(head: Head) -> dict[str, Any]:
        def func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return of(Scored(outputs["logits"], labels, head), num_items_in_batch)

        return {"compute_loss_func": func}

    return given


def _over_number(scored: Scored, number: Any) -> Tensor:
    return usual(scored) if number is None else usual(scored, "sum") / number


def _keeping(loss: Loss) -> Callable[[Head], type]:
    """Divides by the steps that it has kept from the beginning."""

    def over_kept(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = loss(trainer, base, model, inputs, number)
        return found / trainer.kept, outputs

    class Keeping(computing(over_kept)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kept = self.args.gradient_accumulation_steps

    return lambda head: Keeping


def _super_by_rows(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    """Of each sample that has a target super's loss."""
    outputs = without_labels(model, inputs)
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(inputs["labels"]))]
    rows = [row for row in rows if has_target(row["labels"], bare(model).of)]
    losses = [base(model, row, return_outputs=True)[0] for row in rows]
    return torch.stack(losses).mean() if losses else 0.0 * outputs["logits"].sum(), outputs


def over_itself(loss: Tensor) -> Tensor:
    return loss / loss.detach()


def _stock(head: Head) -> type:
    return StockRecorder


def _override(name: str, loss: Loss, full: Full | None = None, *, looped: bool = True, **more: Any) -> Override:
    """By ``compute_loss``; what divides by steps is a Trainer's alone, and not looped."""
    trainer = computing(loss)
    return Override(name, lambda head: trainer, full or whole(loss), loss=loss if looped else None, **more)


def _mixed_override(prefix: str, name: str, place: Callable[[Of], Loss], base: Of, **more: Any) -> Override:
    mixing = MIXINGS[name]
    loss = place(lambda m: mixing(m.model, base(m), far(m)))
    return _override(f"{prefix}-and-teacher-{name}", loss, **_as_mixed(name), **more)


#: Labels that a function of the logits knows.
KNOWN = (*CLASSES, "number", "flags")
FULL_USUAL, FULL_MASKED = whole(own(usual)), whole(_masked_in_loss)

OVERRIDES: dict[str, Override] = {
    override.name: override
    for override in [
        Override("none", _stock, full_base),
        _override("super", by_super(), full_base),
        _override("super-without-number", _without_number, full_base),
        _override("super-half", by_super(lambda m: 0.5 * m.loss)),
        _override("squares", by_super(lambda m: m.loss + 0.01 * squares(m.model))),
        _override("teacher", by_super(lambda m: m.loss + 0.5 * far(m))),
        _override("super-by-steps", by_super(by_steps), full_base, looped=False),
        _override("outputs-loss", _outputs_loss, full_base),
        _override("from-logits", by_super(usual), FULL_USUAL, levels=KNOWN),
        _override("models-own", by_model(), full_base),
        _override("models-own-by-steps", by_model(by_steps), full_base, looped=False),
        _override("models-own-where-number", by_model(where_number), full_base, looped=False),
        _override("own", own(usual), levels=KNOWN),
        _override("own-by-hand", own(by_hand), FULL_USUAL, levels=CLASSES),
        _override("own-by-steps", own(lambda m: by_steps(replace(m, loss=usual(m)))), levels=KNOWN, looped=False),
        _override("own-number", own(own_number), FULL_USUAL, levels=CLASSES),
        # The number counts labels other than -100, whatever a sum by hand leaves out.
        _override("own-number-by-hand", own(lambda m: own_number(m, by_hand)), FULL_USUAL, levels=CLASSES, plain=True),
        _override("r-drop", _r_drop),
        _override("masked-in-loss", _masked_in_loss, levels=CLASSES),
        Override("masked-in-prepare", _masking(as_prepared), FULL_MASKED, levels=CLASSES),
        Override("masked-in-step", _masking(in_step), FULL_MASKED, levels=CLASSES),
        Override("masked-in-place", _masking(in_step, "tensor"), FULL_MASKED, levels=CLASSES),
        Override("func", _stock, FULL_USUAL, _func(usual), levels=KNOWN),
        Override("func-number", _stock, FULL_USUAL, _func_number(_over_number), levels=CLASSES),
        Override(
            "smoothing",
            _stock,
            # Its class is not on upstream's list, so its labels are not shifted.
            whole(
                own(lambda m: F.cross_entropy(m.scores.flatten(0, -2), m.labels.flatten().long(), label_smoothing=0.1))
            ),
            arguments={"label_smoothing_factor": 0.1},
            levels=CLASSES,
            plain=True,
            float32=True,
        ),
        *(_mixed_override("super", name, by_super, lambda m: m.loss) for name in MIXINGS),
        *(
            _mixed_override("own", name, own, usual, levels=KNOWN)
            for name in ("detached", "stop-gradient", "normalised", "uncertain", "later")
        ),
        _override("super-over-itself", by_super(lambda m: over_itself(m.loss))),
        _override("own-half", own(lambda m: 0.5 * usual(m)), levels=KNOWN),
        _override("own-quarter", own(lambda m: 0.25 * usual(m)), levels=KNOWN),
        _override("own-over-itself", own(lambda m: over_itself(usual(m))), levels=KNOWN),
        _override("own-self-taught", own(lambda m: 0.5 * usual(m) + 0.5 * from_start(m)), levels=KNOWN),
        Override("own-by-kept-steps", _keeping(own(usual)), FULL_USUAL, levels=KNOWN),
        Override("own-by-hand-by-kept-steps", _keeping(own(by_hand)), FULL_USUAL, levels=CLASSES),
        Override("super-by-kept-steps", _keeping(_without_number), full_base),
        _override(
            "super-and-teacher-by-steps",
            by_super(lambda m: m.loss + 0.5 * far(m) / m.trainer.args.gradient_accumulation_steps),
            looped=False,
            number=True,
        ),
        # Distillation over the targets.
        _override(
            "super-and-teacher-by-number", by_super(lambda m: m.loss + 0.5 * far_by_number(m)), number=True, plain=True
        ),
        _override("super-by-rows", _super_by_rows, levels=KNOWN),
        _override("own-reentrant", own(lambda m: recomputed(m, reentrant=True)), FULL_USUAL, levels=KNOWN),
        # A token mean plus a mean of texts.
        _override("own-texts", own(lambda m: usual(m) + 0.5 * mean_of_rows(m, by_hand)), levels=TOKENS),
        Override(
            "func-over-itself",
            _stock,
            whole(own(lambda m: over_itself(usual(m)))),
            _func(lambda scored: over_itself(usual(scored))),
            levels=KNOWN,
        ),
    ]
}


# --- data ---------------------------------------------------------------------------------------------------------

#: alike: texts of one length, all of it targets; whole: ragged texts, all of them targets; ragged: prompts are masked;
#: rare: few targets; empty: half the samples have none.
DATA = ("alike", "whole", "ragged", "rare", "empty")
#: No sample has a target.
UNLABELLED = "unlabelled"


def drawn(head: Head, kind: str, count: int, seed: int) -> list[Sample]:
    """Samples of one global batch; at least one has a target, but where none is to have one."""
    g = torch.Generator().manual_seed(seed)
    empty = _empty_rows(count, g) if kind == "empty" and count > 1 else set()
    samples = [_sample(head, kind, row in empty or kind == UNLABELLED, g) for row in range(count)]
    if kind != UNLABELLED and all(not bool(_targets(sample["labels"], head).any()) for sample in samples):
        labels = samples[max(set(range(count)) - empty)]["labels"]
        labels.view(-1)[-1] = 4
    return samples


def _empty_rows(count: int, g: torch.Generator) -> set[int]:
    """The first half, the second half, or any half."""
    which = int(torch.randint(0, 3, (), generator=g))
    order = [list(range(count)), list(range(count))[::-1], torch.randperm(count, generator=g).tolist()][which]
    return set(order[: count // 2])


def _targets(labels: Tensor, head: Head) -> Tensor:
    """Which labels are targets whatever `masked` masks."""
    if labels.is_floating_point():
        return ~labels.isnan()
    found = (labels != head.ignore) & (labels % 4 != MASKED_CLASS)
    return found[1:] if head.level == "next" else found


def _sample(head: Head, kind: str, empty: bool, g: torch.Generator) -> Sample:
    length = 8 if kind == "alike" else int(torch.randint(3, 11, (), generator=g))
    ids = torch.randint(1, VOCABULARY, (length,), generator=g)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sample["labels"] = _labels(head, kind, empty, ids, g)
    plain = kind in ("alike", "whole")
    if "weights" in head.columns:
        weights = torch.rand(length, generator=g).double() + 0.1
        sample["weights"] = torch.ones_like(weights) if plain else weights
    if "task" in head.columns:
        sample["task"] = torch.randint(0, 2, (), generator=g)
    for key in sorted({*head.columns} - {"weights", "task"}):
        unlabelled = kind in ("rare", "empty") and bool(torch.rand((), generator=g) < 0.3)
        sample[key] = torch.tensor(-100) if unlabelled else torch.randint(0, 4, (), generator=g)
    return sample


def _labels(head: Head, kind: str, empty: bool, ids: Tensor, g: torch.Generator) -> Tensor:
    length = len(ids)
    if head.level == "number":
        return 2 * torch.randn((), generator=g, dtype=torch.float64)
    if head.level == "flags":
        return torch.randint(0, 2, (3,), generator=g).double()
    if head.level == "sample":
        unlabelled = empty or (kind == "rare" and bool(torch.rand((), generator=g) < 0.6))
        return torch.tensor(head.ignore) if unlabelled else torch.randint(0, VOCABULARY, (), generator=g)
    if head.level == "next":
        labels = ids.clone()
    elif head.level == "token":
        labels = torch.randint(0, VOCABULARY, (length,), generator=g)
    else:
        labels = torch.randn(length, generator=g, dtype=torch.float64)
    kept = torch.ones(length, dtype=torch.bool)
    if kind in ("ragged", "empty"):
        kept[: int(torch.randint(1, length, (), generator=g))] = False
    elif kind == "rare":
        kept = torch.rand(length, generator=g) < 0.2
        kept[-1] |= bool(torch.rand((), generator=g) < 0.7)
    if empty:
        kept[:] = False
    return labels.masked_fill(~kept, torch.nan if head.level == "token value" else head.ignore)


# --- collators ----------------------------------------------------------------------------------------------------


def _padded(samples: Sequence[Sample], head: Head, *, width: int = 0, left: bool = False) -> Batch:
    width = max(width, *(len(sample["input_ids"]) for sample in samples))
    batch = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if left and key == "labels" and head.level == "next":
            # What stands before a text's first token would be other padding in another batch.
            values = [torch.cat([torch.full_like(value[:1], head.ignore), value[1:]]) for value in values]
        if values[0].ndim == 1 and len(values[0]) == len(samples[0]["input_ids"]) and head.level != "flags":
            fill = 0.0 if key != "labels" else torch.nan if head.level == "token value" else head.ignore
            values = [_filled(value, width - len(value), fill, left) for value in values]
        elif key in ("input_ids", "attention_mask"):
            values = [_filled(value, width - len(value), 0.0, left) for value in values]
        batch[key] = torch.stack(values)
    return batch


def _filled(value: Tensor, missing: int, fill: float, left: bool) -> Tensor:
    return F.pad(value, (missing, 0) if left else (0, missing), value=fill)


def _narrow(samples: Sequence[Sample], head: Head) -> Batch:
    """Labels of half the bits."""
    batch = _padded(samples, head)
    kind = torch.float32 if batch["labels"].is_floating_point() else torch.int32
    return {**batch, "labels": batch["labels"].to(kind)}


def _with_other_labels(samples: Sequence[Sample], head: Head) -> Batch:
    """Beside them a column of labels that the model does not look at."""
    batch = _padded(samples, head)
    return {**batch, "other_labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}


def _with_names(samples: Sequence[Sample], head: Head) -> Batch:
    return {**_padded(samples, head), "names": [f"text of {len(sample['input_ids'])}" for sample in samples]}


def _without_mask(samples: Sequence[Sample], head: Head) -> Batch:
    batch = _padded(samples, head)
    return {key: value for key, value in batch.items() if key != "attention_mask"}


COLLATORS: dict[str, Callable[[Sequence[Sample], Head], Batch]] = {
    "right": _padded,
    "left": lambda samples, head: _padded(samples, head, left=True),
    "wide": lambda samples, head: _padded(samples, head, width=12),
    "narrow-labels": _narrow,
    "other-labels": _with_other_labels,
    "names": _with_names,
    "no-mask": _without_mask,
}
