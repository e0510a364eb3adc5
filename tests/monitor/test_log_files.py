"""How log files are read: tables of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_accum_fix.monitor.run_logs import read_runs
from hf_accum_fix.monitor.series import LogsError

TABLES = {
    "commas": "step,loss\n1,2.5\n2,1.5\n",
    "a space after the comma": "step, loss\n1, 2.5\n2, 1.5\n",
    "semicolons": "step;loss\n1;2.5\n2;1.5\n",
    "tabs": "step\tloss\n1\t2.5\n2\t1.5\n",
    "quotes": '"step", "loss"\r\n"1", "2.5"\r\n"2", "1.5"\r\n',
    "a quoted comma": 'step,"a, b; c; d",loss\n1,"x, y",2.5\n2,"x\n\ny",1.5\n',
}


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_whatever_separates_their_cells(name: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / f"x.{ending}").write_text(TABLES[name])
    (run,) = read_runs(tmp_path)
    assert run.series["loss"].steps == (1.0, 2.0) and run.series["loss"].values == (2.5, 1.5)
    assert run.left_out == ""


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
