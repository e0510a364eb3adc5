"""What autograd delivered, beside what the optimizer uses: planted faults are found, right runs are left alone."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hf_accum_fix
from hf_accum_fix import accumulation_windows
from hf_accum_fix.engines import reached, watched
from hf_accum_fix.engines.difference import Difference
from hf_accum_fix.engines.reached import OTHER_GRADIENT
from hf_accum_fix.engines.watched import Watched, choose
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, samples_of, train
from tests.logged import Said
from tests.numerics.parity import pass_over_imports
from tests.ranks import row_of_each

STEPS = 4
HEAD = HEADS["llama"]
LAYER = "layers.0."
#: After the backward of micro-batch number ``place``.
After = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, place: int) -> None:
    """No fault."""


def drop(model: nn.Module, place: int) -> None:
    if place == 1:
        model.zero_grad()


def scale(model: nn.Module, place: int, *, times: float, only: str = "") -> None:
    for name, parameter in model.named_parameters():
        if place == STEPS - 1 and only in name and parameter.grad is not None:
            parameter.grad.mul_(times)


FAULTS: dict[str, tuple[After, str]] = {
    "dropped": (drop, "micro-batches or ranks are lost"),
    "zero": (partial(scale, times=0.0), "nothing arrives"),
    "factor": (partial(scale, times=1 / STEPS), "a factor of 0.25 = 1 / G"),
    "one layer by 1 %": (partial(scale, times=1.01, only=LAYER), f"only model.{LAYER}"),
    "not finite": (partial(scale, times=math.inf), "not finite"),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def looped(
    dtype: torch.dtype, after: After = nothing, before: Callable[[nn.Module], Any] | None = None, *, windows: int = 1
) -> dict[str, Any]:
    """The report on some windows of a loop."""
    model = HEAD.build().to(dtype).train()
    if before is not None:
        before(model)
    loader: Any = DataLoader(samples_of(HEAD)[:8] * windows, batch_size=2, collate_fn=HEAD.batch)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for window in accumulation_windows(loader, steps=STEPS):
        for place, batch in enumerate(window):
            with contextlib.suppress(MemoryError), window.micro_batch(model):
                window.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                after(model, place)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(parameter._backward_hooks for parameter in model.parameters()) or before is not None
    return hf_accum_fix.report().to_dict()["runs"][-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_window_is_called_right_and_a_fault_is_found_and_named(dtype: torch.dtype, said: Said) -> None:
    run = looped(dtype)
    assert run["reached_optimizer"].startswith("yes, to ") and run["reached_optimizer"].endswith(", on 8 parameters")
    assert run["exact"] and not said("what the optimizer uses")
    assert "reached the optimizer: yes, to " in str(hf_accum_fix.report())
    for count, (after, words) in enumerate(FAULTS.values(), start=1):
        run = looped(dtype, after)
        assert run["reached_optimizer"].startswith("no, ") and words in run["reached_optimizer"]
        assert not run["exact"] and run["reason"] == reached.OTHER_GRADIENT
        assert len(said("what the optimizer uses")) == count


def test_a_gradient_of_zero_is_looked_at_again() -> None:
    def hide(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)

    run = looped(torch.float64, before=hide, windows=2)
    assert run["reached_optimizer"].startswith("yes, ")


def fails(*_: Any) -> None:
    raise MemoryError("no gradient")


#: What fails, and what is said of the check.
FAILING = {
    "judge": (reached, "MemoryError: no gradient"), "_add": (Watched, "failed on a rank"),
    "_gradient": (watched, "failed on a rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_check_ends_no_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, words = FAILING[name]
    monkeypatch.setattr(where, name, fails)
    run = looped(torch.float64)
    assert run["exact"] and run["reached_optimizer"].startswith("not checked: ") and words in run["reached_optimizer"]


def test_a_micro_batch_that_fails_ends_no_training() -> None:
    words = looped(torch.float64, lambda _, place: None if place else fails())["reached_optimizer"]
    assert words == "not checked: a micro-batch, or reading its gradient, failed on a rank"


@pytest.mark.parametrize(
    ("shown", "delivered", "failed"), [(True, 1.0, False), (False, 1.0, True), (False, 0.0, False)]
)
def test_a_gradient_that_an_engine_does_not_show_is_not_called_lost(
    shown: bool, delivered: float, failed: bool
) -> None:
    each = Watched("weight", torch.zeros(2), lambda: None, 2, lambda gradient: gradient, shown=shown)
    each.deliver(torch.full((2,), delivered))
    assert each.read() is None and each.failed == failed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [2, 8, 32])
def test_rounding_is_told_from_one_per_cent(dtype: torch.dtype, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for elements in (16, 64, 4096):
        for _ in range(20):
            parts = torch.randn(steps, elements, generator=generator, dtype=torch.float64).to(dtype)
            expected, used = parts.double().sum(0), torch.zeros(elements, dtype=dtype)
            for part in parts:
                used += part
            assert not compared(used.double(), expected, parts).is_wrong
            if elements >= 64 or dtype is not torch.bfloat16:
                assert compared(used.double() * 1.03, expected, parts).is_wrong
            if dtype is not torch.bfloat16 or (elements == 4096 and steps <= 8):
                assert compared(used.double() * 1.01, expected, parts).is_wrong


def compared(used: torch.Tensor, expected: torch.Tensor, parts: torch.Tensor) -> Difference:
    norm = float(expected.norm())
    return Difference(
        "weight",
        error=float((used - expected).norm()) / norm,
        ratio=float(used @ expected) / norm**2,
        elements=len(used),
        additions=len(parts) + 1,
        spread=max(float(parts.double().norm(dim=1).sum()) / norm, 1.0),
        epsilon=torch.finfo(parts.dtype).eps,
    )


def test_experts_of_some_ranks_alone_are_not_compared() -> None:
    """DeepSpeed's layers of experts mark their parameters, whose gradient it does not average over all ranks."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.allreduce = False  # type: ignore[assignment]
    assert [each.name for each in choose(None, model)] == ["0.weight"]


# --- in every engine --------------------------------------------------------------------------------------------------


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
        yield pytest.param(name, marks=[backend.mark, *([] if shown else [pytest.mark.thorough])])


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
