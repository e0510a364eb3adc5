"""A loss that swings up and down with a period of its own.

    oscillation, alarms = LossOscillation(), Alarms()
    ...
    alarms.say(oscillation.judge(meter.read()))      # meter: a LossMeter, read at every log

Noise from log to log has no period. A learning rate that is too large has one (two logs, as a rule), and so have data
that come in the same order again and again, and a learning rate that restarts.
"""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.loss import LossReading

#: Logs looked at; logs from one look to the next; fewest periods in them.
_LOGS, _EVERY, _FEWEST = 64, 32, 5
#: Share of the power that one frequency and its two neighbours have; relative deviation of the loss that counts.
_SHARE, _SWING = 0.6, 0.07


class LossOscillation:
    """Detect a swing by 10 % and more, of one period between 2 and 12 logs, in two looks at 64 logs each.

    Of the log losses, without their linear trend and under Hann's window, one frequency and its neighbours hold 60 % of
    the power, which noise hardly does twice, correlated or not. Told once as long as it lasts.

    Source: Fisher 1929, "Tests of significance in harmonic analysis".
    """

    def __init__(self) -> None:
        self._logs = deque[float](maxlen=_LOGS)
        self._count, self._before, self._told = 0, 0, False

    def judge(self, reading: LossReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        if not 0 < reading.mean < math.inf:
            self._logs.clear()  # RankLoss tells a loss that is not finite; the others may swing around zero.
            return None
        self._logs.append(math.log(reading.mean))
        self._count += 1
        if self._count % _EVERY or len(self._logs) < _LOGS:
            return None
        found, swing = _dominant(list(self._logs))
        before, self._before = self._before, found
        if not found or abs(found - before) > 1:
            self._told = self._told and bool(found)
            return None
        if self._told:
            return None
        self._told = True
        return Alarm(
            "loss-oscillates",
            f"the loss swings by +- {math.sqrt(2) * swing:.0%} with a period of {_LOGS / found:.3g} logs; look at the "
            "learning rate (lower, or restarts), the order of the data (shuffled in every epoch) and the momentum",
        )


def _dominant(values: Sequence[float]) -> tuple[int, float]:
    """Periods of the dominant swing in these values, 0 where there is none, and the deviation from the trend."""
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    mean = fmean(values)
    slope = sum(x * y for x, y in zip(places, values, strict=True)) / sum(x * x for x in places)
    rest = [y - mean - slope * x for x, y in zip(places, values, strict=True)]
    swing = pstdev(rest)
    if swing < _SWING:
        return 0, swing
    windowed = [y * (1 - math.cos(2 * math.pi * (i + 0.5) / count)) for i, y in enumerate(rest)]
    power = [
        abs(sum(y * cmath.exp(-2j * math.pi * k * i / count) for i, y in enumerate(windowed))) ** 2
        for k in range(count // 2 + 1)
    ]
    at = max(range(_FEWEST, len(power)), key=lambda k: power[k])
    return (at if sum(power[at - 1 : at + 2]) > _SHARE * sum(power) else 0), swing
