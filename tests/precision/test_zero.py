"""DeepSpeed keeps sums of its own: what it adds in is read, and refused where it is not what was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.precision.test_gradients import NOISE
from tests.torchrun import found_by


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("precision") / "rows.json"
    found = found_by("tests.precision.zero_ranks", output, "0", "1", "2", "3")
    return {(row["stage"], row["told"], row["asked"]): row for row in found}


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_is_deepspeeds_own(stage: int, rows: Any) -> None:
    rounded = rows[stage, None, "parameter"]
    for asked in ("parameter", "float32"):
        assert 0 < rows[stage, "fp32", asked]["32"] <= NOISE * rounded["1"] < rounded["32"]


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_it_adds_in_16_bits_is_refused(stage: int, rows: Any) -> None:
    assert 'expected float32: write "data_types"' in rows[stage, None, "float32"]["raised"]
