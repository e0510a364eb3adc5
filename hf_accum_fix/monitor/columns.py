"""The numbers in the rows of a log, by name, in bounded memory: a run of millions of rows takes some megabytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hf_accum_fix.monitor.series import Run, Series, printable

#: Keys that hold the optimizer step of a row.
STEP_KEYS: tuple[str, ...] = ("step", "_step", "Step", "current_steps", "global_step", "iteration")
STEP_KEYS += ("trainer/global_step", "train/global_step", "epoch")
_IGNORED = {"total_flos", *STEP_KEYS} - {"epoch"}
#: Other names of the numbers we read; the first that exists counts.
_ALIASES = {
    "loss": ("loss_metrics/global_avg_loss", "train_loss_step", "train_loss", "loss_step", "Loss/train", "lm loss"),
    "grad_norm": ("grad norm", "gradient_norm"),
    "learning_rate": ("lr", "learning rate"),
}
_LOSSES = {"loss", *_ALIASES["loss"]}
#: Most points of a number, of which unusual ones; most numbers; largest step; most letters of a number in quotes.
_MOST, _MOST_UNUSUAL, _MOST_NAMES, _LAST_STEP, _LETTERS = 20_000, 2_000, 1_000, 1e15, 32
#: Rows from one look at their number to the next, while each is a point.
_A_LOOK = 256
#: Values that are no loss, which a mean would hide.
_NO_LOSS = (0.0, -1.0)
#: Logs, and largest distances between two losses, after which a loss that is not there has stopped.
_LOGS_WITHOUT, _DISTANCES = 3, 2


@dataclass
class _Points:
    """One number: the row, step and value of each point; the logs of the unfinished one, and rows without since."""

    name: str
    rows: array[int] = field(default_factory=lambda: array("q"))
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    total: float = 0.0
    logs: int = 0
    unusual: int = 0
    blanks: int = 0

    def __post_init__(self) -> None:
        self.is_loss, self.is_count = self.name in _LOSSES, self.name.endswith("_alarms")

    def append(self, row: int, step: float, value: float) -> None:
        self.rows.append(row)
        self.steps.append(step)
        self.values.append(value)

    def add(self, row: int, step: float, value: float) -> None:
        """A log of the unfinished point, whose value is the mean, of a count the last; an unusual one is a point."""
        finite = -math.inf < value < math.inf
        if not finite or (self.is_loss and value in _NO_LOSS):
            if self.unusual < _MOST_UNUSUAL:
                self.unusual += 1
                self.append(row, step, value)
                return
            if not finite:
                return
        if self.is_count:
            self.total, self.logs = value, 1
        else:
            self.total += value
            self.logs += 1

    def finish(self, row: int, step: float) -> None:
        """The unfinished point ends with this row."""
        if self.logs:
            self.append(row, step, self.total / self.logs)
            self.total, self.logs = 0.0, 0

    def thin_out(self, rows_a_point: int) -> None:
        """Put the points of so many rows together, but for those that a mean would hide."""
        rows, steps, values = self.rows, self.steps, self.values
        self.rows, self.steps, self.values, self.unusual = array("q"), array("d"), array("d"), 0
        last, last_step = 0, 0.0
        for row, step, value in zip(rows, steps, values, strict=True):
            if (row - 1) // rows_a_point != (last - 1) // rows_a_point:
                self.finish(last, last_step)
            self.add(row, step, value)
            last, last_step = row, step
        self.finish(last, last_step)


class Columns:
    """The numbers of a log's rows, as they come.

    Up to 20,000 rows are kept as they are. Of a longer log, as many rows as needed are one point, their mean, as if the
    run had logged less often; losses that are not finite, 0 or -1 stay points of their own.
    """

    def __init__(self) -> None:
        self.rows, self._rows_a_point, self._rows_to_a_look = 0, 1, _A_LOOK
        self._bad, self._first_bad = 0, 0
        self._points: dict[str, _Points] = {}
        self._by_key: dict[str, _Points | None] = {}
        self._step = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """A row, by its keys; None where a cell is empty; without any where it could not be read."""
        self.rows += 1
        at = next((row[key] for key in STEP_KEYS if key in row), self.rows)
        step = _number(at) if isinstance(at, (int, float)) else None
        if not row or step is None or not abs(step) <= _LAST_STEP:
            self._bad += 1
            self._first_bad = self._first_bad or self.rows
            return
        self._step = step
        for key, value in row.items():
            points = self._by_key[key] if key in self._by_key else self._named(key)
            if points is None:
                continue
            number = value if type(value) is float else _number(value)
            if number is None:
                points.blanks += 1
                continue
            points.blanks = 0
            if self._rows_a_point == 1:
                points.append(self.rows, step, number)
            else:
                points.add(self.rows, step, number)
        if self.rows % self._rows_to_a_look == 0:
            self._finish()

    def run(self, name: str) -> Run:
        """All so far.

        Raises:
            ValueError: if most rows could not be read.
        """
        if 2 * self._bad > self.rows:
            raise ValueError(
                f"{self._bad} of {self.rows} lines could not be read, the first is number {self._first_bad}"
            )
        series = {name: its for name, points in self._points.items() if len(its := self._series(points))}
        loss_name = ""
        for wanted, others in _ALIASES.items():
            found = next((other for other in (wanted, *others) if other in series), None)
            if found is not None:
                series[wanted] = series[found]
                loss_name = found if wanted == "loss" else loss_name
        left_out = f"{self._bad} of {self.rows} lines, the first is number {self._first_bad}" if self._bad else ""
        goes_on_to = self._goes_on_to(loss_name, series) if loss_name else math.nan
        return Run(printable(name), series, left_out, self._rows_a_point, goes_on_to)

    def _named(self, key: str) -> _Points | None:
        """The points of a key; None where it is no number to keep."""
        name = printable(key.removeprefix("train/").replace("eval/", "eval_"))
        full = len(self._points) >= _MOST_NAMES and name not in _LOSSES
        points = None
        if key not in _IGNORED and (name in self._points or not full):
            points = self._points.setdefault(name, _Points(name))
        if len(self._by_key) < 2 * _MOST_NAMES:
            self._by_key[key] = points
        return points

    def _finish(self) -> None:
        longest = 0
        for points in self._points.values():
            points.finish(self.rows, self._step)
            longest = max(longest, len(points.rows) - points.unusual)
        if longest > _MOST:
            self._rows_a_point = self._rows_to_a_look = 2 * self._rows_a_point
            for points in self._points.values():
                points.thin_out(self._rows_a_point)

    def _series(self, points: _Points) -> Series:
        steps, values = points.steps, points.values
        if points.logs:
            steps = steps + array("d", [self._step])
            values = values + array("d", [points.total / points.logs])
        return _in_order(steps, values)

    def _goes_on_to(self, loss_name: str, series: Mapping[str, Series]) -> float:
        """The last step of a log whose loss stops before it: empty, or not there beside what was logged with it."""
        steps = series[loss_name].steps
        with_loss = set(steps)
        wide = max((after - before for before, after in pairwise(steps)), default=steps[-1])
        until = steps[-1] + _DISTANCES * wide
        found = [self._step] if self._points[loss_name].blanks >= _LOGS_WITHOUT else []
        for name, its in series.items():
            if name in _LOSSES or name.startswith("eval") or 2 * len(with_loss.intersection(its.steps)) < len(steps):
                continue
            if sum(step > steps[-1] for step in its.steps) >= _LOGS_WITHOUT:
                found.append(its.steps[-1])
        return max((step for step in found if step > until), default=math.nan)


def _in_order(steps: Sequence[float], values: Sequence[float]) -> Series:
    """By the steps; of a run that went back to a checkpoint, what came last."""
    if all(before <= after for before, after in pairwise(steps)):
        return Series(tuple(steps), tuple(values))
    last = dict(zip(steps, values, strict=True))
    return Series(tuple(sorted(last)), tuple(last[step] for step in sorted(last)))


def _number(value: Any) -> float | None:
    """As a float, inf where it is a whole number larger than any float; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and len(value) > _LETTERS:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        return None
