"""A rank that keeps the others waiting: slow data, a throttled processor, a noisy neighbour.

Symptom: every step is slow, on every rank alike, because all wait in the reduction for one of them.

What a rank does before the reduction is its own: the optimizer's step, data, forwards, all backwards but the last. Its
time by the host's clock, from one `step` to the end of the last forward before the next, is what differs; the rest
of a step is spent together. A GPU that is slow while its host runs ahead is not seen.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.deviation import Deviation, Shifts
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks

#: Steps kept between two readings.
_KEPT = 256


@dataclass(frozen=True)
class PaceReading:
    """Times since the last reading."""

    #: [s] that each rank took before the reduction: the mean without its longest fifth, so that no evaluation and no
    #: checkpoint counts.
    own: tuple[float, ...]
    whole: float  # [s] that a step took on the slowest rank, the median
    steps: int  # fewest steps of a rank

    def lag(self, rank: int) -> float:
        """Time [s] by which a rank is ready later than the mean of the others; 0 on one rank."""
        others = self.own[:rank] + self.own[rank + 1 :]
        return self.own[rank] - fmean(others) if others else 0.0


class Pace(Gathered[PaceReading]):
    """Time that each rank takes before all wait for it.

    A rank lags where it is ready later than the others by more than nobody would act upon, over 30 readings (`Shifts`):
    batches whose length persists are no lag, and one that comes and goes is.

    Args:
        model: the one in training, as it is called in the loop.
        ranks: the ranks; None: torch.distributed.
        clock: seconds.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ranks, self._clock = ranks or TorchRanks(), clock
        self._began = self._ready = clock()
        self._own: deque[float] = deque(maxlen=_KEPT)
        self._whole: deque[float] = deque(maxlen=_KEPT)
        self._lags = deque[PaceReading](maxlen=at.COMPARED)
        self._shifts = Shifts(only_above=True)
        model.register_forward_hook(self._after_forward)

    def step(self) -> None:
        """A step has ended; no device sync."""
        now = self._clock()
        if self._ready > self._began:
            self._own.append(self._ready - self._began)
            self._whole.append(now - self._began)
        self._began = self._ready = now

    def row(self) -> Tensor:
        kept = sorted(self._own)[: math.ceil((1 - at.LEFT_OUT) * len(self._own))]
        row = [fmean(kept), median(self._whole), len(self._own)] if kept else [0.0, 0.0, 0]
        self._own.clear()
        self._whole.clear()
        return torch.tensor(row, dtype=torch.float64)

    def reading(self, table: Tensor) -> PaceReading:
        own, whole, steps = table.T.tolist()
        return PaceReading(tuple(own), max(whole), int(min(steps)))

    def judge(self, reading: PaceReading) -> Alarm | None:
        """An alarm where a rank lags, again over twice as many readings. Every rank judges alike."""
        ranks = len(reading.own)
        if ranks < 2 or reading.steps < at.FEWEST_TIMES:
            return None
        tolerance = max(at.LAG_TOLERANCE * reading.whole, at.LAG_TOLERANCE_SECONDS)
        usual = median_low(reading.own)
        late = [max(-at.MOST_LAG, min(at.MOST_LAG, (own - usual) / tolerance)) for own in reading.own]
        lags = [its - (sum(late) - its) / (ranks - 1) for its in late]
        self._lags.append(reading)
        named = self._shifts.add([Deviation(rank, lag, at.LAG_WANDERS, tolerance=1.0) for rank, lag in enumerate(lags)])
        if named is None:
            return None
        return Alarm(
            f"rank-lags-{named.rank}",
            f"rank {named.rank}: ready {fmean(its.lag(named.rank) for its in self._lags):.3g} s later than the others "
            f"in a step of {reading.whole:.3g} s, in the mean of the last {at.COMPARED} logs; all wait for it; look at "
            "its data loading, the length of its batches, its processor and who else uses it",
        )

    def logged(self, reading: PaceReading) -> dict[str, float]:
        """The rank that is ready last, and how much later than the others [s]."""
        if not reading.steps:
            return {}
        slowest = reading.own.index(max(reading.own))
        return {"slowest_rank": float(slowest), "slowest_rank_lag_s": reading.lag(slowest)}

    def _after_forward(self, module: nn.Module, *args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._ready = self._clock()
