"""One run as it was logged: numbers over its steps, collected row by row. Imports nothing but the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
#: Largest number that we compute with, else it is infinite: squares overflow.
_LARGEST = 1e60


class LogsError(AccumFixError):
    """There are no logs to read."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    r"""The text with control characters spelled out, as ``\x1b``."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@dataclass(frozen=True)
class Series:
    """One logged number over a run."""

    steps: tuple[float, ...] = ()  # optimizer steps, increasing
    values: tuple[float, ...] = ()  # as many

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, keep: Callable[[float], bool]) -> Series:
        """Those of its values, and their steps, that are to be kept."""
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if keep(value)]
        return Series(*zip(*kept, strict=True)) if kept else Series()


@dataclass(frozen=True)
class Run:
    """One run's logs."""

    name: str  # where they were found; printable
    series: Mapping[str, Series]  # by the name they were logged under (TensorBoard's ``train/`` taken off); printable
    left_out: str = ""  # the lines that could not be read, in words; empty: none


def run_of(name: str, rows: Iterable[Any], value: str) -> Run:
    """The numbers of a log's rows; of a run that went back to a checkpoint, what came last.

    Args:
        name: of the run.
        rows: each by its keys; None where a cell is empty; no mapping, or without keys, where it could not be read.
        value: the name of TensorBoard's ``Value``.

    Raises:
        ValueError: if most rows could not be read.
    """
    count, bad, points = 0, 0, dict[str, dict[float, float]]()
    for count, row in enumerate(rows, start=1):
        step = number(next((row[key] for key in STEP_KEYS if key in row), count)) if isinstance(row, dict) else None
        if not row or step is None or not math.isfinite(step):
            bad += 1
            continue
        for key, cell in row.items():
            its = None if key in _IGNORED else number(cell)
            if its is not None:
                points.setdefault(printable(key.removeprefix("train/").replace("eval/", "eval_")), {})[step] = its
    words = f"{bad} of {count} lines"
    if 2 * bad > count:
        raise ValueError(f"{words} could not be read")
    series = {key: Series(*zip(*sorted(its.items()), strict=True)) for key, its in points.items()}
    if "Wall time" in series and "Value" in series:
        series.setdefault(printable(value), series.pop("Value"))
    for wanted, others in _ALIASES.items():
        found = next((key for key in (wanted, *others) if key in series), None)
        if found is not None:
            series[wanted] = series[found]
    return Run(printable(name), series, words if bad else "")


def number(value: Any) -> float | None:
    """As a float, infinite where it is beyond 1e60; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except ValueError:
        return None
    return math.copysign(math.inf, found) if abs(found) > _LARGEST else found


def without_sentinels(losses: Sequence[float]) -> tuple[list[float], int]:
    """The losses without -1, which a pipeline's stages before the last report, and how many were left out.

    None are where other losses lie around -1.
    """
    near = any(0 < abs(loss + 1) < 0.5 for loss in losses)
    kept = [loss for loss in losses if near or loss != -1]
    return kept, len(losses) - len(kept)
