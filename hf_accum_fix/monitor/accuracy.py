"""Whether an accuracy stands while the loss falls. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hf_accum_fix.monitor.robust import theil_sen

#: Fewest evaluations; share of the first loss that a loss has fallen to; gain in accuracy that is one; near 1.
_ENOUGH, _FALLEN, _GAIN, _HIGH = 8, 0.7, 0.02, 0.95


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
