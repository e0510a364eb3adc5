"""On two gloo ranks, by engine: the gradient of 32 micro-batches equals one's to within its noise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.precision.test_gradients import NOISE
from tests.precision.two_ranks import CASES
from tests.torchrun import found_by

#: Every case but the one whose engine adds in float32 by itself.
ROUNDED = [case for case in CASES if case != "fsdp2-reduces-float32"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("precision") / "rows.json"
    found = found_by("tests.precision.two_ranks", output, "1,32", *CASES, timeout=560)
    return {row["case"]: row for row in found}


@pytest.mark.backends
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*ROUNDED, "fsdp2-reduces-float32"])
def test_the_sum_is_right_to_the_noise_of_one_micro_batch(case: str, rows: dict[str, Any]) -> None:
    row = rows[case]
    assert "raised" not in row, row
    floor = row["parameter 1"]
    assert 0 < row["float32 32"] <= NOISE * floor and 0 < row["compensated 32"] <= NOISE * floor, row
    if case in ROUNDED:
        assert row["parameter 32"] > NOISE * row["float32 32"], row
    else:
        assert row["parameter 32"] <= NOISE * floor, row
