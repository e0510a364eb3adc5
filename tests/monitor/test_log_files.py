"""How log files are read: tables of every kind, losses that stop, huge and growing files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hf_accum_fix.monitor import series
from hf_accum_fix.monitor.run_logs import Logs, read_runs
from hf_accum_fix.monitor.series import Columns
from hf_accum_fix.monitor.watch import look

TABLES = {
    "commas": "step,loss\n1,2.5\n2,1.5\n",
    "a space after the comma": "step, loss\n1, 2.5\n2, 1.5\n",
    "semicolons": "step;loss\n1;2.5\n2;1.5\n",
    "semicolons and decimal commas": "step;loss\n1;2,5\n2;1,5\n",
    "tabs": "step\tloss\n1\t2.5\n2\t1.5\n",
    "quotes": '"step", "loss"\r\n"1", "2.5"\r\n"2", "1.5"\r\n',
    "a quoted comma": 'step,"a, b; c; d",loss\n1,"x, y",2.5\n2,"x\n\ny",1.5\n',
    "thousands": 'step,loss\n"1,000",2.5\n"2,000",1.5\n',
}


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_whatever_separates_their_cells(name: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / f"x.{ending}").write_text(TABLES[name])
    (run,) = read_runs(tmp_path)
    times = 1000 if name == "thousands" else 1
    assert run.series["loss"].steps == (times, 2 * times) and run.series["loss"].values == (2.5, 1.5)
    assert run.left_out == ""


# ---- a file beside a log --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"architectures": 3}', '{"architectures": ["XForCausalLM"], "vocab_size": "?"}']
)
def test_a_broken_file_beside_a_log_costs_nothing_of_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": math.nan}]}))
    unread: list[str] = []
    assert look(read_runs(tmp_path, unread), unread=unread).exit_code == 1 and not unread


# ---- a loss that stops -----------------------------------------------------------------------------------------------


def ended(kind: str, last: int = 59) -> tuple[str, str]:
    """A log of 100 steps whose loss is there up to a step: name and text."""
    if kind == "null":
        rows = [{"step": k, "loss": 1.0 if k <= last else None} for k in range(1, 101)]
        return "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "no key":
        rows = [{"step": k, "lr": 0.1} | ({"loss": 1.0} if k <= last else {}) for k in range(1, 101)]
        return "trainer_state.json", json.dumps({"log_history": rows})
    separator = {"empty cells": ",", "empty cells between semicolons": ";"}[kind]
    cells = [f"{k}{separator}{1.0 if k <= last else ''}\n" for k in range(1, 101)]
    return "x.csv", f"step{separator}loss\n" + "".join(cells)


@pytest.mark.parametrize("kind", ["null", "no key", "empty cells", "empty cells between semicolons"])
def test_a_loss_that_stops_while_the_log_goes_on_is_a_finding(kind: str, tmp_path: Path) -> None:
    name, text = ended(kind)
    (tmp_path / name).write_text(text)
    found = look(read_runs(tmp_path))
    assert found.exit_code == 1 and "the loss stops at step 59, and the log goes on to 100" in found.words
    name, text = ended(kind, last=98)
    (tmp_path / name).write_text(text)
    assert look(read_runs(tmp_path)).exit_code == 0


HEALTHY = {
    "validation after the last losses": "epoch,step,train_loss_step,val_loss\n"
    + "".join(f"0,{k},{'2.5' if k % 10 else ''},{'' if k % 10 else '2.4'}\n" for k in range(1, 101)),
    "a learning rate in every step, a loss in every fiftieth": "step,train_loss,lr\n"
    + "".join(f"{k},{'2.5' if k % 50 == 1 else ''},0.1\n" for k in range(1, 191)),
    "a loss that pauses": "step,loss\n" + "".join(f"{k},{'' if 20 < k < 60 else 2.5}\n" for k in range(1, 101)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_is_logged_less_often_does_not_stop(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(HEALTHY[name])
    (run,) = read_runs(tmp_path)
    assert math.isnan(run.goes_on_to)


# ---- huge logs -------------------------------------------------------------------------------------------------------


def test_nothing_unusual_is_lost_in_a_huge_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_MOST", 500)
    columns = Columns()
    for k in range(1, 10_001):
        loss = {5_001: math.nan, 7_003: 0.0, 9_007: -1.0}.get(k, 2.0 + k % 2)
        columns.add({"step": k, "loss": loss, "grad_norm": 1.0, "hf_accum_fix/memory_alarms": k // 9_999})
    run = columns.run("x")
    loss = run.series["loss"]
    assert run.logs_a_point == 32 and 300 <= len(loss) <= 320 and loss.values[0] == 2.5 and loss.steps[0] == 32
    odd = [pair for pair in zip(loss.steps, loss.values, strict=True) if not 2.4 < pair[1] < 2.6]
    assert [step for step, _ in odd] == [5_001, 7_003, 9_007]
    words = look([run]).words
    assert "not finite, the first at step 5001" in words and "exactly 0, the first at step 7003" in words
    assert "memory: 1 alarm," in words and "means of 32 logs each" in words


# ---- growing logs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.log"])
def test_a_growing_log_is_read_again_where_it_has_changed(name: str, tmp_path: Path) -> None:
    def line(step: int) -> str:
        return {
            "x.jsonl": f'{{"step": {step}, "loss": 2.5}}\n', "x.csv": f"{step},2.5\n",
            "x.log": f"step: {step}  loss:  2.5  grad_norm:  1.0\n",
        }[name]  # fmt: skip

    log, logs = tmp_path / name, Logs(grow=True)
    log.write_text(("step,loss\n" if name == "x.csv" else "") + "".join(map(line, range(1, 101))))
    (first,) = logs.read(tmp_path)
    assert len(first.series["loss"]) == 100 and logs.read(tmp_path)[0] is first
    text = line(101) + line(102)
    for part, until in ((text[:-6], 101), (text[-6:], 102)):
        with log.open("a") as file:
            file.write(part)
        assert logs.read(tmp_path)[0].series["loss"].steps == tuple(map(float, range(1, until + 1)))


def test_a_last_line_without_an_end_is_read_once_it_stays(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}')
    logs = Logs(grow=True)
    assert [len(logs.read(tmp_path)[0].series["loss"]) for _ in range(3)] == [1, 2, 2]
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": 1.0}\n')
    assert logs.read(tmp_path)[0].series["loss"].steps == (1.0, 2.0, 3.0)


def test_event_files_are_read_on(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    logs = Logs(grow=True)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 7):
            writer.add_scalar("train/loss", 1.0 / step, step)
            writer.flush()
            if step % 3 == 0:
                (run,) = logs.read(tmp_path)
                assert len(run.series["loss"]) == step and logs.read(tmp_path)[0] is run
