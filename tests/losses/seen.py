"""What a loss is made from, so that one function of it stands in a trainer, in a compute_loss_func and as reference.

And the models that it is a loss of; each takes the number of items in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses import models
from tests.losses.models import bare
from tests.numerics.heads import Batch, TokenModel, log_likelihoods, shifted_cross_entropy
from tests.trainings import FullLoss, above, computing


@dataclass(frozen=True)
class Seen:
    """What a loss is made from: in a micro-batch, or in the whole global batch."""

    logits: Tensor
    batch: Batch
    model: Any = None

    @cached_property
    def tokens(self) -> Tensor:
        """The mean over next tokens."""
        return shifted_cross_entropy(self.logits, self.batch["labels"])

    @cached_property
    def classes(self) -> Tensor:
        """The mean over texts."""
        return F.cross_entropy(self.logits[:, 1, :4], self.batch["kind"])

    @property
    def stack(self) -> Tensor:
        return torch.stack([self.tokens, self.classes])

    @property
    def squares(self) -> Tensor:
        return 0.01 * models.squares(self.model)

    @property
    def z(self) -> Tensor:
        return models.z_loss(self.logits, models.attended(self.batch))

    @property
    def each_token(self) -> tuple[Tensor, Tensor]:
        """Of every next token its loss, and whether it is a target [b, L - 1]."""
        labels = self.batch["labels"][:, 1:]
        return F.cross_entropy(self.logits[:, :-1].transpose(1, 2), labels, reduction="none"), labels != -100

    @property
    def log_p(self) -> tuple[Tensor, Tensor]:
        """The same by no loss function of torch: of every next token its log-likelihood, and whether it is a target."""
        return log_likelihoods(self.logits, self.batch["labels"])

    @property
    def each_class(self) -> Tensor:
        return F.cross_entropy(self.logits[:, 1, :4], self.batch["kind"], reduction="none")

    @property
    def guarded(self) -> Tensor:
        """The mean over next tokens, zero where there is none."""
        losses, valid = self.each_token
        return (losses * valid).sum() / valid.sum().clamp(min=1)

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        return self.logits[:, :-1].flatten(0, 1), self.batch["labels"][:, 1:].flatten()

    @property
    def learnt(self) -> Tensor:
        return self.model.s

    def by(self, logits: Tensor) -> Seen:
        return replace(self, logits=logits)

    def rows(self, rows: Any) -> Seen:
        return Seen(self.logits[rows], {key: value[rows] for key, value in self.batch.items()}, self.model)


#: The loss of a micro-batch, or of the whole global batch.
Loss = Callable[[Seen], Tensor]


def tokens(s: Seen) -> Tensor:
    return s.tokens


def classes(s: Seen) -> Tensor:
    return s.classes


def both(s: Seen) -> Tensor:
    return s.tokens + s.classes


def class_weighted(s: Seen) -> Tensor:
    return F.cross_entropy(*s.flat, weight=torch.linspace(0.2, 1.0, s.logits.shape[-1], dtype=s.logits.dtype))


# --- models ---------------------------------------------------------------------------------------------------------


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
        return {"logits": logits, **({"loss": self.of(Seen(logits, batch, self))} if "labels" in batch else {})}


class Mean(Texts):
    """Takes any keyword, and drops the number: stock does not divide by G, and expects that it is divided by."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        inputs.pop("num_items_in_batch", None)
        return self.found(input_ids=input_ids, **inputs)


class ByNumber(Texts):
    """Divides the sum over its tokens by the number, where there is one; beside it stands the loss it was made with."""

    def __init__(self, beside: Loss | None = None) -> None:
        super().__init__()
        self.beside = beside

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        made = self.mean(input_ids, labels, num_items_in_batch)
        if self.beside is None:
            return made
        return {**made, "loss": made["loss"] + self.beside(Seen(made["logits"], inputs, self))}


class ForFunctions(Mean):
    """Hands its inputs on, for a compute_loss_func, which gets nothing else."""

    def found(self, **inputs: Any) -> dict[str, Any]:
        logits = self.logits(inputs["input_ids"])
        return {"logits": logits, "inputs": inputs, "model": self}


class Points(nn.Module):
    """Numbers [b, out] of four each, and a loss of them; without one, logits alone."""

    def __init__(self, loss: Loss | None = None, out: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, out)
        self.of = loss

    def logits(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return self.found(x, {} if labels is None else {"labels": labels})

    def found(self, x: Tensor, batch: Batch) -> dict[str, Tensor]:
        logits = self.logits(x)
        if "labels" not in batch or self.of is None:
            return {"logits": logits}
        return {"loss": self.of(Seen(logits, batch, self)), "logits": logits}


class TakingPoints(Points):
    """Takes any keyword, and drops the number."""

    def forward(self, x: Tensor, **batch: Any) -> dict[str, Tensor]:
        return self.found(x, batch)


def holding(loss: Loss, head: type[nn.Module] = Texts, **given: Any) -> Callable[[], nn.Module]:
    return lambda: head(loss, **given)


def even(loss: Loss = tokens, head: type[Texts] = Texts) -> Callable[[], nn.Module]:
    """Starts with nearly even probabilities, so that its entropy is hardly another for one token than for the next."""

    def build() -> nn.Module:
        built = head(loss)
        with torch.no_grad():
            built.head.weight.mul_(0.01)
            built.head.bias.zero_()
        return built

    return build


# --- where a loss stands ----------------------------------------------------------------------------------------------


def full(loss: Loss) -> FullLoss:
    return lambda model, batch, step: loss(Seen(model.logits(batch["input_ids"]), batch, model))


def own(loss: Loss) -> type:
    """A compute_loss that never calls super."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        return loss(Seen(outputs["logits"], inputs, bare(model))), outputs

    return computing(compute)


def around(change: Callable[[Tensor, Seen, Any], Tensor]) -> type:
    """``change(loss, seen, trainer)`` of super's loss."""
    return above(lambda loss, logits, batch, trainer: change(loss, Seen(logits, batch, bare(trainer.model)), trainer))


def func(loss: Loss) -> dict[str, Any]:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss(Seen(outputs["logits"], {**outputs["inputs"], "labels": labels}, outputs["model"]))

    return {"compute_loss_func": compute}
