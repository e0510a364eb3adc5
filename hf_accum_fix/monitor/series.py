"""One run as it was logged: numbers over its steps, collected row by row. Imports nothing but the errors."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any

from hf_accum_fix.errors import AccumFixError

#: Prefix of the monitors' names in a log.
PREFIX = "hf_accum_fix/"
#: Name of the loss of a guess with all classes equally likely, ln(classes).
GUESS = f"{PREFIX}loss_of_a_guess"
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
#: Most points of a number; most numbers; largest step; most letters of a number in quotes.
_MOST, _MOST_NAMES, _LAST_STEP, _LETTERS = 20_000, 1_000, 1e15, 32
#: A loss is hardly ever the same negative whole number this often; -1 is what a stage without a loss reports.
_LEAST_TIMES, _LEAST_TIMES_OF_MINUS_ONE = 3, 2
#: Values that are no loss, which a mean would hide.
_NO_LOSS = (0.0, -1.0)
#: Logs, and largest distances between two losses, after which a loss that is not there has stopped.
_LOGS_WITHOUT, _DISTANCES = 3, 2


class LogsError(AccumFixError):
    """There are no logs to read, or no picture could be drawn of them."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    r"""The text with control characters spelled out, as ``\x1b``."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@dataclass(frozen=True)
class Series:
    """One logged number over a run.

    Attributes:
        steps: optimizer steps, in the order they were logged.
        values: as many.
    """

    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, keep: Callable[[float], bool]) -> Series:
        """Those of its values, and their steps, that are to be kept."""
        return _series([(step, value) for step, value in zip(self.steps, self.values, strict=True) if keep(value)])


@dataclass(frozen=True)
class Run:
    """One run's logs.

    Attributes:
        name: where they were found, and which line of a sweep; printable.
        series: by the name they were logged under (TensorBoard's ``train/`` taken off); printable.
        left_out: the lines that could not be read, in words; empty: none.
        logs_a_point: logs in a point of the series: above 1 where the log is long.
        goes_on_to: last step of a log that goes on without a loss; nan: the loss does not stop before the log.
    """

    name: str
    series: Mapping[str, Series]
    left_out: str = ""
    logs_a_point: int = 1
    goes_on_to: float = math.nan


class Columns:
    """The numbers of a log's rows, as they come; 16 bytes each.

    Up to 20,000 logs are the points of a series. Of a longer log, means of 2, 4, 8 ... are, as if the run had logged
    less often; losses that are not finite, 0 or -1 stay points of their own.
    """

    def __init__(self) -> None:
        self.rows, self._bad, self._first_bad = 0, 0, 0
        self._points: dict[str, tuple[array[float], array[float]]] = {}
        self._blanks = Counter[str]()
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
            name = "" if key in _IGNORED else _name(key)
            if not name or (name not in self._points and len(self._points) >= _MOST_NAMES and name not in _LOSSES):
                continue
            steps, values = self._points.setdefault(name, (array("d"), array("d")))
            number = _number(value)
            if number is None:
                self._blanks[name] += 1
                continue
            self._blanks[name] = 0
            steps.append(step)
            values.append(number)

    def run(self, name: str) -> Run:
        """All so far.

        Raises:
            ValueError: if most rows could not be read.
        """
        left_out = f"{self._bad} of {self.rows} lines, the first is number {self._first_bad}" if self._bad else ""
        if 2 * self._bad > self.rows:
            raise ValueError(left_out.replace(",", " could not be read,", 1))
        series = {name: _in_order(*points) for name, points in self._points.items() if points[0]}
        longest, logs = max(map(len, series.values()), default=0), 1
        while longest > _MOST * logs:
            logs *= 2
        series = {name: _thinned(name, its, logs) if logs > 1 else its for name, its in series.items()}
        loss_name = ""
        for wanted, others in _ALIASES.items():
            found = next((other for other in (wanted, *others) if other in series), None)
            if found is not None:
                series[wanted] = series[found]
                loss_name = found if wanted == "loss" else loss_name
        goes_on_to = self._goes_on_to(loss_name, series) if loss_name else math.nan
        return Run(printable(name), series, left_out, logs, goes_on_to)

    def _goes_on_to(self, loss_name: str, series: Mapping[str, Series]) -> float:
        """The last step of a log whose loss stops before it: empty, or not there next to what was logged with it."""
        steps = series[loss_name].steps
        wide = max((after - before for before, after in pairwise(steps)), default=steps[-1])
        found = [self._step] if self._blanks[loss_name] >= _LOGS_WITHOUT else []
        for name, its in series.items():
            if name in _LOSSES or name.startswith("eval") or 2 * len({*steps}.intersection(its.steps)) < len(steps):
                continue
            if sum(step > steps[-1] for step in its.steps) >= _LOGS_WITHOUT:
                found.append(its.steps[-1])
        return max((step for step in found if step > steps[-1] + _DISTANCES * wide), default=math.nan)


@lru_cache(maxsize=2 * _MOST_NAMES)
def _name(key: str) -> str:
    return printable(key.removeprefix("train/").replace("eval/", "eval_"))


def _series(points: list[tuple[float, float]]) -> Series:
    return Series(*zip(*points, strict=True)) if points else Series()


def _in_order(steps: array[float], values: array[float]) -> Series:
    """By the steps; of a run that went back to a checkpoint, what came last."""
    if all(before <= after for before, after in pairwise(steps)):
        return Series(tuple(steps), tuple(values))
    return _series(sorted(dict(zip(steps, values, strict=True)).items()))


def _thinned(name: str, its: Series, logs: int) -> Series:
    """Means of so many logs, of a count of alarms the last; what a mean would hide stays a point of its own."""
    found, hidden = [], _NO_LOSS if name in _LOSSES else ()
    for first in range(0, len(its), logs):
        usual = []
        for step, value in zip(its.steps[first : first + logs], its.values[first : first + logs], strict=True):
            if math.isfinite(value) and value not in hidden:
                usual.append((step, value))
            else:
                found.append((step, value))
        if usual:
            values = [value for _, value in usual]
            found.append((usual[-1][0], values[-1] if name.endswith("_alarms") else fmean(values)))
    return _series(sorted(found, key=lambda point: point[0]))


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


@dataclass(frozen=True)
class Sentinel:
    """A number that means "no loss" in a log: torchtitan's stages before the last report -1.0.

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
