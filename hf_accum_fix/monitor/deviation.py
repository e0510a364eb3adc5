"""Deviation of one rank from the rest, in what the ranks differ by anyway; CUSUM for lasting shifts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

import numpy
from numpy import ndarray

from hf_accum_fix.monitor.robust import Cusum, normal_of_student

#: Degrees of freedom of what is known exactly.
MANY = 1e6


@dataclass(frozen=True)
class Deviation:
    """Distance of one rank from the mean of the others in one reading.

    Attributes:
        rank: its number.
        difference: its value minus the mean of the others, in the unit of the values.
        error: standard error of the difference, in the same unit, were its samples independent.
        freedom: degrees of freedom of the error.
        tolerance: absolute difference that counts as none; the rest is compared with the error.
        spread: factor by which the error is really larger (`Spread`).
        freedom_of_spread: degrees of freedom of that factor.
    """

    rank: int
    difference: float
    error: float
    freedom: float
    tolerance: float = 0.0
    spread: float = 1.0
    freedom_of_spread: float = MANY

    @property
    def deviate(self) -> float:
        """The difference in its errors, with variance 1 were its samples independent (Student's is f / (f - 2))."""
        if not self.error:
            return math.copysign(math.inf, self.difference) if abs(self.difference) > self.tolerance else 0.0
        return self.difference / self.error * math.sqrt(1 - 2 / max(self.freedom, 3.0))

    @property
    def unusual(self) -> float:
        """What is beyond the tolerance as a normal deviate (Student), in the ranks' spread."""
        beyond = max(abs(self.difference) - self.tolerance, 0.0)
        t = beyond / (self.error * self.spread) if self.error else math.inf if beyond else 0.0
        freedom = min(self.freedom, self.freedom_of_spread)
        return normal_of_student(math.copysign(t, self.difference), freedom)


class Spread:
    """Factor by which the ranks are further apart than their errors, learned from reading to reading.

    An error computed from the samples of one reading takes them for independent. Where they are correlated (documents
    in order, difficulty that persists, shards of their own), all ranks wander further, and a mean over several readings
    does not settle as it should. So the ranks' differences, in their errors, are averaged over blocks
    of 1, 2, 4 ... 128 readings; a block mean times the root of its length has variance 1 if all is independent. Its
    variance is estimated for every rank from the others alone, so that a rank that is off does not hide itself: over
    the ranks, and from how blocks change from one to the next. A difference by design shows in the first; a
    difficulty that persists for longer than was seen so far, in the second. The largest counts. Of two ranks only the
    second is known.

    Source: batch means, Conway 1963; Alexopoulos and Seila 1998, "Output Data Analysis" (Handbook of Simulation, 7.3).
    """

    def __init__(self, ranks: int) -> None:
        self._levels = [_Level(ranks) for _ in range(_LEVELS)]

    def add(self, differences: Sequence[float]) -> None:
        """Take one reading's differences of the ranks, in their errors, into account."""
        block: ndarray | None = numpy.array(differences)
        for number, level in enumerate(self._levels):
            if block is not None:
                block = level.add(block, math.sqrt(2.0**number))

    def of(self, place: int, shortest: int = 0, longest: int | None = None) -> tuple[float, float]:
        """Factor, at least 1, by which the errors of the rank at this index are too small; its degrees of freedom.

        Args:
            place: index of the rank.
            shortest: blocks of at least 2**shortest readings count.
            longest: and of less than 2**longest; None: all longer ones.
        """
        variance, freedom = max(level.variance(place) for level in self._levels[shortest:longest])
        return (math.sqrt(variance), freedom) if variance > 1 else (1.0, MANY)


#: Levels of blocks, each twice as long as the one before; degrees of freedom of the prior variance of 1, over the ranks
#: and of changes; blocks after which an observation counts for a third.
_LEVELS, _BELIEF, _BELIEF_IN_CHANGES, _FORGETTING = 8, 4.0, 12.0, 1000.0


class _Level:
    """Blocks of one length."""

    def __init__(self, ranks: int) -> None:
        self._half: ndarray | None = None
        self._before: ndarray | None = None
        self._of_two = ranks == 2
        self._over_ranks, self._over_time = _Variance(_BELIEF), _Variance(_BELIEF_IN_CHANGES if ranks > 2 else _BELIEF)

    def add(self, block: ndarray, scale: float) -> ndarray | None:
        """Take the mean of a block into account; the mean of two blocks where it completes a pair."""
        if not self._of_two:
            self._over_ranks.add(_of_others(scale * block), len(block) - 2)
        if self._before is not None:
            changes = scale * (block - self._before) / math.sqrt(2.0)
            self._over_time.add(changes**2 if self._of_two else _of_others(changes), max(len(block) - 2, 1))
        self._before = block
        if self._half is None:
            self._half = block
            return None
        merged: ndarray = (self._half + block) / 2
        self._half = None
        return merged

    def variance(self, place: int) -> tuple[float, float]:
        """Variance of a block mean, in units of its value for independent samples; its degrees of freedom."""
        return max(self._over_ranks.of(place), self._over_time.of(place))


class _Variance:
    """A variance for every rank, with a prior of 1."""

    def __init__(self, belief: float) -> None:
        self._belief, self._freedom = belief, 0.0
        self._squares: ndarray | None = None

    def add(self, squares: ndarray, freedom: int) -> None:
        """Take sums of squares with so many degrees of freedom into account."""
        kept = 1 - 1 / _FORGETTING
        self._squares = squares if self._squares is None else kept * self._squares + squares
        self._freedom = kept * self._freedom + freedom

    def of(self, place: int) -> tuple[float, float]:
        """The variance for the rank at this index, and its degrees of freedom."""
        freedom = self._belief + self._freedom
        return (1.0 if self._squares is None else float(self._belief + self._squares[place]) / freedom), freedom


def _of_others(differences: ndarray) -> ndarray:
    """For every rank, the sum of squares of the others about their own mean, from each rank's distance to the rest."""
    share = len(differences) / (len(differences) - 1)
    squares = differences**2 / share
    return squares.sum() - share * squares  # type: ignore[no-any-return]


#: Readings of two ranks that are compared; how many parts of them, which share of the mean difference each of these
#: has to show, and how far the mean is (a normal deviate). Chosen by recipes/simulated_runs.py on seeds 97001 and 97002
#: (32 runs of 500 logs a healthy case), and judged on seed 20,000,001 (24) as well: of both together 0.9 false alarms
#: in 1,000 logs by losses and 1.0 by gradients where a strong difficulty persists for 100 micro-batches, 0.4 where
#: shards are memorised, 0.1 at most in every other case. A plain t has to be above 20, and misses a gradient x1.5.
_COMPARED, _PARTS, _SHOWN, _FAR = 30, 6, 2 / 3, 3.7
#: Most errors that one reading counts for.
_MOST_ERRORS = 60.0


class TwoRanks:
    """A paired test of two ranks over the differences of their last 30 readings.

    The ranks differ for good where the mean difference, beyond the tolerance, is far from zero in its errors (Student),
    and every five readings of the 30 show two thirds of it, as a level that is drawn anew does not. The errors are
    widened by the `Spread` of the readings before these 30, so that a shift does not hide itself. The next alarm takes
    twice as many readings.
    """

    def __init__(self) -> None:
        # Of each reading: the difference, the same in errors, and what of this is beyond the tolerance.
        self._last = deque[tuple[float, float, float]](maxlen=_COMPARED)
        self._spread, self._since, self._fewest = Spread(2), 0, _COMPARED

    def add(self, its: Deviation) -> bool:
        """Whether the two have differed for good, with this reading of one of them."""
        if len(self._last) == _COMPARED:
            _, before, _ = self._last[0]
            self._spread.add([before, -before])
        deviate = min(max(its.deviate, -_MOST_ERRORS), _MOST_ERRORS)
        beyond = max(1 - its.tolerance / abs(its.difference), 0.0) if its.difference else 0.0
        self._last.append((its.difference, deviate, deviate * beyond))
        self._since += 1
        if self._since < self._fewest:
            return False
        differences, _, far = zip(*self._last, strict=True)
        mean, length = fmean(differences), _COMPARED // _PARTS
        parts = [fmean(differences[start : start + length]) for start in range(0, _COMPARED, length)]
        lasts = all(part * mean > _SHOWN * mean**2 for part in parts)
        spread, freedom = self._spread.of(0)
        if not lasts or normal_of_student(abs(fmean(far)) * math.sqrt(_COMPARED) / spread, freedom) < _FAR:
            return False
        self._since, self._fewest = 0, 2 * self._fewest
        return True


#: Readings kept; degrees of freedom of the prior variance of 1 over a stretch of them, where nothing shows that ranks
#: wander; chance that the stretch of a healthy rank is odd; readings up to a false alarm of any rank.
_PAST, _BELIEF_IN_STRETCH, _CHANCE, _READINGS_PER_FALSE_ALARM = 256, 48.0, 1.8e-4, 5_000


class Shifts:
    """Detect a lasting shift of one rank against the others: one `Cusum` a rank, over readings.

    Where the ranks wander, any of them is off for a while, and early readings do not show by how much. So a rank whose
    sum has reached its threshold is named only if it is odd among the others: over the readings that made up the sum,
    its mean is further from theirs than theirs are from one another (Student, Bonferroni over the ranks). How far
    theirs are from one another is believed to follow from their errors as long as `Spread` shows nothing else: where
    ranks do not wander, a small shift is found soon; where they do, only the ranks themselves show how far. A rank is
    named again where it is odd over a stretch twice as long. Two ranks are judged by `TwoRanks`.

    Attributes:
        worst: the most unusual rank of the last reading; None before the first.
    """

    def __init__(self) -> None:
        self._cusums: dict[int, Cusum] = {}
        self._ranks = list[int]()
        self._spread, self._two = Spread(0), TwoRanks()
        self._past = deque[list[float]](maxlen=_PAST)
        self._named: dict[int, int] = {}
        self.worst: Deviation | None = None

    def add(self, reading: Sequence[Deviation], ranks: int) -> Deviation | None:
        """The rank that has shifted, with its numbers in this reading; None while none has.

        A rank that is off moves "the others" of every other rank too, so that only the one furthest off is named, and
        all start again. Two ranks are equally far from each other: the higher one is named.

        Args:
            reading: the ranks that could be compared.
            ranks: how many there are.
        """
        named = [each.rank for each in reading]
        if named != self._ranks:
            self._spread, self._two, self._ranks = Spread(len(named)), TwoRanks(), named
            self._past.clear()
        if len(reading) == 2:
            self.worst = max(reading, key=lambda each: each.difference)
            return self.worst if self._two.add(reading[0]) else None
        if all(each.error for each in reading):
            self._past.append([each.deviate for each in reading])
            self._spread.add(self._past[-1])
        pairs = zip(reading, map(self._spread.of, range(len(named))), strict=True)
        reading = [replace(each, spread=its, freedom_of_spread=freedom) for each, (its, freedom) in pairs]
        self.worst = max(reading, key=lambda each: abs(each.unusual))
        shifted = []
        for place, each in enumerate(reading):
            # Each rank adds its own false alarms.
            if each.rank not in self._cusums:
                self._cusums[each.rank] = Cusum(_READINGS_PER_FALSE_ALARM * ranks)
            if self._cusums[each.rank].add(each.unusual) and self._is_odd(place, each):
                shifted.append(each)
        if not shifted:
            return None
        furthest = max(shifted, key=lambda each: (round(self._cusums[each.rank].level, 6), each.difference))
        self._named[furthest.rank] = min(self._cusums[furthest.rank].length, _PAST // 2)
        self._cusums.clear()
        return furthest

    def _is_odd(self, place: int, its: Deviation) -> bool:
        """Whether the rank is the odd one over the readings in which its sum grew."""
        rows = list(self._past)[-self._cusums[its.rank].length :]
        if its.error == 0 or not rows:
            return True
        if len(rows) < 2 * self._named.get(its.rank, 0):
            return False
        sums = [sum(column) / math.sqrt(len(rows)) for column in zip(*rows, strict=True)]
        others = sums[:place] + sums[place + 1 :]
        belief = max(_BELIEF_IN_STRETCH / its.spread**6, 1.0)
        freedom = belief + len(others) - 1
        # A difference between a rank and the mean of all others has more variance than one rank's mean.
        share = len(sums) / len(others)
        squares = sum((each - fmean(others)) ** 2 for each in others) / share
        spread = max(math.sqrt((belief + squares) / freedom), its.spread)
        odd = NormalDist().inv_cdf(1 - _CHANCE / (2 * len(sums)))
        return abs(normal_of_student(sums[place] / spread, freedom)) > odd


#: Added to messages about two ranks, where each is as far from the other.
OF_TWO = "; with two ranks it is unknown which is the odd one"
