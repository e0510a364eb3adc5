"""Run by torchrun on ranks that share one device: three steps of a head through a backend; JSON on rank 0.

torchrun --nproc_per_node 1 -m tests.gpu.ranks OUTPUT.json cuda "fsdp2-launched llama" ...

One rank meets itself by NCCL on a GPU; several ranks of one GPU meet by gloo, since NCCL wants a GPU for each.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.backends.rows import BACKENDS
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, reference, train
from tests.torchrun import leave_with

#: Seconds that one case may take.
PATIENCE = 100


def main(output: Path, device: str, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        # All of them on the first.
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        device = "cuda:0"
    dist.init_process_group("nccl" if device != "cpu" and ranks == 1 else "gloo")
    leave_with([found(case, device, ranks) for case in cases], output)


def found(case: str, device: str, ranks: int) -> dict[str, Any]:
    """Errors of both cuts beside float64 plain SGD, and what float32 can do."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    name, head_name = case.split()
    launched = {key: value for key, value in BACKENDS[name].environment.items() if key != "DS_ACCELERATOR"}
    backend = replace(
        BACKENDS[name],
        dtype=torch.float32,
        data_ranks=ranks,
        environment=launched if device != "cpu" else BACKENDS[name].environment,
    )
    head = HEADS[head_name]
    exact, wanted = (reference(head, UNCLIPPED, backend, exact=each) for each in (True, False))
    row: dict[str, Any] = {"case": case, "floor": wanted.error(exact), "errors": {}}
    try:
        for path, split in (*(("apply", split) for split in SPLITS), ("stock", SPLITS[0])):
            step = train(head, backend, split, path, UNCLIPPED, Path(tempfile.gettempdir()) / "ranks", device=device)
            row["errors"][f"{path} {split[0]}x{split[1]}"] = step.error(exact)
    except Exception:
        # Of all ranks alike, or the others would wait for ever.
        row["raised"] = traceback.format_exc()[-3000:]
    return row


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
