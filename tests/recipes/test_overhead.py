"""What apply() costs, in counts: operations, numbers read by the host, collectives, bytes, forwards."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_accum_fix import Items, LossContract, Reduction
from tests.numerics.heads import before
from tests.recipes import RECIPES, load
from tests.torchrun import torchrun

RECIPE = Path(__file__).parents[2] / "recipes" / "overhead.py"

pytestmark = pytest.mark.skipif(before("5.23"), reason="what is added to the newest release")


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    return load("overhead", known_as="overhead")


@pytest.mark.parametrize("head", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
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


def test_bad_input_is_told_and_nothing_is_overwritten(
    tmp_path: Path, overhead: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text("kept")
    for words in (["--heads", "gpt"], ["--rounds", "0"], ["--output", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            overhead.main(words)
        assert end.value.code == 2
    assert "so that nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_text() == "kept"


def test_waits_for_a_gpu_are_those_that_torch_tells_of(overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for its sync debug mode: no GPU is asked for."""
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with overhead.waits_for_the_gpu() as told:
        for words in ("called a synchronizing CUDA operation (Triggered internally)", "something else") * 2:
            warnings.warn(words, UserWarning, stacklevel=1)
    assert len(told) == 2
    assert modes == ["warn", 0]


# --- the recipes of the router's loss: what they write, and what a step of each convention costs in counts ----------


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """As it is run: the folder of the recipes comes first on the path."""
    monkeypatch.syspath_prepend(RECIPES)
    yield load("router_loss_cost", known_as="recipes_router_loss_cost")
    sys.modules.pop("overhead", None)


@pytest.mark.slow
def test_three_conventions_are_trained_looked_at_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load("router_loss", known_as="recipes_router_loss")
    output = tmp_path / "out"
    short = ["--steps", "2", "--every", "1", "--accumulate", "4", "--samples", "32"]
    assert recipe.main([*short, "--output", str(output)]) == 0
    looks = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert [(each["convention"], each["step"]) for each in looks] == [
        (convention, step) for convention in recipe.CONVENTIONS for step in (1, 2)
    ]
    for each in looks:
        assert all(sum(layer) == pytest.approx(1, rel=1e-5) for layer in each["load"])
        assert 0 < each["information"] < 2 and each["auxiliary"] > 1.9
    last = {each["convention"]: each["loss"] for each in looks}
    assert len(set(last.values())) == len(recipe.CONVENTIONS)
    assert (output / "router_loss.png").stat().st_size > 10_000
    assert (output / "table.md").read_text() in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        recipe.main(["--output", str(output)])
    assert raised.value.code == 2


@pytest.mark.slow
def test_exact_costs_one_forward_more(cost: ModuleType) -> None:
    """Of the layers of the recipe's model, narrow ones, since the width changes no count."""
    cost.SIZE = replace(cost.SIZE, width=32, length=24)
    mean, exact = (cost.count(mode) for mode in ("mean", "exact"))
    # Four micro-batches.
    assert (mean["forwards"], exact["forwards"]) == (4, 8)
    assert exact["operations"] <= 1.5 * mean["operations"]
