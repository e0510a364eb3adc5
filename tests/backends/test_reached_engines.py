"""Every backend: a right run reaches the optimizer; what is planted between autograd and the optimizer is found."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_accum_fix
from hf_accum_fix.engines.reached import OTHER_GRADIENT
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, train
from tests.numerics.parity import pass_over_imports
from tests.ranks import row_of_each

LAYER = "layers.0."


def off(trainer: Any, *, times: float, only: str = "", rank: int | None = None) -> None:
    """Let gradients be multiplied after the last backward of a window; under DeepSpeed, before it gets them."""
    accelerator = trainer.accelerator
    original, mine = accelerator.backward, rank is None or dist.get_rank() == rank
    if accelerator.distributed_type == "DEEPSPEED":

        def scaled(gradient: Any) -> Any:
            return gradient * times

        # The engine's: a user's that adds up is the same in every split, and right.
        scaled.__module__ = "deepspeed.runtime.engine"
        for name, parameter in trainer.model.named_parameters():
            if mine and only in name:
                parameter.register_hook(scaled)
        return

    def backward(loss: Any, **given: Any) -> None:
        original(loss, **given)
        for name, parameter in trainer.model_wrapped.named_parameters():
            if mine and accelerator.sync_gradients and only in name and parameter.grad is not None:
                gradient: Any = parameter.grad
                (gradient.to_local() if hasattr(gradient, "to_local") else gradient).mul_(times)

    accelerator.backward = backward


PLANTED: dict[str, Any] = {
    "right": None,
    "factor": partial(off, times=0.5),
    "layer": partial(off, times=1.01, only=LAYER),
    "rank": partial(off, times=1.05, rank=1),
}


def planted(case: str) -> dict[str, dict[str, Any]]:
    """The report of each fault on a backend."""
    return {fault: reported(BACKENDS[case], fault) for fault in PLANTED}


def reported(backend: Backend, fault: str) -> dict[str, Any]:
    def prepare(trainer: Any) -> None:
        if backend.prepare is not None:
            backend.prepare(trainer)
        if PLANTED[fault] is not None:
            PLANTED[fault](trainer)

    pass_over_imports()
    folder = Path(tempfile.gettempdir()) / "reached"
    train(HEADS["llama"], replace(backend, prepare=prepare), SPLITS[0], "apply", UNCLIPPED, folder)
    return hf_accum_fix.report().to_dict()["runs"][-1]  # type: ignore[no-any-return]


ENGINES = (
    *("ddp", "fsdp1-launched", "fsdp2-launched", "tensor-parallel"),
    *("deepspeed-zero-2", "deepspeed-zero-3", "deepspeed-zero-2-offloaded"),
)


def every_case() -> Iterator[Any]:
    for name, backend in BACKENDS.items():
        shown = backend.compiles or name in ENGINES
        yield pytest.param(name, marks=backend.mark if shown else pytest.mark.thorough)


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, planted, timeout=900)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("case", [*every_case()])
def test_every_engine_is_checked(case: str, rows: Any) -> None:
    found = {fault: run["reached_optimizer"] for fault, run in rows[case].items()}
    assert found["right"].startswith("yes, to "), found
    assert rows[case]["right"].get("reason") != OTHER_GRADIENT
    assert all(found[fault].startswith("no, ") for fault in ("factor", "layer", "rank")), found
    assert "a factor of 0.5" in found["factor"] and LAYER in found["layer"], found
