"""The ratio of two runs' losses, and of their gradient norms, at equal steps. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from hf_accum_fix.monitor.run_summary import Summary

#: A ratio of two losses that no other model or data make throughout; that of two steps of one factor, at most.
_A_FACTOR, _THE_SAME = 1.8, 1.6


@dataclass(frozen=True)
class Comparison:
    """Two runs at the steps that both logged.

    Attributes:
        run: one of them.
        other: the run it is compared with.
        steps: how many steps both logged a loss at that is no zero.
        ratio: median of the losses' ratio; nan without such a step.
        low, high: what all but a tenth of the ratios are above, and below.
        norms: ratio of the median gradient norms; nan where one run logged none.
    """

    run: str
    other: str
    steps: int
    ratio: float
    low: float
    high: float
    norms: float

    @property
    def is_a_factor(self) -> bool:
        """Whether one loss is a multiple of the other throughout, as where it is scaled or logged otherwise."""
        return self.low > 0 and max(self.ratio, 1 / self.ratio) > _A_FACTOR and self.high < _THE_SAME * self.low


def compare(one: Summary, other: Summary) -> Comparison:
    """The ratio of two runs' losses at equal steps."""
    mine, theirs = (dict(zip(each.loss.steps, each.loss.values, strict=True)) for each in (one, other))
    ratios = sorted(mine[step] / theirs[step] for step in mine.keys() & theirs.keys() if theirs[step])
    norms = one.gradients.median / other.gradients.median if one.gradients and other.gradients else math.nan
    if not ratios:
        return Comparison(one.run, other.run, 0, math.nan, math.nan, math.nan, norms)
    left_out = len(ratios) // 10
    low, high = ratios[left_out], ratios[-1 - left_out]
    return Comparison(one.run, other.run, len(ratios), median(ratios), low, high, norms)
