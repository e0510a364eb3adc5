"""Parts that random trainings are put together from: heads, overrides, collators, data, all found by name.

Every part knows its full batch: a head returns its loss without a number, an override has ``full`` beside what it does
in a micro-batch. What a forward writes into its model is, for a full batch, as its window found it, and written once.
Labels are of one level for each head: "next" tokens, classes of a "token", numbers of a "token value", or a class, a
number or three flags of a "sample".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
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

TOKENS = ("next", "token")
CLASSES = (*TOKENS, "sample")
LEVELS = (*CLASSES, "number", "flags", "token value")


# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a head computes its loss from.

    Attributes:
        logits: [b, L, V]; ``pooled`` and ``first`` [b, V], ``kept`` and ``ids`` [b, L].
        model: with its step, what it learns beside its weights, and what its forward writes.
    """

    logits: Tensor
    pooled: Tensor
    first: Tensor
    kept: Tensor
    ids: Tensor
    model: Tiny


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

    def see(self, input_ids: Tensor, draw: int = 0) -> Seen:
        kept = input_ids != 0
        hidden = self.embed(input_ids) * kept[..., None]
        hidden = hidden + (torch.tanh(self.mix(hidden)) * kept[..., None]).cumsum(dim=1) / 4
        if draw:
            hidden = hidden * torch.stack([self._dropped(ids, draw) for ids in input_ids])[:, None]
        length = kept.sum(1)
        pooled = self.last((hidden * kept[..., None]).sum(1) / length[:, None])
        begin = kept.long().argmax(dim=1)
        first = self.last(hidden[torch.arange(len(hidden)), begin])
        return Seen(self.last(hidden), pooled, first, kept, input_ids, self)

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
        seen = self.see(input_ids, draw)
        outputs = {"logits": seen.logits if self.of.of_tokens else seen.pooled}
        if labels is None:
            return outputs
        return {"loss": self.of.loss(seen, labels, columns, num_items_in_batch), **outputs}


def built(head: Head, seed: int, kind: type[Tiny] = Tiny, **given: bool) -> Tiny:
    """The same every time.

    Args:
        given: that it learns factors, or begins with even probabilities.
    """
    torch.manual_seed(seed)
    return kind(head, seed, **given).double()


# --- heads --------------------------------------------------------------------------------------------------------

HeadLoss = Callable[[Seen, Tensor, Mapping[str, Tensor], Any], Tensor]


@dataclass(frozen=True)
class Head:
    """One kind of loss.

    Attributes:
        level: of its labels.
        loss: ``(seen, labels, columns, number)``; without a number the loss of a whole batch.
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


class _Inside:
    """The head of a model whose own forward makes more of its loss."""

    def __init__(self, module: Tiny) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> dict[str, Tensor]:
        return Tiny.forward(self.module, **inputs)

    def parameters(self) -> Any:
        return self.module.parameters()


class _OfOneRank:
    """What a forward knows of a Trainer's arguments."""

    world_size = 1


class _OfLoop:
    args = _OfOneRank


def in_forward(loss: Loss) -> type[Tiny]:
    """A model whose own forward computes what an override does."""

    class InForward(Tiny):
        def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> dict[str, Tensor]:  # type: ignore[override]
            found, outputs = loss(_OfLoop, _base, _Inside(self), inputs, num_items_in_batch)
            return {**outputs, "loss": found}

    return InForward


def _base(model: Any, inputs: Batch, return_outputs: bool = True, num_items_in_batch: Any = None) -> Any:
    """As a Trainer's ``compute_loss``."""
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    return outputs["loss"], outputs


def aligned(logits: Tensor, labels: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and labels [n], after the shift of a causal model."""
    if level == "next":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def usual(logits: Tensor, labels: Tensor, head: Head, reduction: str = "mean") -> Tensor:
    """Of what a model returns as logits: torch's own function for this level of labels."""
    if head.level == "number":
        return F.mse_loss(logits[:, 0], labels.to(logits), reduction=reduction)
    if head.level == "flags":
        return F.binary_cross_entropy_with_logits(logits[:, :3], labels.to(logits), reduction=reduction)
    logits, labels = aligned(logits, labels.long(), head.level)
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=head.ignore)


def by_hand(logits: Tensor, labels: Tensor, head: Head, reduction: str = "mean") -> Tensor:
    """The same without a loss function of torch."""
    if head.level in ("number", "flags"):
        labels = labels.to(logits)
        if head.level == "number":
            losses = (logits[:, 0] - labels).square()
        else:
            losses = F.softplus(logits[:, :3]) - logits[:, :3] * labels
        return losses.sum() if reduction == "sum" else losses.mean()
    losses, valid = token_losses(logits, labels, head)
    return (losses * valid).sum() / (1 if reduction == "sum" else valid.sum())


def token_losses(logits: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Of every label [n], and whether it is a target."""
    logits, labels = aligned(logits, labels.long(), head.level)
    return -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0], labels != head.ignore


def of_level(seen: Seen, head: Head) -> Tensor:
    return seen.logits if head.of_tokens else seen.pooled


#: ``(seen, labels, columns, number, head)`` -> a loss.
HeadOf = Callable[[Seen, Tensor, Mapping[str, Tensor], Any, Head], Tensor]


def _head(name: str, level: str, loss: HeadOf, columns: tuple[str, ...] = (), **more: Any) -> tuple[str, Head]:
    def bound(seen: Seen, labels: Tensor, given: Mapping[str, Tensor], number: Any) -> Tensor:
        return loss(seen, labels, given, number, head)

    head = Head(name, level, bound, columns, **more)
    return name, head


def _reduced(function: Callable[..., Tensor] = usual, *, by_number: bool = False, float32: bool = False) -> HeadOf:
    """The mean over the targets; of what divides by the number, where one comes, their sum over it."""

    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        logits = of_level(seen, head)
        logits = logits.float() if float32 else logits
        if number is None or not by_number:
            return function(logits, labels, head)
        return function(logits, labels, head, "sum") / number

    return loss


_mean, _mean_by_hand = _reduced(), _reduced(by_hand)
_number, _number_by_hand = _reduced(by_number=True), _reduced(by_hand, by_number=True)


def _class_weights(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits, labels = aligned(of_level(seen, head), labels.long(), head.level)
    weight = torch.linspace(0.2, 1.0, VOCABULARY, dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight=weight)


def _element_weights(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=seen.pooled.dtype)
    return F.binary_cross_entropy_with_logits(seen.pooled[:, :3], labels.to(seen.pooled), weight=weight)


def _weights_column(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    losses, valid = token_losses(of_level(seen, head), labels, head)
    weights = given["weights"][:, 1:].reshape(-1) if head.level == "next" else given["weights"].reshape(-1)
    return (losses * weights * valid).sum() / (weights * valid).sum()


def _weighted_elements(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Torch's own weighted mean of numbers."""
    values = seen.logits[..., 0]
    return F.mse_loss(values, labels.nan_to_num().to(values), weight=given["weights"] * ~labels.isnan())


def _kind(seen: Seen, given: Any, key: str) -> Tensor:
    return F.cross_entropy(seen.pooled[:, :4], given[key].long())


def _two_terms(key: str, factor: float, base: HeadOf) -> HeadOf:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        return base(seen, labels, given, number, head) + factor * _kind(seen, given, key)

    return loss


def _with_z(base: HeadOf) -> HeadOf:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        return base(seen, labels, given, number, head) + 0.1 * z_loss(seen.logits, seen.kept)

    return loss


def _indexed(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits, labels = aligned(of_level(seen, head), labels.long(), head.level)
    kept = labels >= 0
    return F.cross_entropy(logits[kept], labels[kept])


def _without_nan(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    kept = ~labels.isnan()
    return F.mse_loss(seen.logits[..., 0][kept], labels[kept].to(seen.logits))


def _chosen(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    losses, valid = token_losses(of_level(seen, head), labels, head)
    chosen = valid & (aligned(seen.logits, labels, head.level)[1] < VOCABULARY // 2)
    return (losses * chosen).sum() / chosen.sum().clamp(min=1)


def _focal(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    losses, valid = token_losses(of_level(seen, head), labels, head)
    return ((1 - (-losses).exp()) ** 2 * losses * valid).sum() / valid.sum()


def _sum(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return usual(of_level(seen, head), labels, head, "sum")


def _root(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return usual(of_level(seen, head), labels, head).sqrt()


def _in_batch_negatives(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    one, other = F.normalize(seen.pooled, dim=-1), F.normalize(seen.first, dim=-1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def _mean_of_texts(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Of every text the mean over its targets, and of those the mean."""
    losses, valid = (each.view(len(labels), -1) for each in token_losses(seen.logits, labels, head))
    return ((losses * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


# --- heads of two losses, and what is made of them ------------------------------------------------------------------

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
#: Those that learn, and those that change from window to window.
LEARN, CHANGE = ("uncertain", "gated"), ("later", "scheduled", "alternating", "zero-first")


def _mixed(mixing: Mixing, base: HeadOf) -> HeadOf:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        return mixing(seen.model, base(seen, labels, given, number, head), _kind(seen, given, "kind"))

    return loss


def _of_one(change: Callable[[Tiny, Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        return change(seen.model, _mean(seen, labels, given, number, head))

    return loss


def _learnt_factor(model: Tiny, a: Tensor) -> Tensor:
    assert model.learnt is not None
    return (-model.learnt[0]).exp() * a + model.learnt[0]


def _imported(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits, labels = aligned(seen.logits, labels.long(), head.level)
    return imported_early(logits, labels)


def _imported_kind(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return _imported(seen, labels, given, number, head) + imported_early(seen.pooled[:, :4], given["kind"].long())


def _again(seen: Seen, labels: Tensor, head: Head, *, reentrant: bool) -> Tensor:
    """Computed once more in the backward."""
    loss: Tensor = checkpoint(usual, seen.logits, labels, head, use_reentrant=reentrant)
    return loss


def _checkpointed(*, reentrant: bool, kind: bool = False) -> Callable[..., Tensor]:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        found = _again(seen, labels, head, reentrant=reentrant)
        return found + _kind(seen, given, "kind") if kind else found

    return loss


def _fused(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    loss: Tensor = Fused.apply(*aligned(seen.logits, labels.long(), head.level))
    return loss


def _fused_and_kind(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return _fused(seen, labels, given, number, head) + _kind(seen, given, "kind")


def _logged(base: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Another loss is computed for the log alone."""

    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        with torch.no_grad():
            _kind(seen, given, "kind")
        return base(seen, labels, given, number, head)

    return loss


# --- heads that write into their model ------------------------------------------------------------------------------


def _random_keys() -> Tensor:
    return F.normalize(torch.randn(QUEUE, VOCABULARY), dim=-1)


def _queue(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Momentum contrast (He et al. 2020): the keys of batches before are the negatives."""
    model: Any = seen.model
    one, other = F.normalize(seen.pooled, dim=-1), F.normalize(seen.first, dim=-1).detach()
    held = model.queue.clone()
    logits = torch.cat([(one * other).sum(-1, keepdim=True), one @ held.T], 1) / 0.5
    if model.training:
        model.queue.copy_(torch.cat([other, held])[:QUEUE])
    contrast = F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))
    return _mean(seen, labels, given, number, head) + contrast


def _centre(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Self-distillation against a centred teacher (DINO, Caron et al. 2021)."""
    model: Any = seen.model
    wanted = ((seen.first - model.centre) / 0.5).softmax(-1).detach()
    if model.training:
        model.centre.mul_(0.5).add_(0.5 * seen.first.detach().mean(0))
    return -(wanted * seen.pooled.log_softmax(-1)).sum(-1).mean()


def _over_average(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Over its own running mean."""
    model: Any = seen.model
    loss = _mean(seen, labels, given, number, head)
    if model.training:
        model.average.mul_(0.5).add_(0.5 * loss.detach())
    return loss / model.average.clone()


def _counting(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """What is written changes nothing."""
    model: Any = seen.model
    if model.training:
        model.calls.add_(1)
    return _mean(seen, labels, given, number, head)


# --- heads whose terms come and go ----------------------------------------------------------------------------------


def _no_term(seen: Seen) -> Tensor:
    return 0.0 * seen.logits.sum()


def _of_rows(seen: Seen, labels: Tensor, head: Head, rows: Tensor) -> Tensor:
    return usual(of_level(seen, head)[rows], labels[rows], head)


def _tasks(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """A row's task says which of two losses it has; one that no row has is left out."""
    task = given["task"]
    loss = _no_term(seen)
    if bool((task == 0).any()):
        loss = loss + _of_rows(seen, labels, head, task == 0)
    if bool((task == 1).any()):
        rows = seen.pooled[task == 1]
        loss = loss + F.cross_entropy(rows, seen.ids[task == 1].amax(1))
    return loss


def _worst_task(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Group DRO (Sagawa et al. 2020)."""
    losses, valid = (each.view(len(labels), -1) for each in token_losses(seen.logits, labels, head))
    found = []
    for task in given["task"].unique():
        rows = given["task"] == task
        found.append((losses[rows] * valid[rows]).sum() / valid[rows].sum().clamp(min=1))
    return torch.stack(found).max(0).values


def _class_by_class(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """A term for each class that is there."""
    kind = given["kind"].long()
    found = [F.cross_entropy(seen.pooled[kind == each, :4], kind[kind == each]) for each in kind[kind >= 0].unique()]
    return _mean(seen, labels, given, number, head) + sum(found, _no_term(seen))


def _kind_where_labelled(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    loss = _mean(seen, labels, given, number, head)
    return loss + _kind(seen, given, "kind") if bool((given["kind"] != -100).any()) else loss


def _where_labelled(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """A penalty on the weights, and the rest where there is any target."""
    loss = 0.01 * squares(seen.model)
    valid = aligned(seen.logits, labels, head.level)[1] != head.ignore
    return loss + _mean(seen, labels, given, number, head) if bool(valid.any()) else loss


def _stack_of_rows(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return mean_of_rows(of_level(seen, head), labels, head, usual)


def mean_of_rows(logits: Tensor, labels: Tensor, head: Head, function: Callable[..., Tensor]) -> Tensor:
    """Of every row its loss, and of those the mean; what has no target is left out."""
    rows = [row for row in range(len(labels)) if has_target(labels[row : row + 1], head)]
    found = [function(logits[row : row + 1], labels[row : row + 1], head) for row in rows]
    return torch.stack(found).mean() if found else 0.0 * logits.sum()


def has_target(labels: Tensor, head: Head) -> bool:
    if labels.is_floating_point():
        return not bool(labels.isnan().all())
    return bool(((labels[:, 1:] if head.level == "next" else labels) != head.ignore).any())


# --- heads whose items are counted by hand --------------------------------------------------------------------------


def _texts_and_tokens(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """A sample mean plus a token mean, as preference losses with a supervised term."""
    return _mean_of_texts(seen, labels, given, number, head) + _mean_by_hand(seen, labels, given, number, head)


def _weights_by_hand(over: str) -> Callable[..., Tensor]:
    """A weight of each class; the mean is over the weights, or over the targets."""

    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        losses, valid = token_losses(of_level(seen, head), labels, head)
        classes = aligned(of_level(seen, head), labels, head.level)[1].long().clamp(min=0)
        weights = torch.linspace(0.2, 1.0, VOCABULARY, dtype=losses.dtype)[classes] * valid
        return (losses * weights).sum() / (weights if over == "weights" else valid).sum()

    return loss


def _weights_over_samples(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Each sample's own loss by torch, weighed, and of that the mean over samples."""
    losses = F.cross_entropy(seen.pooled, labels.long(), reduction="none", ignore_index=head.ignore)
    return (losses * torch.linspace(0.2, 1.0, VOCABULARY).to(losses)[labels.long().clamp(min=0)]).mean()


def _first_target(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Of each text its first target alone."""
    losses, valid = (each.view(len(labels), -1) for each in token_losses(seen.logits, labels, head))
    first = losses.gather(1, valid.long().argmax(1, keepdim=True))[:, 0]
    return (first * valid.any(1)).sum() / valid.any(1).sum().clamp(min=1)


def _asserts(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    if not bool(((labels == seen.ids) | (labels == head.ignore)).all()):
        raise ValueError("labels are no copy of the ids")
    return _mean(seen, labels, given, number, head)


def _ratio(advantage: str) -> Callable[..., Tensor]:
    """A policy gradient's first step: every token's value is its advantage, whatever its gradient is."""

    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        losses, valid = token_losses(seen.logits, labels, head)
        ratio = (losses.detach() - losses).exp()
        times = given[advantage][:, 1:].reshape(-1) if advantage else 1.0
        return -(ratio * times * valid).sum() / valid.sum()

    return loss


def _hinge(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    """Zero for many samples."""
    valid = labels != head.ignore
    right = seen.pooled.gather(1, labels.long().clamp(min=0)[:, None])[:, 0]
    return (F.relu(seen.pooled.mean(1) - right) * valid).sum() / valid.sum().clamp(min=1)


HEADS: dict[str, Head] = dict(
    [
        _head("mean", "next", _mean),
        _head("mean-of-tokens", "token", _mean),
        _head("mean-of-classes", "sample", _mean),
        _head("mean-by-hand", "next", _mean_by_hand),
        _head("mean-of-tokens-by-hand", "token", _mean_by_hand),
        _head("mean-of-classes-by-hand", "sample", _mean_by_hand),
        _head("mean-in-float32", "next", _reduced(float32=True), float32=True),
        _head("number", "next", _number, by_number=True),
        _head("number-of-tokens", "token", _number, by_number=True),
        _head("number-of-classes", "sample", _number, by_number=True),
        _head("number-by-hand", "next", _number_by_hand, by_number=True),
        _head(
            "number-in-float32", "next", _reduced(by_number=True, float32=True), float32=True, by_number=True
        ),
        _head("class-weights", "next", _class_weights),
        _head("class-weights-of-classes", "sample", _class_weights),
        _head("element-weights", "flags", _element_weights),
        _head("weights-column", "next", _weights_column, ("weights",)),
        _head("weighted-elements", "token value", _weighted_elements, ("weights",)),
        _head("regression", "number", _mean),
        _head("regression-by-hand", "number", _mean_by_hand),
        _head("multi-label", "flags", _mean),
        _head("multi-label-by-hand", "flags", _mean_by_hand),
        _head("two-terms-kind", "next", _two_terms("kind", 1.0, _mean), ("kind",)),
        _head("two-terms-sentence", "token", _two_terms("next_sentence_label", 1.0, _mean), ("next_sentence_label",)),
        _head("two-terms-weighed", "next", _two_terms("kind_labels", 0.3, _mean), ("kind_labels",)),
        _head("two-terms-number", "next", _two_terms("kind", 1.0, _number), ("kind",), by_number=True),
        _head("mean-and-z", "next", _with_z(_mean)),
        _head("mean-by-hand-and-z", "next", _with_z(_mean_by_hand)),
        _head("number-and-z", "next", _with_z(_number), by_number=True),
        _head("indexed", "token", _indexed, ignore=-1),
        _head("without-nan", "token value", _without_nan),
        _head("chosen", "next", _chosen),
        _head("focal", "next", _focal),
        _head("sum", "next", _sum),
        _head("sum-of-classes", "sample", _sum),
        _head("root", "number", _root),
        _head("in-batch-negatives", "sample", _in_batch_negatives),
        _head("mean-of-texts", "next", _mean_of_texts),
        *(
            _head(
                f"mean-and-kind-{name}",
                "next",
                _mixed(mixing, _mean),
                ("kind",),
                learns=name in LEARN,
                windows=3 if name in CHANGE else 1,
            )
            for name, mixing in MIXINGS.items()
        ),
        _head("number-and-kind-detached", "next", _mixed(MIXINGS["detached"], _number), ("kind",), by_number=True),
        _head("number-and-kind-later", "next", _mixed(MIXINGS["later"], _number), ("kind",), by_number=True, windows=3),
        _head(
            "number-and-kind-uncertain",
            "next",
            _mixed(MIXINGS["uncertain"], _number),
            ("kind",),
            by_number=True,
            learns=True,
        ),
        _head("learnt-factor", "next", _of_one(_learnt_factor), learns=True),
        _head("half", "next", _of_one(lambda model, a: 0.5 * a)),
        _head("quarter", "next", _of_one(lambda model, a: 0.25 * a)),
        _head("over-itself", "next", _of_one(lambda model, a: a / a.detach())),
        _head("flooded", "next", _of_one(lambda model, a: flooding(a, FLOOD))),
        _head("perplexity", "next", _of_one(lambda model, a: 0.5 * a.exp())),
        _head("root-of-tokens", "next", _of_one(lambda model, a: 2 * a.sqrt())),
        _head("zero-first", "next", _of_one(lambda model, a: min(model.step, 1) * a), windows=3),
        _head("imported", "next", _imported),
        _head("imported-kind", "next", _imported_kind, ("kind",)),
        _head("checkpointed", "next", _checkpointed(reentrant=False)),
        _head("checkpointed-kind", "next", _checkpointed(reentrant=False, kind=True), ("kind",)),
        _head("reentrant", "next", _checkpointed(reentrant=True)),
        _head("reentrant-kind", "next", _checkpointed(reentrant=True, kind=True), ("kind",)),
        _head("fused", "next", _fused),
        _head("fused-kind", "next", _fused_and_kind, ("kind",)),
        _head("logged-kind", "next", _logged(_mean), ("kind",)),
        _head("logged-kind-by-hand", "next", _logged(_mean_by_hand), ("kind",)),
        _head("queue", "next", _queue, state={"queue": _random_keys}),
        _head("centre", "sample", _centre, state={"centre": lambda: torch.zeros(VOCABULARY)}),
        _head("over-average", "next", _over_average, state={"average": lambda: torch.ones(())}),
        _head("counting", "next", _counting, state={"calls": lambda: torch.zeros((), dtype=torch.long)}),
        _head("tasks", "next", _tasks, ("task",)),
        _head("worst-task", "next", _worst_task, ("task",)),
        _head("class-by-class", "next", _class_by_class, ("kind",)),
        _head("kind-where-labelled", "next", _kind_where_labelled, ("kind",)),
        _head("where-labelled", "next", _where_labelled, unlabelled=True),
        _head("stack-of-rows", "next", _stack_of_rows),
        _head("stack-of-classes", "sample", _stack_of_rows),
        _head("texts-and-tokens", "next", _texts_and_tokens),
        _head("weights-by-hand", "next", _weights_by_hand("weights")),
        _head("weights-by-hand-over-targets", "next", _weights_by_hand("targets")),
        _head("weights-by-hand-of-classes", "sample", _weights_by_hand("weights")),
        _head("weights-over-samples", "sample", _weights_over_samples),
        _head("focal-of-classes", "sample", _focal),
        _head("first-target", "next", _first_target),
        _head("asserts", "next", _asserts),
        _head("ratio", "next", _ratio("")),
        _head("ratio-times", "next", _ratio("weights"), ("weights",)),
        _head("hinge", "sample", _hinge),
    ]
)  # fmt: skip


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
        unlabelled: a window may have no target at all.
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
    unlabelled: bool = False
    windows: int = 1
    number: bool = False
    loss: Loss | None = None

    def suits(self, head: Head) -> bool:
        if (self.plain and head.ignore != -100) or (self.number and not head.by_number):
            return False
        return head.level in self.levels

    def data(self, head: Head) -> tuple[str, ...]:
        """Kinds of data that it can be trained on."""
        none = self.unlabelled or (head.unlabelled and self.full is full_base)
        return (*DATA, UNLABELLED) if none else DATA


def full_base(model: Tiny, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def full_usual(model: Tiny, batch: Batch) -> Tensor:
    return usual(of_level(model.see(batch["input_ids"]), model.of), batch["labels"], model.of)


def without_labels(model: Any, inputs: Batch) -> Any:
    return model(**{key: value for key, value in inputs.items() if key != "labels"})


def _super(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return base(model, inputs, return_outputs=True, num_items_in_batch=number)


def _without_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return base(model, inputs, return_outputs=True)


def _penalty(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    return loss + 0.01 * squares(model), outputs


def _changed(loss: Loss, change: Callable[[Tensor, Any], Tensor]) -> Loss:
    """What ``change(loss, trainer)`` makes of another's loss."""

    def changed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = loss(trainer, base, model, inputs, number)
        return change(found, trainer), outputs

    return changed


def _by_steps(loss: Tensor, trainer: Any) -> Tensor:
    return loss / trainer.args.gradient_accumulation_steps


def _by_window(loss: Tensor, trainer: Any) -> Tensor:
    return loss / trainer.current_gradient_accumulation_steps


@cache
def _teacher() -> Tiny:
    return built(HEADS["mean"], 999).requires_grad_(False)


def _far(logits: Tensor, inputs: Batch, head: Head) -> Tensor:
    """KL(teacher || logits), the mean over attended tokens, or over samples."""
    seen = _teacher().see(inputs["input_ids"])
    others, kept = (seen.logits, seen.kept) if head.of_tokens else (seen.pooled, torch.ones(len(logits)).bool())
    return divergence(logits, others, kept)


def _far_by_torch(logits: Tensor, inputs: Batch, head: Head) -> Tensor:
    seen = _teacher().see(inputs["input_ids"])
    others = seen.logits if head.of_tokens else seen.pooled
    if head.of_tokens:
        logits, others = logits[seen.kept], others[seen.kept]
    return F.kl_div(logits.log_softmax(-1), others.log_softmax(-1), reduction="batchmean", log_target=True)


def _taught(far: Callable[[Tensor, Batch, Head], Tensor]) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = _super(trainer, base, model, inputs, number)
        return found + 0.5 * far(outputs["logits"], inputs, bare(model).of), outputs

    return loss


def _full_taught(model: Tiny, batch: Batch) -> Tensor:
    logits = of_level(model.see(batch["input_ids"]), model.of)
    return full_base(model, batch) + 0.5 * _far(logits, batch, model.of)


def _outputs_loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    _, outputs = _super(trainer, base, model, inputs, number)
    return outputs["loss"], outputs


def _from_logits(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    _, outputs = _super(trainer, base, model, inputs, number)
    return usual(outputs["logits"], inputs["labels"], bare(model).of), outputs


def _models_own(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs["loss"], outputs


def _models_own_where_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    loss = outputs["loss"]
    if number is not None and trainer.model_accepts_loss_kwargs:
        loss = loss / trainer.args.gradient_accumulation_steps
    return loss, outputs


def _own(function: Callable[..., Tensor]) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        outputs = without_labels(model, inputs)
        return function(outputs["logits"], inputs["labels"], bare(model).of), outputs

    return loss


def _own_number(function: Callable[..., Tensor]) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        outputs, head = without_labels(model, inputs), bare(model).of
        if number is None:
            return function(outputs["logits"], inputs["labels"], head), outputs
        # As upstream documents: the number counts all ranks, whose gradients are averaged.
        summed = function(outputs["logits"], inputs["labels"], head, "sum") * trainer.args.world_size
        return summed / number, outputs

    return loss


def _r_drop(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    other = model(**inputs, draw=1)
    both = _apart(outputs["logits"], other["logits"], inputs, bare(model).of)
    return (loss + other["loss"]) / 2 + both / 2, outputs


def _full_r_drop(model: Tiny, batch: Batch) -> Tensor:
    one, other = model(**batch), model(**batch, draw=1)
    both = _apart(one["logits"], other["logits"], batch, model.of)
    loss: Tensor = (one["loss"] + other["loss"]) / 2 + both / 2
    return loss


def _apart(one: Tensor, other: Tensor, inputs: Batch, head: Head) -> Tensor:
    kept = inputs["input_ids"] != 0 if head.of_tokens else torch.ones(len(one)).bool()
    return divergence(one, other, kept) + divergence(other, one, kept)


def masked(batch: Batch, head: Head) -> Batch:
    """A copy without the labels of one class in four."""
    labels = batch["labels"]
    return {**batch, "labels": labels.masked_fill(labels % 4 == MASKED_CLASS, head.ignore)}


def _masked_in_loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return _super(trainer, base, model, masked(inputs, bare(model).of), number)


def _masking(place: Callable[..., type], *how: str) -> Callable[[Head], type]:
    """A trainer that masks labels in one place or another."""
    return lambda head: place(lambda batch: masked(batch, head), *how)


def _full_masked(model: Tiny, batch: Batch) -> Tensor:
    return full_base(model, masked(batch, model.of))


def _func(head: Head) -> dict[str, Any]:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return usual(outputs["logits"], labels, head)

    return {"compute_loss_func": mean}


def _func_number(head: Head) -> dict[str, Any]:
    def by_number(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if num_items_in_batch is None:
            return usual(outputs["logits"], labels, head)
        return usual(outputs["logits"], labels, head, "sum") / num_items_in_batch

    return {"compute_loss_func": by_number}


def _full_smoothed(model: Tiny, batch: Batch) -> Tensor:
    logits = of_level(model.see(batch["input_ids"]), model.of)
    logits, labels = aligned(logits, batch["labels"].long(), model.of.level)
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def _override(name: str, loss: Loss, full: Full = full_base, *, by_steps: bool = False, **more: Any) -> Override:
    """By ``compute_loss``; what divides by steps is a Trainer's alone."""
    trainer = computing(loss)
    return Override(name, lambda head: trainer, full, loss=None if by_steps else loss, **more)


# --- overrides of two losses, of rows, of the steps kept ------------------------------------------------------------


def _super_mixed(mixing: Mixing) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = _super(trainer, base, model, inputs, number)
        return mixing(bare(model), found, _far(outputs["logits"], inputs, bare(model).of)), outputs

    return loss


def _full_mixed(mixing: Mixing) -> Full:
    def full(model: Tiny, batch: Batch) -> Tensor:
        far = _far(of_level(model.see(batch["input_ids"]), model.of), batch, model.of)
        return mixing(model, full_base(model, batch), far)

    return full


def _own_mixed(mixing: Mixing, function: Callable[..., Tensor]) -> Loss:
    def loss(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        outputs, head = without_labels(model, inputs), bare(model).of
        found = function(outputs["logits"], inputs["labels"], head)
        return mixing(bare(model), found, _far(outputs["logits"], inputs, head)), outputs

    return loss


def _full_own_mixed(mixing: Mixing) -> Full:
    def full(model: Tiny, batch: Batch) -> Tensor:
        logits = of_level(model.see(batch["input_ids"]), model.of)
        return mixing(model, usual(logits, batch["labels"], model.of), _far(logits, batch, model.of))

    return full


def _from_own(change: Callable[[Tensor], Tensor], function: Callable[..., Tensor] = usual) -> Loss:
    return _changed(_own(function), lambda loss, trainer: change(loss))


def _from_super(change: Callable[[Tensor], Tensor]) -> Loss:
    return _changed(_super, lambda loss, trainer: change(loss))


def _full_from_own(change: Callable[[Tensor], Tensor]) -> Full:
    return lambda model, batch: change(full_usual(model, batch))


def _full_over_itself(model: Tiny, batch: Batch) -> Tensor:
    loss = full_base(model, batch)
    return loss / loss.detach()


@lru_cache(maxsize=8)
def _at_first(head: Head, seed: int, even: bool) -> Tiny:
    return seeded(lambda: built(head, seed, even=even))().requires_grad_(False)


def _from_start(logits: Tensor, inputs: Batch, model: Tiny) -> Tensor:
    """KL from the model as it began, which is zero at first, and so is its gradient."""
    teacher = _at_first(model.of, model.seed, model.even)
    others = of_level(teacher.see(inputs["input_ids"]), model.of)
    kept = inputs["input_ids"] != 0 if model.of.of_tokens else torch.ones(len(logits)).bool()
    return divergence(logits, others, kept)


def _own_self_taught(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _own(usual)(trainer, base, model, inputs, number)
    return 0.5 * loss + 0.5 * _from_start(outputs["logits"], inputs, bare(model)), outputs


def _full_self_taught(model: Tiny, batch: Batch) -> Tensor:
    logits = of_level(model.see(batch["input_ids"]), model.of)
    return 0.5 * usual(logits, batch["labels"], model.of) + 0.5 * _from_start(logits, batch, model)


def _keeping(loss: Loss) -> Callable[[Head], type]:
    """Divides by the steps that it has kept from the beginning."""

    class Keeping(computing(_over_kept(loss))):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kept = self.args.gradient_accumulation_steps

    return lambda head: Keeping


def _over_kept(loss: Loss) -> Loss:
    def over(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
        found, outputs = loss(trainer, base, model, inputs, number)
        return found / trainer.kept, outputs

    return over


def _super_and_far_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    far = _far(outputs["logits"], inputs, bare(model).of)
    return loss + 0.5 * far / trainer.args.gradient_accumulation_steps, outputs


def _super_and_far_by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    """Distillation over the targets."""
    loss, outputs = _super(trainer, base, model, inputs, number)
    summed, count = _far_of_targets(outputs["logits"], inputs, bare(model).of)
    times = 1 if number is None else trainer.args.world_size
    return loss + 0.5 * times * summed / (count if number is None else number), outputs


def _full_far_of_targets(model: Tiny, batch: Batch) -> Tensor:
    logits = of_level(model.see(batch["input_ids"]), model.of)
    summed, count = _far_of_targets(logits, batch, model.of)
    return full_base(model, batch) + 0.5 * summed / count


def _far_of_targets(logits: Tensor, inputs: Batch, head: Head) -> tuple[Tensor, Tensor]:
    """KL(teacher || logits), summed over the targets, and how many they are."""
    others = of_level(_teacher().see(inputs["input_ids"]), head)
    logits, labels = aligned(logits, inputs["labels"].long(), head.level)
    others, _ = aligned(others, inputs["labels"].long(), head.level)
    valid = labels != head.ignore
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    return ((log_q.exp() * (log_q - log_p)).sum(-1) * valid).sum(), valid.sum()


def _super_by_rows(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = without_labels(model, inputs)
    losses = [base(model, row, return_outputs=True)[0] for row in _rows(inputs, bare(model).of)]
    return torch.stack(losses).mean() if losses else 0.0 * outputs["logits"].sum(), outputs


def _full_by_rows(model: Tiny, batch: Batch) -> Tensor:
    losses = [full_base(model, row) for row in _rows(batch, model.of)]
    return torch.stack(losses).mean() if losses else 0.0 * model.see(batch["input_ids"]).logits.sum()


def _rows(batch: Batch, head: Head) -> list[Batch]:
    """Each sample that has a target as a batch."""
    rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(len(batch["labels"]))]
    return [row for row in rows if has_target(row["labels"], head)]


def _own_rows(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = without_labels(model, inputs)
    return mean_of_rows(outputs["logits"], inputs["labels"], bare(model).of, usual), outputs


def _full_own_rows(model: Tiny, batch: Batch) -> Tensor:
    return mean_of_rows(of_level(model.see(batch["input_ids"]), model.of), batch["labels"], model.of, usual)


def _own_imported(logits: Tensor, labels: Tensor, head: Head) -> Tensor:
    logits, labels = aligned(logits, labels.long(), head.level)
    return imported_early(logits, labels, ignore_index=head.ignore)


def _own_logged(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    """What torch computes is logged, and what is trained is by hand."""
    outputs, head = without_labels(model, inputs), bare(model).of
    with torch.no_grad():
        usual(outputs["logits"], inputs["labels"], head)
    loss = by_hand(outputs["logits"], inputs["labels"], head)
    return loss + 0.5 * _far_by_torch(outputs["logits"], inputs, head), outputs


def _full_own_far(model: Tiny, batch: Batch) -> Tensor:
    return full_usual(model, batch) + 0.5 * _far(of_level(model.see(batch["input_ids"]), model.of), batch, model.of)


def _own_reentrant(logits: Tensor, labels: Tensor, head: Head) -> Tensor:
    loss: Tensor = checkpoint(usual, logits, labels, head, use_reentrant=True)
    return loss


def _own_where_labelled(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    """A penalty, and a loss where there is any label."""
    outputs = without_labels(model, inputs)
    loss = 0.01 * squares(model)
    if has_target(inputs["labels"], bare(model).of):
        loss = loss + usual(outputs["logits"], inputs["labels"], bare(model).of)
    return loss, outputs


def _full_where_labelled(model: Tiny, batch: Batch) -> Tensor:
    loss = 0.01 * squares(model)
    return loss + full_usual(model, batch) if has_target(batch["labels"], model.of) else loss


def _own_texts(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    """A token mean plus a mean of texts."""
    outputs, head = without_labels(model, inputs), bare(model).of
    logits, labels = outputs["logits"], inputs["labels"]
    return usual(logits, labels, head) + 0.5 * mean_of_rows(logits, labels, head, by_hand), outputs


def _full_own_texts(model: Tiny, batch: Batch) -> Tensor:
    return full_usual(model, batch) + 0.5 * mean_of_rows(
        of_level(model.see(batch["input_ids"]), model.of), batch["labels"], model.of, by_hand
    )


def _func_over_itself(head: Head) -> dict[str, Any]:
    def over_itself(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = usual(outputs["logits"], labels, head)
        return loss / loss.detach()

    return {"compute_loss_func": over_itself}


def _half_of(loss: Tensor) -> Tensor:
    return 0.5 * loss


def _quarter_of(loss: Tensor) -> Tensor:
    return 0.25 * loss


def _over_itself(loss: Tensor) -> Tensor:
    return loss / loss.detach()


def _flooded(loss: Tensor) -> Tensor:
    return flooding(loss, FLOOD)


def _stock(head: Head) -> type:
    return StockRecorder


#: Labels that a function of the logits knows.
KNOWN = (*CLASSES, "number", "flags")

OVERRIDES: dict[str, Override] = {
    override.name: override
    for override in [
        Override("none", _stock, full_base),
        _override("super", _super),
        _override("super-without-number", _without_number),
        _override("half", _from_super(_half_of), lambda model, batch: 0.5 * full_base(model, batch)),
        _override("squares", _penalty, lambda model, batch: full_base(model, batch) + 0.01 * squares(model)),
        _override("teacher", _taught(_far), _full_taught),
        _override("teacher-by-torch", _taught(_far_by_torch), _full_taught),
        _override("super-by-steps", _changed(_super, _by_steps), by_steps=True),
        _override("outputs-loss", _outputs_loss),
        _override("from-logits", _from_logits, full_usual, levels=KNOWN),
        _override("models-own", _models_own),
        _override("models-own-by-steps", _changed(_models_own, _by_steps), by_steps=True),
        _override("models-own-by-window", _changed(_models_own, _by_window), by_steps=True),
        _override("models-own-where-number", _models_own_where_number, by_steps=True),
        _override("own", _own(usual), full_usual, levels=KNOWN),
        _override("own-by-hand", _own(by_hand), full_usual, levels=KNOWN),
        _override("own-by-steps", _changed(_own(usual), _by_steps), full_usual, levels=KNOWN, by_steps=True),
        # The number counts labels other than -100, whatever a sum leaves out.
        _override("own-number", _own_number(usual), full_usual, levels=CLASSES, plain=True),
        _override("own-number-by-hand", _own_number(by_hand), full_usual, levels=CLASSES, plain=True),
        _override("r-drop", _r_drop, _full_r_drop),
        _override("masked-in-loss", _masked_in_loss, _full_masked, levels=CLASSES),
        Override("masked-in-prepare", _masking(as_prepared), _full_masked, levels=CLASSES),
        Override("masked-in-step", _masking(in_step), _full_masked, levels=CLASSES),
        Override("masked-in-place", _masking(in_step, "tensor"), _full_masked, levels=CLASSES),
        Override("func", _stock, full_usual, _func, levels=KNOWN),
        Override("func-number", _stock, full_usual, _func_number, levels=CLASSES),
        Override(
            "smoothing",
            _stock,
            _full_smoothed,
            arguments={"label_smoothing_factor": 0.1},
            levels=CLASSES,
            plain=True,
            float32=True,
        ),
        *(
            _override(
                f"super-and-teacher-{name}",
                _super_mixed(mixing),
                _full_mixed(mixing),
                learns=name in LEARN,
                windows=3 if name in CHANGE else 1,
            )
            for name, mixing in MIXINGS.items()
        ),
        *(
            _override(
                f"own-and-teacher-{name}",
                _own_mixed(MIXINGS[name], usual),
                _full_own_mixed(MIXINGS[name]),
                levels=KNOWN,
                learns=name in LEARN,
                windows=3 if name in CHANGE else 1,
            )
            for name in ("detached", "stop-gradient", "normalised", "uncertain", "later")
        ),
        _override("super-over-itself", _from_super(_over_itself), _full_over_itself),
        _override("own-half", _from_own(_half_of), _full_from_own(_half_of), levels=KNOWN),
        _override("own-quarter", _from_own(_quarter_of), _full_from_own(_quarter_of), levels=KNOWN),
        _override("own-quarter-by-hand", _from_own(_quarter_of, by_hand), _full_from_own(_quarter_of), levels=KNOWN),
        _override("own-over-itself", _from_own(_over_itself), _full_from_own(_over_itself), levels=KNOWN),
        _override("own-flooded", _from_own(_flooded), _full_from_own(_flooded), levels=KNOWN),
        _override("own-root", _from_own(Tensor.sqrt), _full_from_own(Tensor.sqrt), levels=KNOWN),
        _override("own-self-taught", _own_self_taught, _full_self_taught, levels=KNOWN),
        Override("own-by-kept-steps", _keeping(_own(usual)), full_usual, levels=KNOWN),
        Override("own-by-hand-by-kept-steps", _keeping(_own(by_hand)), full_usual, levels=KNOWN),
        Override("super-by-kept-steps", _keeping(_without_number), full_base),
        _override("super-and-teacher-by-steps", _super_and_far_by_steps, _full_taught, by_steps=True, number=True),
        _override(
            "super-and-teacher-by-number", _super_and_far_by_number, _full_far_of_targets, number=True, plain=True
        ),
        _override("super-by-rows", _super_by_rows, _full_by_rows, levels=KNOWN),
        _override("own-rows", _own_rows, _full_own_rows, levels=KNOWN),
        _override("own-imported", _own(_own_imported), full_usual, levels=CLASSES),
        _override("own-logged", _own_logged, _full_own_far, levels=KNOWN),
        _override("own-reentrant", _own(_own_reentrant), full_usual, levels=KNOWN),
        _override("own-where-labelled", _own_where_labelled, _full_where_labelled, levels=TOKENS, unlabelled=True),
        _override("own-texts", _own_texts, _full_own_texts, levels=TOKENS),
        Override("func-over-itself", _stock, _full_from_own(_over_itself), _func_over_itself, levels=KNOWN),
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
