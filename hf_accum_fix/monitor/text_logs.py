"""Rows of numbers in logs, line by line: JSON, tables, what trainers print."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hf_accum_fix.monitor.series import STEP_KEYS

_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN))"
#: Colours of a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: torchtitan's "step: 5  loss: 2.1", nanoGPT's "iter 5: loss 2.1".
_STEP = re.compile(rf"\b(?:step:\s*(?=\d+\s+loss:)|iter (?=\d+: loss))(\d+):?\s+loss:?\s*{_NUMBER}")
_TIMM = re.compile(rf"\bTrain: (\d+) \[\s*(\d+)/(\d+) .*?Loss:\s*{_NUMBER}")
_MEGATRON = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|.*loss")
_TRAINER = re.compile(r"\{'(?:loss|eval_loss)': [^{}]*\}")
#: Other numbers, if they are printed: of torchtitan, and of timm.
_BESIDE = {
    "grad_norm": re.compile(rf"\bgrad_norm:\s*{_NUMBER}"),
    "memory_gib": re.compile(rf"\bmemory:\s*{_NUMBER}GiB"),
    "learning_rate": re.compile(rf"\bLR:\s*{_NUMBER}"),
}
#: What may stand between the cells of a table; most lines of a cell with line breaks.
_DELIMITERS, _LINES_OF_A_CELL = ",;\t", 100

Row = Mapping[str, Any]


class Lines(Protocol):
    """The rows of a log's lines, one after another."""

    def rows(self, line: str) -> Iterator[Row]:
        """The rows that this line completes; an empty one where it could not be read."""


class JsonLines:
    """An object a line."""

    def rows(self, line: str) -> Iterator[Row]:
        """Its object."""
        if not line.strip():
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = {}
        yield row if isinstance(row, dict) else {}


class CsvLines:
    """A table with a header; its cells are separated by commas, semicolons or tabs."""

    def __init__(self) -> None:
        self._header: list[str] = []
        self._delimiter = ","
        self._begun: list[str] = []

    def rows(self, line: str) -> Iterator[Row]:
        """Its cells as numbers, None where one is empty or no number; nothing for the header."""
        if not self._begun and not line.strip():
            return
        if not self._header:
            # Quoted names may hold any of them.
            bare = re.sub(r'"[^"]*"', "", line)
            self._delimiter = max(_DELIMITERS, key=bare.count)
        self._begun.append(line)
        text = "\n".join(self._begun)
        if text.count('"') % 2 and len(self._begun) < _LINES_OF_A_CELL:
            return
        self._begun = []
        try:
            cells = next(csv.reader(text.splitlines(True), delimiter=self._delimiter, skipinitialspace=True), [])
        except csv.Error:
            yield {}
            return
        if not self._header:
            self._header = [cell.strip() for cell in cells]
            return
        row = dict(self._numbers([(key, cell.strip()) for key, cell in zip(self._header, cells, strict=False)]))
        yield row if any(value is not None for value in row.values()) else {}

    def _numbers(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, float | None]]:
        """The cells as numbers; None where one is empty or no number, but for a step, which may have another name."""
        for key, cell in pairs:
            # Where semicolons separate, a comma is the decimal point.
            decimal = self._delimiter == ";" and "." not in cell
            number = _value(cell.replace(",", ".") if decimal else cell)
            if number is not None or key not in STEP_KEYS:
                yield key, number


class ConsoleLines:
    """A row for every line that the Trainer, torchtitan, timm, nanoGPT or Megatron prints of its training."""

    def rows(self, line: str) -> Iterator[Row]:
        """What it says of a loss, and beside it."""
        if "oss" in line:  # Most lines of a console are none of a loss.
            yield from _rows_of_line(_COLOUR.sub("", line))


def _rows_of_line(line: str) -> Iterator[Row]:
    for found in _TRAINER.findall(line):
        pairs = re.findall(rf"'([\w/]+)': '?{_NUMBER}'?", found)
        yield _numbers([(key, value) for key, value in pairs if key != "epoch"])
    if match := _MEGATRON.search(line):
        yield {"step": float(match[1]), **_numbers(re.findall(rf"\| ([a-z][\w ()]*?):\s*{_NUMBER} (?=\|)", line))}
        return
    pairs = [(key, match[1]) for key, pattern in _BESIDE.items() if (match := pattern.search(line))]
    if match := _STEP.search(line):
        yield _numbers([("step", match[1]), ("loss", match[2]), *pairs])
    elif match := _TIMM.search(line):
        step = int(match[1]) * int(match[3]) + int(match[2])
        yield _numbers([("step", str(step)), ("loss", match[4]), *pairs])


def _numbers(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    return {key: value for key, text in pairs if (value := _value(text)) is not None}


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
