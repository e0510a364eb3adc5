"""The reduction of a loss over the items of its micro-batch."""

from __future__ import annotations

from enum import Enum


class Reduction(str, Enum):
    """What a loss does with the items of its micro-batch."""

    NUMBER = "number"
    MEAN = "mean"
    SUM = "sum"
    PLAIN = "plain"
    STOCK = "stock"
    WINDOW = "window"

    @property
    def words(self) -> str:
        """The predicate of a sentence about the loss."""
        return _PREDICATES[self.value]


_PREDICATES = {
    "number": "divides by num_items_in_batch",
    "mean": "is the mean over its own items",
    "sum": "is a sum",
    "plain": "is averaged over micro-batches",
    "stock": "stays as the trainer scales it",
    "window": "is computed over all samples of a step",
}
