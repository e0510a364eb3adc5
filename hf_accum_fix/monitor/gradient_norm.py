"""The gradient norm over time: its usual size, its spikes, and how often it is clipped.

Symptom: the run diverges, or learns nothing because every step is clipped; the last gradient norm before each log, one
in ten, shows neither.

The norm after the reduction is the same on every rank, so `read` communicates nothing. The noise of a gradient falls
with the root of its items: a short step, as at the end of an epoch, is no spike. Imports no torch by itself: `watch`
judges logs by it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.robust import noise_sigma

if TYPE_CHECKING:
    from torch import Tensor

LOOK_AT = "look at the samples of that step, the learning rate (a longer warm-up) and the precision"
#: Smallest norm that has a logarithm of its own; least deviation of log norms that a window is assumed to have.
_LEAST_NORM, _LEAST_SIGMA = 1e-30, 0.02


@dataclass(frozen=True)
class GradientNormReading:
    """The norms since the last reading, compared with the last steps before them."""

    steps: int  # how many
    median: float  # of the norms of the window, these included; nan without any
    not_finite: float  # share of the window's steps whose norm was inf or nan
    spikes: float  # norms far above the usual
    spike: float  # the largest of them over its usual norm
    usual: float  # that usual norm, the median of the steps before it
    steps_ago: float  # steps between it and the reading


class GradientNorm(Gathered[GradientNormReading]):
    """Compare every step's gradient norm with a window of the steps before it.

    A spike is a norm whose logarithm is more than 9 times its noise above its median over the window, and at least 3
    times as large, of a step with half of the usual items or more. The noise is from step to step (`noise_sigma`), so
    that neither the trend of a run that learns nor the spikes themselves raise the bar.

    Args:
        max_norm: norm that gradients are clipped to; None where they are not.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        self.max_norm = max_norm
        self._usual, self._items = deque[float](maxlen=at.WINDOW), deque[float](maxlen=at.WINDOW)
        self._finite = deque[bool](maxlen=at.WINDOW)
        self._new: list[tuple[Any, Any]] = []
        self._norms: Sequence[float] = ()
        self._clipped = 0
        self._block, self._logs = list[float](), deque[float](maxlen=at.DRIFT_BLOCKS)
        self._reported: dict[str, float] = {}

    def update(self, norm: Tensor | float, items: Tensor | float = math.nan) -> None:
        """Take one step's norm into account, before clipping; no device sync.

        A norm whose parts lie on the ranks (fully_shard's) is reduced when it is read, by every rank.

        Args:
            norm: of the gradient, one number, the same on every rank.
            items: of the step on this rank; nan: not known.
        """
        self._new.append((norm.detach() if hasattr(norm, "detach") else norm, items))

    def read(self) -> GradientNormReading:
        """The norms since the last reading: one device sync, no collective."""
        return self.reading(self.row()[None])

    def row(self) -> Tensor:
        import torch

        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm, _ in self._new]
        columns = [torch.as_tensor(its).reshape(()) for its in (*norms, *(items for _, items in self._new))]
        device = next((its.device for its in columns if its.device.type != "cpu"), torch.device("cpu"))
        on_device = [its.to(device, torch.float32, non_blocking=True) for its in columns]
        numbers = torch.stack(on_device).tolist() if on_device else []
        self._new.clear()
        return torch.tensor(self.add(numbers[: len(norms)], numbers[len(norms) :]), dtype=torch.float64)

    def add(self, norms: Sequence[float], items: Sequence[float]) -> list[float]:
        """Add norms that are numbers already: how many spikes, and the largest."""
        self._norms, found = norms, list[tuple[float, float, float]]()
        for place, (norm, its) in enumerate(zip(norms, items, strict=True)):
            self._finite.append(math.isfinite(norm))
            self._clipped = self._clipped + 1 if self.max_norm is not None and norm > self.max_norm else 0
            if not math.isfinite(norm):
                continue
            self._block.append(math.log(max(norm, _LEAST_NORM)))
            if len(self._block) == at.DRIFT_BLOCK:
                self._logs.append(median(self._block))
                self._block.clear()
            if norm <= 0:
                continue
            usual = median(self._usual) if len(self._usual) >= at.FEWEST_NORMS else math.inf
            short = bool(self._items) and its < at.SHORT_STEP * median(self._items)
            if norm > at.SPIKE * usual and not short:
                sigma = max(noise_sigma([math.log(each) for each in self._usual]), _LEAST_SIGMA)
                if math.log(norm / usual) > at.UNUSUAL_NORM * sigma:
                    found.append((norm / usual, usual, len(norms) - 1 - place))
            self._usual.append(norm)
            if its > 0:
                self._items.append(its)
        return [len(found), *max(found, default=(math.nan,) * 3)]

    def reading(self, table: Tensor | Sequence[Sequence[float]]) -> GradientNormReading:
        """The reading; by the items of rank 0, so that every rank judges alike."""
        norms, self._norms = self._norms, ()
        centre = median(self._usual) if self._usual else math.nan
        not_finite = 1 - sum(self._finite) / len(self._finite) if self._finite else 0.0
        return GradientNormReading(len(norms), centre, not_finite, *(float(its) for its in table[0]))

    def logged(self, reading: GradientNormReading) -> dict[str, float]:
        """Median of the last norms, and spikes since the last log."""
        if not reading.steps:
            return {}
        return {"gradient_norm_median": reading.median, "gradient_norm_spikes": reading.spikes}

    def judge(self, reading: GradientNormReading) -> Alarm | None:
        """An alarm where norms are not finite (over 1 in 20 of the window), spike, are always clipped, or drift."""
        if reading.not_finite > at.NOT_FINITE and len(self._finite) >= at.FEWEST_NORMS:
            return Alarm(
                "gradient-norm-not-finite",
                f"{reading.not_finite:.0%} of the last {len(self._finite)} gradient norms are inf or nan (a loss "
                "scaler makes few); look at the learning rate and the precision",
            )
        if not reading.spikes:
            return self._always_clipped(reading) or self._drift()
        return Alarm(
            "gradient-norm-spike",
            f"gradient norm {reading.spike * reading.usual:.3g}, {reading.spike:.3g} times the usual "
            f"{reading.usual:.3g}, {reading.steps_ago:.0f} steps before this log; {LOOK_AT}",
        )

    def _always_clipped(self, reading: GradientNormReading) -> Alarm | None:
        """Every step of the last 1,000, 2,000, 4,000 ... was clipped, to a fifth or less."""
        clipped, before = self._clipped, max(self._clipped - reading.steps, 0)
        due = (clipped // at.ALWAYS).bit_length() > (before // at.ALWAYS).bit_length()
        if self.max_norm is None or not due or reading.median < at.FAR_CLIPPED * self.max_norm:
            return None
        return Alarm(
            "gradient-norm-always-clipped",
            f"each of the last {clipped:,} steps was clipped, from {reading.median:.3g} in the median to "
            f"{self.max_norm:.3g}: all are equally long, for any gradient; a loss that nothing divided by the "
            "accumulation steps looks like this (`hf-accum-fix doctor`), and so does a max_norm that is too small",
        )

    def _drift(self) -> Alarm | None:
        """A norm that has grown from block to block, or vanished; reported again after as much again."""
        ways = (("grows", 1.0, at.GROWN, at.GROWS_STEADILY), ("vanishes", -1.0, at.VANISHED, 0.0))
        for verb, sign, factor, rising in ways:
            levels = [sign * log for log in self._logs]
            since = levels[levels.index(min(levels)) :] if levels else []
            if len(since) < at.FEWEST_BLOCKS:
                self._reported.pop(verb, None)
                continue
            rises = sum(after > before for before, after in pairwise(since)) / (len(since) - 1)
            growth = since[-1] - max(since[0], self._reported.get(verb, -math.inf))
            if growth < math.log(factor) or rises < rising:
                continue
            self._reported[verb] = since[-1]
            return Alarm(
                f"gradient-norm-{verb}",
                f"the gradient norm {verb}: {math.exp(sign * since[0]):.3g} {at.DRIFT_BLOCK * len(since):,} norms ago, "
                f"{math.exp(self._logs[-1]):.3g} now; look at the learning rate, weight decay and normalisation, and "
                "for activations or a loss that grow or die",
            )
        return None
