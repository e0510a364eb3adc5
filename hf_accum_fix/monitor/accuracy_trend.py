"""A loss that falls while the accuracy stands: what is optimised is not what is wanted.

    accuracy, alarms = AccuracyTrend(), Alarms()
    ...
    alarms.say(accuracy.judge(meter.read().mean, evaluate(model)))      # at every evaluation

An accuracy that is near 1 is no alarm, nor is one that has risen. Imports no torch: `watch` judges logs by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.robust import theil_sen

#: Fewest evaluations; share of the first loss that a loss has fallen to; gain in accuracy that is one; near 1.
_ENOUGH, _FALLEN, _GAIN, _HIGH = 8, 0.7, 0.02, 0.95


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


def stands(losses: Sequence[float], accuracies: Sequence[float]) -> bool:
    """Whether the accuracy has stood while the loss fell: one of each for every evaluation."""
    if len(accuracies) < _ENOUGH or losses[0] <= 0:
        return False
    last = fmean(losses[-len(losses) // 4 :])
    slope = theil_sen(range(len(accuracies)), accuracies)
    gain = slope.value * (len(accuracies) - 1)
    risen = slope.low > 0 or max(gain, accuracies[-1] - accuracies[0]) > _GAIN
    return last < _FALLEN * losses[0] and not risen and fmean(accuracies) < _HIGH


def in_words(losses: Sequence[float], accuracies: Sequence[float]) -> str:
    """What to tell of it."""
    return (
        f"the loss falls from {losses[0]:.4g} to {losses[-1]:.4g} while the accuracy stands: {accuracies[0]:.4g} to "
        f"{accuracies[-1]:.4g} in {len(accuracies)} evaluations; look at what the loss counts (masked labels, "
        "padding), at the metric and its labels, and for data that are memorised"
    )
