"""A rank that keeps the others waiting: slow data, a throttled processor, a noisy neighbour.

Symptom: every step is slow, on every rank alike, because all wait in the reduction for one of them.

    pace = Pace(model)                               # after the model is wrapped
    ...
    pace.step()                                      # every step: no device sync
    alarms.say(pace.judge(pace.read()))              # at every log: one collective

What a rank does before the reduction is its own: the optimizer's step, data, forwards, all backwards but the last. Its
time by the host's clock, from one `step` to the end of the last forward before the next, is what differs; the rest
of a step is spent together. A GPU that is slow while its host runs ahead is not seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.alarms import Alarm, Streak
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, by_rank

#: Steps kept between two readings; fewest for a judgement; readings in a row in which a rank lags.
_KEPT, _ENOUGH, _IN_A_ROW = 256, 5, 5


@dataclass(frozen=True)
class PaceReading:
    """Medians over the steps since the last reading, so that no single evaluation or checkpoint counts.

    Attributes:
        own: [s] that each rank took before the reduction.
        whole: [s] that a step took on the slowest rank.
        steps: fewest steps of a rank.
    """

    own: tuple[float, ...]
    whole: float
    steps: int

    def lag(self, rank: int) -> float:
        """Time [s] by which a rank is ready later than the median of the others; 0 on one rank."""
        others = self.own[:rank] + self.own[rank + 1 :]
        return self.own[rank] - median(others) if others else 0.0

    @property
    def slowest(self) -> int:
        """The rank that is ready last."""
        return self.own.index(max(self.own))


class Pace:
    """Time that each rank takes before all wait for it.

    Args:
        model: the one in training, as it is called in the loop.
        ranks: the ranks; None: torch.distributed.
        tolerance: lag, as a share of the whole step, that nobody would act upon.
        tolerance_in_seconds: the same in seconds: the milliseconds by which processes of one machine differ.
        clock: seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks | None = None,
        tolerance: float = 0.1,
        tolerance_in_seconds: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._clock = ranks or TorchRanks(), clock
        self._tolerance, self._tolerance_in_seconds = tolerance, tolerance_in_seconds
        self._began = self._ready = clock()
        self._own: deque[float] = deque(maxlen=_KEPT)
        self._whole: deque[float] = deque(maxlen=_KEPT)
        self._lagging = Streak(_IN_A_ROW)
        model.register_forward_hook(self._after_forward)

    def step(self) -> None:
        """A step has ended; no device sync."""
        now = self._clock()
        if self._ready > self._began:
            self._own.append(self._ready - self._began)
            self._whole.append(now - self._began)
        self._began = self._ready = now

    def read(self) -> PaceReading:
        """The times since the last reading: one collective of three numbers a rank."""
        return self.reading(by_rank(self._ranks, self.row()))

    def row(self) -> Tensor:
        """This rank's part of a reading: no device sync, no collective."""
        row = [median(self._own), median(self._whole), len(self._own)] if self._own else [0.0, 0.0, 0]
        self._own.clear()
        self._whole.clear()
        return torch.tensor(row, dtype=torch.float64)

    def reading(self, table: Tensor) -> PaceReading:
        """The reading, from the rows of all ranks."""
        own, whole, steps = table.T.tolist()
        return PaceReading(tuple(own), max(whole), int(min(steps)))

    def judge(self, reading: PaceReading) -> Alarm | None:
        """An alarm where the same rank lags in five readings in a row. Every rank judges alike."""
        if len(reading.own) < 2 or reading.steps < _ENOUGH:
            return None
        rank = reading.slowest
        lag = reading.lag(rank)
        tolerance = max(self._tolerance * reading.whole, self._tolerance_in_seconds)
        if not self._lagging.completed_by(rank, to_blame=lag > tolerance):
            return None
        return Alarm(
            f"rank-lags-{rank}",
            f"rank {rank}: ready {lag:.3g} s later than the others in a step of {reading.whole:.3g} s, in "
            f"{_IN_A_ROW} logs in a row; all wait for it; look at its data loading, the length of its batches, its "
            "processor and who else uses it",
        )

    def _after_forward(self, module: nn.Module, *args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._ready = self._clock()
