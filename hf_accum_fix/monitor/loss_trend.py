"""A loss that was learned and is lost again: divergence, while the run goes on.

    trend, alarms = LossTrend(), Alarms()
    ...
    alarms.say(trend.judge(meter.read()))            # meter: a LossMeter, read at every log

A plateau is no alarm (`LossStall`).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.loss import LossReading

#: Logs in a mean: hard stretches of data pass sooner.
_LOGS = 30
#: Ratio to the best mean, and to the mean before, from which a loss has diverged; ratio to the best of every log in it.
_FAR, _BACK = 1.5, 1.2


class LossTrend:
    """Detect a loss that has come back from its best towards where it began, and stays there.

    Means of 30 logs are compared. It has diverged where it is 1.5 times its best and as high as in the first log; or,
    within 30 logs, has risen by half and at least halfway back to there. No log of the mean is near the best. So no
    spikes, no hard stretches of data, and no data that grow harder and harder count. Told once; again where the
    loss has doubled since, or has recovered in between.
    """

    def __init__(self) -> None:
        self._logs = deque[float](maxlen=2 * _LOGS)
        self._first, self._best, self._told = math.nan, math.inf, math.inf

    def judge(self, reading: LossReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        loss = reading.mean
        if not math.isfinite(loss):
            return None  # RankLoss tells
        self._logs.append(loss)
        if math.isnan(self._first):
            self._first = loss
        logs = list(self._logs)
        last, earlier = logs[-_LOGS:], logs[:-_LOGS]
        if len(last) < _LOGS:
            return None
        now = fmean(last)
        self._best = min(self._best, now)
        if now < _BACK * self._best:
            self._told = math.inf
        jumped = bool(earlier) and now > max(_FAR * fmean(earlier), (self._first + self._best) / 2)
        far = now > _FAR * self._best > 0 and min(last) > _BACK * self._best
        if not (far and (jumped or now > self._first)) or (self._told < math.inf and now < 2 * self._told):
            return None
        self._told = now
        return Alarm(
            "loss-diverges",
            f"the loss diverges: {now:.4g} over the last {_LOGS} logs, {self._best:.4g} at its best, "
            f"{self._first:.4g} in the first log; look at the learning rate (a longer warm-up, a lower peak), the data "
            "since then and the gradient norms before it rose",
        )
