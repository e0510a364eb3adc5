"""Run by torchrun on two gloo ranks: a router's loss of the global batch through backends; JSON on rank 0.

Three steps of a small Mixtral under each convention, beside plain SGD along a twin of the formula in float64.
torchrun --nproc_per_node 2 -m tests.backends.routers OUTPUT.json "fsdp2-launched" ...
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.backends import loops
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import SPLITS, UNCLIPPED, Trajectory, reference, train
from tests.backends.two_ranks import PATIENCE
from tests.numerics.heads import HEADS, Batch, Head
from tests.numerics.parity import pass_over_imports
from tests.router.conventions import COEFFICIENT, TOP_K, InFloat64, balance, domains, with_coefficient
from tests.torchrun import leave_with

MIXTRAL = with_coefficient(replace(HEADS["mixtral"], samples=domains(), router=COEFFICIENT), COEFFICIENT)
#: The convention, the cut, and who takes the step.
RUNS = (
    *(("exact", split, "trainer") for split in SPLITS),
    ("exact", SPLITS[0], "loop"),
    ("window", SPLITS[0], "trainer"),
    ("mean", SPLITS[0], "trainer"),
)


def along_twin(convention: str, per_device: int, backend: Backend = BACKENDS["ddp"]) -> Trajectory:
    """Plain SGD along the twin's loss, in the precision of a backend."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(**batch)
        mask = batch["attention_mask"]
        if convention == "window":
            router = running_balance(outputs["router_logits"], mask, per_device)
        else:
            router = balance(outputs["router_logits"], TOP_K, mask)
        return outputs["loss"] - COEFFICIENT * outputs["aux_loss"] + COEFFICIENT * router

    with in_precision_of(backend):
        return reference(replace(MIXTRAL, loss=loss), UNCLIPPED, backend)


def in_precision_of(backend: Backend) -> AbstractContextManager[Any]:
    return InFloat64() if backend.dtype is torch.float64 else nullcontext()


def running_balance(router_logits: Sequence[Tensor], mask: Tensor, per_device: int) -> Tensor:
    """``E sum_i F_i Q_i`` with F of what a rank has routed in the window so far, and Q of the global batch."""
    rows, width = mask.shape
    logits = torch.stack(list(router_logits)).double().view(len(router_logits), rows, width, -1)
    experts = logits.shape[-1]
    probabilities = logits.softmax(-1) * mask[None, :, :, None]
    chosen = (
        nn.functional.one_hot(logits.topk(TOP_K, dim=-1).indices, experts).sum(dim=-2).double() * mask[None, :, :, None]
    )

    def micro_batches(each: Tensor) -> Tensor:
        return each.sum(dim=(0, 2)).view(rows // per_device, per_device, experts).sum(dim=1)

    counts, sums = micro_batches(chosen), micro_batches(probabilities)
    tokens = counts.sum(dim=1, keepdim=True) / TOP_K
    # Every second micro-batch is the other rank's.
    shares = [counts[rank::2].cumsum(dim=0) / tokens[rank::2].cumsum(dim=0) for rank in range(2)]
    return experts * sum((shares[rank] * sums[rank::2]).sum() for rank in range(2)) / tokens.sum()


def taken(backend: Backend, convention: str, split: tuple[int, int], by: str, folder: Path) -> Trajectory:
    with in_precision_of(backend):
        if by == "loop":
            return loops.train(MIXTRAL, backend, split, UNCLIPPED, router_loss=convention)
        return train(MIXTRAL, backend, split, "apply", UNCLIPPED, folder, router_loss=convention)


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, folder = [], Path(tempfile.gettempdir()) / "routers"
    with InFloat64():
        without: Head = replace(with_coefficient(MIXTRAL, 0.0), router=0.0)
        none = reference(without, UNCLIPPED, BACKENDS["ddp"])
    for case in cases:
        # A rank that waits for ever says where.
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        row: dict[str, Any] = {"case": case, "runs": []}
        for convention, split, by in RUNS:
            pass_over_imports()
            formula = "window" if convention == "window" else "exact"
            wanted = along_twin(formula, split[0])
            run: dict[str, Any] = {"convention": convention, "split": split, "by": by}
            row["runs"].append(run)
            try:
                found = taken(BACKENDS[case], convention, split, by, folder)
            except Exception:
                # Of both ranks alike, or the other one would wait for ever.
                run["raised"] = traceback.format_exc()[-3000:]
                continue
            # Of what the router's loss adds to the steps; the floor is the formula's in the backend's precision.
            run["error"] = found.error(wanted) / none.error(wanted)
            run["floor"] = along_twin(formula, split[0], BACKENDS[case]).error(wanted) / none.error(wanted)
            run["loss"] = max(abs(one / other - 1) for one, other in zip(found.losses, wanted.losses, strict=True))
        rows.append(row)
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
