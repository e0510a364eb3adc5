"""A lasting shift between two ranks, where no third rank shows how far ranks wander."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
from numpy import ndarray

#: Believed of two ranks whose levels wander, with equal chances: the deviation of the levels' difference, in errors of
#: a reading, and the correlation of one reading's level with the next one's.
_WANDER, _CORRELATION = (2.0, 5.0), (0.0, 0.7, 0.93)
#: How often a level that is drawn anew at times is, and with which deviation, in errors of a reading.
_OFTEN, _JUMP = 0.15, 5.0
#: Difference above which its logarithm counts, since large ones vary in proportion; the largest.
_LARGE, _LARGEST = 3.0, 60.0
#: Readings up to a false alarm; fewest since a shift; last readings at which one may have begun.
_PER_FALSE_ALARM, _FEWEST_SINCE, _LAST = 1_000, 5, 64
#: Readings over which a shift rises that is there at once; a chance that is none.
_AT_ONCE, _NEVER = 1e-9, 1e-300
#: How many times as likely a shift is from the first reading as from any other; readings in which one that is constant
#: in the unit of the values, or that cannot begin later, is looked for.
_AT_FIRST, _EARLY = 20.0, 24


@dataclass(frozen=True)
class Belief:
    """What is believed of a quantity of two ranks before it is seen.

    Attributes:
        fewest: readings before the first judgement.
        steady: the chance that the levels of healthy ranks do not wander, where none is drawn anew.
        jumping: the chance that the level of a healthy rank is drawn anew at times.
        from_the_first: of a fault that is there from the first reading, each as likely as another: deviation of its
            shift, readings over which it rises as the model learns, and whether it is then constant in the unit of the
            values, else in errors.
        shift: deviation of the shift of a fault that begins later, in errors; 0: none is looked for, nor any later on.
        slopes: what another quantity may make of the difference, times its own difference: each as likely.
    """

    fewest: int
    steady: float
    jumping: float
    from_the_first: tuple[tuple[float, float, bool], ...]
    shift: float
    slopes: tuple[float, ...] = (0.0,)


#: The loss follows the difficulty of the data, which may persist for logs, and a fault moves it far; the norm of a
#: gradient does so less. What the loss does not explain of the norm hardly wanders: harder data have both larger, by a
#: power of the loss between 0.5 and 0.8 in all simulated runs.
OF_LOSSES = Belief(
    10, 0.97, 0.15, tuple((5.0, rises, in_values) for rises in (0.0, 1.0) for in_values in (True, False)), 5.0
)
_OF_A_NORM = tuple((size, 0.0, in_values) for size in (3.0, 12.0) for in_values in (True, False))
OF_NORMS = Belief(8, 0.97, 0.025, _OF_A_NORM, 3.0)
OF_NORMS_BESIDE_LOSSES = Belief(5, 0.99, 0.005, _OF_A_NORM, 0.0, (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))


class ShiftOfTwo:
    """Decide whether two ranks differ for good, since the first reading or a later one.

    Healthy ranks differ in one of three ways: not at all but for the error of a reading; by a level that wanders,

        x[t] = w[t] + e[t],        w[t] = rho w[t - 1] + sqrt(1 - rho^2) sigma u[t],        e, u normal with variance 1,

    x being the difference in errors, less a slope times the difference of another quantity; or by a level that is drawn
    anew now and then. A fault adds a normal shift from some reading on, by more than the tolerance. One that is there
    from the first reading may be constant in the unit of the values, whose error falls as the model learns, or rise
    meanwhile. The sum over all first readings of the Bayes factors reaches K after K readings in the mean, or later,
    where two ranks differ as believed (Shiryaev and Roberts). Each alarm multiplies the evidence that the next one
    needs.

    Source: Pollak 1985, "Optimal detection of a change in distribution"; Harrison and West 1997, "Bayesian
    Forecasting and Dynamic Models", ch. 11; Willsky and Jones 1976, "A generalized likelihood ratio approach to the
    detection of jumps" (how a shift shows in a filter's innovations).
    """

    def __init__(self, belief: Belief = OF_NORMS) -> None:
        self._belief = belief
        wandering = [(rho, sigma) for rho in _CORRELATION for sigma in _WANDER]
        chances = [belief.steady] + [(1 - belief.steady) / len(wandering)] * len(wandering)
        slopes = numpy.array(belief.slopes)
        self._rho, sigma = numpy.tile(numpy.array([(0.0, 0.0), *wandering]).T, len(slopes))
        self._variance = self._uncertain = sigma**2
        self._slope = numpy.repeat(slopes, len(chances))
        self._weight = numpy.log(numpy.tile(chances, len(slopes)) / len(slopes))
        self._level = numpy.zeros(len(sigma))
        self._jumps = _Jumps(belief.jumping, slopes)
        # Of each possible shift: its first reading, its size, how it goes on; and per explanation what the filter takes
        # of it for the level, its precision, and its precision times its mean.
        self._shifts, self._seen = numpy.empty((4, 0)), numpy.empty((3, 0, len(sigma)))
        self._count, self._alarms, self._first_error = 0, 0, 0.0

    def add(self, deviate: float, error: float, tolerance: float = 0.0, beside: float = 0.0) -> bool:
        """Whether the two ranks have shifted, with this reading.

        Args:
            deviate: difference of the two, in its errors.
            error: standard error of the difference, in the unit of the values; 0: no deviation at all was seen.
            tolerance: absolute difference that counts as none, in the same unit.
            beside: difference of the other quantity, in the same errors.
        """
        self._count += 1
        self._first_error = self._first_error or error
        value = _compressed(deviate - self._slope * beside)
        shift = self._shifts_now(error)
        variance = self._uncertain + 1
        gain = self._uncertain / variance
        taken, precision, pull = self._seen
        seen, innovation = shift[:, None] - taken, value - self._level
        self._seen = numpy.stack([
            self._rho * (taken + gain * seen),
            precision + seen**2 / variance,
            pull + seen * innovation / variance,
        ])  # fmt: skip
        self._level = self._rho * (self._level + gain * innovation)
        self._uncertain = self._rho**2 * self._uncertain * (1 - gain) + (1 - self._rho**2) * self._variance
        self._weight = self._weight - (innovation**2 / variance + numpy.log(variance)) / 2
        self._jumps.add(deviate, beside)
        total = numpy.logaddexp.reduce([*self._weight, *self._jumps.weight])
        self._weight, self._jumps.weight = self._weight - total, self._jumps.weight - total
        wanted = math.log(_PER_FALSE_ALARM) * (1 + self._alarms)
        if self._count < self._belief.fewest or not self._evidence(shift, tolerance / error if error else 0.0) > wanted:
            return False
        self.named()
        return True

    def named(self) -> None:
        """A rank was named: the next shift is another one, and needs more evidence."""
        self._alarms += 1
        self._shifts, self._seen = self._shifts[:, :0], self._seen[:, :0]

    def _shifts_now(self, error: float) -> ndarray:
        """Size in errors of each possible shift, one that begins now included."""
        later = ((self._belief.shift, 0.0, False),) if self._belief.shift else ()
        started = self._belief.from_the_first if self._count == 1 else later
        recent = self._shifts[0] > self._count - _LAST
        new = numpy.array([(self._count, *how) for how in started]).reshape(-1, 4).T
        self._shifts = numpy.hstack([self._shifts[:, recent], new])
        self._seen = numpy.hstack([self._seen[:, recent], numpy.zeros((3, len(started), len(self._rho)))])
        began, size, rises, in_values = self._shifts
        risen = 1 - numpy.exp(-(self._count - began + 1) / numpy.maximum(rises, _AT_ONCE))
        shrunk = self._first_error / error if error else 1.0
        now: ndarray = size * risen * numpy.where(in_values, shrunk, 1.0)
        return now

    def _evidence(self, shift: ndarray, tolerance: float) -> float:
        """Log of the sum of the Bayes factors of all possible shifts."""
        began, _, _, in_values = self._shifts
        _, precision, pull = self._seen
        age = self._count - began + 1
        early = in_values > 0 if self._belief.shift else numpy.full(len(age), True)
        if not any(judged := numpy.where(early, age <= _EARLY, age >= _FEWEST_SINCE)):
            return -math.inf
        # Shifts that nobody would act upon count as none.
        most = (tolerance / shift)[:, None]
        small = numpy.clip(pull / precision, -most, most)
        none = small * (pull - small * precision / 2)
        shifted = (pull**2 / (precision + 1) - numpy.log(precision + 1)) / 2
        jumps = numpy.logaddexp.reduce(self._jumps.weight)
        healthy = numpy.logaddexp(numpy.logaddexp.reduce(self._weight + none, axis=1), jumps)
        factors = numpy.logaddexp.reduce(self._weight + shifted, axis=1) - healthy
        likely = numpy.where(began == 1, math.log(_AT_FIRST / len(self._belief.from_the_first)), 0.0)
        return float(numpy.logaddexp.reduce((factors + likely)[judged]))


def _compressed(deviates: ndarray) -> ndarray:
    size = numpy.minimum(abs(deviates), _LARGEST)
    large = _LARGE * (1 + numpy.log(numpy.maximum(size, _LARGE) / _LARGE))
    found: ndarray = numpy.copysign(numpy.where(size < _LARGE, size, large), deviates)
    return found


class _Jumps:
    """A level that is drawn anew at some readings: for each slope, a Gaussian for the mixture of both at each.

    Source: Ackerson and Fu 1970, "On state estimation in switching environments".
    """

    def __init__(self, chance: float, slopes: ndarray) -> None:
        self._slopes, self._often = slopes, 0.0
        self.weight = numpy.full(len(slopes), math.log(chance / len(slopes)))
        self._level, self._uncertain = numpy.zeros(len(slopes)), numpy.full(len(slopes), _JUMP**2)

    def add(self, deviate: float, beside: float) -> None:
        """Take a difference into account: `weight` is the log of the chance of this explanation, up to a constant."""
        value = _compressed(deviate - self._slopes * beside)
        # [as before or drawn anew, slopes]
        chance = numpy.array([[1 - self._often], [self._often]])
        mean, variance = numpy.stack([self._level, 0 * value]), numpy.stack([self._uncertain, 0 * value + _JUMP**2])
        gain = variance / (variance + 1)
        likely = chance * numpy.exp(-((value - mean) ** 2) / (variance + 1) / 2) / numpy.sqrt(variance + 1) + _NEVER
        mean, variance = mean + gain * (value - mean), variance * (1 - gain)
        self.weight = self.weight + numpy.log(likely.sum(0))
        share = likely / likely.sum(0)
        self._level = (share * mean).sum(0)
        self._uncertain = (share * (variance + (mean - self._level) ** 2)).sum(0)
        self._often = _OFTEN
