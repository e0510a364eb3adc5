"""Hand-written loops on two real gloo ranks under torchrun: unequal items, unequal windows, ranks that end apart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loop.steps import OURS
from tests.torchrun import found_by


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("loop") / "found.json"
    return dict(found_by("tests.loop.two_ranks", output))


def test_two_ranks_take_the_full_batch_step(found: dict[str, Any]) -> None:
    for case, row in found["cases"].items():
        for way in OURS:
            assert row[way] <= row["tolerance"], (case, row)
        assert row.get("stock", 1.0) > 1e-3, (case, row)


def test_ranks_with_unequal_numbers_of_micro_batches(found: dict[str, Any]) -> None:
    for name, row in found["unequal"].items():
        assert row["plain"] <= row["tolerance"], (name, row)


def test_ranks_that_end_apart_are_told_on_both(found: dict[str, Any]) -> None:
    for ranks, told in zip(found["uneven"], ["rank 0 has 2, rank 1 has 0", "rank 0 has 2, rank 1 has 0"], strict=True):
        for raised in ranks:
            assert f"unequal numbers of micro-batches in this window ({told})" in raised, ranks


def test_a_rank_that_fails_as_it_is_observed_is_told_on_both_at_once(found: dict[str, Any]) -> None:
    (one, waited), (other, _) = found["failing"]
    assert one.startswith("RankError: rank 0 stops, because of rank 1: ValueError: no forward here")
    assert other == "ValueError: no forward here"
    assert waited < 5


def test_a_rank_without_labels_is_told_on_both_before_a_forward(found: dict[str, Any]) -> None:
    for raised, waited in found["unlabelled"]:
        assert raised.startswith(
            "RankError: got rank 0: 2 micro-batches with ['labels']; rank 1: 2 micro-batches with no"
        )
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
