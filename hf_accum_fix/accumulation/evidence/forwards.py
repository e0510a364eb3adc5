"""What was run of a loss, and what each forward showed: the evidence that a contract is concluded from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_accum_fix.accumulation.loss_calls import LossCall

#: The numbers handed in: small, so that a cut fraction shows; not multiples, so that it shows in one call.
NUMBERS = (8.0, 16.5, 8.5)

HIGH = NUMBERS[1]


@dataclass(frozen=True)
class WatchedLoss:
    """One call of a loss function of torch, read (see `LossCall`)."""

    reduction: str
    value: float
    items: float
    targets: float
    weighted: bool
    ignore_index: int | None

    @classmethod
    def read(cls, call: LossCall) -> WatchedLoss:
        """Wait for the device, and read it."""
        counts = float(call.items), float(call.targets)
        return cls(call.reduction, float(call.value.detach()), *counts, call.weighted, call.ignore_index)

    @property
    def mean(self) -> bool:
        """Whether it returned a mean over items."""
        return self.reduction == "mean"


#: Of a router's load-balancing loss and of its z-loss: the two values, or what they are multiplied by.
RouterPair = tuple[float, float]


@dataclass(frozen=True)
class Seen:
    """One forward: its loss, the router losses its outputs carry, the loss calls in it, whether it drew at random.

    Attributes:
        own: a trainer computed the loss by itself.
    """

    loss: float
    dtype: torch.dtype
    router: RouterPair
    calls: tuple[WatchedLoss, ...]
    random: bool
    own: bool

    @property
    def rounding(self) -> float:
        """Relative error of what is computed from losses that are alike but for their last digits."""
        return 1e-2 if self.dtype.itemsize < 4 else 1e-5 if self.dtype.itemsize == 4 else 1e-6


@dataclass(frozen=True)
class Evidence:
    """What was run of a loss: a batch, its two parts, and what each showed.

    Attributes:
        batches: the batch and its two parts; the same one three times where it cannot be taken apart.
        seen: their forwards.
        sliced: the parts are rows of the batch.
        tolerance: relative, of two losses that are the same.
        configured: coefficients of the router losses.
        world_size: W.
    """

    batches: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    seen: tuple[Seen, ...]
    sliced: bool
    tolerance: float
    configured: RouterPair
    world_size: int

    @property
    def whole(self) -> Seen:
        """The forward of the batch."""
        return self.seen[0]

    @property
    def in_parts(self) -> bool:
        """Whether the parts are parts, and their losses numbers."""
        return self.batches[1] is not self.batches[0] and all(np.isfinite(each.loss) for each in self.seen)

    def without(self, coefficients: RouterPair) -> list[float]:
        """The losses without the router's."""
        return [each.loss - weighed_router(coefficients, each.router) for each in self.seen]

    def adds_up(self, losses: Sequence[float], rest: float = 0.0) -> bool:
        """Whether the parts' losses are the batch's, each with the same ``rest`` in it."""
        error = losses[1] + losses[2] - losses[0] - rest
        return abs(error) <= self.tolerance * max(abs(loss) for loss in losses)


def mean_of(call: WatchedLoss) -> float:
    """A call's mean over its items, whether it took it or not; nan for a sum."""
    if call.mean:
        return call.value
    return call.value / call.items if call.reduction == "none" and call.items else float("nan")


def call_counts(evidence: Evidence, factors: Sequence[float]) -> list[float] | None:
    """What the calls with a factor reduced over, in each forward; None where they differ or there are none."""
    counts = []
    for each in evidence.seen:
        if len(each.calls) != len(factors):
            return None
        items = {call.items for call, factor in zip(each.calls, factors, strict=True) if abs(factor) > 1e-12}
        if len(items) != 1:
            return None
        counts.append(items.pop())
    return counts


def weighed_router(coefficients: RouterPair, router: RouterPair) -> float:
    """The router's part of a loss."""
    return coefficients[0] * router[0] + coefficients[1] * router[1]
