"""A loss that falls while the accuracy stands: what is optimised is not what is wanted.

    accuracy, alarms = AccuracyTrend(), Alarms()
    ...
    alarms.say(accuracy.judge(meter.read().mean, evaluate(model)))      # at every evaluation

An accuracy that is near 1 is no alarm, nor is one that has risen.
"""

from __future__ import annotations

import math

from hf_accum_fix.monitor.accuracy import in_words, stands
from hf_accum_fix.monitor.alarms import Alarm


class AccuracyTrend:
    """Detect an accuracy that has stood from the first of eight evaluations or more, while the loss lost 30 %."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._accuracies: list[float] = []
        self._told = False

    def judge(self, loss: float, accuracy: float) -> Alarm | None:
        """The alarm that this evaluation completes, if any: told once.

        Args:
            loss: of the training since the last evaluation, the mean over its items.
            accuracy: between 0 and 1, the same on every rank.
        """
        if math.isfinite(loss) and math.isfinite(accuracy):
            self._losses.append(loss)
            self._accuracies.append(accuracy)
        if self._told or not stands(self._losses, self._accuracies):
            return None
        self._told = True
        return Alarm("accuracy-stands", in_words(self._losses, self._accuracies))
