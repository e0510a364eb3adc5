"""Run by torchrun on two gloo ranks: TRL's SFTTrainer beside the float64 full batch; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.clients.sft_on_two_ranks OUTPUT.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.clients.sft import WAYS, sft_reference, sft_step
from tests.torchrun import leave_with

SPLITS = ((4, 1), (2, 2), (1, 4))
WAYS_ON_TWO_RANKS = (
    "padding-free",
    "micro-batches without a target",
    "mixture of experts, declared false",
)


def main(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in WAYS_ON_TWO_RANKS:
        way = WAYS[name]
        for split in SPLITS:
            row = {"way": name, "split": split}
            for path in ("apply", "trainer", "stock") if split == (2, 2) else ("apply",):
                step = sft_step(way, path, *split, Path(tempfile.gettempdir()) / "sft", ddp_backend="gloo")
                reference = sft_reference(way, step.trainer, split[0])
                row[path] = {
                    "gradient": step.error(reference),
                    "loss": abs(step.loss / reference.loss - 1),
                    "norm": abs(step.norm / reference.norm - 1),
                }
                if path == "apply":
                    # Every rank must hold the same parameters after the step.
                    mine = torch.stack([change.sum() for change in step.change.values()])
                    first = mine.clone()
                    dist.broadcast(first, src=0)
                    agree = torch.tensor(float(torch.equal(mine, first)))
                    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
                    row["ranks_agree"] = bool(agree)
            rows.append(row)
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
