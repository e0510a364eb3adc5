"""On two gloo ranks, by engine: the gradient of 64 and of 1,024 micro-batches equals that of two within its noise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.precision.test_gradients import NOISE
from tests.precision.two_ranks import BY_TRAINER, CASES, LONG
from tests.torchrun import found_by

#: Every case but the one whose engine adds in float32 by itself.
ROUNDED = [case for case in CASES if case != "fsdp2-reduces-float32" and case not in LONG]
#: What ranks reduce in, where that is not bfloat16; a contract given by hand is not recorded.
REDUCED_IN = {
    "ddp-float16": ["float16"],
    "ddp-reduces-float32": ["bfloat16", "in_float32"],
    "fsdp1-reduces-float32": ["float32"],
    "fsdp2-reduces-float32": ["float32"],
    "ddp-unused": None,
    "ddp-unused-bucket-view": None,
}


def found(tmp_path_factory: pytest.TempPathFactory, cuts: str, cases: list[str]) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("precision") / "rows.json"
    rows = found_by("tests.precision.two_ranks", output, cuts, *cases, timeout=560)
    return {row["case"]: row for row in rows}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(tmp_path_factory, "1,32", [case for case in CASES if case not in LONG])


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(tmp_path_factory, "1,512", [*LONG, BY_TRAINER])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*ROUNDED, "fsdp2-reduces-float32"])
def test_the_sum_is_right_to_the_noise_of_one_micro_batch(case: str, rows: dict[str, Any]) -> None:
    row = rows[case]
    assert "raised" not in row, row
    floor = row["parameter 1"]
    assert 0 < row["float32 32"] <= NOISE * floor and 0 < row["compensated 32"] <= NOISE * floor, row
    assert row["reduced_in"] == REDUCED_IN.get(case, ["bfloat16"]), row
    if case in ROUNDED:
        assert row["parameter 32"] > NOISE * row["float32 32"], row
    else:
        assert row["parameter 32"] <= NOISE * floor, row


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*LONG, BY_TRAINER])
def test_so_is_that_of_1024_micro_batches(case: str, fine: dict[str, Any]) -> None:
    row = fine[case]
    assert "raised" not in row, row
    floor = row["parameter 1"]
    assert 0 < row["float32 512"] <= NOISE * floor and 0 < row["compensated 512"] <= NOISE * floor, row
    for rounded in ("parameter 512", *(["stock 512"] if case == BY_TRAINER else [])):
        # By rounding alone.
        assert 10 * floor < row[rounded] < 0.5, row
