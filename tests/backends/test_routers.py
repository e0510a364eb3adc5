"""A router's loss of the global batch on backends that shard, where the pass that counts is run sharded, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.rows import BACKENDS

RUN_BY = ("tests.backends.routers", 600)
CASES = (
    "fsdp1-launched",
    "fsdp2-launched",
    "fsdp2-launched-offloaded",
    "deepspeed-zero-1",
    "deepspeed-zero-2",
    "deepspeed-zero-3",
)
#: Of what the router's loss adds to three steps, where sums are made in float64 from end to end.
FLOAT64 = 1e-12


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [pytest.param(case, marks=BACKENDS[case].mark) for case in CASES])
def test_the_routers_loss_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    runs = rows[case]["runs"]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if run["convention"] != "mean"]
    assert {(run["convention"], run["by"]) for run in ours} == {
        ("exact", "trainer"),
        ("exact", "loop"),
        ("window", "trainer"),
    }
    for run in ours:
        # A float32 backend is held to what float32 makes of the same formula.
        assert run["error"] <= max(FLOAT64, 2 * run["floor"]), run
        assert run["loss"] <= 1e-6, run
    (mean,) = (run for run in runs if run["convention"] == "mean")
    assert mean["error"] > 0.1, mean
