"""What training runs have logged, read back: JSON, lines of JSON, TensorBoard's event files, tables, consoles."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hf_accum_fix.monitor.series import GUESS, STEP_KEYS, Columns, LogsError, Run, Series, printable

Row = Mapping[str, Any]
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
#: The file, how many of its bytes have been read, and how many it has.
Progress = Callable[[Path, int, int], None]

_KINDS = ("*.jsonl", "*.csv", "*.tsv", "*.log", "*.txt")
#: Whole columns in a line of a sweep's results (recipes/llava_sweep.py), and their names here.
_WHOLE_COLUMNS = {"losses": "loss", "grad_norms": "grad_norm"}
#: Bytes read at once; most bytes of a config.json.
_CHUNK, _LARGEST_CONFIG = 1 << 20, 1 << 20
#: Of each file what changes where it is written: inode, size, time.
_State = list[tuple[int, int, int]]
_NO_FILE = "is no regular file; expected"


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


#: Files of lines, by their ending; all others are a trainer_state.json.
_LINES: Mapping[str, type[Lines]] = {
    ".jsonl": JsonLines, ".csv": CsvLines, ".tsv": CsvLines,
    ".log": ConsoleLines, ".txt": ConsoleLines, ".out": ConsoleLines,
}  # fmt: skip


def read_runs(path: Path, unread: list[str] | None = None) -> list[Run]:
    """The runs in a file or a folder; a folder without logs of its own is looked through for folders with some.

    Args:
        path: of the file or the folder.
        unread: collects messages about what could not be read; None: that is an error.

    Raises:
        LogsError: if there is none.
    """
    return Logs().read(path, unread)


class Logs:
    """The logs of some places, to be read again while they are written: a file is read where it has changed.

    Args:
        progress: is told how much of a file has been read.
        grow: whether the logs are being written: a last line that has no end yet is waited for.
    """

    def __init__(self, progress: Progress = lambda path, done, size: None, *, grow: bool = False) -> None:
        self._progress, self._grow = progress, grow
        #: Of each place its files as they were, whether they were whole, and its runs.
        self._seen: dict[Path, tuple[_State, bool, list[Run]]] = {}

    def read_all(self, paths: Sequence[Path], unread: list[str]) -> list[Run]:
        """The runs of several places; what cannot be read hides nothing of the rest.

        Raises:
            LogsError: if none can be read.
        """
        runs: list[Run] = []
        errors: list[LogsError] = []
        for path in paths:
            try:
                runs += self.read(path, unread)
            except LogsError as error:
                errors.append(error)
        if not runs:
            raise LogsError("; ".join(map(str, errors)))
        unread += map(str, errors)
        return runs

    def read(self, path: Path, unread: list[str] | None = None) -> list[Run]:
        """As `read_runs`."""
        expected = "a folder of logs, a trainer_state.json or a .jsonl file"
        if not path.exists():
            raise LogsError(f"{path} does not exist; expected {expected}")
        if not (path.is_file() or path.is_dir()):
            raise LogsError(f"{path} {_NO_FILE} {expected}")  # Reading a pipe or a device may wait for ever.
        broken: list[LogsError] = []
        found = self._of_file(path) if path.is_file() else self._of_folder(path, broken)
        if not found and path.is_dir():
            folders = [its for its in sorted(path.iterdir()) if its.is_dir()]
            found = [run for folder in folders for run in self._of_folder(folder, broken)]
        runs = [run for run in found if "loss" in run.series]
        if broken and (unread is None or not runs):
            raise broken[0]
        if not runs:
            columns = ", ".join(sorted({name for run in found for name in run.series})) or "none"
            raise LogsError(
                f"no loss was found in {path} (columns found: {columns}); expected a trainer_state.json (here or in "
                "checkpoint-*), a .jsonl or .csv file with `step` and `loss`, TensorBoard event files, what a trainer "
                "printed (.log, .txt), or W&B's exported history; rename the column to `loss`"
            )
        if unread is not None:
            unread += map(str, broken)
        return runs

    def _of_folder(self, folder: Path, broken: list[LogsError]) -> list[Run]:
        """Runs from one kind of logs only: the same run may be logged in several."""
        state = _latest_state(folder)
        files = [[state]] if state is not None else [sorted(filter(Path.is_file, folder.glob(kind))) for kind in _KINDS]
        seen: list[Run] = []
        for of_kind in files:
            runs = _all(self._of_file, of_kind, broken)
            seen += runs
            if any("loss" in run.series for run in runs):
                return [run for run in runs if "loss" in run.series]
        events = sorted({event.parent for event in folder.glob("**/*tfevents*")})
        return _all(self._of_events, events, broken) or seen

    def _of_file(self, file: Path) -> list[Run]:
        def read(settled: bool) -> tuple[list[Run], bool]:
            if file.suffix not in _LINES:
                return [_run_of_state(file)], True
            of_file = _Lines(file)
            whole = of_file.read(self._progress, settled)
            return of_file.runs(), whole

        expected = "a trainer_state.json with a log_history, a .jsonl file with an object a line, or a .csv file with"
        return self._kept(file, [file], read, f"{expected} a header")

    def _of_events(self, folder: Path) -> list[Run]:
        files = sorted(folder.glob("*tfevents*"))
        # TensorBoard's reader opens everything in the folder, and waits at a pipe for ever.
        odd = next((event for event in files if not event.is_file()), None)
        if odd is not None:
            raise LogsError(f"{odd} {_NO_FILE} TensorBoard event files; move it elsewhere")
        return self._kept(folder, files, lambda settled: ([_run_of_events(folder)], True), "TensorBoard event files")

    def _kept(
        self, place: Path, files: Sequence[Path], read: Callable[[bool], tuple[list[Run], bool]], expected: str
    ) -> list[Run]:
        """The runs of a place: the same objects where its files are as they were."""
        try:
            state: _State = [(its.st_ino, its.st_size, its.st_mtime_ns) for its in map(Path.stat, files)]
            before, whole, runs = self._seen.get(place, ([], False, []))
            if state != before or not whole:
                runs, whole = read(not self._grow or state == before)
                self._seen[place] = state, whole, runs
            return runs
        except LogsError:
            raise
        except Exception as error:  # TensorBoard's reader raises errors of its own.
            words = f"{place} could not be read ({type(error).__name__}: {error}); expected {expected}"
            raise LogsError(words) from error


def _all(read: Callable[[Path], list[Run]], places: Sequence[Path], broken: list[LogsError]) -> list[Run]:
    runs: list[Run] = []
    for place in places:
        try:
            runs += read(place)
        except LogsError as error:
            broken.append(error)
    return runs


class _Lines:
    """The runs in a file of lines: one, or one a line of a sweep."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, _LINES[path.suffix]()
        self._columns, self._sweep = Columns(), list[Run]()

    def read(self, progress: Progress, settled: bool) -> bool:
        """Whether all lines have an end; a last one without is taken where it is settled and can be read."""
        size, done, line = self._path.stat().st_size, 0, b"\n"
        with self._path.open("rb") as file:
            while lines := file.readlines(_CHUNK):
                lines[0] = lines[0].removeprefix(b"" if done else b"\xef\xbb\xbf")
                done += sum(map(len, lines))
                progress(self._path, done, size)
                for line in lines:
                    ended = line.endswith(b"\n")
                    # A number in a table may go on.
                    if ended or (settled and not isinstance(self._lines, CsvLines)):
                        # A bar of progress begins its line again and again.
                        texts = line.removesuffix(b"\n").decode(errors="replace").split("\r")
                        rows = [row for text in texts for row in self._lines.rows(text)]
                        for row in rows if ended or all(rows) else ():
                            self._add(row)
        return settled or line.endswith(b"\n")

    def runs(self) -> list[Run]:
        if self._sweep:
            return self._sweep
        if not self._columns.rows and not isinstance(self._lines, ConsoleLines):
            return []
        return [self._columns.run(str(self._path))]

    def _add(self, row: Row) -> None:
        if "losses" in row and not isinstance(self._lines, CsvLines):
            columns = Columns()
            for its in _columns(row):
                columns.add(its)
            self._sweep.append(columns.run(f"{self._path}: {_label(row)}"))
        if not self._sweep:
            self._columns.add(row)


def _columns(row: Row) -> Iterator[Row]:
    for column, meaning in _WHOLE_COLUMNS.items():
        for step, value in enumerate(row.get(column, ()), start=1):
            yield {"step": step, meaning: value}


def _label(row: Row) -> str:
    """The name of one line of a sweep."""
    named = {key: value for key, value in row.items() if isinstance(value, (str, int)) and not isinstance(value, bool)}
    return printable(", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in named.items()))


def _run_of_state(file: Path) -> Run:
    """A trainer_state.json, with the loss of a guess where the model next to it names its classes."""
    columns, folder = Columns(), file.parent
    for row in json.loads(file.read_text(encoding="utf-8-sig", errors="replace"))["log_history"]:
        columns.add(row if isinstance(row, dict) else {})
    run = columns.run(str(folder if file.name == "trainer_state.json" else file))
    config = folder / "config.json"
    classes = 0
    try:
        if config.is_file() and config.stat().st_size <= _LARGEST_CONFIG:
            classes = _classes(json.loads(config.read_text(encoding="utf-8", errors="replace")))
    except Exception:
        pass  # Not a model's: the log counts, not what is next to it.
    guess = {GUESS: Series((0.0,), (math.log(classes),))} if classes > 1 else {}
    return replace(run, series={**guess, **run.series})


def _classes(its: Mapping[str, Any]) -> int:
    """Classes of a model's config; 0: not known."""
    head = str((its.get("architectures") or [""])[0])
    if head.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return int(its.get("vocab_size") or (its.get("text_config") or {}).get("vocab_size") or 0)
    if not head.endswith(("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")):
        return 0
    # transformers does not store two labels, its default.
    classes = 0 if its.get("problem_type") in ("regression", "multi_label_classification") else 2
    return len(its.get("id2label") or ()) or classes


def _run_of_events(folder: Path) -> Run:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise LogsError(
            f"{folder} holds TensorBoard event files, and tensorboard is not installed; pip install tensorboard, or "
            "point at the trainer_state.json"
        ) from error
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in reader.Tags()["scalars"]:
        for its in reader.Scalars(tag):
            rows.setdefault(its.step, {"step": its.step})[tag] = float(its.value)
    columns = Columns()
    for step in sorted(rows):
        columns.add(rows[step])
    return columns.run(str(folder))


def _latest_state(folder: Path) -> Path | None:
    """The folder's trainer_state.json, or its last checkpoint's."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    found = folder.glob("checkpoint-*/trainer_state.json")
    numbered = {int(its[1]): place for place in found if (its := re.search(r"-(\d+)$", place.parent.name))}
    return numbered[max(numbered)] if numbered else None
