"""`watch` as its third audit asked for it: every finding, and what could not be told."""

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


def written(folder: Path, losses: list[float], **columns: list[float]) -> Path:
    """A file of lines, a log every tenth step."""
    rows = [{"step": 10 * place, "loss": loss} for place, loss in enumerate(losses, start=1)]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def a_run(losses: list[float], **columns: list[float]) -> Run:
    steps = tuple(float(10 * place) for place in range(1, len(losses) + 1))
    return Run("x", {key: Series(steps, tuple(its)) for key, its in {"loss": losses, **columns}.items()})


def falling(logs: int, noise: float = 0.03, seed: int = 0) -> list[float]:
    draw = numpy.random.default_rng(seed)
    return ((0.5 + 2 * numpy.exp(-5 * numpy.arange(logs) / logs)) * numpy.exp(noise * draw.normal(size=logs))).tolist()


# ---- what is a finding, and what an observation ----------------------------------------------------------------------


def swinging() -> Run:
    swing = 1 + 0.3 * numpy.sin(2 * math.pi * numpy.arange(200) / 6)
    return a_run((numpy.array(falling(200)) * swing).tolist(), learning_rate=[1e-3] * 200)


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
    "a swing at a steady rate": (swinging(), "the loss swings by"),
    "a rate of 0": (a_run([2.0 + 0.01 * (k % 7) for k in range(320)], learning_rate=[0.0] * 320), "rate, at most 0"),
    "norms that vanish": (
        a_run(falling(900), grad_norm=[math.exp(-k / 50) for k in range(900)]), "the gradient norm vanishes"
    ),
    "norms that are nan": (a_run(falling(60), grad_norm=[1.0] * 40 + [math.nan] * 20), "gradient norms are inf or nan"),
    "one -1": (a_run([*falling(20), -1.0, *falling(20)]), "1 of 41 losses are -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_every_finding_of_the_monitors_is_one_of_watch(name: str) -> None:
    run, told = FOUND[name]
    found = look([run])
    assert found.exit_code == 1 and any(told in line for line in found.findings), found.findings


def stalls() -> list[float]:
    return [2.0 + 0.05 * math.sin(its) for its in range(320)]


SPIKED = [1 + 0.1 * (k % 3) + 50 * (k == 50) for k in range(60)]
OBSERVED = {
    "a stall": (a_run(stalls()), "the loss is where it began"),
    "a swing of which nothing is known": (Run("x", {"loss": swinging().series["loss"]}), "the loss swings"),
    "a norm that spikes": (a_run(falling(60), grad_norm=SPIKED), "the gradient norm spikes, at step 510"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_what_may_be_meant_so_is_an_observation(name: str) -> None:
    run, told = OBSERVED[name]
    found = look([run])
    assert found.exit_code == 0 and told in found.words.split("observed, which may be intended:")[1]


def test_a_memorised_loss_of_zero_and_a_swing_of_the_schedule_are_none() -> None:
    memorised = [2.0 * math.exp(-its / 4) for its in range(60)]
    assert look([a_run([its if its > 5e-5 else 0.0 for its in memorised])]).findings == ()
    restarts = [1e-3 * (1 - (k % 6) / 6) for k in range(200)]
    run = Run("x", {**swinging().series, "learning_rate": a_run(restarts).series["loss"]})
    assert "swings" not in look([run]).words


# ---- what could not be told ------------------------------------------------------------------------------------------


def test_what_could_not_be_compared_is_said_and_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a", falling(40))
    rows = [{"step": 70 * place + 1000, "loss": its} for place, its in enumerate(falling(40), start=1)]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["watch", str(tmp_path)]) == 3
    assert "no steps in common" in capsys.readouterr().out


# ---- what people have ------------------------------------------------------------------------------------------------


def test_steps_that_go_down_or_back_are_put_in_order(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(falling(60), start=1)]
    (tmp_path / "down.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    (run,) = read_runs(tmp_path / "down.jsonl")
    assert look([run]).findings == () and run.series["loss"].steps[0] == 1
    resumed = [*({**row, "loss": 9.0} for row in rows), *rows[30:]]
    (tmp_path / "back.jsonl").write_text("".join(json.dumps(row) + "\n" for row in resumed))
    (run,) = read_runs(tmp_path / "back.jsonl")
    assert run.series["loss"].values[29:32] == (9.0, rows[30]["loss"], rows[31]["loss"])


# ---- one bad file hides nothing --------------------------------------------------------------------------------------


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
    "losses": {"loss": [1e308 * (1 + k / 100) for k in range(40)]},
    "the last losses": {"loss": [*falling(30), *[10.0 ** (30 * k) for k in range(1, 11)]]},
    "norms": {"loss": falling(40), "grad_norm": [1e308] * 40},
    "rates": {"loss": falling(40), "learning_rate": [1e308] * 40},
    "a guess": {"loss": falling(40), "hf_accum_fix/loss_of_a_guess": [1e308] * 40},
    "tiny losses": {"loss": [1e-310 * (k + 1) for k in range(40)]},
    "losses of both signs": {"loss": [(-1) ** k * 1e308 for k in range(40)]},
}


@pytest.mark.parametrize("name", HUGE)
def test_numbers_near_overflow_are_told_in_words(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    its = HUGE[name]
    written(tmp_path / "huge", its["loss"], **{key: values for key, values in its.items() if key != "loss"})
    written(tmp_path / "usual", falling(40))
    code = main(["watch", str(tmp_path)])
    said = capsys.readouterr()
    printed = " ".join(said.out.split())
    assert "Traceback" not in said.err and "Error" not in said.out + said.err
    if "losses" in name and name != "tiny losses":
        assert code == 1 and "beyond 1e60" in printed
