"""`watch`: every finding, every observation, the ratio of two runs, and what could not be told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import Run, Series
from hf_accum_fix.monitor.watch import look, summarise


def falling(logs: int = 60, noise: float = 0.03, seed: int = 0) -> list[float]:
    draw = numpy.random.default_rng(seed)
    return ((0.5 + 2 * numpy.exp(-5 * numpy.arange(logs) / logs)) * numpy.exp(noise * draw.normal(size=logs))).tolist()


def a_run(losses: list[float], **columns: list[float]) -> Run:
    """A log every tenth step."""
    steps = tuple(float(10 * place) for place in range(1, len(losses) + 1))
    return Run("x", {key: Series(steps, tuple(its)) for key, its in {"loss": losses, **columns}.items()})


def written(folder: Path, losses: list[float], steps: tuple[int, int] = (0, 10), **columns: list[float]) -> Path:
    """A folder with a file of lines."""
    first, every = steps
    names = ("loss", *columns)
    rows = [dict(zip(names, its, strict=True)) for its in zip(losses, *columns.values(), strict=True)]
    lines = [json.dumps({"step": first + every * place, **row}) + "\n" for place, row in enumerate(rows, start=1)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(lines))
    return folder


def test_a_run_in_words(tmp_path: Path) -> None:
    losses = falling(100)
    columns = {
        "eval_accuracy": {100: 0.1, 500: 0.85, 1000: 0.9}, "hf_accum_fix/rank_loss_alarms": {10: 0, 610: 2},
    }  # fmt: skip
    rows = [
        {"loss": loss, "grad_norm": 1.0 + 0.1 * math.sin(place), "step": 10 * place}
        for place, loss in enumerate(losses, start=1)
    ]
    rows += [{key: value, "step": step} for key, values in columns.items() for step, value in values.items()]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    (run,) = read_runs(tmp_path)
    assert f"{numpy.mean(losses[-10:]):.4g} last (+- " in summarise(run).rows[0][1]
    text = look([run]).words
    assert text.startswith(f"{tmp_path}: 100 logged losses\n")
    assert "falls over" in text and "per 100 steps" in text
    assert "median 1" in text and "rank loss alarms: 2, the first by step 610" in text


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    written(tmp_path, [1.0] * 9)
    script = (
        f"import sys; from hf_accum_fix.cli import main; main(['watch', {str(tmp_path)!r}]);"
        "assert not {'matplotlib', 'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and "9 logged losses" in done.stdout, done.stderr


def test_healthy_runs_have_no_findings() -> None:
    draw = numpy.random.default_rng(1)
    for noise in (0.0, 0.02, 0.2):
        for logs in (5, 20, 200):
            norms = numpy.exp(0.1 * draw.normal(size=logs)) * (1 + 20 * numpy.exp(-numpy.arange(logs) / 3))
            assert look([a_run(falling(logs, noise, 1), grad_norm=norms.tolist())]).findings == ()


@pytest.mark.parametrize(("times", "code"), [(1.0, 0), (4.0, 1), (0.25, 1)])
def test_a_whole_factor_between_runs_is_a_finding(
    times: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = numpy.random.default_rng(5)
    for name, factor in (("a", 1.0), ("b", times)):
        norms = (factor * (1 + 0.01 * draw.normal(size=60))).tolist()
        written(tmp_path / name, [factor * its for its in falling(60, 0.02, seed=int(factor == 1.0))], grad_norm=norms)
    assert main(["watch", str(tmp_path)]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert ("times its gradient norm: one factor throughout" in printed) == bool(code)
    assert ("finding" in printed) == bool(code) and "times its loss" in printed


def swinging() -> list[float]:
    return (numpy.array(falling(200)) * (1 + 0.3 * numpy.sin(2 * math.pi * numpy.arange(200) / 6))).tolist()


STEADY = [1e-3] * 200
FOUND = {
    "nan": (a_run([*falling(40), *[math.nan] * 20]), "not finite or beyond 1e60, the first at step 410"),
    "diverges": (a_run([*falling(60)[:45], *[1.0 + 0.4 * k for k in range(15)]]), "diverges"),
    "no loss": (a_run([-1.0] * 60), "60 of 60 losses are -1"),
    "two of no loss": (a_run([*falling(30), -1.0, -1.0]), "2 of 32 losses are -1"),
    "a mean over stages": (a_run([(its - 1) / 2 for its in falling(60)]), "below zero"),
    "four times a guess": (
        a_run([4 * its for its in falling(60)], **{"hf_accum_fix/loss_of_a_guess": [2.4] * 60}), "times the loss of a g"
    ),
    "an alarm": (a_run(falling(60), **{"hf_accum_fix/memory_alarms": [0.0] * 50 + [1.0] * 10}), "memory alarms: 1"),
    "a nan that a Trainer logs as 0": (a_run([*falling(40), *[0.0] * 6]), "6 logged losses are exactly 0"),
    "all losses 0": (a_run([0.0] * 12), "12 logged losses are exactly 0"),
    "a swing at a steady rate": (a_run(swinging(), learning_rate=STEADY), "the loss swings by"),
    "a rate of 0": (a_run([2.0 + 0.01 * (k % 7) for k in range(320)], learning_rate=[0.0] * 320), "rate, at most 0"),
    "norms that vanish": (
        a_run(falling(900), grad_norm=[math.exp(-k / 50) for k in range(900)]), "the gradient norm vanishes"
    ),
    "norms that are nan": (a_run(falling(60), grad_norm=[1.0] * 40 + [math.nan] * 20), "gradient norms are inf or nan"),
    "one -1": (a_run([*falling(20), -1.0, *falling(20)]), "1 of 41 losses are -1"),
}  # fmt: skip
SPIKED = [1 + 0.1 * (k % 3) + 50 * (k == 50) for k in range(60)]
#: What may be meant so.
OBSERVED = {
    "a stall": (a_run([2.0 + 0.05 * math.sin(its) for its in range(320)]), "the loss is where it began"),
    "a swing of which nothing is known": (a_run(swinging()), "the loss swings"),
    "a norm that spikes": (a_run(falling(60), grad_norm=SPIKED), "the gradient norm spikes, at step 510"),
}


@pytest.mark.parametrize("name", [*FOUND, *OBSERVED])
def test_every_finding_of_the_monitors_is_one_of_watch(name: str) -> None:
    run, told = {**FOUND, **OBSERVED}[name]
    found = look([run])
    if name in FOUND:
        assert found.exit_code == 1 and any(told in line for line in found.findings), found.findings
    else:
        assert found.exit_code == 0 and told in found.words.split("observed, which may be intended:")[1]


def test_a_memorised_loss_of_zero_and_a_swing_of_the_schedule_are_none() -> None:
    memorised = [2.0 * math.exp(-its / 4) for its in range(60)]
    assert look([a_run([its if its > 5e-5 else 0.0 for its in memorised])]).findings == ()
    restarts = [1e-3 * (1 - (k % 6) / 6) for k in range(200)]
    assert "swings" not in look([a_run(swinging(), learning_rate=restarts)]).words


def test_what_could_not_be_compared_is_said_and_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a", falling(40))
    written(tmp_path / "b", falling(40), steps=(1000, 70))
    assert main(["watch", str(tmp_path)]) == 3
    assert "no steps in common" in capsys.readouterr().out


def test_a_finding_is_told_beside_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = written(tmp_path / "bad", [*falling(20), math.nan]) / "log.jsonl"
    (tmp_path / "garbage.csv").write_text("hello, world\n\x00, \x01\n")
    (tmp_path / "config.json").write_text("{")
    others = (tmp_path / "garbage.csv", tmp_path / "nowhere", tmp_path / "config.json")
    for logs in ((bad, *others), (*others, bad)):
        assert main(["watch", *map(str, logs)]) == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert "1 logged losses are not finite or" in printed and printed.count("could not read: ") == 3
    good = written(tmp_path / "good", falling(20))
    assert main(["watch", *map(str, (good, others[0]))]) == 3
    assert main(["watch", *map(str, others)]) == 3
    assert "nowhere does not exist" in " ".join(capsys.readouterr().err.split())


HUGE = {
    "losses": {"losses": [1e308 * (1 + k / 100) for k in range(40)]},
    "the last losses": {"losses": [*falling(30), *[10.0 ** (30 * k) for k in range(1, 11)]]},
    "norms": {"losses": falling(40), "grad_norm": [1e308] * 40},
    "rates": {"losses": falling(40), "learning_rate": [1e308] * 40},
    "a guess": {"losses": falling(40), "hf_accum_fix/loss_of_a_guess": [1e308] * 40},
    "tiny losses": {"losses": [1e-310 * (k + 1) for k in range(40)]},
    "losses of both signs": {"losses": [(-1) ** k * 1e308 for k in range(40)]},
}


@pytest.mark.parametrize("name", HUGE)
def test_numbers_near_overflow_are_told_in_words(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "huge", **HUGE[name])  # type: ignore[arg-type]
    written(tmp_path / "usual", falling(40))
    code = main(["watch", str(tmp_path)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "Error" not in said.out + said.err
    if "losses" in name and name != "tiny losses":
        assert code == 1 and "beyond 1e60" in " ".join(said.out.split())
