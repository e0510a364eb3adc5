"""What a training run has logged, read back: JSON, lines of JSON, TensorBoard's event files, CSV, consoles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.monitor.text_logs import rows_of_console, rows_of_csv

#: Prefix of the monitors' names in a log.
PREFIX = "hf_accum_fix/"
#: Name of the loss of a guess with all classes equally likely, ln(classes).
GUESS = f"{PREFIX}loss_of_a_guess"
#: Keys that hold the optimizer step of a line.
_STEP_KEYS = ("step", "_step", "current_steps", "global_step", "iteration", "trainer/global_step", "epoch")
#: Whole columns in a line of a sweep's results (recipes/llava_sweep.py), and their names here.
_WHOLE_COLUMNS = {"losses": "loss", "grad_norms": "grad_norm"}
_IGNORED = {"total_flos", *_STEP_KEYS}
#: Other names of the numbers we read; the first that exists counts.
_ALIASES = {
    "loss": ("loss_metrics/global_avg_loss", "train_loss_step", "train_loss", "loss_step", "Loss/train", "lm loss"),
    "grad_norm": ("grad norm", "gradient_norm"),
    "learning_rate": ("lr", "learning rate"),
}
_KINDS = ("*.jsonl", "*.csv", "*.log", "*.txt")


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
    """

    name: str
    series: Mapping[str, Series]


def read_runs(path: Path) -> list[Run]:
    """The runs in a file or a folder; a folder without logs of its own is looked through for folders with some.

    Raises:
        LogsError: if there is none.
    """
    if not path.exists():
        raise LogsError(f"{path} does not exist; expected a folder of logs, a trainer_state.json or a .jsonl file")
    if not (path.is_file() or path.is_dir()):
        # Reading a pipe or a device may wait for ever.
        raise LogsError(f"{path} is no regular file; expected a folder of logs, a trainer_state.json or a .jsonl file")
    runs = _runs_of_file(path) if path.is_file() else _runs_of_folder(path)
    if not runs and path.is_dir():
        runs = [run for folder in sorted(path.iterdir()) if folder.is_dir() for run in _runs_of_folder(folder)]
    runs = [run for run in runs if "loss" in run.series]
    if not runs:
        raise LogsError(
            f"no loss was found in {path}; expected a trainer_state.json (here or in checkpoint-*), a .jsonl or "
            ".csv file with `step` and `loss`, TensorBoard event files, or what a trainer printed (.log, .txt); of W&B "
            "the exported history"
        )
    return runs


def _runs_of_folder(folder: Path) -> list[Run]:
    """Runs from one kind of logs only: the same run may be logged in several."""
    state = _latest_state(folder)
    if state is not None:
        return _runs_of_file(state)
    for kind in _KINDS:
        runs = [run for file in sorted(folder.glob(kind)) if file.is_file() for run in _runs_of_file(file)]
        runs = [run for run in runs if "loss" in run.series]
        if runs:
            return runs
    events = sorted(folder.glob("**/*tfevents*"))
    for event in events:
        if not event.is_file():
            # TensorBoard's reader opens everything in the folder, and waits at a pipe for ever.
            raise LogsError(f"{event} is no regular file; expected TensorBoard event files; move it elsewhere")
    return [_from_events(place) for place in sorted({event.parent for event in events})]


def _latest_state(folder: Path) -> Path | None:
    """The folder's trainer_state.json, or its last checkpoint's."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    found = [place for place in folder.glob("checkpoint-*/trainer_state.json") if _number(place.parent) is not None]
    return max(found, key=lambda place: _number(place.parent) or 0, default=None)


def _number(checkpoint: Path) -> int | None:
    last = checkpoint.name.rsplit("-", 1)[-1]
    return int(last) if last.isdecimal() else None


def _runs_of_file(file: Path) -> list[Run]:
    name = str(file.parent if file.name == "trainer_state.json" else file)
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            return _from_lines(name, _lines(text))
        if file.suffix == ".csv":
            return [_from_rows(name, rows_of_csv(text))]
        if file.suffix in (".log", ".txt", ".out"):
            return [_from_rows(name, rows_of_console(text))]
        return [_with_guess(_from_rows(name, json.loads(text)["log_history"]), file.parent)]
    except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise LogsError(
            f"{file} could not be read ({type(error).__name__}: {error}); expected a trainer_state.json with a "
            "log_history, or a .jsonl file with an object a line"
        ) from error


def _lines(text: str) -> list[dict[str, Any]]:
    """The objects of the lines, without a last line that is half written."""
    *whole, last = text.split("\n")
    rows = [json.loads(line) for line in whole if line.strip()]
    try:
        return [*rows, json.loads(last)] if last.strip() else rows
    except ValueError:
        if not rows:
            raise
        return rows


def _with_guess(run: Run, folder: Path) -> Run:
    """Add the loss of a guess, where the model's config.json lies beside the log and names its classes."""
    config = folder / "config.json"
    if GUESS in run.series or not config.is_file():
        return run
    its = json.loads(config.read_text(encoding="utf-8"))
    head = str((its.get("architectures") or [""])[0])
    if head.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        classes = its.get("vocab_size") or (its.get("text_config") or {}).get("vocab_size") or 0
    elif head.endswith(("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")):
        # transformers does not store two labels, its default.
        classes = 0 if its.get("problem_type") in ("regression", "multi_label_classification") else 2
        classes = len(its.get("id2label") or ()) or classes
    else:
        classes = 0
    if classes < 2:
        return run
    return Run(run.name, {**run.series, GUESS: Series((0.0,), (math.log(classes),))})


def _from_lines(name: str, rows: list[dict[str, Any]]) -> list[Run]:
    whole = [row for row in rows if "losses" in row]
    if not whole:
        return [_from_rows(name, rows)] if rows else []
    return [Run(printable(f"{name}: {_label(row)}"), dict(_columns(row))) for row in whole]


def _columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Series]]:
    for column, meaning in _WHOLE_COLUMNS.items():
        values = row.get(column, ())
        if values:
            yield meaning, Series(tuple(map(float, range(1, len(values) + 1))), tuple(map(_number_of, values)))


def _label(row: Mapping[str, Any]) -> str:
    """The name of one line of a sweep."""
    told = {key: value for key, value in row.items() if isinstance(value, (str, int)) and not isinstance(value, bool)}
    return ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in told.items())


def _from_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Run:
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for place, row in enumerate(rows, start=1):
        step = next((float(row[key]) for key in _STEP_KEYS if key in row), float(place))
        if not math.isfinite(step):
            raise ValueError(f"got step {step}; expected a number")
        for key, value in row.items():
            if key not in _IGNORED and isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = columns.setdefault(printable(key.removeprefix("train/")), ([], []))
                steps.append(step)
                values.append(_number_of(value))
    return _named(name, {key: Series(tuple(steps), tuple(values)) for key, (steps, values) in columns.items()})


def _named(name: str, series: dict[str, Series]) -> Run:
    """The run with our names for loss, gradient norm and learning rate."""
    for wanted, others in _ALIASES.items():
        found = next((other for other in others if other in series), None)
        if wanted not in series and found is not None:
            series[wanted] = series[found]
    return Run(printable(name), series)


def _number_of(value: float) -> float:
    """As a float; inf where it is a whole number larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _from_events(folder: Path) -> Run:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise LogsError(
            f"{folder} holds TensorBoard event files, and tensorboard is not installed; pip install tensorboard, or "
            "point at the trainer_state.json"
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    series = {}
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        key = printable(tag.removeprefix("train/").replace("eval/", "eval_"))
        series[key] = Series(tuple(float(s.step) for s in scalars), tuple(float(s.value) for s in scalars))
    return _named(str(folder), series)
