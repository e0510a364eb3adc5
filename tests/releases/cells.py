"""The cells of one release: every head and cut, stock and ours, beside the float64 reference; JSON lines.

    python -m tests.releases.cells OUTPUT.jsonl                                  (one rank)
    torchrun --nproc_per_node 2 -m tests.releases.cells OUTPUT.jsonl             (two gloo ranks)

A cell that cannot be run says why, in the words of the error: a release may not know a head, or not run it in float64.
"""

from __future__ import annotations

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
from tests.numerics.heads import HEADS
from tests.numerics.parity import PATHS, cut, reference_step, take_step

#: One head for each way in which a release can go wrong.
CHOSEN = (
    "llama",
    "gpt2-position-0",
    "llava",
    "mixtral",
    "bert-mlm",
    "bert-classes",
    "t5",
    "lora",
    "llama-smoothing",
    "func-with-mean",
    "no-kwargs",
)
#: Trajectories of three epochs whose last window is short.
EPOCHS = ("llama", "bert-mlm")
SPLITS = {1: ((2, 4), (1, 8)), 2: ((4, 1), (1, 4))}
#: Nine steps of a loss computed in float32.
EPOCHS_TOLERANCE = 1e-5


def cells(world_size: int, output: Path) -> Iterator[dict[str, Any]]:
    """One cell after the other, the same on every rank."""
    for name in CHOSEN:
        head = HEADS[name]
        for per_device, accumulate in SPLITS[world_size]:
            cell = {"head": name, "split": [per_device, accumulate], "tolerance": head.tolerance, "router": head.router}
            reference, why = _tried(lambda: reference_step(head, cut(head.samples, per_device)))
            for path in PATHS:
                if reference is None:
                    yield {**cell, "path": path, "error": None, "loss": None, "why": why}
                    continue
                step, why = _tried(lambda: take_step(head, head.samples, per_device, accumulate, path, output))
                yield {
                    **cell,
                    "path": path,
                    "error": None if step is None else step.error(reference),
                    "loss": None if step is None else step.loss / reference.loss,
                    "why": why,
                }
    for name in EPOCHS:
        head = HEADS[name]
        wanted, losses = epochs.reference(head, world_size)
        for stream in (False, True):
            cell = {"head": f"{name}, {'stream' if stream else 'epochs'}", "split": [1, 3], "router": 0.0}
            for path in PATHS:
                taken, why = _tried(lambda: epochs.train(head, path, output, stream=stream, world_size=world_size))
                yield {
                    **cell,
                    "tolerance": EPOCHS_TOLERANCE,
                    "path": path,
                    "error": None if taken is None else epochs.error(taken[0], wanted),
                    "loss": None if taken is None or not taken[2] else taken[2][-1] / losses[-1],
                    "why": why,
                }


def _tried(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What it returned, or why it could not be run."""
    try:
        return run(), None
    except Exception as error:  # whatever a release raises is what its cell has to say
        return None, f"{type(error).__name__}: {error}"


def main(output: Path) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    told = {
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "torch": torch.__version__,
        "world_size": world_size,
    }
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
