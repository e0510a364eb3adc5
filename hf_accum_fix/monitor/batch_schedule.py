"""A run that goes on with another global batch, and the learning rates of the old one.

Symptom: resumed on other ranks, a run learns more slowly, or diverges: its schedule counts steps, and a step has become
another number of items.

    schedule, alarms = BatchSchedule(), Alarms()
    schedule.load_state_dict(saved)                                          # of the run that is resumed
    ...
    alarms.say(schedule.judge(items / steps, rate, ranks=world_size))        # at every log
    saved = schedule.state_dict()
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from hf_accum_fix.monitor.alarms import Alarm

#: Ratio of two batches that count as another, on other ranks and on the same; of a batch to the largest and smallest of
#: the logs before; of two learning rates that count as the same; logs kept.
_ANOTHER, _ANOTHER_ON_THE_SAME, _OUTSIDE, _SAME_RATE, _KEPT = 1.25, 1.5, 1.1, 1.15, 20


class BatchSchedule:
    """Compare the first log of a resumed run with the last ones before it."""

    def __init__(self) -> None:
        self._items: list[float] = []
        self._rate, self._ranks = math.nan, 0
        self._resumed = False

    def judge(self, items: float, rate: float, ranks: int) -> Alarm | None:
        """The alarm that the first log after a resumption calls for, if any. Every rank judges alike.

        Args:
            items: mean of a global batch, over the steps since the last log.
            rate: learning rate now; nan where it is not known.
            ranks: data-parallel ranks.
        """
        if not 0 < items < math.inf:
            return None
        before, rate_before, ranks_before = self._items, self._rate, self._ranks
        self._items = [*before, items][-_KEPT:]
        self._rate, self._ranks = rate, ranks
        resumed, self._resumed = self._resumed, False
        if not resumed or not before:
            return None
        times = items / fmean(before)
        another = _ANOTHER if ranks != ranks_before else _ANOTHER_ON_THE_SAME
        usual = min(before) / _OUTSIDE < items < max(before) * _OUTSIDE
        # Of the batch in proportion, or by its root: both rules are in use.
        rates = rate / rate_before if rate_before else 0.0
        matches = rates > 0 and min(abs(math.log(rates / its)) for its in (times, times**0.5)) < math.log(_SAME_RATE)
        if usual or matches or abs(math.log(times)) < math.log(another):
            return None
        return Alarm(
            "batch-changed",
            f"a step has {items:,.0f} items on {ranks} ranks, {times:.3g} times the {fmean(before):,.0f} on "
            f"{ranks_before} ranks before it was resumed, and the learning rate has not changed to match: keep "
            f"the global batch by accumulating {1 / times:.3g} times the micro-batches, or set learning rate, warm-up "
            "and total steps for the new one",
        )

    def state_dict(self) -> dict[str, Any]:
        """Items, learning rate and ranks of the last logs, for JSON."""
        return {"items": list(self._items), "rate": self._rate, "ranks": self._ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the next log with these."""
        self._items = list(state.get("items", ()))
        self._rate, self._ranks = state.get("rate", math.nan), int(state.get("ranks", 0))
        self._resumed = True
