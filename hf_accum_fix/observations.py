"""What was observed in the training runs of this process, kept for report()."""

from __future__ import annotations

from collections.abc import Mapping
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


def clear() -> None:
    """Forget everything recorded."""
    with _LOCK:
        _RUNS.clear()
