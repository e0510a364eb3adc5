"""The recipe of hand-written loops: what it refuses, and what a tiny run of it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.processes import recipe


@pytest.mark.slow
@pytest.mark.parametrize("head", ["llama", "bert"])
def test_the_official_recipes_are_off_and_windows_are_not(head: str, tmp_path: Path) -> None:
    tiny = ("--windows", "1", "--epochs", "1", "--total-batch", "16", "--splits", "4x4,1x16")
    done = recipe("accelerate_loop", "--head", head, *tiny, "--output", tmp_path, code=0)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["per_device"]) for row in rows] == [
        (mode, per_device) for mode in ("accumulate", "count", "windows") for per_device in (4, 1)
    ]
    for row in rows:
        first, short = row["errors"]["0"], row["errors"]["1"]
        if row["mode"] == "windows":
            assert max(first["gradient"], short["gradient"]) < 1e-5 and first["loss"] == pytest.approx(1, rel=1e-6)
        elif row["mode"] == "accumulate":
            assert first["gradient"] > 1e-3 and short["times"] == pytest.approx(0.5, abs=0.15)
        else:
            times = 1 if head == "llama" else row["accumulation"]
            assert first["gradient"] > 1e-3 and first["times"] == pytest.approx(times, rel=0.2)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "environment.json").read_text())["versions"]["accelerate"]
    assert "windows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--splits", "16"), "expected PxG"),
        (("--splits", "16x3"), "does not make --total-batch 64"),
        (("--modes", "windows,other"), "got modes ['other']"),
        (("--windows", "100000"), "fewer --windows"),
        (("--epochs", "0"), "expected 1 or more"),
    ],
)
def test_bad_input_is_answered_at_once(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = recipe("accelerate_loop", *arguments, "--output", tmp_path / "out")
    assert done.returncode == 2 and told in done.stderr
    assert not (tmp_path / "out").exists()


# --- the recipe on a tiny model: the same windows, less padding, a table that says so -------------------------------


@pytest.mark.timeout(280)
@pytest.mark.slow
def test_table_lines_and_picture(tmp_path: Path) -> None:
    tiny = ("--size", "tiny", "--rounds", "1", "--windows", "1", "--batch", "4", "--steps", "4")
    given = ("--modes", "stock,balanced", "--texts", "docstrings", "--output", tmp_path)
    recipe("window_speed", *tiny, *given, code=0)
    stock, balanced = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert balanced["padded_over_real"] < stock["padded_over_real"]
    assert 0 < balanced["gradient"] < 1e-5
    assert balanced["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert "| balanced |" in (tmp_path / "table.md").read_text() and (tmp_path / "window_speed.png").exists()


def test_an_unknown_mode_is_refused() -> None:
    done = recipe("window_speed", "--modes", "stock,faster")
    assert done.returncode == 2 and "got modes ['faster']" in done.stderr


# --- the recipe by its stand-in: figures in a table of 80 columns, and a part that fails among those that do not ----

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
