"""A router's loss of the global batch on backends that shard, where the pass that counts is run sharded, too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.backends.rows import BACKENDS, DEEPSPEED
from tests.faults.launch import torchrun

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


def marked(case: str) -> Any:
    later = pytest.mark.deepspeed if BACKENDS[case].wrapped == DEEPSPEED else pytest.mark.backends
    return pytest.param(case, marks=later)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The rows of the cases that were selected, by one start of torchrun."""
    output = tmp_path_factory.mktemp("routers") / "rows.json"
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    done = torchrun("tests.backends.routers", output, *cases, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["case"]: row for row in json.loads(output.read_text())}


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [*map(marked, CASES)])
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
