"""What training runs have logged, read back: JSON, lines of JSON, TensorBoard's event files, CSV, consoles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_accum_fix.monitor.columns import Columns
from hf_accum_fix.monitor.log_file import LogFile, Progress
from hf_accum_fix.monitor.series import LogsError as LogsError
from hf_accum_fix.monitor.series import Run as Run
from hf_accum_fix.monitor.series import Series as Series

_KINDS = ("*.jsonl", "*.csv", "*.tsv", "*.log", "*.txt")


def read_runs(path: Path, unread: list[str] | None = None) -> list[Run]:
    """The runs in a file or a folder; a folder without logs of its own is looked through for folders with some.

    Args:
        path: of the file or the folder.
        unread: collects messages about what could not be read; None: that is an error.

    Raises:
        LogsError: if there is none.
    """
    return Logs().read(path, unread)


def _silent(path: Path, done: int, size: int) -> None:
    pass


class Logs:
    """The logs of some places, to be read again while they are written: then only what has been appended.

    Args:
        progress: is told how much of a file has been read.
        grow: whether the logs are being written: a last line that has no end yet is waited for.
    """

    def __init__(self, progress: Progress = _silent, *, grow: bool = False) -> None:
        self._progress, self._grow = progress, grow
        self._files: dict[Path, LogFile] = {}
        self._events: dict[Path, _Events] = {}

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
        if not path.exists():
            raise LogsError(f"{path} does not exist; expected a folder of logs, a trainer_state.json or a .jsonl file")
        if not (path.is_file() or path.is_dir()):
            # Reading a pipe or a device may wait for ever.
            raise LogsError(
                f"{path} is no regular file; expected a folder of logs, a trainer_state.json or a .jsonl file"
            )
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
                "printed (.log, .txt), or W&B's exported history or chart; rename the column to `loss`"
            )
        if unread is not None:
            unread += map(str, broken)
        return runs

    def _of_file(self, file: Path) -> list[Run]:
        return self._files.setdefault(file, LogFile(file)).runs(self._progress, grows=self._grow)

    def _of_folder(self, folder: Path, broken: list[LogsError]) -> list[Run]:
        """Runs from one kind of logs only: the same run may be logged in several."""
        state = _latest_state(folder)
        files = [[state]] if state is not None else [sorted(filter(Path.is_file, folder.glob(kind))) for kind in _KINDS]
        seen: list[Run] = []
        for of_kind in files:
            runs: list[Run] = []
            for file in of_kind:
                try:
                    runs += self._of_file(file)
                except LogsError as error:
                    broken.append(error)
            seen += runs
            if any("loss" in run.series for run in runs):
                return [run for run in runs if "loss" in run.series]
        return self._of_events(folder, broken) or seen

    def _of_events(self, folder: Path, broken: list[LogsError]) -> list[Run]:
        found: list[Run] = []
        events = sorted(folder.glob("**/*tfevents*"))
        for place in sorted({event.parent for event in events}):
            # TensorBoard's reader opens everything in the folder, and waits at a pipe for ever.
            odd = next((event for event in events if event.parent == place and not event.is_file()), None)
            try:
                if odd is not None:
                    raise LogsError(f"{odd} is no regular file; expected TensorBoard event files; move it elsewhere")
                found.append(self._events.setdefault(place, _Events(place)).run())
            except LogsError as error:
                broken.append(error)
        return found


class _Events:
    """TensorBoard's event files of one folder; its reader reads on where it was."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, (-1, -1)
        self._reader: Any = None
        self._run: Run | None = None

    def run(self) -> Run:
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError as error:
            raise LogsError(
                f"{self._folder} holds TensorBoard event files, and tensorboard is not installed; pip install "
                "tensorboard, or point at the trainer_state.json"
            ) from error
        try:
            files = list(self._folder.glob("*tfevents*"))
            seen = len(files), sum(file.stat().st_size for file in files)
            if self._run is None or seen != self._seen:
                self._reader = self._reader or EventAccumulator(str(self._folder), size_guidance={"scalars": 0})
                self._reader.Reload()
                self._seen, self._run = seen, _run_of(self._reader, self._folder)
        except Exception as error:
            raise LogsError(
                f"{self._folder} could not be read ({type(error).__name__}: {error}); expected TensorBoard event files"
            ) from error
        return self._run


def _run_of(reader: Any, folder: Path) -> Run:
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
