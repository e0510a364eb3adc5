"""Rows of numbers in logs that are not JSON: tables with commas, and lines that trainers print."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence

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


def rows_of_csv(text: str) -> list[dict[str, float]]:
    """One row a line, without cells that are empty or no number; empty where a line could not be read."""
    lines = text.split("\n")
    whole = csv.DictReader(lines if text.endswith("\n") else lines[:-1])  # The last line may be half written.
    rows: list[dict[str, float]] = []
    while True:
        try:
            line = next(whole, None)
        except csv.Error:
            rows.append({})
            continue
        if line is None:
            return rows
        rows.append(_numbers([pair for pair in line.items() if all(isinstance(its, str) for its in pair)]))


def rows_of_console(text: str) -> list[dict[str, float]]:
    """A row for every line that the Trainer, torchtitan, timm, nanoGPT or Megatron prints of its training."""
    return [row for line in _COLOUR.sub("", text).split("\n") for row in _rows_of_line(line)]


def _rows_of_line(line: str) -> Iterator[dict[str, float]]:
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
