"""What a loss does with the items of its micro-batch: a value for data, and words for people."""

from __future__ import annotations

from enum import Enum


class Reduction(str, Enum):
    """What a loss does with the items of its micro-batch."""

    NUMBER = "number"
    INTEGER = "integer"
    MEAN = "mean"
    SUM = "sum"
    PLAIN = "plain"

    @property
    def words(self) -> str:
        """The same as the predicate of a sentence about a loss."""
        return _PREDICATES[self.value]


_PREDICATES = {
    "number": "divides by the target count it is given",
    "integer": "divides by the target count it is given, as an integer",
    "mean": "is the mean over its own targets",
    "sum": "is a sum",
    "plain": "is averaged over micro-batches",
}
