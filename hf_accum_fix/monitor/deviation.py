"""How far a rank is from the others, and when that is for good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_accum_fix.monitor.robust import Cusum, normal_of_student


@dataclass(frozen=True)
class Deviation:
    """How far one rank is from the mean of the others in one reading.

    Attributes:
        rank: its number.
        difference: its value minus that of the others, in the unit of what is compared.
        unusual: the same in its standard errors (a normal deviate).
    """

    rank: int
    difference: float
    unusual: float

    @classmethod
    def of(cls, rank: int, difference: float, error: float, freedom: float, tolerance: float) -> Deviation:
        """That of a difference whose standard error is told from so many degrees of freedom (Student).

        Args:
            rank: its number.
            difference: its value minus that of the others.
            error: standard error of that, in the same unit.
            freedom: degrees of freedom of the error.
            tolerance: absolute difference that counts as none; what is beyond it is held against the error.
        """
        beyond = max(abs(difference) - tolerance, 0.0)
        if beyond == 0:
            return cls(rank, difference, 0.0)
        t = math.copysign(beyond / error if error else math.inf, difference)
        return cls(rank, difference, normal_of_student(t, freedom))


class Shifts:
    """Says when a rank has shifted against the others for good: one `Cusum` a rank, over readings.

    Args:
        readings_per_false_alarm: mean number of readings up to a false alarm of any rank.
    """

    def __init__(self, readings_per_false_alarm: float) -> None:
        self._readings_per_false_alarm = readings_per_false_alarm
        self._cusums: dict[int, Cusum] = {}

    def add(self, reading: Sequence[Deviation], ranks: int) -> Deviation | None:
        """The rank that has shifted, as it is in this reading; None while none has.

        A rank that is off moves "the others" of every other rank too, so that only the one furthest off is named, and
        all start again.

        Args:
            reading: the ranks that could be compared.
            ranks: how many there are.
        """
        shifted = []
        for each in reading:
            # Any of the ranks may alarm falsely.
            cusum = self._cusums.setdefault(each.rank, Cusum(self._readings_per_false_alarm * ranks))
            if cusum.add(each.unusual):
                shifted.append(each)
        if not shifted:
            return None
        # Two ranks are equally far from each other: the one above is named.
        named = max(shifted, key=lambda each: (round(self._cusums[each.rank].level, 6), each.difference))
        self._cusums.clear()
        return named


#: What is added where there are two ranks: each is as far from the other.
OF_TWO = "; of two ranks it cannot be told which is the odd one"
