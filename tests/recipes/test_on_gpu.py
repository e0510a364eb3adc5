"""The recipe by its stand-in: figures in a table of 80 columns, and a part that fails among those that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
def test_a_part_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import on_gpu

    def fails(rows: on_gpu.Rows, options: object) -> None:
        rows.add("before it fails", 1.0)
        raise MemoryError("none left")

    monkeypatch.setitem(on_gpu.PARTS, "fails", fails)
    given = ["--quick", "--parts", "fails,accumulate_in", "--rounds", "1", "--output", str(tmp_path)]
    assert on_gpu.main(given) == 1
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["what"] for row in rows[:2]] == ["before it fails", "FAILED"] and rows[1]["error"] == "none left"
    assert {row["part"] for row in rows} == {"fails", "accumulate_in"} and len(rows) == 9
    told = capsys.readouterr().out
    assert "[2/2] accumulate_in" in told
    assert all(len(line) <= 80 for line in (tmp_path / "table.txt").read_text().splitlines())
    for bad in (["--parts", "none"], ["--quick", "--rounds", "0"], ["--quick", "--output", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            on_gpu.main(bad)
        assert end.value.code == 2
    for name in ("on_gpu", "overhead", "router_loss_cost", "window_speed"):
        sys.modules.pop(name, None)
