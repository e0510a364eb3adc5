"""The recipes of the router's loss: what they write, and what a step of each convention costs in counts."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.numerics.heads import before

RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.skipif(before("5.23"), reason="what is added to the newest release")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """As it is run: the folder of the recipes comes first on the path."""
    monkeypatch.syspath_prepend(RECIPES)
    yield loaded("router_loss_cost")
    sys.modules.pop("overhead", None)


@pytest.mark.slow
def test_four_conventions_are_trained_looked_at_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = loaded("router_loss")
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
def test_the_window_costs_no_forward_and_exact_one_more(cost: ModuleType) -> None:
    """Of the layers of the recipe's model, narrow ones, since the width changes no count."""
    cost.SIZE = replace(cost.SIZE, width=32, length=24)
    mean, window, exact = (cost.count(mode) for mode in ("mean", "window", "exact"))
    # Four micro-batches.
    assert (mean["forwards"], window["forwards"], exact["forwards"]) == (4, 4, 8)
    assert window["operations"] <= 1.02 * mean["operations"]
    assert exact["operations"] <= 1.5 * mean["operations"]
