"""A run that learns nothing: its loss stands where it began.

    stall, alarms = LossStall(), Alarms()
    ...
    alarms.say(stall.judge(meter.read()))            # meter: a LossMeter, read at every log

A plateau after learning is no alarm: a run that has converged looks like one that has stalled.
"""

from __future__ import annotations

import math
from statistics import fmean

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.loss import LossReading
from hf_accum_fix.monitor.robust import blocks, noise_sigma, theil_sen

#: Logs until the judgement, blocks of them that a slope is taken over, logs that are the beginning, and the end.
_LOGS, _BLOCKS, _FIRST, _LAST = 300, 60, 5, 30
#: Fall of the loss, as a share, that is learning; of the first logs above the rest, and in their standard errors; of a
#: tenth of the logs below the first.
_LEARNED, _ABOVE, _ERRORS, _FAR_BELOW = 0.05, 0.02, 3.0, 0.2


class LossStall:
    """Judge once, at the 300th log, whether the loss has fallen since the first.

    It has where the line through all logs (Theil and Sen, 99.9 %) falls for sure, or by 5 %; where the first five logs
    lie above the rest, by 2 % and three standard errors; or where a tenth of the logs lie 20 % below them. Losses that
    may be negative are not judged: no level of theirs means that nothing is learned.
    """

    def __init__(self) -> None:
        self._logs: list[float] = []

    def judge(self, reading: LossReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        if not reading.total.items or len(self._logs) >= _LOGS:
            return None
        self._logs.append(reading.mean)
        if len(self._logs) < _LOGS or not all(0 < loss < math.inf for loss in self._logs):
            return None
        parts = blocks(_LOGS, _BLOCKS)
        slope = theil_sen(
            [fmean(part) for part in parts], [fmean(self._logs[i] for i in part) for part in parts], 0.999
        )
        mean, first = fmean(self._logs), fmean(self._logs[:_FIRST])
        error = noise_sigma(self._logs) / math.sqrt(_FIRST)
        fell_at_once = first - mean > max(_ABOVE * mean, _ERRORS * error)
        lowest = min(fmean(self._logs[place : place + _LAST]) for place in range(0, _LOGS, _LAST))
        falls = slope.high < 0 or -slope.value * _LOGS > _LEARNED * mean
        if falls or fell_at_once or lowest < (1 - _FAR_BELOW) * first:
            return None
        return Alarm(
            "loss-stalls",
            f"the loss stands where it began: {first:.4g} in the first {_FIRST} logs, "
            f"{fmean(self._logs[-_LAST:]):.4g} in the last {_LAST} of {_LOGS}; look at the learning rate, "
            "at parameters that are frozen or not held by the optimizer, and at the labels",
        )
