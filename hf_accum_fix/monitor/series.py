"""One run as it was logged: numbers over its steps. Imports nothing but the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_accum_fix.errors import AccumFixError

#: Prefix of the monitors' names in a log.
PREFIX = "hf_accum_fix/"
#: Name of the loss of a guess with all classes equally likely, ln(classes).
GUESS = f"{PREFIX}loss_of_a_guess"


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

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, keep: Callable[[float], bool]) -> Series:
        """Those of its values, and their steps, that are to be kept."""
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if keep(value)]
        return Series(tuple(step for step, _ in kept), tuple(value for _, value in kept))


@dataclass(frozen=True)
class Run:
    """One run's logs.

    Attributes:
        name: where they were found, and which line of a sweep; printable.
        series: by the name they were logged under (TensorBoard's ``train/`` taken off); printable.
        left_out: the lines that could not be read, in words; empty: none.
        logs_a_point: logs in a point of the series: above 1 where the log is too long to be kept.
        goes_on_to: last step of a log that goes on without a loss; nan: the loss does not stop before the log.
    """

    name: str
    series: Mapping[str, Series]
    left_out: str = ""
    logs_a_point: int = 1
    goes_on_to: float = math.nan
