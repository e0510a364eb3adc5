"""Dealt windows on two real gloo ranks: samples move between ranks, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.balancing.two_ranks import HEADS_RUN, OF_TRAJECTORIES, SPLITS, TRAJECTORIES
from tests.numerics.heads import before
from tests.torchrun import found_by

#: The everyday tests run these; others are marked "slow", and those that show nothing new "thorough".
EVERYDAY = ("llama 2x2", "bert-mlm 2x2", "bert-classes 2x2", "mixtral 2x2", "bert-mlm, plain", "dispatched stream")
THOROUGH = {
    *(f"{name} {rows}x{steps}" for name in HEADS_RUN for rows, steps in SPLITS if (rows, steps) != (2, 2)),
    *("llama, plain", "bert-mlm, drop last", "bert-mlm, stream", "llama, split batches", "resumed at 4"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By case, of the cases that were selected."""
    output = tmp_path_factory.mktemp("dealt") / "rows.json"
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    found: dict[str, dict[str, Any]] = found_by("tests.balancing.two_ranks", output, *cases, timeout=900)
    return found


def of(*cases: str) -> pytest.MarkDecorator:
    def marks(case: str) -> list[pytest.MarkDecorator]:
        later = pytest.mark.thorough if case in THOROUGH else pytest.mark.slow
        return [] if case in EVERYDAY else [later]

    return pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in cases])


pytestmark = pytest.mark.timeout(900)


@of(*(f"{name} {rows}x{steps}" for name in HEADS_RUN for rows, steps in SPLITS))
def test_two_ranks_take_the_full_batch_step(case: str, rows: Any) -> None:
    row = rows[case]
    assert row["error"] <= row["tolerance"], row
    assert row["loss"] <= max(row["tolerance"], 1e-6), row
    assert len({*row["sizes"]}) > 1


@of(*(f"{name}, {kind}" for name in OF_TRAJECTORIES for kind in TRAJECTORIES))
def test_the_trajectory_is_that_of_the_windows_as_they_come(case: str, rows: Any) -> None:
    row = rows[case]
    assert row["error"] <= (1e-5 if case.startswith("llama") else 1e-11), row
    assert row["same samples"] and row["windows"] >= 6, row
    assert row["padded"] < 0.9, row


@of("resumed at 4", "resumed at 7")
def test_cut_in_the_second_or_third_epoch_and_resumed_it_is_the_same(case: str, rows: Any) -> None:
    assert rows[case] == {"error": 0.0, "same samples": True, "windows": 9 - int(case[-1])}


@pytest.mark.skipif(before("5.17"), reason="batch_rebalance came with 5.17")
@of("batch_rebalance resumed, stock", "batch_rebalance resumed")
def test_batch_rebalance_resumes_in_its_own_order(case: str, rows: Any) -> None:
    """Stock takes the first epoch's order for the resumed one."""
    assert (rows[case]["error"] > 0.01) if case.endswith("stock") else (rows[case]["error"] == 0.0)


@pytest.mark.skipif(before("5.17"), reason="older releases shard on a GPU alone")
@of("fsdp2")
def test_sharded_it_is_dealt_slot_by_slot(case: str, rows: Any) -> None:
    row = rows[case]
    assert row["wrapped"].startswith("FSDP") and row["in lockstep"], row
    assert row["error"] <= 1e-5 and row["same samples"] and row["windows"] == 9 and row["padded"] < 1, row


@of("dispatched stream")
def test_a_dispatched_stream_is_refused_on_every_rank(case: str, rows: Any) -> None:
    assert "dispatch_batches=False" in rows[case]["raised"]
