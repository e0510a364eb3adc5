"""Parts that random trainings are put together from: heads, overrides, collators, data, all found by name.

Every part knows its full batch: a head returns its loss without a number, an override has ``full`` beside what it does
in a micro-batch. Labels are of one level for each head: "next" tokens, classes of a "token", numbers of a
"token value", or a class, a number or three flags of a "sample".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attacks.models import divergence, squares, z_loss
from tests.attacks.trainings import computing
from tests.numerics.heads import Batch, Sample
from tests.numerics.parity import StockRecorder

VOCABULARY, HIDDEN = 12, 8
#: A class of its own for tokens whose labels are masked in the midst of a training.
MASKED_CLASS = 3

TOKENS = ("next", "token")
CLASSES = (*TOKENS, "sample")
LEVELS = (*CLASSES, "number", "flags", "token value")


# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a head computes its loss from: logits [b, L, V], ``pooled`` [b, V], ``first`` [b, V], ``kept`` [b, L]."""

    logits: Tensor
    pooled: Tensor
    first: Tensor
    kept: Tensor


class Tiny(nn.Module):
    """Whatever the padding and its side, a text has the same logits; dropout, where drawn, is a text's own."""

    #: Stock looks for one where it smooths labels.
    config = None

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, VOCABULARY)
        self.of = head

    def see(self, input_ids: Tensor, draw: int = 0) -> Seen:
        kept = input_ids != 0
        hidden = self.embed(input_ids) * kept[..., None]
        hidden = hidden + (torch.tanh(self.mix(hidden)) * kept[..., None]).cumsum(dim=1) / 4
        if draw:
            hidden = hidden * torch.stack([self._dropped(ids, draw) for ids in input_ids])[:, None]
        length = kept.sum(1)
        pooled = self.last((hidden * kept[..., None]).sum(1) / length[:, None])
        begin = kept.long().argmax(dim=1)
        return Seen(self.last(hidden), pooled, self.last(hidden[torch.arange(len(hidden)), begin]), kept)

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


def built(head: Head, seed: int) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(head).double()


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
    """

    name: str
    level: str
    loss: HeadLoss
    columns: tuple[str, ...] = ()
    ignore: int = -100
    float32: bool = False
    by_number: bool = False

    @property
    def of_tokens(self) -> bool:
        return self.level not in ("sample", "number", "flags")


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


def _head(
    name: str, level: str, loss: Callable[..., Tensor], columns: tuple[str, ...] = (), **more: Any
) -> tuple[str, Head]:
    def bound(seen: Seen, labels: Tensor, given: Mapping[str, Tensor], number: Any) -> Tensor:
        return loss(seen, labels, given, number, head)

    head = Head(name, level, bound, columns, **more)
    return name, head


def _mean(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return usual(of_level(seen, head), labels, head)


def _mean_by_hand(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return by_hand(of_level(seen, head), labels, head)


def _number(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits = of_level(seen, head)
    return usual(logits, labels, head) if number is None else usual(logits, labels, head, "sum") / number


def _number_by_hand(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits = of_level(seen, head)
    return by_hand(logits, labels, head) if number is None else by_hand(logits, labels, head, "sum") / number


def _in_float32(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    return usual(of_level(seen, head).float(), labels, head)


def _number_in_float32(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
    logits = of_level(seen, head).float()
    return usual(logits, labels, head) if number is None else usual(logits, labels, head, "sum") / number


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


def _two_terms(key: str, factor: float, base: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(seen: Seen, labels: Tensor, given: Any, number: Any, head: Head) -> Tensor:
        return base(seen, labels, given, number, head) + factor * _kind(seen, given, key)

    return loss


def _with_z(base: Callable[..., Tensor]) -> Callable[..., Tensor]:
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


HEADS: dict[str, Head] = dict(
    [
        _head("mean", "next", _mean),
        _head("mean-of-tokens", "token", _mean),
        _head("mean-of-classes", "sample", _mean),
        _head("mean-by-hand", "next", _mean_by_hand),
        _head("mean-of-tokens-by-hand", "token", _mean_by_hand),
        _head("mean-of-classes-by-hand", "sample", _mean_by_hand),
        _head("mean-in-float32", "next", _in_float32, float32=True),
        _head("number", "next", _number, by_number=True),
        _head("number-of-tokens", "token", _number, by_number=True),
        _head("number-of-classes", "sample", _number, by_number=True),
        _head("number-by-hand", "next", _number_by_hand, by_number=True),
        _head("number-in-float32", "next", _number_in_float32, float32=True, by_number=True),
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
    """

    name: str
    trainer: Callable[[Head], type]
    full: Full
    given: Callable[[Head], Mapping[str, Any]] = lambda head: {}
    arguments: Mapping[str, Any] = field(default_factory=dict)
    levels: Sequence[str] = LEVELS
    plain: bool = False
    float32: bool = False

    def suits(self, head: Head) -> bool:
        return head.level in self.levels and not (self.plain and head.ignore != -100)


def full_base(model: Tiny, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def full_usual(model: Tiny, batch: Batch) -> Tensor:
    return usual(of_level(model.see(batch["input_ids"]), model.of), batch["labels"], model.of)


def without_labels(model: Any, inputs: Batch) -> Any:
    return model(**{key: value for key, value in inputs.items() if key != "labels"})


def bare(model: Any) -> Any:
    return getattr(model, "module", model)


def _super(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return base(model, inputs, return_outputs=True, num_items_in_batch=number)


def _without_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    return base(model, inputs, return_outputs=True)


def _half(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    return 0.5 * loss, outputs


def _penalty(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    return loss + 0.01 * squares(model), outputs


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


def _super_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _super(trainer, base, model, inputs, number)
    return loss / trainer.args.gradient_accumulation_steps, outputs


def _models_own(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs["loss"], outputs


def _models_own_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs["loss"] / trainer.args.gradient_accumulation_steps, outputs


def _models_own_by_window(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs["loss"] / trainer.current_gradient_accumulation_steps, outputs


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


def _own_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> tuple[Tensor, Any]:
    loss, outputs = _own(usual)(trainer, base, model, inputs, number)
    return loss / trainer.args.gradient_accumulation_steps, outputs


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


def _prepares(head: Head) -> type:
    class Prepares(StockRecorder):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return masked(super()._prepare_inputs(inputs), head)

    return Prepares


def _masks_in_step(head: Head) -> type:
    class MasksInStep(StockRecorder):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            return super().training_step(model, masked(inputs, head), num_items_in_batch)

    return MasksInStep


def _masks_in_place(head: Head) -> type:
    class MasksInPlace(StockRecorder):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs["labels"].copy_(masked(inputs, head)["labels"])
            return super().training_step(model, inputs, num_items_in_batch)

    return MasksInPlace


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


def _override(name: str, loss: Loss, full: Full = full_base, **more: Any) -> Override:
    trainer = computing(loss)
    return Override(name, lambda head: trainer, full, **more)


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
        _override("half", _half, lambda model, batch: 0.5 * full_base(model, batch)),
        _override("squares", _penalty, lambda model, batch: full_base(model, batch) + 0.01 * squares(model)),
        _override("teacher", _taught(_far), _full_taught),
        _override("teacher-by-torch", _taught(_far_by_torch), _full_taught),
        _override("super-by-steps", _super_by_steps),
        _override("outputs-loss", _outputs_loss),
        _override("from-logits", _from_logits, full_usual, levels=KNOWN),
        _override("models-own", _models_own),
        _override("models-own-by-steps", _models_own_by_steps),
        _override("models-own-by-window", _models_own_by_window),
        _override("models-own-where-number", _models_own_where_number),
        _override("own", _own(usual), full_usual, levels=KNOWN),
        _override("own-by-hand", _own(by_hand), full_usual, levels=KNOWN),
        _override("own-by-steps", _own_by_steps, full_usual, levels=KNOWN),
        _override("own-number", _own_number(usual), full_usual, levels=CLASSES),
        # The number counts labels other than -100, whatever a sum by hand leaves out.
        _override("own-number-by-hand", _own_number(by_hand), full_usual, levels=CLASSES, plain=True),
        _override("r-drop", _r_drop, _full_r_drop),
        _override("masked-in-loss", _masked_in_loss, _full_masked, levels=CLASSES),
        Override("masked-in-prepare", _prepares, _full_masked, levels=CLASSES),
        Override("masked-in-step", _masks_in_step, _full_masked, levels=CLASSES),
        Override("masked-in-place", _masks_in_place, _full_masked, levels=CLASSES),
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
    ]
}


# --- data ---------------------------------------------------------------------------------------------------------

#: alike: texts of one length, all of it targets; whole: ragged texts, all of them targets; ragged: prompts are masked;
#: rare: few targets; empty: half the samples have none.
DATA = ("alike", "whole", "ragged", "rare", "empty")


def drawn(head: Head, kind: str, count: int, seed: int) -> list[Sample]:
    """Samples of one global batch; at least one has a target."""
    g = torch.Generator().manual_seed(seed)
    empty = _empty_rows(count, g) if kind == "empty" and count > 1 else set()
    samples = [_sample(head, kind, row in empty, g) for row in range(count)]
    if all(not bool(_targets(sample["labels"], head).any()) for sample in samples):
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
    for key in set(head.columns) - {"weights"}:
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
