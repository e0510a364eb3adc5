"""What recipes share: options, arguments of a quiet Trainer, ranks, results on disk, tables and pictures.

Nothing heavy is imported before it is used, so that a wrong option is answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

IGNORED = -100  # a label that is no target
VERSIONS = ("transformers", "accelerate", "torch", "datasets", "tokenizers", "peft", "hf-accum-fix")

# ---- Options ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser whose help is the recipe's docstring; an error is one line of the first rank, with exit code 2."""

    def __init__(self, text: str | None, output: str = "", *, new: bool = False) -> None:
        """Add --output, a folder in results/ with this name; a new one has to be empty."""
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if output:
            words, kind = "folder for the results (default: %(default)s)", new_folder if new else Path
            self.add_argument("--output", type=kind, default=f"results/{output}", help=words)

    def error(self, message: str) -> NoReturn:
        if first_rank():
            sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(2)


def new_folder(text: str) -> Path:
    folder = Path(text)
    # Other ranks may read their options when the first one has begun to write.
    if first_rank() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} is there already; give a new one, so that nothing is overwritten")
    return folder


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected 1 or more")
    return number


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names with commas between, each once."""
    known = list(known)

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"got {','.join(unknown)}; expected some of {','.join(known)}")
        return list(dict.fromkeys(text.split(",")))

    return names


class Split(NamedTuple):
    """One way to split the global batch: samples per device, micro-batches of a step."""

    per_device: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.per_device}x{self.accumulation}"


def splits_of(text: str) -> list[Split]:
    found = [re.fullmatch(r"(\d+)x(\d+)", part) for part in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"got {text}; expected PxG, such as 16x2, with commas between")
    return list(dict.fromkeys(Split(int(each[1]), int(each[2])) for each in found if each))


# ---- Training ---------------------------------------------------------------------------------------------


def on_cpu() -> bool:
    import torch

    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or not torch.cuda.is_available()


def arguments(folder: Path | str, **given: Any) -> Any:
    """TrainingArguments of a run that logs, reports and saves nothing, unless they are given."""
    from transformers import TrainingArguments

    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    quiet |= {"use_cpu": on_cpu(), "dataloader_pin_memory": False, "remove_unused_columns": False}
    return TrainingArguments(str(folder), **{**quiet, **given})


class InOrder:
    """Mixin before a Trainer: the samples in their order, so that every run has the same batches."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.data import SequentialSampler

        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


def forget_accelerator() -> None:
    """Reset what accelerate keeps for the whole process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def start_ranks(count: int) -> NoReturn:
    """Replace this process by so many ranks of the same command."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [sys.executable, *ranks, *sys.argv])


def end_ranks() -> None:
    """End the process if it is one of several ranks: to destroy a gloo group can abort or hang."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# ---- Results ----------------------------------------------------------------------------------------------


def environment(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": "cpu" if on_cpu() else torch.cuda.get_device_name(),
        "arguments": {name: str(value) for name, value in vars(options).items()},
    }


def add_line(file: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON, on the disk as soon as it is known."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose columns are aligned."""
    lines = [list(map(str, line)) for line in (head, ["---"] * len(head), *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def figure_of(rows: int, columns: int, size: tuple[float, float], **shares: Any) -> tuple[Any, Any]:
    """A figure and its panels [rows][columns]; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shares)


def tidy(panel: Any, *, steps: bool = False, **labels: Any) -> None:
    """Set labels; no frame above and on the right, a pale grid, plain numbers; ``steps`` are on the x axis."""
    from matplotlib import ticker

    panel.set(**labels)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    if steps:
        panel.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    if panel.get_yscale() == "log":
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")
