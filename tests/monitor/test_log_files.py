"""How log files are read: tables of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_accum_fix.monitor.run_logs import read_runs

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
