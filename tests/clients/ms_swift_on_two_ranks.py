"""Run by torchrun on two gloo ranks: ms-swift's trainers, stock and patched; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.clients.ms_swift_on_two_ranks OUTPUT.json WEIGHTS REFERENCES.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.clients.ms_swift import KINDS, answered, swift_step
from tests.torchrun import leave_with

SPLITS = ((4, 1), (2, 2), (1, 4))
#: Whether the ranks agree on what counts as an item hung on the last bit of two losses, and so on the data.
SEEDS = range(4)
CASES = {
    **{f"sft, data {seed}": replace(KINDS["sft"], rows=partial(answered, seed)) for seed in SEEDS},
    **{name: kind for name, kind in KINDS.items() if not name.startswith("sft")},
}


def main(output: Path, folder: Path, references: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = torch.load(references, weights_only=False)
    rows = []
    for name, kind in CASES.items():
        for split in SPLITS:
            row = {"case": name, "split": split}
            for path in ("stock", "apply") if split == (2, 2) or not kind.item_mean else ("apply",):
                try:
                    with kind.as_configured():
                        step = swift_step(kind, path, *split, folder, ddp_backend="gloo")
                    row[path] = {"gradient": step.error(wanted[name]), "loss": abs(step.loss / wanted[name].loss - 1)}
                # What we raise is raised on every rank alike; anything else stops the launcher in time.
                except Exception as error:
                    row[path] = {"raised": repr(error)}
            rows.append(row)
    leave_with(rows, output)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
