"""Pipeline parallelism: only the last stage knows the loss, and the others log a placeholder number.

Symptom: the dashboard shows -1, or half the loss. torchtitan's stages without a loss report -1.0, which enters every
average over ranks, and is all that a view of rank 0 shows.

In training, do not update the meter where there is no loss; the reading has the last stage's loss on every rank:

    losses = []
    schedule.step(*inputs, target=target, losses=losses)       # torch.distributed.pipelining; filled on the last stage
    for loss in losses:
        meter.update(loss, items=...)                          # no loss, no call (or update(None))
    meter.read().mean                                          # every rank, rank 0 too

For logs that exist already: `without_sentinels`. An average over sentinels cannot be corrected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

#: A loss is hardly ever the same negative whole number this often; -1 is what a stage without a loss reports.
_LEAST_TIMES, _LEAST_TIMES_OF_MINUS_ONE = 3, 2


@dataclass(frozen=True)
class Sentinel:
    """A number that means "no loss" in a log.

    Attributes:
        value: the number.
        places: its positions.
        count: of all values of the log.
    """

    value: float
    places: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        """A message for the reader of the log."""
        if len(self.places) == self.count:
            return (
                f"all {self.count} losses are {self.value:g}: this is the log of a rank that has no loss (a pipeline "
                "stage before the last); read the log of a rank of the last stage, the highest rank as a rule, or let "
                "a LossMeter bring its loss to rank 0"
            )
        verb = "is" if len(self.places) == 1 else "are"
        return (
            f"{len(self.places)} of {self.count} losses {verb} {self.value:g}, which means a rank without a loss "
            "(a pipeline stage before the last); left out here"
        )


def without_sentinels(losses: Sequence[float]) -> tuple[list[float], Sentinel | None]:
    """The real losses, and the sentinel that was left out; None where there was none.

    A sentinel is -1, once where all others are above zero, else twice, or another negative whole number three times,
    digit for digit, that no other value is near: losses that may be negative do not repeat themselves exactly.
    """
    repeated = Counter(loss for loss in losses if loss < 0 and float(loss).is_integer())
    for value, times in repeated.most_common(1):
        near = any(0 < abs(loss - value) < 0.5 for loss in losses)
        alone = len(losses) > 1 and all(loss > 0 or loss == value for loss in losses)
        least = _LEAST_TIMES if value != -1 else 1 if alone else _LEAST_TIMES_OF_MINUS_ONE
        if times >= least and not near:
            places = tuple(place for place, loss in enumerate(losses) if loss == value)
            kept = [loss for loss in losses if loss != value]
            return kept, Sentinel(value, places, len(losses))
    return list(losses), None
