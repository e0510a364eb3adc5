"""What a loss is made from, so that one function of it stands in a trainer, in a compute_loss_func and as reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses import models
from tests.losses.models import bare
from tests.numerics.heads import Batch, shifted_cross_entropy
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
    def each_class(self) -> Tensor:
        return F.cross_entropy(self.logits[:, 1, :4], self.batch["kind"], reduction="none")

    @property
    def each_row(self) -> list[Tensor]:
        """Of each text the mean over its tokens."""
        return [self.rows(slice(row, row + 1)).tokens for row in range(len(self.logits))]

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
        learnt: Tensor = self.model.s
        return learnt

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
