"""How log files are read: what people have, and what nobody meant as a log, which is told in one line, never a hang,
a traceback or a foreign file's end.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_accum_fix.cli import main
from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import LogsError
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
    "commas": ("x.csv", "step,loss\n1,2.5\n2,1.5\n", (1, 2), (2.5, 1.5)),
    "a space after the comma": ("x.tsv", "step, loss\n1, 2.5\n2, 1.5\n", (1, 2), (2.5, 1.5)),
    "semicolons": ("x.csv", "step;loss\n1;2.5\n2;1.5\n", (1, 2), (2.5, 1.5)),
    "tabs": ("x.csv", "step\tloss\n1\t2.5\n2\t1.5\n", (1, 2), (2.5, 1.5)),
    "quotes": ("x.tsv", '"step", "loss"\r\n"1", "2.5"\r\n"2", "1.5"\r\n', (1, 2), (2.5, 1.5)),
    "a quoted comma": ("x.tsv", 'step,"a, b; c; d",loss\n1,"x, y",2.5\n2,"x\n\ny",1.5\n', (1, 2), (2.5, 1.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_what_people_have(name: str, tmp_path: Path) -> None:
    file, text, steps, losses = SOURCES[name]
    (tmp_path / file).write_text(text)
    for place in (tmp_path, tmp_path / file):
        (run,) = read_runs(place)
        assert run.series["loss"].steps == steps and run.left_out == ("1 of 3 lines" if "being written" in name else "")
        assert run.series["loss"].values == pytest.approx(losses, nan_ok=True)


def test_other_columns_of_a_console(tmp_path: Path) -> None:
    (tmp_path / "titan.log").write_text(TITAN)
    (tmp_path / "megatron.log").write_text(MEGATRON)
    titan, megatron = (read_runs(tmp_path / name)[0].series for name in ("titan.log", "megatron.log"))
    assert titan["grad_norm"].values == (1.5, 1.2) and titan["memory_gib"].values == (0.42, 0.5)
    assert megatron["grad_norm"].values == (2.5, 2.1) and megatron["learning_rate"].values == (1e-5, 2e-5)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A read of a pipe that nobody writes to ends here, not at the time limit of the whole suite."""

    def ended(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lines(path: Path, count: int = 12, **others: object) -> Path:
    rows = [{"step": step, "loss": 1.0 / step, **others} for step in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "trainer_state.json"])
def test_a_pipe_is_no_log_and_is_passed_over_beside_logs(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(LogsError):
            read_runs(place)
    if name == "x.jsonl":
        (tmp_path / "b.jsonl").mkdir()
        lines(tmp_path / "c.jsonl")
        assert [len(run.series["loss"]) for run in read_runs(tmp_path)] == [12]


ODD_LINES = {
    "huge integer as a loss": '{"step": 1, "loss": 1' + "0" * 400 + "}",
    "integer of more digits than Python reads": '{"step": 1, "loss": 1' + "0" * 5000 + "}",
    "a loss of 1e400": '{"step": 1, "loss": 1e400}',
    "huge integer as a step": '{"step": 1' + "0" * 400 + ', "loss": 1}',
    "a step of 1e400": '{"step": 1e400, "loss": 1}',
    "a step of nan": '{"step": NaN, "loss": 1}',
    "no step": '{"step": null, "loss": 1}',
    "a step in words": '{"step": "first", "loss": 1}',
    "deep nesting": "[" * 100_000,
    "a deep nesting that ends": '{"loss": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number": "7",
    "a list": "[1, 2]",
    "a count of alarms of 1e400": '{"step": 1, "loss": 1, "hf_accum_fix/rank_loss_alarms": 1e400}',
    "no text": "\x00\x01",
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES.keys())
@pytest.mark.parametrize("many", [1, 12], ids=["once", "twelve times"])
def test_odd_lines_are_read_or_refused(
    line: str, many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text(f"{line}\n" * many)
    assert main(["watch", str(tmp_path)]) in (0, 1, 3)
    assert "Traceback" not in capsys.readouterr().err


def test_an_odd_byte_a_bad_line_and_a_mark_at_the_start_leave_the_rest_readable(tmp_path: Path) -> None:
    texts = {
        "bytes.jsonl": b'\xef\xbb\xbf{"step": 1, "loss": 2, "name": "caf\xe9"}\n{"step": 2, "loss": 1}\n',
        "torn.jsonl": b'{"step": 1, "lo\n{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n',
        "table.csv": b'\xef\xbb\xbfstep,loss,note\n1,2,"' + b"x" * 200_000 + b'"\n2,1,\n3,1,caf\xe9\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    bytes_, torn, table = (read_runs(tmp_path / name)[0] for name in texts)
    assert bytes_.series["loss"].values == (2.0, 1.0) and bytes_.left_out == ""
    assert torn.series["loss"].steps == (2.0, 3.0) and torn.left_out == "1 of 3 lines"
    assert table.series["loss"].values[-1] == 1.0 and "1 of" in table.left_out
    assert "  left out        1 of 3 lines" in look([torn]).words
    (tmp_path / "torn.jsonl").write_text("{\n{\n" + '{"step": 3, "loss": 1}\n')
    with pytest.raises(LogsError, match="2 of 3 lines could not be read"):
        read_runs(tmp_path / "torn.jsonl")


ESCAPES = "\x1b]0;owned\x07\x1b[2Jx\r\x9b31m\u202e"


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ESCAPES
    folder.mkdir()
    lines(folder / "a.jsonl", **{f"eval_{ESCAPES}_accuracy": 0.5, f"hf_accum_fix/{ESCAPES}_alarms": 3})
    assert main(["watch", str(folder)]) in (0, 1)
    assert main(["watch", str(tmp_path / f"nowhere{ESCAPES}")]) == 3
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not [letter for letter in text if not (letter.isprintable() or letter == "\n")]
        assert r"\x1b]0;owned\x07" in text


#: In trainer_state.json; nothing: there is no file, and no folder.
UNREADABLE = {
    "{": "expected", "[]": "expected", '{"log_history": 3}': "expected",
    '{"log_history": [{"step": 1, "eval_loss": 2}]}': "expected", "": "does not exist", "no file": "no loss was found",
}  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_cannot_be_read_is_said(text: str, tmp_path: Path) -> None:
    if text not in ("", "no file"):
        (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(LogsError, match=UNREADABLE[text]):
        read_runs(tmp_path if text else tmp_path / "nowhere")


def test_steps_that_go_down_or_back_are_put_in_order(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 61)]
    resumed = [*({**row, "loss": 9.0} for row in rows), *rows[30:]]
    for name, its in (("down", rows[::-1]), ("back", resumed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in its))
    (down,), (back,) = (read_runs(tmp_path / f"{name}.jsonl") for name in ("down", "back"))
    assert look([down]).findings == () and down.series["loss"].steps[0] == 1
    assert back.series["loss"].values[29:32] == (9.0, rows[30]["loss"], rows[31]["loss"])


def test_the_last_checkpoint_stands_for_a_folder_and_folders_for_runs(tmp_path: Path) -> None:
    for name, logs in (("a/checkpoint-9", 9), ("a/checkpoint-10", 10), ("b", 3)):
        (tmp_path / name).mkdir(parents=True)
        history = [{"loss": 1.0, "step": step} for step in range(1, logs + 1)]
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "pictures").mkdir()
    assert [len(run.series["loss"]) for run in read_runs(tmp_path)] == [10, 3]


#: A table with lines that cannot be read, the losses that can, and what is left out.
TORN = {
    "text": ("step,loss\n1,2.5\n2,1.5\nhello,world\n", 2, "1 of 3 lines"),
    "text beside a step": ("step,loss\n1,2.5\n2,1.5\n3,oops\n", 2, "1 of 3 lines"),
    "more or fewer cells": ("step,loss\n1,2.5\n2,1.5\n3\n4,1.4,7\n", 2, "2 of 4 lines"),
    "a NUL": ("step,loss\n1,2.5\n2,1.5\n3,1\0.4\n", 2, "1 of 3 lines"),
    "an open quote": ('step,loss\n1,2.5\n2,1.5\n3,1.4\n4,"1.3\n5,1.2\n', 3, "2 of 5 lines"),
    "empty cells": ("step,loss,note\n1,2.5,\n2,,first\n3,None,\n4,1.5,last\n", 2, ""),
}


@pytest.mark.parametrize("name", TORN)
def test_lines_of_a_table_that_cannot_be_read_are_counted(name: str, tmp_path: Path) -> None:
    text, losses, left_out = TORN[name]
    (tmp_path / "x.csv").write_text(text)
    (run,) = read_runs(tmp_path)
    assert len(run.series["loss"]) == losses and run.left_out == left_out


@pytest.mark.parametrize(("name", "key"), [("x", "loss"), ("run-.-tag-Loss_train", "loss"), ("x-tag-lr", "lr")])
def test_a_number_that_tensorboard_exports_is_named_by_its_file(name: str, key: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.csv").write_text("Wall time,Step,Value\n1690000000.1,1,2.5\n1690000001.1,2,1.5\n")
    if key == "loss":
        (run,) = read_runs(tmp_path)
        assert run.series[key].steps == (1.0, 2.0) and run.series[key].values == (2.5, 1.5)
    else:
        with pytest.raises(LogsError, match=f"columns found: Wall time, learning_rate, {key}"):
            read_runs(tmp_path)
