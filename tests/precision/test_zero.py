"""DeepSpeed keeps sums of its own: what it adds in is read, and refused where it is not what was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.precision.test_gradients import NOISE
from tests.torchrun import found_by


def found(tmp_path_factory: pytest.TempPathFactory, *given: str) -> Any:
    rows = found_by("tests.precision.zero_ranks", tmp_path_factory.mktemp("precision") / "rows.json", *given)
    return {(row["stage"], row["told"], row["asked"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(tmp_path_factory, "32", "0", "1", "2", "3")


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(tmp_path_factory, "512", "1", "2", "3")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_is_deepspeeds_own(stage: int, rows: Any) -> None:
    rounded = rows[stage, "nothing", "parameter"]
    for told, asked in (("adds", "parameter"), ("adds", "float32"), ("adds and reduces", "compensated")):
        assert 0 < rows[stage, told, asked]["32"] <= NOISE * rounded["1"] < rounded["32"]
        reduced = "float32" if "reduces" in told else "bfloat16"
        assert rows[stage, told, asked]["reduced_in"] == [reduced]


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_so_is_that_of_1024_micro_batches(stage: int, fine: Any) -> None:
    rounded = fine[stage, "nothing", "parameter"]
    assert 0 < fine[stage, "adds", "float32"]["512"] <= NOISE * rounded["1"] < rounded["512"] / 10


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_it_adds_in_16_bits_is_refused(stage: int, rows: Any) -> None:
    assert 'expected float32; add "data_types"' in rows[stage, "nothing", "float32"]["raised"]
