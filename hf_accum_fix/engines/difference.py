"""Tell a fault from rounding in gradients that should be equal, and name what the fault looks like.

A sum of n numbers that is rounded to u at each addition is off by at most n u times the sum of their norms (N. Higham,
Accuracy and Stability of Numerical Algorithms, 4.2). A common factor is found below that: roundings differ from element
to element, so over m elements that are off by rho they make a factor of about rho / sqrt(m), of which six times are
allowed, and at least one epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hf_accum_fix.upstream.defects import Factor

#: Of an engine that hands on in float32 what it got in float64.
FLOOR: Final = 1e-6
#: From so many elements on, a factor is told from roundings.
_SEVERAL: Final = 16
#: Ratios this near are called the same.
_SAME: Final = 0.01


@dataclass(frozen=True)
class Difference:
    """Between what the optimizer is about to use of a parameter, and what was expected; over all ranks.

    Attributes:
        name: of the parameter.
        error: relative to the norm of what was expected.
        ratio: what is used times this is nearest to the expected one's multiple: <used, expected> / |expected|^2.
        elements: that were compared.
        additions: of the sum.
        spread: the norms of what was added, summed, over the norm of the sum; at least 1.
        epsilon: of the coarsest dtype on the way.
    """

    name: str
    error: float
    ratio: float
    elements: int
    additions: int
    spread: float
    epsilon: float

    @property
    def rest(self) -> float:
        """What no factor explains of the error."""
        return math.sqrt(max(self.error**2 - (self.ratio - 1) ** 2, 0.0))

    @property
    def tolerance(self) -> float:
        """Largest error that is rounding."""
        return max(FLOOR, self.additions * self.epsilon / 2 * self.spread)

    @property
    def is_factor(self) -> bool:
        """Whether it is a multiple, to rounding, of what was expected."""
        return math.isfinite(self.ratio) and self.rest <= self.tolerance

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding."""
        if not self.error <= self.tolerance:
            return True
        by_chance = 6 * self.rest / math.sqrt(self.elements - 1) if self.elements >= _SEVERAL else self.tolerance
        return abs(self.ratio - 1) > max(FLOOR, self.epsilon, by_chance)


def factors_of(steps: int, ranks: int, count: int | None = None) -> dict[Factor, float]:
    """What G and W make of a gradient where they are applied once too often or too rarely, but for factors of 1.

    ``steps``: G; ``ranks``: W; ``count``: micro-batches of a short window.
    """
    count = count or steps
    found = {
        Factor.G: float(count),
        Factor.W: float(ranks),
        Factor.G_W: float(count * ranks),
        Factor.PER_G: 1 / steps,
        Factor.PER_W: 1 / ranks,
        Factor.PER_G_W: 1 / (steps * ranks),
        Factor.SHORT: count / steps,
    }
    return {factor: value for factor, value in found.items() if value != 1.0}


def factors_near(ratio: float, factors: Mapping[Factor, float], within: float) -> list[Factor]:
    """Those of some factors that a gradient over the right one is, to a relative difference."""
    return [factor for factor, value in factors.items() if abs(ratio - value) <= within * abs(value)]


def factor_in_words(ratio: float, steps: int, ranks: int) -> str:
    """What a factor is to a hundredth, such as "G or W"; empty: nothing known."""
    same = (Factor.G_W, Factor.PER_G_W) if min(steps, ranks) == 1 else ()
    found = factors_near(ratio, factors_of(steps, ranks), _SAME)
    return " or ".join(each.value for each in found if each not in same)


def looks_like(every: Sequence[Difference], steps: int, ranks: int) -> str:
    """What could have made these differences of one window, of which one is wrong at least.

    ``steps``: G; ``ranks``: W.
    """
    wrong = [each for each in every if each.is_wrong]
    if not all(math.isfinite(each.error) for each in wrong):
        return "numbers that are not finite: an overflow on the way"
    few = len(wrong) < len(every)
    names = ", ".join(each.name for each in wrong[:2]) + (", ..." if len(wrong) > 2 else "")
    ratios = [each.ratio for each in wrong]
    together = sum(ratios) / len(ratios)
    same = max(ratios) - min(ratios) <= _SAME * abs(together) and all(each.is_factor for each in wrong)
    if few:
        return f"only {names}: a hook on it, or a weight that the engine does not know"
    if same and abs(together) < _SAME:
        return "nothing arrives"
    if same:
        known = factor_in_words(together, steps, ranks)
        return f"a factor of {together:.3g}" + (f" = {known}" if known else "")
    if together < 1:
        return "micro-batches or ranks are lost, or each is changed (clipped?) before they are added"
    return "another gradient is added, or one is added twice"
