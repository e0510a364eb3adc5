"""Errors of the auxiliary gradient, one row a family and size of a micro-batch, on the ranks it is started on.

python -m tests.router.rows OUTPUT.json "Mixtral 4" ...
torchrun --nproc_per_node 2 -m tests.router.rows OUTPUT.json "Mixtral 4" ...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.parity import pass_over_imports
from tests.router.conventions import FAMILIES, InFloat64, auxiliary, token_share, twin
from tests.torchrun import leave

CONVENTIONS = ("stock", "mean", "window", "exact")


def row(case: str, ranks: int) -> dict[str, Any]:
    """The relative errors to the float64 twin, and what their logged values say."""
    family, size = case.rsplit(" ", maxsplit=1)
    head, per_device = FAMILIES[family], int(size)
    arguments: dict[str, Any] = {"ddp_backend": "gloo"} if ranks > 1 else {}
    # Label smoothing is the Trainer's; a loop trains by the model's own loss.
    conventions = CONVENTIONS if "label_smoothing_factor" in head.arguments else (*CONVENTIONS, "loop")
    pass_over_imports()
    with InFloat64():
        wanted, value = twin(head)
        found = {name: auxiliary(head, name, per_device, ranks, **arguments) for name in conventions}
        shared = token_share(head, per_device)
    return {
        "family": family,
        "per_device": per_device,
        "ranks": ranks,
        "error": {
            **{name: each.error(wanted) for name, each in found.items()},
            "token share": float((shared - wanted).norm() / wanted.norm()),
        },
        "value": {name: each.value / value for name, each in found.items()},
    }


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rows = [row(case, ranks) for case in cases]
    if ranks == 1 or dist.get_rank() == 0:
        output.write_text(json.dumps(rows))
    if ranks > 1:
        leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
