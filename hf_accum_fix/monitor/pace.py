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

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.deviation import Spread
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.robust import normal_of_student

#: Steps kept between two readings; fewest for a judgement; share of the longest that is left out.
_KEPT, _ENOUGH, _LEFT_OUT = 256, 5, 0.2
#: Last readings that a lag is judged over, and the chance that a healthy rank of these looks late (Bonferroni).
_READINGS, _CHANCE = (8, 16, 32, 64, 128, 256), 1e-5
#: Readings before which the ranks' spread is the one from earlier, and how many of those show it.
_RECENT, _SHOWN = 64, 32
#: Lag, as a share of the whole step, that nobody would act upon; in seconds: processes of one machine differ by that.
_TOLERANCE, _TOLERANCE_IN_SECONDS = 0.1, 0.01
#: In tolerances: most that the lag of one reading counts for, so that one long stall is no lag; how far ranks are
#: believed to wander from reading to reading.
_MOST, _WANDER = 5.0, 0.3


@dataclass(frozen=True)
class PaceReading:
    """Times since the last reading.

    Attributes:
        own: [s] that each rank took before the reduction: the mean without its longest fifth, so that no evaluation and
            no checkpoint counts.
        whole: [s] that a step took on the slowest rank, the median.
        steps: fewest steps of a rank.
    """

    own: tuple[float, ...]
    whole: float
    steps: int

    def lag(self, rank: int) -> float:
        """Time [s] by which a rank is ready later than the mean of the others; 0 on one rank."""
        others = self.own[:rank] + self.own[rank + 1 :]
        return self.own[rank] - fmean(others) if others else 0.0

    @property
    def slowest(self) -> int:
        """The rank that is ready last."""
        return self.own.index(max(self.own))


class Pace(Gathered[PaceReading]):
    """Time that each rank takes before all wait for it.

    A rank lags where its mean lag over the last 8, 16 ... 256 readings is surely above what nobody would act upon
    (Student, Bonferroni over the ranks). How far such a mean wanders is learned from blocks of an eighth of its length
    and longer (`Spread`), so that batches whose length persists are no lag, and one that comes and goes is. Once the
    readings before the last 64 show it, means over no more are judged by these, so that a lag does not hide itself.

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
        # Of every rank in tolerances, at most _MOST, and in seconds.
        self._lags = deque[tuple[list[float], list[float]]](maxlen=_READINGS[-1])
        self._fewest = _READINGS[0]
        self._recent = deque[list[float]](maxlen=_RECENT)
        self._shown = 0
        self._spread = self._earlier = Spread(0)
        model.register_forward_hook(self._after_forward)

    def step(self) -> None:
        """A step has ended; no device sync."""
        now = self._clock()
        if self._ready > self._began:
            self._own.append(self._ready - self._began)
            self._whole.append(now - self._began)
        self._began = self._ready = now

    def row(self) -> Tensor:
        kept = sorted(self._own)[: math.ceil((1 - _LEFT_OUT) * len(self._own))]
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
        if ranks < 2 or reading.steps < _ENOUGH:
            return None
        tolerance = max(_TOLERANCE * reading.whole, _TOLERANCE_IN_SECONDS)
        usual = median_low(reading.own)
        late = [max(-_MOST, min(_MOST, (own - usual) / tolerance)) for own in reading.own]
        lags = [its - (sum(late) - its) / (ranks - 1) for its in late]
        self._lags.append((lags, [reading.lag(rank) for rank in range(ranks)]))
        self._learn([lag / _WANDER for lag in lags])
        far = NormalDist().inv_cdf(1 - _CHANCE / ranks)
        for level, count in enumerate(_READINGS):
            if not self._fewest <= count <= len(self._lags):
                continue
            last = list(self._lags)[-count:]
            means = [fmean(column) for column in zip(*(lags for lags, _ in last), strict=True)]
            rank = means.index(max(means))
            if self._shown >= _SHOWN and count <= _RECENT:
                # Blocks of up to this many readings have been seen.
                spread, freedom = self._earlier.of(rank, level, count.bit_length())
            else:
                spread, freedom = self._spread.of(rank, level)
            beyond = max(means[rank] - 1, 0.0) / (_WANDER * spread / math.sqrt(count))
            if normal_of_student(beyond, freedom) > far:
                self._lags.clear()
                self._fewest = min(2 * count, _READINGS[-1])
                return Alarm(
                    f"rank-lags-{rank}",
                    f"rank {rank}: ready {fmean(seconds[rank] for _, seconds in last):.3g} s later than the others in "
                    f"a step of {reading.whole:.3g} s, in the mean of the last {count} logs; all wait for it; look at "
                    "its data loading, the length of its batches, its processor and who else uses it",
                )
        return None

    def _learn(self, lags: list[float]) -> None:
        """How far ranks wander, now and before the last readings."""
        if not self._recent:
            self._spread, self._earlier = Spread(len(lags)), Spread(len(lags))
        if len(self._recent) == _RECENT:
            self._earlier.add(self._recent[0])
            self._shown += 1
        self._recent.append(lags)
        self._spread.add(lags)

    def logged(self, reading: PaceReading) -> dict[str, float]:
        """The rank that is ready last, and how much later than the others [s]."""
        if not reading.steps:
            return {}
        return {"slowest_rank": float(reading.slowest), "slowest_rank_lag_s": reading.lag(reading.slowest)}

    def _after_forward(self, module: nn.Module, *args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._ready = self._clock()
