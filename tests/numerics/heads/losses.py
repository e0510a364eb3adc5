"""Losses written out, where the promise defines one that the model does not return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.heads.head import Batch


def shifted_cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits.double(), labels, label_smoothing=smoothing, reduction=reduction)


def over_number(logits: Tensor, labels: Tensor, number: Any = None) -> Tensor:
    """The mean over next tokens; with a number the sum over it."""
    if number is None:
        return shifted_cross_entropy(logits, labels)
    return shifted_cross_entropy(logits, labels, reduction="sum") / number


def log_likelihoods(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of every next token, by no loss function of torch, and whether it is a target [b, L - 1]."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0], labels != -100


def smoothing_reference(epsilon: float, shift: bool = True) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        logits = model(**batch)["logits"].double()
        if shift:
            return shifted_cross_entropy(logits, labels, smoothing=epsilon)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=epsilon)

    return loss
