"""An alarm, and how often it is repeated."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from hf_accum_fix.monitor.ranks import Ranks, TorchRanks

logger = logging.getLogger("hf_accum_fix.monitor")


@dataclass(frozen=True)
class Alarm:
    """Something is wrong with this run.

    Attributes:
        kind: kebab-case name of the symptom and of the rank to blame, if any; alarms of one kind count as the same.
        message: what was found, where, and what to look at.
    """

    kind: str
    message: str


class Streak:
    """Readings in a row in which the same rank is to blame.

    Args:
        wanted: so many make an alarm; then the count begins anew.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._rank, self._times = -1, 0

    def completed_by(self, rank: int, *, to_blame: bool) -> bool:
        """Whether this reading, in which that rank stands out, is the last one wanted."""
        self._times = (self._times + 1 if rank == self._rank else 1) if to_blame else 0
        self._rank = rank
        completed = self._times >= self._wanted
        if completed:
            self._times = 0
        return completed


class Alarms:
    """Log alarms as warnings, on rank 0, each kind at its 1st, 2nd, 4th, 8th ... time.

    Args:
        ranks: the ranks; None: torch.distributed.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or TorchRanks()
        self._times: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Alarms so far, logged or not; the same on every rank."""
        return self._times.total()

    def state_dict(self) -> dict[str, int]:
        """How often each kind came."""
        return dict(self._times)

    def load_state_dict(self, times: dict[str, int]) -> None:
        """Go on counting from there."""
        self._times = Counter(times)

    def say(self, alarm: Alarm | None) -> None:
        """Count the alarm and log it if it is due; None is no alarm."""
        if alarm is None:
            return
        self._times[alarm.kind] += 1
        times = self._times[alarm.kind]
        if self._ranks.rank == 0 and times & (times - 1) == 0:
            logger.warning("%s: %s%s", alarm.kind, alarm.message, "" if times == 1 else f" (time {times})")
