"""What a training run has logged, read back: JSON, lines of JSON, TensorBoard's event files, CSV, consoles."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.monitor.text_logs import rows_of_console, rows_of_csv

#: Prefix of the monitors' names in a log.
PREFIX = "hf_accum_fix/"
#: Name of the loss of a guess with all classes equally likely, ln(classes).
GUESS = f"{PREFIX}loss_of_a_guess"
#: Keys that hold the optimizer step of a line.
_STEP_KEYS: tuple[str, ...] = ("step", "_step", "Step", "current_steps", "global_step", "iteration")
_STEP_KEYS += ("trainer/global_step", "train/global_step", "epoch")
#: Whole columns in a line of a sweep's results (recipes/llava_sweep.py), and their names here.
_WHOLE_COLUMNS = {"losses": "loss", "grad_norms": "grad_norm"}
_IGNORED = {"total_flos", *_STEP_KEYS} - {"epoch"}
#: Other names of the numbers we read; the first that exists counts.
_ALIASES = {
    "loss": ("loss_metrics/global_avg_loss", "train_loss_step", "train_loss", "loss_step", "Loss/train", "lm loss"),
    "grad_norm": ("grad norm", "gradient_norm"),
    "learning_rate": ("lr", "learning rate"),
}
_KINDS = ("*.jsonl", "*.csv", "*.log", "*.txt")
#: A column of a chart that W&B exports: run, metric, and which of the three columns it has.
_CHART = re.compile(r"(.+) - (.+?)(__MIN|__MAX)?")
#: Accumulation steps and ranks, as the rows of a sweep name them, and as consoles and files next to a log do.
_SETTINGS = {
    "accumulation": ("accumulation", "gradient_accumulation_steps", "accumulation_steps"),
    "ranks": ("processes", "num_processes", "world_size", "ranks"),
}
_SETTING = {
    name: re.compile(rf"\b(?:{'|'.join(words)})[\"']?\s*[:=]\s*(\d+)", re.IGNORECASE)
    for name, words in {
        "accumulation": ("gradient[_ ]accumulation[_ ]steps",),
        "ranks": ("num_processes", "world_size"),
    }.items()
}


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
        settings: "accumulation" steps and "ranks", where they are known.
        left_out: the lines that could not be read, in words; empty: none.
    """

    name: str
    series: Mapping[str, Series]
    settings: Mapping[str, int] = field(default_factory=dict)
    left_out: str = ""


def read_runs(path: Path, unread: list[str] | None = None) -> list[Run]:
    """The runs in a file or a folder; a folder without logs of its own is looked through for folders with some.

    Args:
        path: of the file or the folder.
        unread: collects messages about what could not be read; None: that is an error.

    Raises:
        LogsError: if there is none.
    """
    if not path.exists():
        raise LogsError(f"{path} does not exist; expected a folder of logs, a trainer_state.json or a .jsonl file")
    if not (path.is_file() or path.is_dir()):
        # Reading a pipe or a device may wait for ever.
        raise LogsError(f"{path} is no regular file; expected a folder of logs, a trainer_state.json or a .jsonl file")
    broken: list[LogsError] = []
    found = _runs_of_file(path) if path.is_file() else _runs_of_folder(path, broken)
    if not found and path.is_dir():
        found = [run for folder in sorted(path.iterdir()) if folder.is_dir() for run in _runs_of_folder(folder, broken)]
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


def _runs_of_folder(folder: Path, broken: list[LogsError]) -> list[Run]:
    """Runs from one kind of logs only: the same run may be logged in several."""
    state = _latest_state(folder)
    files = [[state]] if state is not None else [sorted(filter(Path.is_file, folder.glob(kind))) for kind in _KINDS]
    seen: list[Run] = []
    for of_kind in files:
        runs: list[Run] = []
        for file in of_kind:
            try:
                runs += _runs_of_file(file)
            except LogsError as error:
                broken.append(error)
        seen += runs
        if any("loss" in run.series for run in runs):
            return [run for run in runs if "loss" in run.series]
    events = sorted(folder.glob("**/*tfevents*"))
    for event in events:
        if not event.is_file():
            # TensorBoard's reader opens everything in the folder, and waits at a pipe for ever.
            raise LogsError(f"{event} is no regular file; expected TensorBoard event files; move it elsewhere")
    return [_from_events(place) for place in sorted({event.parent for event in events})] or seen


def _latest_state(folder: Path) -> Path | None:
    """The folder's trainer_state.json, or its last checkpoint's."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    found = folder.glob("checkpoint-*/trainer_state.json")
    numbered = {int(its[1]): place for place in found if (its := re.search(r"-(\d+)$", place.parent.name))}
    return numbered[max(numbered)] if numbered else None


def _runs_of_file(file: Path) -> list[Run]:
    name = str(file.parent if file.name == "trainer_state.json" else file)
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if file.suffix == ".jsonl":
            runs = _from_lines(name, list(_rows_of_lines(text)))
        elif file.suffix == ".csv":
            runs = _from_csv(name, rows_of_csv(text))
        elif file.suffix in (".log", ".txt", ".out"):
            runs = [_from_rows(name, rows_of_console(text))]
        else:
            runs = [_with_guess(_from_rows(name, json.loads(text)["log_history"]), file.parent)]
        nearby = _settings_nearby(file, text) if len(runs) == 1 else {}
        return [replace(run, settings={**nearby, **run.settings}) for run in runs]
    except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise LogsError(
            f"{file} could not be read ({type(error).__name__}: {error}); expected a trainer_state.json with a "
            "log_history, a .jsonl file with an object a line, or a .csv file with a header"
        ) from error


def _rows_of_lines(text: str) -> Iterator[dict[str, Any]]:
    """The objects of the lines, empty where one could not be read, without a last line that is half written."""
    lines = text.split("\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if place == len(lines) > 1:
                return
            row = {}
        yield row if isinstance(row, dict) else {}


def _settings_nearby(file: Path, text: str) -> dict[str, int]:
    """Accumulation steps and ranks, from a console or from the settings next to a log, if they agree."""
    texts = [text] if file.suffix in (".log", ".txt", ".out") else []
    for pattern in ("*args*.json", "*args*.yaml", "config.yaml"):
        texts += [
            its.read_text(encoding="utf-8", errors="replace") for its in file.parent.glob(pattern) if its.is_file()
        ]
    found = {name: {int(its) for text in texts for its in known.findall(text)} for name, known in _SETTING.items()}
    return {name: its.pop() for name, its in found.items() if len(its) == 1}


def _with_guess(run: Run, folder: Path) -> Run:
    """Add the loss of a guess, if the model's config.json is next to the log and names its classes."""
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
    return replace(run, series={**run.series, GUESS: Series((0.0,), (math.log(classes),))})


def _from_lines(name: str, rows: list[dict[str, Any]]) -> list[Run]:
    """One run, or those of a sweep, a line each."""
    sweep = [row for row in rows if "losses" in row]
    if not sweep:
        return [_from_rows(name, rows)] if rows else []
    return [
        replace(_from_rows(f"{name}: {_label(row)}", _columns(row)), settings=dict(_settings(row))) for row in sweep
    ]


def _from_csv(name: str, rows: list[dict[str, float]]) -> list[Run]:
    """One run, or those of a chart that W&B exported."""
    charts: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        steps = {key: value for key, value in row.items() if key in _STEP_KEYS}
        of_row: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            if (its := _CHART.fullmatch(key)) and not its[3]:
                of_row.setdefault(its[1], dict(steps))[its[2]] = value
        for run, its_row in of_row.items():
            charts.setdefault(run, []).append(its_row)
    return [_from_rows(f"{name}: {run}", its) for run, its in charts.items()] or [_from_rows(name, rows)]


def _columns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"step": step, meaning: value}
        for column, meaning in _WHOLE_COLUMNS.items()
        for step, value in enumerate(row.get(column, ()), start=1)
    ]


def _settings(row: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, keys in _SETTINGS.items():
        value = next((row[key] for key in keys if key in row), None)
        if isinstance(value, int) and value > 0:
            yield name, value


def _label(row: Mapping[str, Any]) -> str:
    """The name of one line of a sweep."""
    named = {key: value for key, value in row.items() if isinstance(value, (str, int)) and not isinstance(value, bool)}
    return ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in named.items())


def _from_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Run:
    columns: dict[str, tuple[list[float], list[float]]] = {}
    bad: list[int] = []
    rows = list(rows)
    for place, row in enumerate(rows, start=1):
        at = next((row[key] for key in _STEP_KEYS if key in row), place)
        step = _number_of(at) if isinstance(at, (int, float)) else math.nan
        if not row or not math.isfinite(step):
            bad.append(place)
            continue
        for key, value in row.items():
            if key not in _IGNORED and isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = columns.setdefault(printable(_key(key)), ([], []))
                steps.append(step)
                values.append(_number_of(value))
    if 2 * len(bad) > len(rows):
        raise ValueError(f"{len(bad)} of {len(rows)} lines could not be read, the first is number {bad[0]}")
    series = {key: _in_order(*of_key) for key, of_key in columns.items()}
    for wanted, others in _ALIASES.items():
        found = next((other for other in others if other in series), None)
        if wanted not in series and found is not None:
            series[wanted] = series[found]
    left_out = f"{len(bad)} of {len(rows)} lines, the first is number {bad[0]}" if bad else ""
    return Run(printable(name), series, left_out=left_out)


def _key(name: str) -> str:
    return name.removeprefix("train/").replace("eval/", "eval_")


def _in_order(steps: Sequence[float], values: Sequence[float]) -> Series:
    """By the steps; of a run that went back to a checkpoint, what came last."""
    if all(before <= after for before, after in pairwise(steps)):
        return Series(tuple(steps), tuple(values))
    last = dict(zip(steps, values, strict=True))
    return Series(tuple(sorted(last)), tuple(last[step] for step in sorted(last)))


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
    tags = events.Tags()["scalars"]
    rows = [{tag: float(its.value), "step": its.step} for tag in tags for its in events.Scalars(tag)]
    return _from_rows(str(folder), rows)
