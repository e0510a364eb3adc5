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
from typing import Any

from hf_accum_fix.monitor.alarms import Alarm

#: Ratio of two batches that count as another; of two learning rates that count as the same.
_ANOTHER, _SAME_RATE = 1.25, 1.15


class BatchSchedule:
    """Compare the first log of a resumed run with the last one before it."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
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
        before, self._last = self._last, {"items": items, "rate": rate, "ranks": float(ranks)}
        resumed, self._resumed = self._resumed, False
        if not resumed or not before.get("items"):
            return None
        times = items / before["items"]
        rates = rate / before["rate"] if before.get("rate") else math.nan
        # Both rules are in use: in proportion, and by the root.
        adjusted = (
            any(abs(math.log(rates / rule)) < math.log(_SAME_RATE) for rule in (times, times**0.5))
            if (rates > 0)
            else False
        )
        if abs(math.log(times)) < math.log(_ANOTHER) or adjusted:
            return None
        return Alarm(
            "batch-changed",
            f"a step has {items:,.0f} items on {ranks} ranks, {times:.3g} times the {before['items']:,.0f} on "
            f"{before['ranks']:.0f} ranks before it was resumed, and the learning rate has not changed to match: keep "
            f"the global batch by accumulating {1 / times:.3g} times the micro-batches, or set learning rate, warm-up "
            "and total steps for the new one",
        )

    def state_dict(self) -> dict[str, float]:
        """Items, learning rate and ranks of the last log, for JSON."""
        return dict(self._last)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the next log with this one."""
        self._last, self._resumed = dict(state), True
