"""The base of the monitors, readings in and alarms out; an alarm, how often it is repeated, and what else it does.

Imports no torch by itself.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from hf_accum_fix.errors import AccumFixError

if TYPE_CHECKING:
    from torch import Tensor

    from hf_accum_fix.monitor.ranks import Ranks

R = TypeVar("R")

logger = logging.getLogger("hf_accum_fix.monitor")

#: The ranks at the end of an alarm's name.
_RANKS = re.compile(r"-\d+(, \d+)*$")


@dataclass(frozen=True)
class Alarm:
    """Something is wrong with this run; or, an observation, is a fault or meant so, which only its owner knows.

    Attributes:
        kind: kebab-case name of the symptom and of the rank at fault, if any; alarms with one name count as the same.
        message: what was found, where, and what to look at.
        observation: it is logged, but neither counted nor passed to ``on_alarm``.
    """

    kind: str
    message: str
    observation: bool = False


OnAlarm = Callable[[Alarm], Any] | Literal["log", "stop", "raise"]


class MonitorAlarmError(AccumFixError):
    """An alarm that ends the run; raised on every rank at the same log."""


class Gathered(Generic[R]):
    """A monitor whose reading is made of one row of numbers from each rank."""

    _ranks: Ranks

    def row(self) -> Tensor:
        """This rank's numbers since the last reading: [numbers], float64 on the CPU, as many on every rank."""
        raise NotImplementedError

    def reading(self, table: Tensor) -> R:
        """The reading, from the rows of all ranks: [ranks, numbers]."""
        raise NotImplementedError

    def read(self) -> R:
        """What was measured since the last reading: one device sync at most, one collective of a row a rank."""
        from hf_accum_fix.monitor.ranks import by_rank

        return self.reading(by_rank(self._ranks, self.row()))

    def judge(self, reading: R) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        return None

    def logged(self, reading: R) -> dict[str, float]:
        """What to log of a reading, by name; nan: no number yet."""
        return {}


class Alarms:
    """Log alarms as warnings, on rank 0, each kind at its 1st, 2nd, 4th, 8th ... time.

    Args:
        ranks: the ranks; None: torch.distributed.
        on_alarm: "log" alone; "stop" sets `stop`; "raise" raises; a callable gets every alarm, on every rank.

    Attributes:
        stop: an alarm asks to stop the run; the same on every rank.

    Raises:
        ValueError: if ``on_alarm`` is something else.
    """

    def __init__(self, ranks: Ranks | None = None, on_alarm: OnAlarm = "log") -> None:
        if ranks is None:
            from hf_accum_fix.monitor.ranks import TorchRanks

            ranks = TorchRanks()
        if not callable(on_alarm) and on_alarm not in ("log", "stop", "raise"):
            raise ValueError(f"got {on_alarm!r}; expected a callable, 'log', 'stop' or 'raise' for on_alarm")
        self._ranks, self.on_alarm, self.stop = ranks, on_alarm, False
        self._times, self._observed = Counter[str](), Counter[str]()

    @property
    def count(self) -> int:
        """Alarms so far, logged or not; the same on every rank."""
        return self._times.total()

    def counters(self) -> dict[str, float]:
        """Alarms so far: all of them, and by their names without the ranks."""
        found = Counter({"all_alarms": self.count})
        for kind, times in self._times.items():
            found[_RANKS.sub("", kind).replace("-", "_") + "_alarms"] += times
        return {name: float(times) for name, times in found.items()}

    def say(self, alarm: Alarm | None, step: int | None = None) -> None:
        """Count the alarm, log it if it is due, and run `on_alarm`; None is no alarm.

        Args:
            alarm: the alarm.
            step: its step; None: unknown.

        Raises:
            MonitorAlarmError: where ``on_alarm`` is "raise".
        """
        if alarm is None:
            return
        if step is not None:
            alarm = replace(alarm, message=f"step {step}: {alarm.message}")
        counter = self._observed if alarm.observation else self._times
        counter[alarm.kind] += 1
        times = counter[alarm.kind]
        if self._ranks.rank == 0 and times & (times - 1) == 0:
            kind = f"observed, no alarm: {alarm.kind}" if alarm.observation else alarm.kind
            logger.warning("%s: %s%s", kind, alarm.message, "" if times == 1 else f" (time {times})")
        if alarm.observation:
            return
        if callable(self.on_alarm):
            self.on_alarm(alarm)
        self.stop = self.stop or self.on_alarm == "stop"
        if self.on_alarm == "raise":
            raise MonitorAlarmError(f"{alarm.kind}: {alarm.message}")
