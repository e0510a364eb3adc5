"""A loss that was learned and is lost again: divergence, while the run goes on.

    trend, alarms = LossTrend(), Alarms()
    ...
    alarms.say(trend.judge(meter.read()))            # meter: a LossMeter, read at every log

A plateau is no alarm: a run that has converged looks like one that has stalled.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.loss import LossReading

#: Logs in a mean.
_LOGS = 10
#: Ratio to the best mean from which a loss has diverged, and below which every log of a mean must not be.
_FAR, _BACK = 1.5, 1.2


class LossTrend:
    """Detect a loss that has come back at least half of the way from its best to where it began, and stays there.

    Means of ten logs are compared. It has diverged where the last one is at least 1.5 times the best, at least halfway
    back to the first, and no log in it is near the best: so neither spikes nor a harder part of the data are told
    unless they last. It is told once; again where the loss has doubled since, or has recovered in between.
    """

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_LOGS)
        self._first, self._best, self._told = math.nan, math.inf, math.inf

    def judge(self, reading: LossReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        loss = reading.mean
        if not math.isfinite(loss):
            return None  # RankLoss tells
        self._last.append(loss)
        if len(self._last) < _LOGS:
            return None
        now = fmean(self._last)
        if math.isnan(self._first):
            self._first = now
        self._best = min(self._best, now)
        if self._best <= 0:
            return None
        if now < _BACK * self._best:
            self._told = math.inf
        halfway = (self._first + self._best) / 2
        if now < max(_FAR * self._best, halfway) or min(self._last) < _BACK * self._best:
            return None
        if not math.isinf(self._told) and now < 2 * self._told:
            return None
        self._told = now
        return Alarm(
            "loss-diverges",
            f"the loss diverges: {now:.4g} over the last {_LOGS} logs, {self._best:.4g} at its best, "
            f"{self._first:.4g} in the beginning; look at the learning rate (a longer warm-up, a lower peak), the data "
            "since then and the gradient norms before it rose",
        )
