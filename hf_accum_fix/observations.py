"""The observations of this process's training runs, for report()."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

_LOCK = Lock()
_RUNS: list[dict[str, Any]] = []


def record(run: Mapping[str, Any]) -> None:
    """Append the observations of one run; the mapping is copied, its values must be JSON-serialisable."""
    with _LOCK:
        _RUNS.append(dict(run))


def amend(run: Mapping[str, Any]) -> None:
    """Update the observations of the latest run; without one, do nothing."""
    with _LOCK:
        if _RUNS:
            _RUNS[-1].update(run)


def recorded() -> tuple[dict[str, Any], ...]:
    """Copies of the observations of all runs, oldest first."""
    with _LOCK:
        return tuple(dict(run) for run in _RUNS)


def clear() -> None:
    """Delete all observations."""
    with _LOCK:
        _RUNS.clear()
