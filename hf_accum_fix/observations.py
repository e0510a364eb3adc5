"""What was observed in the training runs of this process, kept for report()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

_LOCK = Lock()
_RUNS: list[dict[str, Any]] = []


def record(run: Mapping[str, Any]) -> None:
    """Append one run's observations; the mapping is copied, its values must be JSON-able."""
    with _LOCK:
        _RUNS.append(dict(run))


def amend(run: Mapping[str, Any]) -> None:
    """Add to what was recorded last, of the run that is under way; without one nothing happens."""
    with _LOCK:
        if _RUNS:
            _RUNS[-1].update(run)


def recorded() -> tuple[dict[str, Any], ...]:
    """Copies of everything recorded in this process, oldest first."""
    with _LOCK:
        return tuple(dict(run) for run in _RUNS)


@dataclass
class Windows:
    """How many accumulation windows a training has opened, and how many of them were not exact.

    Attributes:
        opened: so far.
        inexact: found to be made in another way than observed.
        news: one was found since the other ranks were last told.
        recorded: the training is in the report already.
    """

    opened: int = 0
    inexact: int = 0
    news: bool = False
    recorded: bool = False
    _last_inexact: int = -1

    def note_inexact(self, number: int | None = None, windows: int = 1) -> None:
        """Take one that is not exact; noted twice, it counts once.

        Args:
            number: of the window, from 1; None: the last one opened.
            windows: so many, up to that one.
        """
        number = self.opened if number is None else number
        if number <= self._last_inexact:
            return
        self._last_inexact = number
        self.inexact += windows
        self.news = True
        if self.recorded:
            amend({"exact": False, "inexact_windows": self.inexact})

    @property
    def exact(self) -> int:
        """Windows that were exact, if the loss is."""
        return self.opened - self.inexact


def clear() -> None:
    """Forget everything recorded."""
    with _LOCK:
        _RUNS.clear()
