"""What apply() costs, in counts: operations, numbers read by the host, collectives, bytes, forwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hf_accum_fix import Items, LossContract, Reduction
from tests.numerics.heads import before
from tests.recipes import load
from tests.torchrun import torchrun

RECIPE = Path(__file__).parents[2] / "recipes" / "overhead.py"

pytestmark = pytest.mark.skipif(before("5.23"), reason="what is added to the newest release")


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    return load("overhead", known_as="overhead")


@pytest.mark.parametrize("head", ["llama", pytest.param("bert", marks=pytest.mark.thorough)])
def test_a_step_costs_one_in_a_hundred_operations_and_no_memory(head: str, overhead: ModuleType) -> None:
    """The layers of the medium model, and narrow ones, since the width changes no count."""
    size = replace(overhead.SIZES["medium"], width=32, length=16)
    stock, ours = (overhead.count(head, size, mode) for mode in ("stock", "apply"))
    assert stock.operations < ours.operations <= 1.01 * stock.operations
    assert ours.operations - stock.operations <= 15 * overhead.STEPS_OF_ACCUMULATION
    # On a CPU, where it waits for nothing, the count is looked at in every window; on a GPU, at the end of training.
    assert ours.reads <= stock.reads + 1
    assert ours.collectives == stock.collectives == 0
    assert ours.peak_bytes <= stock.peak_bytes + 256
    assert stock.observing_forwards == 0 and 0 < ours.observing_forwards <= 3 * 9


def test_a_contract_given_by_hand_costs_no_forward(overhead: ModuleType) -> None:
    contract = LossContract(Reduction.NUMBER, Items(keys=("labels",), shift=True))
    ours = overhead.count("llama", overhead.SIZES["tiny"], "apply", contract=contract)
    assert ours.observing_forwards == 0


@pytest.mark.slow
def test_two_ranks_have_no_collective_more(tmp_path: Path) -> None:
    output = tmp_path / "overhead"
    done = torchrun(RECIPE, "--counts", "--sizes", "tiny", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    for head in ("llama", "bert"):
        stock, ours = (row for row in rows if row["head"] == head)
        assert (stock["mode"], ours["mode"]) == ("stock", "apply")
        # What the ranks tell each other is read twice: who failed, and what is not exact.
        assert ours["collectives"] == stock["collectives"] > 0 and ours["reads"] <= stock["reads"] + 2
    assert "collectives a step" in (output / "table.md").read_text()
