"""The statistics the monitors decide with: robust, with an error of their own, and with their sources. Pure Python.

A monitor that cries wolf is switched off, so every rule here is one whose rate of false alarms can be stated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median

#: The standard deviation of a normal sample over its median absolute deviation: 1 / Phi^-1(3/4).
SIGMA_PER_MAD = 1.482602218505602


def median_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the standard deviation estimated from the median absolute deviation.

    Up to half of the values may be anything. The second is exact for normal values only.

    Source: Hampel 1974, "The influence curve and its role in robust estimation".
    """
    centre = median(values)
    return centre, SIGMA_PER_MAD * median(abs(value - centre) for value in values)


def noise_sigma(values: Sequence[float]) -> float:
    """Standard deviation of the noise of a series around its smooth trend.

    A value minus the mean of its neighbours has hardly any trend, and three halves of the noise's variance:
    ``MAD(x[i-1] - 2 x[i] + x[i+1]) * 1.4826 / sqrt(6)``. Noise that is correlated from one value to the next comes out
    too small. nan for fewer than four values.

    Source: Gasser, Sroka and Jennen-Steinmetz 1986, "Residual variance and residual pattern in nonlinear regression",
    with the median absolute deviation for the mean square.
    """
    triples = zip(values, values[1:], values[2:], strict=False)
    found = [before - 2.0 * here + after for before, here, after in triples]
    return median_and_sigma(found)[1] / math.sqrt(6.0) if len(found) > 1 else math.nan


def error_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean of a series whose neighbours are correlated; a trend counts as correlation.

    ``s / sqrt(n) * sqrt((1 + r) / (1 - r))`` with the correlation r of neighbours, here between 0 and 0.9.

    nan for fewer than two values.

    Source: Box and Jenkins 1976, "Time Series Analysis", ch. 2; n (1 - r) / (1 + r) is the effective sample size.
    """
    if len(values) < 2:
        return math.nan
    mean = fmean(values)
    rest = [value - mean for value in values]
    squares = sum(its * its for its in rest)
    together = sum(before * after for before, after in pairwise(rest))
    r = min(max(together / squares, 0.0), 0.9) if squares else 0.0
    return math.sqrt(squares / (len(values) - 1) / len(values) * (1 + r) / (1 - r))


@dataclass(frozen=True)
class Slope:
    """A slope and its interval."""

    value: float  # median of the slopes of all pairs [y per x]
    low: float  # lower end of the interval
    high: float  # upper end


def theil_sen(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> Slope:
    """Slope of y over x as the median over all pairs, with the interval that Kendall's tau gives it.

    Right under up to 29 % outliers. The interval takes the deviations as independent: give it blocks of a series whose
    neighbours are correlated (`blocks`). Pairs are ``n (n - 1) / 2``: keep n in the hundreds.

    Args:
        x: abscissae; at least two different ones.
        y: ordinates, as many.
        confidence: of the two-sided interval.

    Source: Theil 1950; Sen 1968, "Estimates of the regression coefficient based on Kendall's tau" (the interval; the
    variance with ties is Kendall's).
    """
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if x[i] != x[j])
    ties = [count for values in (x, y) for count in Counter(values).values()]
    variance = _kendall_variance(len(x)) - sum(map(_kendall_variance, ties))
    reach = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * math.sqrt(max(variance, 0.0))
    first = round((len(slopes) - reach) / 2.0) - 1
    last = round((len(slopes) + reach) / 2.0)
    return Slope(median(slopes), slopes[max(first, 0)], slopes[min(last, len(slopes) - 1)])


def _kendall_variance(n: int) -> float:
    return n * (n - 1) * (2 * n + 5) / 18.0


def blocks(count: int, parts: int) -> list[range]:
    """``count`` consecutive places split into at most ``parts`` ranges of nearly equal length, none empty."""
    parts = min(parts, count)
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def slope_of_means(x: Sequence[float], y: Sequence[float], parts: int, confidence: float = 0.95) -> Slope:
    """`theil_sen` over the means of blocks: a long series is quick, and correlated neighbours count as one."""
    of = blocks(len(x), parts)
    return theil_sen([fmean(x[i] for i in part) for part in of], [fmean(y[i] for i in part) for part in of], confidence)


def normal_of_student(t: float, degrees_of_freedom: float) -> float:
    """The normal deviate that is as unusual as ``t`` is for Student's distribution.

    Within 0.01 of exact for deviates up to 1 and from one degree of freedom on; beyond, it understates (6.0 as 5.9 for
    five degrees), so that an alarm decided by it is late rather than false.

    Source: Wallace 1959, "Bounds on normal approximations to Student's and the chi-square distributions".
    """
    nu = degrees_of_freedom
    return math.copysign((8 * nu + 1) / (8 * nu + 3) * math.sqrt(nu * math.log1p(t * t / nu)), t)
