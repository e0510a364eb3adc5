"""Hand-written loops on two real gloo ranks under torchrun: unequal items, unequal windows, ranks that end apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loop.steps import OURS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("loop") / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", "tests.loop.two_ranks", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(output.read_text()))


def test_two_ranks_take_the_full_batch_step(found: dict[str, Any]) -> None:
    for case, row in found["cases"].items():
        for way in OURS:
            assert row[way] <= row["tolerance"], (case, row)
        assert row.get("stock", 1.0) > 1e-3, (case, row)


def test_ranks_with_unequal_numbers_of_micro_batches(found: dict[str, Any]) -> None:
    assert found["unequal"]["plain"] <= found["unequal"]["tolerance"]


def test_ranks_that_end_apart_are_told_on_both(found: dict[str, Any]) -> None:
    for ranks in found["uneven"]:
        for rank, raised in enumerate(ranks):
            assert raised.startswith(f"rank {rank}: some ranks have a micro-batch in this window"), ranks


def test_a_rank_that_fails_as_it_is_observed_is_told_on_both_at_once(found: dict[str, Any]) -> None:
    (one, waited), (other, _) = found["failing"]
    assert one.startswith("RankError: rank 0 stops, because of rank 1: ValueError: no forward here")
    assert other == "ValueError: no forward here"
    assert waited < 5


def test_repeated_samples_are_left_out_where_that_is_asked(found: dict[str, Any]) -> None:
    for count in (7, 5):
        assert found["repeated"][f"{count} dropped"] <= 1e-6
        assert found["repeated"][str(count)] > 1e-3
    assert found["repeated"]["reported"] == [[1, True], [1, False], [3, True], [3, False]]


def test_one_small_collective_a_window_and_one_reduction_of_the_gradient(found: dict[str, Any]) -> None:
    assert found["collectives"]["second window"] == ["all_reduce", "asked: 1"]
    assert found["collectives"]["end of the epoch"] == ["all_reduce"]
    assert found["collectives"]["reductions"] == 1
