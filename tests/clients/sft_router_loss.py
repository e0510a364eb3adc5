"""TRL's SFTTrainer on a mixture of experts, whose router loss it turns on by itself, adds and divides.

Run by torchrun on two gloo ranks it writes the errors of the auxiliary gradient, as JSON, on rank 0:

torchrun --nproc_per_node 2 -m tests.clients.sft_router_loss OUTPUT.json
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_accum_fix
from tests.clients.sft import Way, sft_step, tokens
from tests.numerics.parity import Step
from tests.router.conventions import COEFFICIENT, FAMILIES, InFloat64, flat, twin, with_coefficient
from tests.torchrun import leave_with

FAMILY = "Qwen3-MoE"
TWO_RANK_SIZES = (1, 8)


def sft(convention: str, per_device: int, coefficient: float, ranks: int = 1, **config: Any) -> Step:
    """One step of SFTTrainer, stock or by the patch under a convention."""
    head = FAMILIES[FAMILY]
    way = Way(with_coefficient(head, coefficient), tokens(head.samples), config)
    accumulate = len(head.samples) // per_device // ranks
    options: Mapping[str, Any] = {"ddp_backend": "gloo"} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as output:
        if convention == "stock":
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)
        with hf_accum_fix.apply(router_loss=convention):
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)


def sft_error(convention: str, per_device: int, ranks: int = 1, **config: Any) -> tuple[float, Step]:
    """Relative error of the auxiliary gradient, told by two steps, and the step with the coefficient."""
    with InFloat64():
        wanted, _ = twin(FAMILIES[FAMILY])
        with_it = sft(convention, per_device, COEFFICIENT, ranks, **config)
        found = flat(with_it.change) - flat(sft("stock", per_device, 0.0, ranks, **config).change)
    return float((found - wanted).norm() / wanted.norm()), with_it


def main(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    errors = {
        f"{convention} {size}": sft_error(convention, size, ranks=2)[0]
        for convention in ("mean", "window", "exact")
        for size in TWO_RANK_SIZES
    }
    leave_with(errors, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
