"""The cells of one release: every head and cut, stock and ours, beside the float64 reference; JSON lines.

    python -m tests.releases.cells OUTPUT.jsonl                                  (one rank)
    torchrun --nproc_per_node 2 -m tests.releases.cells OUTPUT.jsonl             (two gloo ranks)

A cell that cannot be run says why, in the words of the error: a release may not know a head, or not run it in float64.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers

from tests.numerics import epochs
from tests.numerics.heads import HEADS, Head, before
from tests.numerics.parity import PATHS, cut, reference_step, take_step

#: One head for each way in which a release can go wrong.
CHOSEN = (
    *("llama", "gpt2-position-0", "llava", "mixtral", "bert-mlm", "bert-classes", "t5", "lora", "llama-smoothing"),
    *("func-with-mean", "no-kwargs"),
)
#: Trajectories of three epochs whose last window is short.
EPOCHS = ("llama", "bert-mlm")
SPLITS = {1: ((2, 4), (1, 8)), 2: ((4, 1), (1, 4))}
#: Nine steps of a loss computed in float32.
EPOCHS_TOLERANCE = 1e-5


def cells(world_size: int, output: Path) -> Iterator[dict[str, Any]]:
    """One cell after the other, the same on every rank."""
    for name in CHOSEN:
        for split in SPLITS[world_size]:
            yield from one_step(HEADS[name], split, output)
    for name in EPOCHS:
        for stream in (False, True):
            yield from whole_epochs(HEADS[name], stream, world_size, output)


def one_step(head: Head, split: tuple[int, int], output: Path) -> Iterator[dict[str, Any]]:
    per_device, accumulate = split
    cell = {"head": head.name, "split": split, "tolerance": head.tolerance, "router": head.router}
    reference, why = _tried(reference_step, head, cut(head.samples, per_device))
    for path in PATHS:
        step = None
        if reference is not None:
            step, why = _tried(take_step, head, head.samples, per_device, accumulate, path, output)
        error = None if step is None else step.error(reference)
        yield {**cell, "path": path, "error": error, "loss": step and step.loss / reference.loss, "why": why}


def whole_epochs(head: Head, stream: bool, world_size: int, output: Path) -> Iterator[dict[str, Any]]:
    name = f"{head.name}, {'stream' if stream else 'epochs'}"
    cell = {"head": name, "split": (1, 3), "tolerance": EPOCHS_TOLERANCE, "router": head.router}
    wanted, losses = epochs.reference(head, world_size)
    for path in PATHS:
        taken, why = _tried(epochs.train, head, path, output, stream=stream, world_size=world_size)
        error, loss = (taken.error(wanted), taken.losses[-1] / losses[-1]) if taken else (None, None)
        yield {**cell, "path": path, "error": error, "loss": loss, "why": why}


def _tried(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
    """What it returned, or why it could not be run."""
    # Every training collects garbage first; looking through what was imported is most of its time.
    gc.freeze()
    try:
        return run(*args, **kwargs), None
    except Exception as error:  # whatever a release raises is what its cell has to say
        return None, f"{type(error).__name__}: {error}"


def main(output: Path) -> None:
    torch.set_num_threads(1)
    if before("5.0"):
        # Older releases make their masks in the default dtype, which the least float64 does not fit into.
        torch.set_default_dtype(torch.float64)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    told = {each.__name__: each.__version__ for each in (transformers, accelerate, torch)} | {"world_size": world_size}
    with tempfile.TemporaryDirectory() as folder:
        rows = [{**told, **cell} for cell in cells(world_size, Path(folder))]
    if world_size > 1:
        dist.barrier()
    if int(os.environ.get("RANK", "0")) == 0:
        written = output.with_suffix(".part")
        written.write_text("".join(json.dumps(row) + "\n" for row in rows))
        written.replace(output)
    sys.stdout.flush()
    # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
