"""What training runs have logged, read back: JSON, lines of JSON, tables, consoles."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_accum_fix.monitor.series import STEP_KEYS, LogsError, Run, number, run_of

Row = Mapping[str, Any]
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN))"
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
#: Cells without a number, as pandas and Python write them.
_EMPTY = ("", "None", "N/A", "NA", "null", "-")


def _json_lines(lines: Iterable[str]) -> Iterator[Row]:
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = {}
        yield row if isinstance(row, dict) else {}


def _table(lines: Iterable[str]) -> Iterator[Row]:
    """Cells as numbers, None where one is empty or no number, but for a step, which may have another name.

    A row that cannot be read, and counts each of its lines, has another number of cells than the header, or text in a
    column of numbers.
    """
    lines = iter(lines)
    first = next(lines, "")
    delimiter = max(",;\t", key=re.sub(r'"[^"]*"', "", first).count)
    (header,) = csv.reader([first], delimiter=delimiter, skipinitialspace=True) if first else ([],)
    header = [key.strip() for key in header]
    reader, of_numbers = csv.reader(lines, delimiter=delimiter, skipinitialspace=True), set[str]()
    cells: list[str] | None = []
    while cells is not None:
        before = reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error:
            cells = [""]
        if not cells:
            continue
        texts = dict(zip(header, map(str.strip, cells), strict=False))
        row = {key: number(text) for key, text in texts.items()}
        of_numbers |= {key for key, value in row.items() if value is not None}
        words = {key for key, text in texts.items() if row[key] is None and text not in _EMPTY}
        row = {key: value for key, value in row.items() if value is not None or key not in STEP_KEYS}
        is_ragged = len(cells) < len(header) or any(cells[len(header) :])
        if is_ragged or words & of_numbers or all(value is None for value in row.values()):
            # An open quote takes the lines up to the next one into its cell.
            yield from [{}] * (reader.line_num - before)
        else:
            yield row


def _console(lines: Iterable[str]) -> Iterator[Row]:
    """A row for every line that the Trainer, torchtitan, timm, nanoGPT or Megatron prints of its training."""
    for line in lines:
        if "oss" in line:  # Most lines of a console are none of a loss.
            yield from _rows_of_line(_COLOUR.sub("", line))


def _rows_of_line(line: str) -> Iterator[Row]:
    for found in _TRAINER.findall(line):
        yield {key: value for key, value in re.findall(rf"'([\w/]+)': '?{_NUMBER}'?", found) if key != "epoch"}
    beside = {key: match[1] for key, pattern in _BESIDE.items() if (match := pattern.search(line))}
    if match := _MEGATRON.search(line):
        yield {"step": match[1], **dict(re.findall(rf"\| ([a-z][\w ()]*?):\s*{_NUMBER} (?=\|)", line))}
    elif match := _STEP.search(line):
        yield {"step": match[1], "loss": match[2], **beside}
    elif match := _TIMM.search(line):
        yield {"step": int(match[1]) * int(match[3]) + int(match[2]), "loss": match[4], **beside}


#: Files of lines, by their ending; all others are a trainer_state.json.
_LINES: Mapping[str, Callable[[Iterable[str]], Iterator[Row]]] = {
    ".jsonl": _json_lines, ".csv": _table, ".tsv": _table, ".log": _console, ".txt": _console, ".out": _console,
}  # fmt: skip


def read_runs(path: Path, unread: list[str] | None = None) -> list[Run]:
    """The runs in a file or a folder; a folder without logs of its own is looked through for folders with some.

    Args:
        path: of the file or the folder.
        unread: collects messages about what could not be read; None: that is an error.

    Raises:
        LogsError: if there is none.
    """
    if not (path.is_file() or path.is_dir()):  # Reading a pipe or a device may wait for ever.
        raise LogsError(
            f"{path} does not exist, or is no regular file; expected a folder of logs, a trainer_state.json or a "
            ".jsonl file"
        )
    broken: list[LogsError] = []
    runs = _of_folder(path, broken) if path.is_dir() else [_of_file(path)]
    if not runs and path.is_dir():
        runs = [run for folder in sorted(filter(Path.is_dir, path.iterdir())) for run in _of_folder(folder, broken)]
    columns = ", ".join(sorted({name for run in runs for name in run.series})) or "none"
    runs = [run for run in runs if "loss" in run.series]
    if broken and (unread is None or not runs):
        raise broken[0]
    if not runs:
        raise LogsError(
            f"no loss was found in {path} (columns found: {columns}); expected a trainer_state.json (here or in "
            "checkpoint-*), a .jsonl or .csv file with `step` and `loss`, or what a trainer printed (.log, .txt); "
            "rename the column to `loss`"
        )
    if unread is not None:
        unread += map(str, broken)
    return runs


def _of_folder(folder: Path, broken: list[LogsError]) -> list[Run]:
    """Runs from one kind of logs only: the same run may be logged in several."""
    state = _latest_state(folder)
    kinds = [[state]] if state is not None else [sorted(filter(Path.is_file, folder.glob(f"*{end}"))) for end in _LINES]
    seen: list[Run] = []
    for files in kinds:
        runs = list[Run]()
        for file in files:
            try:
                runs.append(_of_file(file))
            except LogsError as error:
                broken.append(error)
        seen += runs
        if any("loss" in run.series for run in runs):
            return runs
    return seen


def _of_file(file: Path) -> Run:
    # TensorBoard exports one number, which only the name of the file tells.
    tag = re.search(r"-tag-(?:train_)?(.+?)(?:_train)?$", file.stem.lower())
    name = str(file.parent if file.name == "trainer_state.json" else file)
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            rows = _LINES[file.suffix](lines) if file.suffix in _LINES else json.load(lines)["log_history"]
            return run_of(name, rows, tag[1] if tag else "loss")
    except (OSError, ValueError, TypeError, LookupError, RecursionError, csv.Error) as error:
        raise LogsError(
            f"{file} could not be read ({type(error).__name__}: {error}); expected a trainer_state.json with a "
            "log_history, a .jsonl file with an object a line, or a .csv file with a header"
        ) from error


def _latest_state(folder: Path) -> Path | None:
    """The folder's trainer_state.json, or its last checkpoint's."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    found = folder.glob("checkpoint-*/trainer_state.json")
    numbered = {int(its[1]): place for place in found if (its := re.search(r"-(\d+)$", place.parent.name))}
    return numbered[max(numbered)] if numbered else None
