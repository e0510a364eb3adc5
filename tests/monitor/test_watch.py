"""A run in one look: what is read, what is said of one run, and the ratio of two."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from hf_accum_fix.cli import watch as command
from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import LogsError, Run, Series
from hf_accum_fix.monitor.watch import look, summarise


def curve(draw: numpy.random.Generator, logs: int, *, noise: float = 0.02, times: float = 1.0) -> list[float]:
    return (times * (0.5 + 2 * numpy.exp(-5 * numpy.arange(logs) / logs) + noise * draw.normal(size=logs))).tolist()


def a_run(name: str, losses: list[float], every: int = 10) -> Run:
    steps = tuple(float(every * place) for place in range(1, len(losses) + 1))
    return Run(name, {"loss": Series(steps, tuple(losses))})


def write_state(folder: Path, losses: list[float], **columns: dict[int, float]) -> Path:
    rows: list[dict[str, Any]] = [
        {"loss": loss, "grad_norm": 1.0 + 0.1 * math.sin(place), "epoch": 0.1, "step": 10 * place}
        for place, loss in enumerate(losses, start=1)
    ]
    for key, values in columns.items():
        rows += [{key: value, "step": step} for step, value in values.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def test_a_run_in_words(tmp_path: Path) -> None:
    losses = curve(numpy.random.default_rng(0), 100)
    alarms = {"hf_accum_fix/rank_loss_alarms": {10: 0, 610: 2}}
    folder = write_state(tmp_path / "run", losses, eval_accuracy={100: 0.1, 500: 0.85, 1000: 0.9}, **alarms)
    (run,) = read_runs(folder)
    its = summarise(run)
    assert f"{numpy.mean(losses[-10:]):.4g} last (+- " in its.rows[0][1]
    text = look([run]).words
    assert text.startswith(f"{folder}: 100 logged losses\n")
    assert "falls over" in text and "per 100 steps" in text
    assert "median 1" in text and "rank loss alarms: 2, the first by step 610" in text


def test_the_last_checkpoint_stands_for_a_folder_and_folders_for_runs(tmp_path: Path) -> None:
    write_state(tmp_path / "a" / "checkpoint-9", [1.0] * 9)
    write_state(tmp_path / "a" / "checkpoint-10", [1.0] * 10)
    write_state(tmp_path / "b", [1.0] * 3)
    (tmp_path / "pictures").mkdir()
    assert [len(run.series["loss"]) for run in read_runs(tmp_path)] == [10, 3]


@pytest.mark.parametrize("text", ["{", "[]", '{"log_history": 3}', '{"log_history": [{"step": 1, "eval_loss": 2}]}'])
def test_what_cannot_be_read_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(LogsError, match="expected"):
        read_runs(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(LogsError, match="does not exist"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(LogsError, match="no loss was found"):
        read_runs(tmp_path)


def test_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = numpy.random.default_rng(6)
    for name in "ab":
        write_state(tmp_path / name, curve(draw, 40), eval_accuracy={200: 0.5, 400: 0.7})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert command.execute(parser.parse_args(arguments)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "times its loss" in printed and "at 40 steps, 1 times its gradient norm" in printed


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    write_state(tmp_path, [1.0] * 9)
    script = (
        "import argparse, sys; from hf_accum_fix.cli import watch; parser = argparse.ArgumentParser();"
        f"watch.add_arguments(parser); watch.execute(parser.parse_args([{str(tmp_path)!r}]));"
        "assert not {'matplotlib', 'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and "9 logged losses" in done.stdout, done.stderr
