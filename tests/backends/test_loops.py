"""Hand-written loops on backends that shard, two gloo ranks: three windows beside plain SGD over the global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_accum_fix import SeamError, accumulation_windows
from tests.backends import trajectory
from tests.backends.loops import LOOP_HEADS, accelerator, train
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import CLIPPED, RATE, SPLITS, UNCLIPPED, assert_steps, attempted, compared, references
from tests.numerics.parity import Step, cut, reference_step, trainable
from tests.ranks import on_ranks, selected

#: One head takes the number, one returns its own mean and drops it, one does not take it.
CASES = (
    *("fsdp1-launched llama", "fsdp1-launched bert", "fsdp1-bf16 llama", "fsdp2-launched llama", "fsdp2-launched bert"),
    *("deepspeed-zero-0 llama", "deepspeed-zero-2 llama", "deepspeed-zero-3 llama", "deepspeed-zero-3 bert"),
    "deepspeed-zero-3-bf16 llama",
)


#: Before a release.
THOROUGH = ("fsdp1-launched bert", "fsdp1-bf16 llama", "deepspeed-zero-3-bf16 llama")


def marked(case: str) -> Any:
    return pytest.param(case, marks=[BACKENDS[case.split()[0]].mark, *[pytest.mark.thorough] * (case in THOROUGH)])


def uneven(backend: Backend) -> list[str]:
    """What this rank raises where the second one's dataloader has a micro-batch less: at once, later, with routing."""
    found = []
    for head_name, window, router_loss in (("llama", 1, "mean"), ("llama", 2, "mean"), ("mixtral", 2, "exact")):
        head = LOOP_HEADS[head_name][0]
        batches = [head.batch([sample]) for sample in trajectory.samples_of(head)[:4]]
        found.append("")
        with trajectory.variables(backend.environment):
            live = accelerator(backend, 1, 2, UNCLIPPED)
            model: Any = trajectory.built(head, backend)
            model, optimizer = live.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
            mine = batches[: 2 * window - dist.get_rank()]
            try:
                for each in accumulation_windows(mine, live, router_loss=router_loss):
                    for batch in each:
                        with each.micro_batch(model):
                            live.backward(each.loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            except SeamError as refusal:
                found[-1] = str(refusal)
    return found


def unequal(backend: Backend) -> float:
    """The error of a window of four micro-batches on the first rank and two on the second."""
    head = LOOP_HEADS["bert"][0]
    pieces = cut(head.samples, 1)[:6]
    mine = pieces[:4] if dist.get_rank() == 0 else pieces[4:]
    with trajectory.variables(backend.environment):
        live = accelerator(backend, 1, 4, UNCLIPPED)
        model: Any = trajectory.built(head, backend)
        start = trainable(model)
        model, optimizer = live.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for window in accumulation_windows([head.batch(piece) for piece in mine], live):
            for batch in window:
                with window.micro_batch(model):
                    live.backward(window.loss(model, batch))
            optimizer.step()
        end = trajectory.gathered(model, backend)
    return Step({name: end[name] - start[name] for name in start}, 0.0, 0.0).error(reference_step(head, pieces))


def row(case: str) -> Any:
    """Every training of a case: its errors, or what it raised."""
    name, head_name = case.split()
    if head_name in ("uneven", "unequal"):
        return (uneven if head_name == "uneven" else unequal)(BACKENDS[name])
    backend, (head, layer) = BACKENDS[name], LOOP_HEADS[head_name]
    backend = replace(backend, environment={**backend.environment, "FSDP_TRANSFORMER_CLS_TO_WRAP": layer})
    runs = []
    for split, max_norm, stock in (
        *((split, UNCLIPPED, False) for split in SPLITS),
        (SPLITS[0], CLIPPED, False),
        (SPLITS[0], UNCLIPPED, True),
    ):
        exact, wanted, noise = references(head, max_norm, backend)
        run = {"split": split, "max_norm": max_norm, "noise": noise, "stock": stock}
        found = attempted(train, head, backend, split, max_norm, stock=stock)
        runs.append({**run, **(found if isinstance(found, dict) else compared(found, exact, wanted))})
    return runs


def rows_of(cases: Sequence[str]) -> dict[str, Any]:
    return {case: row(case) for case in cases}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """On each rank, of the cases that were selected, by one start of two ranks."""
    return on_ranks(rows_of, selected(request), timeout=600)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_every_window_is_the_step_of_the_global_batch(case: str, ranks: Any) -> None:
    runs, backend = ranks[0][case], BACKENDS[case.split()[0]]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if not run["stock"]]
    assert len(ours) == 3
    assert_steps(ours, backend, 2e-6 if backend.dtype is torch.float32 else 0.0)
    (stock,) = (run for run in runs if run["stock"])
    assert stock["exact"] > 0.1, stock


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked("fsdp2-launched uneven"), marked("deepspeed-zero-2 uneven")])
def test_ranks_that_would_wait_in_the_middle_of_a_window_are_told(case: str, ranks: Any) -> None:
    for rank in ranks:
        for raised in rank[case]:
            assert raised.startswith("got unequal numbers of micro-batches in this window"), ranks


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked("deepspeed-zero-1 unequal")])
def test_ranks_that_meet_once_a_window_may_have_unequal_numbers(case: str, ranks: Any) -> None:
    assert ranks[0][case] <= 1e-6
