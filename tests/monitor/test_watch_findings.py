"""What people have as logs, and what is found in them: the exit code is 1 where something is, 0 where nothing is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import Run, Series
from hf_accum_fix.monitor.watch import look

# ruff: noqa: E501 - lines as trainers print them

TITAN = """\
[rank0]:[titan] 2025-01-01 10:00:00,000 - root - INFO - Training starts at step 1.
[rank0]:[titan] 2025-01-01 10:00:01,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1376  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[33mmemory:  0.42GiB(0.44%)  \x1b[34mtps: 1,234\x1b[39m
[rank0]:[titan] 2025-01-01 10:00:02,000 - root - INFO - step: 10  loss:  7.5000  grad_norm:  1.2  memory:  0.50GiB(0.5%)  tps: 9,876
"""
TIMM = """\
Train: 0 [   0/1251 (  0%)]  Loss: 6.943 (6.94)  Time: 1.2s,  12.0/s  LR: 1.000e-06  Data: 0.9 (0.9)
Train: 0 [  50/1251 (  4%)]  Loss: 6.500 (6.7)  Time: 1.2s,  12.0/s  LR: 2.000e-06  Data: 0.9 (0.9)
Train: 1 [   0/1251 (  0%)]  Loss: 6.000 (6.0)  Time: 1.2s,  12.0/s  LR: 3.000e-06  Data: 0.9 (0.9)
"""
NANO = """\
step 0: train loss 10.9, val loss 10.8
iter 0: loss 10.9886, time 1000.00ms, mfu -100.00%
iter 10: loss 9.5, time 100.00ms, mfu 12.00%
"""
MEGATRON = """\
 [2025-01-01 10:00:00] iteration       10/     500 | consumed samples: 80 | elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-05 | global batch size:     8 | lm loss: 1.080000E+01 | loss scale: 1.0 | grad norm: 2.500 | number of skipped iterations:   0 |
 [2025-01-01 10:00:09] iteration       20/     500 | consumed samples: 160 | elapsed time per iteration (ms): 500.0 | learning rate: 2.000000E-05 | global batch size:     8 | lm loss: 9.700000E+00 | loss scale: 1.0 | grad norm: 2.100 | number of skipped iterations:   0 |
"""
TRAINER = """\
  1%|          | 5/500 [00:01<01:40,  4.9it/s]{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}
{'loss': '2.25', 'grad_norm': nan, 'learning_rate': '4e-05', 'epoch': '0.02'}
{'eval_loss': 2.0, 'epoch': 0.02}
{'train_runtime': 12.0, 'train_loss': 2.4, 'epoch': 0.02}
"""
SOURCES = {
    "timm's summary.csv": ("summary.csv", "epoch,train_loss,eval_loss,eval_top1,lr\n0,6.9,6.8,0.1,0.001\n1,6.0,5.9,3.0,0.002\n", (0, 1), (6.9, 6.0)),
    "Lightning's metrics.csv": ("metrics.csv", "epoch,step,train_loss_step,val_loss\n0,9,2.5,\n0,9,,2.4\n0,19,2.0,\n", (9, 19), (2.5, 2.0)),
    "a W&B history": ("history.csv", "_step,train/loss,train/grad_norm\n1,2.5,1.0\n2,NaN,2.0\n3,1.5,\n", (1, 2, 3), (2.5, math.nan, 1.5)),
    "torchtitan's console": ("titan.log", TITAN, (1, 10), (8.1376, 7.5)),
    "timm's console": ("timm.txt", TIMM, (0, 50, 1251), (6.943, 6.5, 6.0)),
    "nanoGPT's console": ("nano.log", NANO, (0, 10), (10.9886, 9.5)),
    "Megatron's console": ("megatron.log", MEGATRON, (10, 20), (10.8, 9.7)),
    "the Trainer's console": ("trainer.log", TRAINER, (1, 2), (2.5, 2.25)),
    "lines of JSON, the last being written": ("x.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo', (1, 2), (2.0, 1.0)),
    "JSON under another name": ("y.jsonl", '{"iteration": 5, "Loss/train": 2}\n{"iteration": 6, "Loss/train": 1}\n', (5, 6), (2.0, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("whole_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize(("name", "text", "steps", "losses"), SOURCES.values(), ids=SOURCES.keys())
def test_what_people_have(
    name: str, text: str, steps: tuple[float, ...], losses: tuple[float, ...], whole_folder: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    (run,) = read_runs(tmp_path if whole_folder else tmp_path / name)
    assert run.series["loss"].steps == steps
    assert run.series["loss"].values == pytest.approx(losses, nan_ok=True)


def test_other_columns_of_a_console(tmp_path: Path) -> None:
    (tmp_path / "titan.log").write_text(TITAN)
    (tmp_path / "megatron.log").write_text(MEGATRON)
    titan, megatron = (read_runs(tmp_path / name)[0].series for name in ("titan.log", "megatron.log"))
    assert titan["grad_norm"].values == (1.5, 1.2) and titan["memory_gib"].values == (0.42, 0.5)
    assert megatron["grad_norm"].values == (2.5, 2.1) and megatron["learning_rate"].values == (1e-5, 2e-5)


def curve(draw: numpy.random.Generator, logs: int = 60, noise: float = 0.02) -> numpy.ndarray:
    return (0.5 + 2 * numpy.exp(-5 * numpy.arange(logs) / logs)) * (1 + noise * draw.normal(size=logs))


def a_run(name: str, losses: numpy.ndarray | list[float], **others: list[float]) -> Run:
    steps = tuple(float(10 * place) for place in range(1, len(losses) + 1))
    series = {"loss": Series(steps, tuple(map(float, losses)))}
    return Run(name, {**series, **{key: Series(steps, tuple(values)) for key, values in others.items()}})


def test_healthy_runs_have_no_findings() -> None:
    draw = numpy.random.default_rng(1)
    for noise in (0.0, 0.02, 0.2):
        for logs in (5, 20, 200):
            norms = numpy.exp(0.1 * draw.normal(size=logs)) * (1 + 20 * numpy.exp(-numpy.arange(logs) / 3))
            run = a_run("x", curve(draw, logs, noise), grad_norm=norms.tolist())
            assert look([run]).findings == ()


@pytest.mark.parametrize(("times", "code"), [(1.0, 0), (4.0, 1), (0.25, 1)])
def test_a_whole_factor_between_runs_is_a_finding(
    times: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = numpy.random.default_rng(5)
    for name, factor in (("a", 1.0), ("b", times)):
        rows = [
            {"step": step, "loss": factor * loss, "grad_norm": factor * (1 + 0.01 * draw.normal())}
            for step, loss in enumerate(curve(draw), start=1)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["watch", str(tmp_path)]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert ("times its gradient norm: one factor throughout" in printed) == bool(code)
    assert ("finding" in printed) == bool(code)
