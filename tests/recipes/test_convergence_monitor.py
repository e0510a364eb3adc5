"""The recipe of the monitors: a short run with a planted fault, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_accum_fix.monitor.run_logs import read_runs
from tests.cli.processes import recipe


@pytest.mark.slow
def test_a_planted_fault_is_told_and_the_logs_are_read_back(tmp_path: Path) -> None:
    done = recipe("convergence_monitor", "--fault", "replica", "--steps", "100", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    alarms = (tmp_path / "alarms.txt").read_text().splitlines()
    assert alarms and all("replicas-differ: parameter module.8.weight differs: rank 1" in alarm for alarm in alarms)
    assert done.stdout.splitlines()[-1] == "1 alarm"
    (run,) = read_runs(tmp_path)
    loss = run.series["loss"]
    assert loss.steps == tuple(float(step) for step in range(10, 101, 10)) and loss.values[-1] < loss.values[0] / 2
    assert run.series["eval_accuracy"].values[-1] > 0.8
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


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


#: In every CI.
SHOWN = ("data", "replica")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each in SHOWN else pytest.mark.thorough) for each in FAULTS]
)
def test_every_fault_is_found_on_two_ranks(fault: str, tmp_path: Path) -> None:
    steps, alarm = FAULTS[fault]
    done = recipe("convergence_monitor", "--fault", fault, "--steps", str(steps), "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"ALARM {alarm}: " in (tmp_path / "alarms.txt").read_text()


@pytest.mark.slow
def test_the_audit_prints_its_tables_and_writes_them(tmp_path: Path) -> None:
    done = recipe("convergence_monitor", "--audit", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert max(map(len, done.stdout.splitlines())) <= 80
    tables = json.loads((tmp_path / "audit.json").read_text())
    for title, rows in tables.items():
        assert title in done.stdout and all(next(iter(row.values())) in done.stdout for row in rows)
    by_name = {next(iter(row.values())): row for rows in tables.values() for row in rows}
    assert by_name["shuffled labels on a rank"]["found"] == "1/1" and by_name["plain, 4 ranks"]["rank_loss"] == 0
    assert by_name["40 MiB a step, 6 GiB free"]["step"] < by_name["40 MiB a step, 6 GiB free"]["full at"]


@pytest.mark.slow
def test_shuffled_labels_prints_a_line_a_training() -> None:
    done = recipe("shuffled_labels", "--seeds", "1", "--logs", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 6 and "words, healthy, seed 40: loss None, gradient None" in done.stdout


@pytest.mark.slow
def test_gradient_precision_runs(tmp_path: Path) -> None:
    done = recipe("gradient_precision", "--samples", "64", "--splits", "1,4", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--fault", "lightning"], ["--steps", "many"]])
def test_a_wrong_call_is_answered_at_once(arguments: list[str]) -> None:
    done = recipe("convergence_monitor", *arguments)
    assert done.returncode == 2 and "usage:" in done.stderr
