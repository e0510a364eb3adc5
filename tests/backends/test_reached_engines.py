"""On every backend a right run reaches the optimizer, and what a backend changes on the way is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_accum_fix.engines.reached import OTHER_GRADIENT
from tests.backends.planted import LAYER, planted
from tests.backends.rows import BACKENDS
from tests.ranks import row_of_each

ENGINES = (
    *("ddp", "fsdp1-launched", "fsdp2-launched", "fsdp2-bf16", "tensor-parallel"),
    *("deepspeed-zero-2", "deepspeed-zero-3", "deepspeed-zero-2-offloaded"),
)


def every_case() -> Iterator[Any]:
    for name, backend in BACKENDS.items():
        shown = backend.compiles or name in ENGINES
        yield pytest.param(name, marks=backend.mark if shown else pytest.mark.thorough)


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, planted, timeout=900)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("case", [*every_case()])
def test_every_engine_is_checked(case: str, rows: Any) -> None:
    found = {fault: run["reached_optimizer"] for fault, run in rows[case].items()}
    assert found["right"].startswith("yes, to "), found
    assert rows[case]["right"].get("reason") != OTHER_GRADIENT
    assert all(found[fault].startswith("no, ") for fault in ("factor", "layer", "rank")), found
    assert "a factor of 0.5" in found["factor"] and LAYER in found["layer"], found
