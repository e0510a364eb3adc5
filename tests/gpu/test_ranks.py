"""Engines on a GPU: one rank of FSDP2 and of ZeRO by NCCL; two ranks that share one GPU by gloo."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.backends import trajectory
from tests.backends.rows import BACKENDS
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, attempted, reference, train
from tests.ranks import on_ranks

#: A head that drops the number, which stock trains wrong, through each engine.
HEAD = "llama-classification"


def rows_of(device: str, cases: Sequence[str]) -> list[dict[str, Any]]:
    """On each rank: one meets itself by NCCL on a GPU; several of one GPU meet by gloo: NCCL wants a GPU for each."""
    ranks = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        # All of them on the first.
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        device = "cuda:0"
    dist.init_process_group("nccl" if device != "cpu" and ranks == 1 else "gloo")
    if device != "cpu" and ranks > 1:
        trajectory.whole_tensor = whole_tensor
    return [row(case, device, ranks) for case in cases]


def whole_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """By way of the CPU: what `DTensor.full_tensor` runs is no collective that gloo has for a GPU."""
    if not isinstance(parameter, DTensor):
        return parameter
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, parameter.to_local().detach().cpu())
    return torch.cat(shards)


def row(case: str, device: str, ranks: int) -> dict[str, Any]:
    """Errors of both cuts beside float64 plain SGD, and what float32 can do."""
    launched = dict(BACKENDS[case].environment)
    if device != "cpu":
        launched.pop("DS_ACCELERATOR", None)
    backend, head = replace(BACKENDS[case], dtype=torch.float32, data_ranks=ranks, environment=launched), HEADS[HEAD]
    exact, wanted = (reference(head, UNCLIPPED, backend, exact=each) for each in (True, False))
    row: dict[str, Any] = {"case": case, "floor": wanted.error(exact)}
    folder = Path(tempfile.gettempdir()) / "ranks"
    for path, split in (*(("apply", split) for split in SPLITS), ("stock", SPLITS[0])):
        step = attempted(train, head, backend, split, path, UNCLIPPED, folder, device=device)
        row |= step if isinstance(step, dict) else {f"{path} {split[0]}x{split[1]}": step.error(exact)}
    return row


def assert_exact(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert "raised" not in row, row["raised"]
        assert row["stock 1x4"] > 0.1, row
        # The parameters are float32: three steps end in their rounding.
        assert max(row["apply 1x4"], row["apply 2x2"]) <= 2 * row["floor"] + 1e-6, row


NEEDS = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engines", "ranks"),
    [
        (("fsdp2-launched",), 1),
        pytest.param(("deepspeed-zero-2", "deepspeed-zero-3"), 1, marks=NEEDS),
        (("ddp",), 2),
        (("fsdp2-launched",), 2),
    ],
)
def test_an_engine_on_one_device(engines: tuple[str, ...], ranks: int, device: str) -> None:
    """gloo knows not every collective of a GPU; where it does not, that is the reason of the skip."""
    rows = on_ranks(rows_of, device, engines, ranks=ranks, group=False)[0]
    raised = rows[0].get("raised", "").strip().rpartition("\n")[2]
    if device == "cuda" and ranks == 2 and ("gloo" in raised.lower() or "not support" in raised.lower()):
        pytest.skip(f"needs collectives that gloo has not: {raised}")
    assert_exact(rows)
