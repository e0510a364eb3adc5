"""A router's loss of the global batch on backends that shard, where the pass that counts is run sharded, too.

Three steps of a small Mixtral.
"""

from __future__ import annotations

import functools
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends import loops
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import SPLITS, UNCLIPPED, Trajectory, attempted, furthest, reference, train
from tests.numerics.heads import HEADS, Batch, Head
from tests.ranks import row_of_each
from tests.router.conventions import COEFFICIENT, TOP_K, InFloat64, balance, domains, with_coefficient

CASES = (
    *("fsdp1-launched", "fsdp2-launched", "fsdp2-launched-offloaded"),
    *("deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3"),
)
#: Of what the router's loss adds to three steps, where sums are made in float64 from end to end.
FLOAT64 = 1e-12
MIXTRAL = with_coefficient(replace(HEADS["mixtral"], samples=domains(), router=COEFFICIENT), COEFFICIENT)
#: The convention, the cut, and who takes the step.
RUNS = (
    *(("exact", split, "trainer") for split in SPLITS),
    *(("exact", SPLITS[0], "loop"), ("mean", SPLITS[0], "trainer")),
)


def marks_of(case: str) -> list[pytest.MarkDecorator]:
    shown = case in ("fsdp2-launched", "deepspeed-zero-2", "deepspeed-zero-3")
    return [BACKENDS[case].mark, *[pytest.mark.thorough] * (not shown)]


def along_twin(backend: Backend = BACKENDS["ddp"]) -> Trajectory:
    """Plain SGD along the twin's loss, in the precision of a backend."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(**batch)
        router = balance(outputs["router_logits"], TOP_K, batch["attention_mask"])
        return outputs["loss"] - COEFFICIENT * outputs["aux_loss"] + COEFFICIENT * router

    with in_precision_of(backend):
        return reference(replace(MIXTRAL, loss=loss), UNCLIPPED, backend)


def in_precision_of(backend: Backend) -> AbstractContextManager[Any]:
    return InFloat64() if backend.dtype is torch.float64 else nullcontext()


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
    runs, none, wanted, folder = [], without_router_loss(), along_twin(), Path(tempfile.gettempdir()) / "routers"
    floor = along_twin(BACKENDS[case]).error(wanted) / none.error(wanted)
    for convention, split, by in RUNS:
        run: dict[str, Any] = {"convention": convention, "split": split, "by": by, "floor": floor}
        found = attempted(taken, BACKENDS[case], convention, split, by, folder)
        if not isinstance(found, dict):
            # Of what the router's loss adds to the steps; the floor is the formula's in the backend's precision.
            error = found.error(wanted) / none.error(wanted)
            found = {"error": error, "loss": furthest(found.losses, wanted.losses)}
        runs.append({**run, **found})
    return runs


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=600)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in CASES])
def test_the_routers_loss_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    runs = rows[case]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if run["convention"] != "mean"]
    assert {(run["convention"], run["by"]) for run in ours} == {("exact", "trainer"), ("exact", "loop")}
    for run in ours:
        # A float32 backend is held to what float32 makes of the same formula.
        assert run["error"] <= max(FLOAT64, 2 * run["floor"]), run
        assert run["loss"] <= 1e-6, run
    (mean,) = (run for run in runs if run["convention"] == "mean")
    assert mean["error"] > 0.1, mean
