"""The same on two gloo ranks: the counts of both ride in the one collective of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.router.load_balancing import Call
from tests.faults.test_looking_fails import PlantedError, faulty
from tests.ranks import on_ranks
from tests.router.conventions import COEFFICIENT, FAMILIES, TWIN, InFloat64, auxiliary, flat, step, twin


def errors() -> dict[str, tuple[float, float]]:
    """By convention: the relative error to the float64 twin of the router's part, and its value over the twin's."""
    head = FAMILIES["Mixtral"]
    with InFloat64():
        wanted, value = twin(head)
        found = {name: auxiliary(head, name, 8, 2, ddp_backend="gloo") for name in ("stock", "mean", "exact", "loop")}
    return {name: (each.error(wanted), each.value / value) for name, each in found.items()}


@pytest.mark.slow
def test_exact_is_the_full_batch_of_both_ranks() -> None:
    found = on_ranks(errors)[0]
    for ours in ("exact", "loop"):
        assert found[ours][0] <= TWIN and abs(found[ours][1] - 1) <= TWIN, found
    assert min(found["stock"][0], found["mean"][0]) > 1e-2, found


def raised_by_failing(fails_at: int) -> str:
    """What each rank raises as the second one fails in a forward of the pass that counts."""
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
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("forward", [pytest.param(2, id="recognising"), pytest.param(5, id="counting")])
def test_a_rank_that_fails_before_the_collective_stops_the_other(forward: int) -> None:
    first, second = on_ranks(raised_by_failing, forward, timeout=120)
    assert second == "ValueError: out of luck"
    assert first.startswith("RankError: rank 0 stops, because of rank 1: ValueError: out of luck;")


@contextmanager
def faulty_in_forward() -> Iterator[None]:
    """Counting fails inside the forwards that count, which are without gradient."""
    kept = Call.tally

    def tally(call: Call, given: str) -> Any:
        if not torch.is_grad_enabled():
            raise PlantedError("on purpose")
        return kept(call, given)

    Call.tally = tally  # type: ignore[method-assign]
    try:
        yield
    finally:
        Call.tally = kept  # type: ignore[method-assign]


FAULTS = {
    "recognising": lambda: faulty("router.router_loss", "RouterLoss.recognise_among"),
    "in a forward": faulty_in_forward,
    "counting": lambda: faulty("router.router_loss", "RouterLoss.count"),
    "before any forward": lambda: faulty("overrides.session", "Session.run_counting"),
}


def trained_with_faults() -> list[str]:
    """What is wrong on this rank as counting has a fault of ours on both, or on the second alone."""
    head, rank, wrong = FAMILIES["Mixtral"], dist.get_rank(), []
    given: dict[str, Any] = {"ranks": 2, "accumulate": 2, "ddp_backend": "gloo"}
    short = replace(head, samples=head.samples[:16])
    stock = flat(step(short, "stock", 4, COEFFICIENT, **given).change)
    for name, where in product(FAULTS, ("both", "second")):
        with FAULTS[name]() if where == "both" or rank == 1 else nullcontext():
            ours = step(short, "exact", 4, COEFFICIENT, **given)
        session = ours.trainer.__dict__[SESSION]
        wrong += [f"{name} on {where}: no stock"] * (not torch.equal(flat(ours.change), stock))
        told = session.state.aside and not session.state.exact and "trouble" in session.warned
        wrong += [f"{name} on {where}: {session.warned}"] * (not told)
    return wrong


@pytest.mark.slow
def test_a_fault_of_ours_lets_all_ranks_train_as_stock() -> None:
    assert on_ranks(trained_with_faults, timeout=150, patience=30) == [[], []]
