"""Run by torchrun on two gloo ranks: rank 1 fails in the pass that counts; each rank prints what it raised.

torchrun --nproc_per_node 2 -m tests.router.failing_rank FORWARD
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.router.conventions import COEFFICIENT, FAMILIES, step


def main(fails_at: int) -> None:
    dist.init_process_group("gloo")
    head, rank, forwards = FAMILIES["Mixtral"], dist.get_rank(), 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += not torch.is_grad_enabled()
        if rank == 1 and forwards == fails_at:
            raise ValueError("out of luck")

    def build() -> nn.Module:
        model = head.build()
        model.register_forward_pre_hook(fail)
        return model

    samples = [*head.samples[:16], *head.samples[:16]]
    failing = replace(head, build=build, samples=samples)
    try:
        step(failing, "exact", 4, COEFFICIENT, ranks=2, accumulate=2, steps=2, ddp_backend="gloo")
        raised = "nothing"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"rank {rank} raised {raised}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
