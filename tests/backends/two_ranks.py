"""Run by torchrun on two gloo ranks: trajectories of heads through backends; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.backends.two_ranks OUTPUT.json "ddp llama" "fsdp2-launched llama stream" ...
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.backends.rows import BACKENDS
from tests.backends.trajectory import CLIPPED, HEADS, SPLITS, UNCLIPPED, Trajectory, reference, train
from tests.numerics.parity import pass_over_imports
from tests.torchrun import leave_with

#: Seconds that one case may take.
PATIENCE = 100


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, folder = [], Path(tempfile.gettempdir()) / "backends"
    for case in cases:
        began = time.monotonic()
        # A rank that waits for ever says where.
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        name, head_name, *stream = case.split()
        backend, head = BACKENDS[name], HEADS[head_name]
        row: dict[str, Any] = {"case": case, "runs": []}
        for max_norm in (CLIPPED, UNCLIPPED):
            exact, wanted = (reference(head, max_norm, backend, exact=exact) for exact in (True, False))
            noise = reference(head, max_norm, backend, by=1, order=-1).error(wanted)
            for path, split in (
                *(("apply", split) for split in SPLITS),
                *((("trainer", SPLITS[0]), ("stock", SPLITS[0])) if max_norm == UNCLIPPED else ()),
            ):
                pass_over_imports()
                try:
                    found = train(head, backend, split, path, max_norm, folder, stream=bool(stream))
                except Exception:
                    # Of both ranks alike, or the other one would wait for ever.
                    row["runs"].append({"path": path, "split": split, "raised": traceback.format_exc()[-3000:]})
                    continue
                run = {"path": path, "split": split, "max_norm": max_norm, "noise": noise, "exact": found.error(exact)}
                row["runs"].append({**run, **errors(found, wanted), "norms": found.norms})
        row["seconds"] = time.monotonic() - began
        rows.append(row)
    leave_with(rows, output)


def errors(found: Trajectory, wanted: Trajectory) -> dict[str, float]:
    """Relative errors: of the parameter change, and the largest of the steps' losses and norms."""
    return {
        "change": found.error(wanted),
        "loss": furthest(found.losses, wanted.losses),
        "norm": furthest(found.norms, wanted.norms) if found.norms else 0.0,
    }


def furthest(found: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
