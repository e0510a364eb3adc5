"""One file of logs: read once, line by line, and further where it has grown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hf_accum_fix.monitor.beside_logs import guess_beside
from hf_accum_fix.monitor.columns import STEP_KEYS, Columns
from hf_accum_fix.monitor.series import GUESS, LogsError, Run, Series, printable
from hf_accum_fix.monitor.text_logs import ConsoleLines, CsvLines, JsonLines, Lines, Row, rows_of_state

#: The file, how many of its bytes have been read, and how many it has.
Progress = Callable[[Path, int, int], None]

#: Files of lines, by their ending; all others are a trainer_state.json.
_LINES: Mapping[str, type[Lines]] = {
    ".jsonl": JsonLines, ".csv": CsvLines, ".tsv": CsvLines,
    ".log": ConsoleLines, ".txt": ConsoleLines, ".out": ConsoleLines,
}  # fmt: skip
#: A column of a chart that W&B exports: run, metric, and which of the three columns it has.
_CHART = re.compile(r"(.+) - (.+?)(__MIN|__MAX)?")
#: Whole columns in a line of a sweep's results (recipes/llava_sweep.py), and their names here.
_WHOLE_COLUMNS = {"losses": "loss", "grad_norms": "grad_norm"}
_CHUNK, _LONGEST_LINE = 1 << 20, 1 << 26
#: What is wrong with a log that is none.
_UNREADABLE = (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError)


class LogFile:
    """The runs in a file; of a file of lines, what has been appended is read alone.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path.parent if path.name == "trainer_state.json" else path)
        self._state: tuple[int, ...] = ()
        self._runs: list[Run] = []
        self._begin()

    def runs(self, progress: Progress, *, grows: bool = False) -> list[Run]:
        """The runs so far: the same objects where the file is as it was.

        Args:
            progress: is told how much has been read.
            grows: whether the last line may go on; it is read once it has an end, or has not changed since.

        Raises:
            LogsError: if it cannot be read.
        """
        try:
            found = self._path.stat()
            state = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            if state == self._state and not (grows and self._tail):
                return self._runs
            if state[:2] != self._state[:2] or found.st_size < self._offset:
                self._begin()
            settled = not grows or state == self._state
            self._state = ()
            if self._path.suffix in _LINES:
                self._read_lines(progress, found.st_size, settled)
                runs = self._of_lines()
            else:
                columns = Columns()
                for row in rows_of_state(self._path, lambda done: progress(self._path, done, found.st_size)):
                    columns.add(row)
                run = columns.run(self._name)
                guess = guess_beside(self._path.parent)
                if GUESS not in run.series and not math.isnan(guess):
                    run = replace(run, series={**run.series, GUESS: Series((0.0,), (guess,))})
                runs = [run]
        except _UNREADABLE as error:
            raise LogsError(
                f"{self._path} could not be read ({type(error).__name__}: {error}); expected a trainer_state.json with "
                "a log_history, a .jsonl file with an object a line, or a .csv file with a header"
            ) from error
        self._state, self._runs = state, runs
        return runs

    def _begin(self) -> None:
        """Forget all that was read: the file is another one."""
        self._offset, self._tail, self._too_long = 0, b"", False
        self._lines: Lines = _LINES.get(self._path.suffix, JsonLines)()
        self._columns, self._charts = Columns(), dict[str, Columns]()
        self._sweep: list[Run] = []

    def _read_lines(self, progress: Progress, size: int, settled: bool) -> None:
        pieces = [self._tail]
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK):
                begins = self._offset == 0
                self._offset += len(chunk)
                progress(self._path, self._offset, size)
                if begins:
                    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
                whole, end, rest = chunk.rpartition(b"\n")
                if end:
                    for line in (b"".join(pieces) + whole).split(b"\n"):
                        self._take(line)
                    pieces = []
                pieces.append(rest)
                if sum(map(len, pieces)) > _LONGEST_LINE:
                    self._too_long, pieces = True, []
        self._tail = b"".join(pieces)
        if settled and self._tail and self._ends():
            self._take(self._tail)
            self._tail = b""

    def _ends(self) -> bool:
        """Whether a last line without an end is whole: a number in a table may go on."""
        if isinstance(self._lines, CsvLines):
            return False
        if not isinstance(self._lines, JsonLines) or not self._columns.rows + len(self._sweep):
            return True
        return all(self._lines.rows(self._tail.decode(errors="replace")))

    def _take(self, line: bytes) -> None:
        if self._too_long:
            self._too_long = False
            self._columns.add({})
            return
        # A bar of progress begins its line again and again.
        for text in line.decode(errors="replace").split("\r"):
            for row in self._lines.rows(text):
                self._add(row)

    def _add(self, row: Row) -> None:
        if isinstance(self._lines, CsvLines):
            self._add_to_charts(row)
        elif "losses" in row:
            columns = Columns()
            for its in _columns(row):
                columns.add(its)
            self._sweep.append(columns.run(f"{self._name}: {_label(row)}"))
            return
        if not self._sweep:
            self._columns.add(row)

    def _add_to_charts(self, row: Row) -> None:
        """The cells of a chart that W&B exported, to the runs they are of."""
        of_row: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            if " - " in key and value is not None and (its := _CHART.fullmatch(key)) and not its[3]:
                of_row.setdefault(its[1], {})[its[2]] = value
        steps = {key: row[key] for key in STEP_KEYS if key in row} if of_row else {}
        for name, its_row in of_row.items():
            self._charts.setdefault(name, Columns()).add({**steps, **its_row})

    def _of_lines(self) -> list[Run]:
        if self._sweep:
            return list(self._sweep)
        if self._charts:
            return [columns.run(f"{self._name}: {name}") for name, columns in self._charts.items()]
        if not self._columns.rows and not isinstance(self._lines, ConsoleLines):
            return []
        return [self._columns.run(self._name)]


def _columns(row: Row) -> Iterator[Row]:
    for column, meaning in _WHOLE_COLUMNS.items():
        for step, value in enumerate(row.get(column, ()), start=1):
            yield {"step": step, meaning: value}


def _label(row: Row) -> str:
    """The name of one line of a sweep."""
    named = {key: value for key, value in row.items() if isinstance(value, (str, int)) and not isinstance(value, bool)}
    return printable(", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in named.items()))
