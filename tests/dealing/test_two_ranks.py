"""Dealt windows on two real gloo ranks: samples move between ranks, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dealing.two_ranks import HEADS_RUN, OF_TRAJECTORIES, SPLITS, TRAJECTORIES
from tests.numerics.heads import before
from tests.torchrun import found_by


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("dealt") / "rows.json"
    found: dict[str, dict[str, Any]] = found_by("tests.dealing.two_ranks", output, timeout=900)
    return found


pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}x{split[1]}")
@pytest.mark.parametrize("name", HEADS_RUN)
def test_two_ranks_take_the_full_batch_step(name: str, split: tuple[int, int], rows: Any) -> None:
    row = rows[f"{name} {split[0]}x{split[1]}"]
    assert row["error"] <= row["tolerance"], row
    assert row["loss"] <= max(row["tolerance"], 1e-6), row
    assert len({*row["sizes"]}) > 1


@pytest.mark.parametrize("kind", TRAJECTORIES)
@pytest.mark.parametrize("name", OF_TRAJECTORIES)
def test_the_trajectory_is_that_of_the_windows_as_they_come(name: str, kind: str, rows: Any) -> None:
    row = rows[f"{name}, {kind}"]
    assert row["error"] <= (1e-5 if name == "llama" else 1e-11), row
    assert row["same samples"] and row["windows"] >= 6, row
    assert row["padded"] < 0.9, row


@pytest.mark.parametrize("saved", [4, 7])
def test_cut_in_the_second_or_third_epoch_and_resumed_it_is_the_same(saved: int, rows: Any) -> None:
    assert rows[f"resumed at {saved}"] == {"error": 0.0, "same samples": True, "windows": 9 - saved}


@pytest.mark.skipif(before("5.17"), reason="batch_rebalance came with 5.17")
def test_batch_rebalance_resumes_in_its_own_order(rows: Any) -> None:
    """Stock takes the first epoch's order for the resumed one."""
    assert rows["batch_rebalance resumed, stock"]["error"] > 0.01
    assert rows["batch_rebalance resumed"]["error"] == 0.0


@pytest.mark.skipif(before("5.17"), reason="older releases shard on a GPU alone")
def test_sharded_it_is_dealt_slot_by_slot(rows: Any) -> None:
    row = rows["fsdp2"]
    assert row["wrapped"].startswith("FSDP") and row["in lockstep"], row
    assert row["error"] <= 1e-5 and row["same samples"] and row["windows"] == 9 and row["padded"] < 1, row


def test_a_dispatched_stream_is_refused_on_every_rank(rows: Any) -> None:
    assert "dispatch_batches=False" in rows["dispatched stream"]["raised"]
