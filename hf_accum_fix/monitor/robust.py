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
    too small (`noise_of_means`). nan for fewer than four values.

    Source: Gasser, Sroka and Jennen-Steinmetz 1986, "Residual variance and residual pattern in nonlinear regression",
    with the median absolute deviation for the mean square.
    """
    return _second_difference(values, 1) / math.sqrt(6.0)


def noise_of_means(values: Sequence[float]) -> float:
    """Times ``1 / sqrt(n)`` the standard error of the mean of n neighbours of a series, its smooth trend aside.

    `noise_sigma` where the noise is independent. Where it is correlated, it is taken for an autoregression of first
    order with deviation s and correlation r of neighbours (here between 0 and 0.9). Its second differences over one
    place and over two have the variances

        v1 = 2 s^2 (1 - r) (3 - r)        v2 = 2 s^2 (1 - r^2) (3 - r^2),

    whose ratio gives r; the variance wanted is ``s^2 (1 + r) / (1 - r)``. nan for fewer than four values.

    Source: the variance of a mean under autocorrelation, e.g. Box and Jenkins 1976, "Time Series Analysis", ch. 2.
    """
    over_one, over_two = _second_difference(values, 1), _second_difference(values, 2)
    if not over_one > 0 or math.isnan(over_two):
        return over_one / math.sqrt(6.0)
    low, high = 0.0, 0.9
    while high - low > 1e-6:
        r = (low + high) / 2.0
        expected = (1.0 + r) * (3.0 - r * r) / (3.0 - r)
        low, high = (r, high) if expected < (over_two / over_one) ** 2 else (low, r)
    return over_one * math.sqrt((1.0 + low) / (2.0 * (3.0 - low))) / (1.0 - low)


def error_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean of a series whose neighbours are correlated; a trend counts as correlation.

    ``s / sqrt(n) * sqrt((1 + r) / (1 - r))`` with the correlation r of neighbours, here between 0 and 0.9.

    Source: as `noise_of_means`; n (1 - r) / (1 + r) is the effective sample size.
    """
    mean = fmean(values)
    rest = [value - mean for value in values]
    squares = sum(its * its for its in rest)
    together = sum(before * after for before, after in pairwise(rest))
    r = min(max(together / squares, 0.0), 0.9) if squares else 0.0
    return math.sqrt(squares / (len(values) - 1) / len(values) * (1 + r) / (1 - r))


def _second_difference(values: Sequence[float], lag: int) -> float:
    """Robust standard deviation of ``x[i - lag] - 2 x[i] + x[i + lag]``; nan for fewer than two of them."""
    triples = zip(values, values[lag:], values[2 * lag :], strict=False)
    found = [before - 2.0 * here + after for before, here, after in triples]
    return median_and_sigma(found)[1] if len(found) > 1 else math.nan


@dataclass(frozen=True)
class Slope:
    """A slope and its interval.

    Attributes:
        value: median of the slopes of all pairs [y per x].
        low: lower end of the interval.
        high: upper end.
    """

    value: float
    low: float
    high: float


def theil_sen(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> Slope:
    """Slope of y over x as the median over all pairs, with the interval that Kendall's tau gives it.

    Right under up to 29 % outliers. The interval takes the deviations as independent: give it blocks of a series whose
    neighbours are correlated (`blocks`). Pairs are ``n (n - 1) / 2``: keep n in the hundreds.

    Args:
        x: abscissae; at least two different ones.
        y: ordinates, as many.
        confidence: of the two-sided interval.

    Raises:
        ValueError: if there are not two different abscissae.

    Source: Theil 1950; Sen 1968, "Estimates of the regression coefficient based on Kendall's tau" (the interval; the
    variance with ties is Kendall's).
    """
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if x[i] != x[j])
    if not slopes:
        raise ValueError(f"a slope needs two different abscissae; found {len(x)} values at {sorted(set(x))}")
    variance = _kendall_variance(len(x)) - sum(
        _kendall_variance(count) for values in (x, y) for count in Counter(values).values()
    )
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


#: Half the shift, in standard deviations, that is to be found fastest; the most that a single value counts for.
_ALLOWANCE, _LIMIT = 0.5, 6.0


class Cusum:
    """Detect a lasting shift of a standardised series: an outlier does not trigger it, a small lasting shift does.

    Sums the amount by which each value exceeds 1/2, on either side, never below zero; an alarm at ``threshold``. A
    value counts for at most 6. Without any shift the mean number of values up to an alarm is

        (exp(2 k b) - 2 k b - 1) / (4 k^2)        k = 1/2, b = threshold + 1.166,

    from which the threshold follows. A shift by s standard deviations is found after about
    ``threshold / (s - 1/2)`` values.

    Args:
        values_per_false_alarm: mean number of values, normal with deviation 1 or less, up to a false alarm.

    Source: Page 1954, "Continuous inspection schemes"; Siegmund 1985, "Sequential Analysis", section 2.6 (the mean
    number; two sides alarm twice as often as one).
    """

    def __init__(self, values_per_false_alarm: float) -> None:
        self.threshold = _threshold(values_per_false_alarm)
        self._sums, self._lengths = [0.0, 0.0], [0, 0]

    def add(self, value: float) -> bool:
        """Whether the series has shifted, with this value (in standard deviations; nan counts as the limit)."""
        value = _LIMIT if math.isnan(value) else max(-_LIMIT, min(_LIMIT, value))
        for side, sign in enumerate((1.0, -1.0)):
            # Twice the threshold at most, so that a shift that has passed is forgotten.
            self._sums[side] = min(max(0.0, self._sums[side] + sign * value - _ALLOWANCE), 2.0 * self.threshold)
            self._lengths[side] = self._lengths[side] + 1 if self._sums[side] else 0
        return self.level >= self.threshold

    @property
    def length(self) -> int:
        """Values since the larger of the two sums was last zero."""
        return self._lengths[self._sums.index(self.level)]

    @property
    def level(self) -> float:
        """The larger of the two sums."""
        return max(self._sums)


def _threshold(values_per_false_alarm: float) -> float:
    low, high = 0.0, 200.0
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        rate = 2.0 * _ALLOWANCE * (middle + 1.166)
        found = (math.exp(rate) - rate - 1.0) / (4.0 * _ALLOWANCE**2)
        low, high = (middle, high) if found < values_per_false_alarm else (low, middle)
    return high
