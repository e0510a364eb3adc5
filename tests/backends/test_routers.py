"""A router's loss of the global batch on backends that shard, where the pass that counts is run sharded, too.

Three steps of a small Mixtral.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends import loops
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import SPLITS, UNCLIPPED, Trajectory, furthest, reference, train
from tests.numerics.heads import HEADS, Batch, Head
from tests.numerics.parity import pass_over_imports
from tests.ranks import row_of_each
from tests.router.conventions import COEFFICIENT, TOP_K, InFloat64, balance, domains, with_coefficient

CASES = (
    "fsdp1-launched",
    "fsdp2-launched",
    "fsdp2-launched-offloaded",
    "deepspeed-zero-1",
    "deepspeed-zero-2",
    "deepspeed-zero-3",
)
#: Of what the router's loss adds to three steps, where sums are made in float64 from end to end.
FLOAT64 = 1e-12


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


@functools.cache
def without_router_loss() -> Trajectory:
    with InFloat64():
        without: Head = replace(with_coefficient(MIXTRAL, 0.0), router=0.0)
        return reference(without, UNCLIPPED, BACKENDS["ddp"])


def row(case: str) -> list[dict[str, Any]]:
    """Three steps under each convention, beside plain SGD along a twin of the formula in float64."""
    runs, none, folder = [], without_router_loss(), Path(tempfile.gettempdir()) / "routers"
    for convention, split, by in RUNS:
        pass_over_imports()
        formula = "window" if convention == "window" else "exact"
        wanted = along_twin(formula, split[0])
        run: dict[str, Any] = {"convention": convention, "split": split, "by": by}
        runs.append(run)
        try:
            found = taken(BACKENDS[case], convention, split, by, folder)
        except Exception:
            # Of both ranks alike, or the other one would wait for ever.
            run["raised"] = traceback.format_exc()[-3000:]
            continue
        # Of what the router's loss adds to the steps; the floor is the formula's in the backend's precision.
        run["error"] = found.error(wanted) / none.error(wanted)
        run["floor"] = along_twin(formula, split[0], BACKENDS[case]).error(wanted) / none.error(wanted)
        run["loss"] = furthest(found.losses, wanted.losses)
    return runs


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=600)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [pytest.param(case, marks=BACKENDS[case].mark) for case in CASES])
def test_the_routers_loss_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    runs = rows[case]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if run["convention"] != "mean"]
    assert {(run["convention"], run["by"]) for run in ours} == {
        ("exact", "trainer"),
        ("exact", "loop"),
        ("window", "trainer"),
    }
    for run in ours:
        # A float32 backend is held to what float32 makes of the same formula.
        assert run["error"] <= max(FLOAT64, 2 * run["floor"]), run
        assert run["loss"] <= 1e-6, run
    (mean,) = (run for run in runs if run["convention"] == "mean")
    assert mean["error"] > 0.1, mean
