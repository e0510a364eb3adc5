"""A short run of every recipe: it ends well, leaves what it promises, and refuses a call that means nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from hf_accum_fix.upstream.seams import TESTED_RELEASES
from recipes import add_release
from tests.cli.processes import recipe
from tests.numerics.heads import before
from tests.recipes import RECIPES, load
from tests.torchrun import torchrun

#: Arguments of the shortest run, and what it leaves in its folder.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "any_machine": ("--steps 6", ("any_machine.png",)),
    "accelerate_loop": ("--head bert --windows 1 --epochs 1 --total-batch 16 --splits 4x4", ("curves.png",)),
    "convergence_monitor": ("--audit --quick", ("audit.json",)),
    "coupled_cost": ("--pairs 64 --windows 2", ("results.json", "table.md")),
    "coupled_recall": ("--steps 10 --batch 64", ("results.jsonl",)),
    "gradient_precision": ("--samples 64 --splits 1,4", ("error.png",)),
    "llava_sweep": ("--steps 1 --total-batch 32 --splits 1x32", ("results.jsonl", "curves.png")),
    "on_gpu": ("--quick --parts accumulate_in,router_loss --rounds 1", ("results.json", "table.txt")),
    "router_loss": ("--steps 2 --every 1 --accumulate 4 --samples 32", ("router_loss.png", "table.md")),
    "sample_shards": ("--layouts cp --splits 1x2", ("results.jsonl",)),
    "window_speed": (
        "--size tiny --rounds 1 --windows 1 --batch 4 --steps 4 --modes stock,balanced,auto --texts docstrings",
        ("results.jsonl", "window_speed.png"),
    ),
}
#: Before a release.
LONG = RUNS.keys() - {"accelerate_loop", "llava_sweep"}
#: Steps of a short run, and the alarm that it has to end with, by the fault.
FAULTS = {
    "data": (400, "rank-loss-1"),
    "seed": (60, "ranks-see-the-same-data"),
    "scale": (400, "rank-gradient-1"),
    "replica": (120, "replicas-differ"),
    "batch-norm": (60, "batch-norm-stale-parameters"),
    "leak": (300, "memory-grows-1"),
    "spike": (200, "gradient-norm-spike"),
    "lag": (400, "rank-lags-1"),
}


@pytest.mark.slow
@pytest.mark.skipif(before("5.23"), reason="they are run with the newest release")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.thorough if each in LONG else ()) for each in RUNS]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    arguments, left = RUNS[name]
    output = tmp_path / "out"
    done = recipe(name, *arguments.split(), "--output", output, code=0)
    assert done.stdout
    assert all((output / file).stat().st_size > 0 for file in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each == "replica" else pytest.mark.thorough) for each in FAULTS]
)
def test_every_fault_is_found_on_two_ranks(fault: str, tmp_path: Path) -> None:
    steps, alarm = FAULTS[fault]
    recipe("convergence_monitor", "--fault", fault, "--steps", str(steps), "--output", tmp_path, code=0)
    assert f"ALARM {alarm}: " in (tmp_path / "alarms.txt").read_text()


@pytest.mark.skipif(before("5.23"), reason="what is added to the newest release")
def test_a_step_costs_one_in_a_hundred_operations_and_no_memory() -> None:
    """The layers of the medium model, and narrow ones, since the width changes no count."""
    overhead = load("overhead", known_as="overhead")
    size = replace(overhead.SIZES["medium"], width=32, length=16)
    stock, ours = (overhead.count("llama", size, mode) for mode in ("stock", "apply"))
    assert stock.operations < ours.operations <= 1.01 * stock.operations
    assert ours.operations - stock.operations <= 15 * overhead.STEPS_OF_ACCUMULATION
    # On a CPU, where it waits for nothing, the count is looked at in every window; on a GPU, at the end of training.
    assert ours.reads <= stock.reads + 1
    assert ours.collectives == stock.collectives == 0
    assert ours.peak_bytes <= stock.peak_bytes + 256
    assert stock.observing_forwards == 0 and 0 < ours.observing_forwards <= 3 * 9


@pytest.mark.slow
@pytest.mark.skipif(before("5.23"), reason="what is added to the newest release")
def test_two_ranks_have_no_collective_more(tmp_path: Path) -> None:
    done = torchrun(RECIPES / "overhead.py", "--counts", "--sizes", "tiny", "--heads", "bert", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    stock, ours = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (stock["mode"], ours["mode"]) == ("stock", "apply")
    # What the ranks tell each other is read twice: who failed, and what is not exact.
    assert ours["collectives"] == stock["collectives"] > 0 and ours["reads"] <= stock["reads"] + 2
    assert "collectives a step" in (tmp_path / "table.md").read_text()


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pip that notes what it is asked for."""
    module = load("in_release")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / ".environments")
    pip = tmp_path / "lender" / module.BIN / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    pip.chmod(0o755)
    for _ in range(2):
        folder = module.made("5.4.0", ["torch==2"], ["transformers==5.4.0"], shared=[tmp_path / "lender"])
        assert (folder / "complete").exists()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "torch==2" in asked[0] and "transformers==5.4.0" in asked[1]


@pytest.mark.skipif(transformers.__version__ not in TESTED_RELEASES, reason="the installed release is no tested one")
def test_a_release_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(add_release.RELEASES.read_text())
    without = json.loads(add_release.RELEASES.read_text())
    for kind in ("published", "tested"):
        without[kind].remove(transformers.__version__)
    data, script = tmp_path / "releases.json", tmp_path / "in_release.py"
    data.write_text(json.dumps(without))
    script.write_text(add_release.IN_RELEASE.read_text())
    monkeypatch.setattr(add_release, "RELEASES", data)
    monkeypatch.setattr(add_release, "IN_RELEASE", script)
    assert add_release.main() == 0 and json.loads(data.read_text()) == whole


def test_the_matrix_is_summarised_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of ours that is off is not within; CI makes the cells."""
    matrix = load("release_matrix", known_as="release_matrix")
    monkeypatch.setattr(matrix.in_release, "environment", lambda release: tmp_path)
    for error, code in ((1e-9, 0), (1e-3, 1)):
        for ranks in matrix.WORLD_SIZES:
            rows = [
                {"head": "llama", "split": [1, 8], "tolerance": 1e-6, "router": 0.0, "path": path, "error": error}
                for path in ("stock", "apply", "trainer")
            ]
            text = "".join(json.dumps({**row, "loss": 1.0, "why": None}) + "\n" for row in rows)
            matrix.cells_file(tmp_path, "5.4.0", ranks).write_text(text)
        assert matrix.main(["5.4.0", "--output", str(tmp_path)]) == code
    assert (tmp_path / "matrix.png").stat().st_size > 1000
    sys.modules.pop("release_matrix")


@pytest.mark.parametrize(
    "call", ["accelerate_loop --splits 16x3", "convergence_monitor --fault lightning", "window_speed --modes faster"]
)
def test_a_wrong_call_ends_at_once(call: str) -> None:
    assert recipe(*call.split(), code=2).stderr
