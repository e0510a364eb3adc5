"""Deviation of one rank from the rest, in what ranks differ by anyway: a paired test over their last 30 readings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy
from numpy import ndarray

from hf_accum_fix.monitor.robust import normal_of_student
from hf_accum_fix.monitor.thresholds import BELIEF, BLOCKS, CHANCE, COMPARED, KEPT, MOST_ERRORS, PART, SHOWN


@dataclass(frozen=True)
class Deviation:
    """Distance of one rank from the mean of the others."""

    rank: int
    difference: float  # its value minus the mean of the others, in the unit of the values
    error: float  # standard error of the difference, in the same unit, were its samples independent
    freedom: float = 1e6  # degrees of freedom of the error
    tolerance: float = 0.0  # absolute difference that counts as none

    @property
    def deviate(self) -> float:
        """The difference in its errors, 60 at most, with variance 1 were its samples independent."""
        size = abs(self.difference) / self.error if self.error else math.inf if self.difference else 0.0
        size *= math.sqrt(1 - 2 / max(self.freedom, 3.0))  # Student's variance is f / (f - 2).
        return math.copysign(min(size, MOST_ERRORS), self.difference)

    @property
    def unusual(self) -> float:
        """What of the deviate is beyond the tolerance."""
        return self.deviate * max(1 - self.tolerance / abs(self.difference), 0.0) if self.difference else 0.0


class Shifts:
    """A paired test of one rank against the others, over their last 30 readings.

    A rank differs for good where its mean difference, beyond the tolerance, is far from zero in its errors (Student,
    Bonferroni over the ranks), and every five readings of the 30 show half of it, as a level that is drawn anew does
    not. Where samples are correlated (documents in order, difficulty that persists), all ranks wander further: the
    errors are widened by how far block means of the readings before the 30 changed from block to block, and, of more
    than two ranks, by how far the *others* were apart. Of two ranks the higher one is named.

    The next alarm takes twice as many readings.

    Source: batch means, Conway 1963; Alexopoulos and Seila 1998, "Output Data Analysis" (Handbook of Simulation, 7.3).

    Args:
        only_above: whether a rank below the others is none that is off.
    """

    def __init__(self, *, only_above: bool = False) -> None:
        self._only_above = only_above
        self._past = deque[Sequence[Deviation]](maxlen=KEPT)
        self._ranks = list[int]()
        self._since, self._fewest = 0, COMPARED

    def add(self, reading: Sequence[Deviation]) -> Deviation | None:
        """The rank that has shifted, with its mean difference over the last 30 readings; None while none has.

        Its `unusual` is the normal deviate that decided.
        """
        if [its.rank for its in reading] != self._ranks:
            self._past.clear()
            self._ranks, self._since, self._fewest = [its.rank for its in reading], 0, COMPARED
        self._past.append(reading)
        self._since += 1
        if self._since < self._fewest:
            return None
        last = list(self._past)[-COMPARED:]
        differences, beyond = (
            numpy.array([[getattr(its, name) for its in each] for each in last]) for name in ("difference", "unusual")
        )
        mean, parts = differences.mean(0), differences.reshape(-1, PART, len(reading)).mean(1)
        lasts = (parts * mean > SHOWN * mean**2).all(0)
        if not lasts.any():
            return None
        at_least = NormalDist().inv_cdf(1 - CHANCE / len(reading))
        deviates = numpy.array([[its.deviate for its in each] for each in self._past])
        found = []
        for place, (variance, freedom) in enumerate(_wander(deviates[:-COMPARED], deviates[-COMPARED:])):
            far = normal_of_student(beyond[:, place].mean() * math.sqrt(COMPARED / variance), freedom)
            if lasts[place] and (far if self._only_above else abs(far)) > at_least:
                found.append(Deviation(self._ranks[place], float(mean[place]), abs(float(mean[place]) / far)))
        if not found:
            return None
        self._since, self._fewest = 0, 2 * self._fewest
        return max(found, key=lambda its: (round(abs(its.deviate), 6), its.difference))


def _wander(before: ndarray, last: ndarray) -> list[tuple[float, float]]:
    """For each rank the variance of a mean, in units of its value for independent samples; its degrees of freedom.

    Args:
        before: deviates of the readings before the last ones: [readings, ranks].
        last: those of the last readings.
    """
    ranks = last.shape[1]
    several = ranks > 2
    samples = [math.sqrt(len(last)) * last.mean(0, keepdims=True)] if several else []
    for length in BLOCKS:
        count = len(before) // length
        means = math.sqrt(length) * before[len(before) - count * length :].reshape(count, length, ranks).mean(1)
        samples += [numpy.diff(means, axis=0) / math.sqrt(2), *([means] if several else [])]
    found = [[(1.0, 1e6)] * ranks]
    for rows in samples:
        freedom = BELIEF + len(rows) * max(ranks - 2, 1)
        squares = rows**2 * (ranks - 1) / ranks
        # The others' about their own mean; of two ranks nobody knows who the other is.
        squares = squares.sum(1, keepdims=True) - squares * ranks / (ranks - 1) if several else rows**2
        found.append([((BELIEF + total) / freedom, freedom) for total in squares.sum(0).tolist()])
    return [max(each) for each in zip(*found, strict=True)]


#: Added to messages about two ranks, where each is as far from the other.
OF_TWO = "; with two ranks it is unknown which is the odd one"
