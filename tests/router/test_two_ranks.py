"""The same on two gloo ranks under torchrun: the counts of both ride in the one collective of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.conventions import FAMILIES, SIZES, TWIN
from tests.router.table import errors
from tests.torchrun import torchrun

SLOW = ("Mixtral 8",)


def check(rows: list[dict[str, object]]) -> None:
    for row in rows:
        error, value = row["error"], row["value"]
        assert isinstance(error, dict) and isinstance(value, dict)
        loops = [] if row["family"] == "Mixtral, label smoothing" else ["loop"]
        for ours in ("exact", *loops):
            assert error[ours] <= TWIN, row
            assert abs(value[ours] - 1) <= TWIN, row
        assert min(error["stock"], error["mean"], error["window"]) > 1e-2, row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exact_is_the_full_batch_of_both_ranks(tmp_path: Path) -> None:
    rows = errors(2, SLOW, tmp_path / "rows.json")
    assert [f"{row['family']} {row['per_device']}" for row in rows] == [*SLOW]
    check(rows)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_every_family_and_cut(tmp_path: Path) -> None:
    cases = [f"{family} {size}" for family in FAMILIES for size in SIZES]
    check(errors(2, [case for case in cases if case not in SLOW], tmp_path / "rows.json"))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [pytest.param(2, id="recognising"), pytest.param(5, id="counting")])
def test_a_rank_that_fails_before_the_collective_stops_the_other(forward: int) -> None:
    out = torchrun("tests.router.failing_rank", str(forward), timeout=120).stdout
    assert "rank 1 raised ValueError: out of luck" in out
    assert "rank 0 raised RankError: rank 0 stops, because of rank 1: ValueError: out of luck" in out
