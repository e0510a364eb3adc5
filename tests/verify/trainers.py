"""Trainers to verify: of the heads of the numerical tests, and of models made for one case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from tests.numerics import parity
from tests.numerics.heads import HEADS, Head, Sample
from tests.numerics.parity import training_arguments


def trainer_of(
    head: Head | str, output: Path, *, cls: type = Trainer, evaluated: Sequence[Sample] | None = None, **given: Any
) -> Any:
    """A trainer that has not trained yet, as `parity.trainer_of` takes it."""
    head = HEADS[head] if isinstance(head, str) else head
    return parity.trainer_of(head, output, partial(cls, eval_dataset=evaluated), **given)


class Regression(nn.Module):
    """The mean over its samples, which it does not declare; what a case needs is added to its features."""

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))[:, 0]
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}


class Contrastive(nn.Module):
    """Each sample against the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.one(x) @ self.other(x).T
        return {"loss": nn.functional.cross_entropy(logits, torch.arange(len(x))), "logits": logits}


def points(count: int) -> list[Sample]:
    g = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(4, generator=g), "labels": torch.randn((), generator=g)} for _ in range(count)]


def small(
    model: nn.Module, output: Path, samples: Any, *, cls: type = Trainer, data_collator: Any = None, **arguments: Any
) -> Any:
    """A trainer of one of these, 2 x 4."""
    args = training_arguments(output, **arguments)
    return cls(model=model, args=args, train_dataset=samples, data_collator=data_collator)
