"""What a first user sees of the sweep: on a terminal, in a log file, in the picture, and where something is missing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "llava_sweep.py"
pytestmark = pytest.mark.usefixtures("one_process")
BERT = ["--head", "bert", "--steps", "1", "--total-batch", "8", "--splits", "2x4", "--modes", "stock"]
REFERENCE = {"loss": 2.8923, "grad_norm": 17.089, "items": 1809}
FACTOR = {"stock": 43.354842, "hotfix": 1.354839, "apply": 1.0, "trainer": 1.0, "balanced": 1.0}


def asked(**changes: Any) -> argparse.Namespace:
    given = {"head": "llava", "model": None, "steps": 100, "total_batch": 128, "world": 4, "dtype": "float32"}
    return argparse.Namespace(**{**given, **changes})


def rows_of(options: argparse.Namespace, times: float = 1.0) -> list[dict[str, Any]]:
    splits = [(16, 2), (8, 4), (1, 32)]
    return [
        {
            "mode": mode,
            "processes": options.world,
            "per_device": per_device,
            "accumulation": accumulation,
            "losses": [REFERENCE["loss"] * factor * times / step for step in range(1, options.steps + 1)],
            "grad_norms": [REFERENCE["grad_norm"] * factor * times] * options.steps,
        }
        for mode, factor in FACTOR.items()
        for per_device, accumulation in splits
    ]


def table_of(
    sweep: ModuleType,
    release: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: float = 1.0,
    **changes: Any,
) -> str:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    options = asked(**changes)
    sweep.show_table(rows_of(options, times), REFERENCE, options)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("release", "times", "changes"),
    [
        ("4.49.0", 1.0, {}),
        ("4.49.0", 1.0, {"steps": 20}),
        ("5.23.0", 1.0, {}),
        ("5.23.0", 128.0, {"head": "bert", "steps": 20}),
    ],
)
def test_the_table_fits_80_columns_and_loses_nothing(
    release: str,
    times: float,
    changes: dict[str, Any],
    sweep: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = table_of(sweep, release, monkeypatch, capsys, times, **changes)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    words = shown.split()
    for row in rows_of(asked(**changes), times):
        assert f"{row['per_device']}x{row['accumulation']}" in words
        assert {f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}"} <= set(words)
        assert f"{row['losses'][0] / REFERENCE['loss']:.6f}" in words
    assert f"transformers {release}" in shown and "4 processes" in shown and "global batch 128" in shown


@pytest.mark.parametrize(
    ("release", "changes", "shown"),
    [
        ("4.49.0", {}, {"138": 1, "33.13": 1}),
        ("4.49.0", {"steps": 20}, {"138": 1, "33.13": 0}),
        ("4.49.0", {"total_batch": 64}, {"138": 0, "33.13": 0}),
        ("4.49.0", {"head": "bert"}, {"138": 0, "33.13": 0}),
        ("5.23.0", {}, {"138": 0, "33.13": 0}),
    ],
)
def test_published_values_stand_beside_what_they_compare_with_alone(
    release: str,
    changes: dict[str, Any],
    shown: dict[str, int],
    sweep: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = table_of(sweep, release, monkeypatch, capsys, **changes).split()
    assert {value: words.count(value) for value in shown} == shown
    assert ("published" in words) is any(shown.values())


def test_a_log_file_gets_a_line_a_minute(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """600 steps of one second each."""
    clock = [1000.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])
    log = sweep.LineAMinute(600)
    for step in range(600):
        clock[0] += 1
        log.step("stock 16x2" if step < 300 else "apply 1x32")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0] == "60 of 600 steps in 1 min 0 s, about 9 min 0 s to go; now stock 16x2"
    assert lines[5] == "360 of 600 steps in 6 min 0 s, about 4 min 0 s to go; now apply 1x32"


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a tiny run, given relative, and the log file of that run."""
    folder = tmp_path_factory.mktemp("logged")
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(RECIPE), *BERT, "--output", "out"]
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=200)
    text = (folder / "log").read_text()
    assert done.returncode == 0, text
    return folder / "out", text


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}


def test_a_log_file_says_what_is_run_and_where_it_was_written(logged: tuple[Path, str]) -> None:
    folder, text = logged
    lines = text.splitlines()
    assert f"transformers {version('transformers')}" in lines[0] and "1 mode x 1 split x 1 step" in lines[0]
    assert lines[-1] == f"wrote results.jsonl, environment.json and curves.png to {folder}"
    assert "\x1b" not in text and "\r" not in text


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, str(RECIPE), *BERT, "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment()) as running:
        os.close(theirs)
        shown = b"".join(read_all(ours)).decode()
        errors = running.stderr.read() if running.stderr else b""
    assert running.returncode == 0, errors
    assert "stock 2x4" in shown and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown and "1/1" in shown
    assert "curves.png to" in shown


def read_all(end: int) -> Iterator[bytes]:
    # On Linux the last reader of a terminal gets EIO where a file would be at its end.
    with contextlib.suppress(OSError):
        while chunk := os.read(end, 4096):
            yield chunk
    os.close(end)


@pytest.mark.parametrize(
    ("missing", "given"),
    [
        ("rich", []),
        ("matplotlib", ["--head", "bert"]),
        ("sklearn", []),
        ("PIL", []),
        ("datasets", []),
        ("peft", ["--lora"]),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_missing_extras_are_named_before_anything_is_made(
    missing: str,
    given: list[str],
    rank: str,
    sweep: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("RANK", rank)
    tiny = ["--steps", "1", "--total-batch", "8", "--splits", "8x1", "--modes", "stock"]
    assert sweep.main([*given, *tiny, "--output", str(tmp_path / "new" / "out")]) == 2
    error = capsys.readouterr().err
    if rank == "0":
        assert f"got no {missing};" in error and 'pip install "hf-accum-fix[recipes]"' in error
    else:
        assert error == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_data_leaves_no_folder_behind(sweep: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("not JSON")
    given = ["--data", str(tmp_path / "data.json"), "--images", str(tmp_path), "--output", str(tmp_path / "out")]
    assert sweep.main(given) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "LLaVA, built small"),
        ({"head": "bert"}, "BERT, built small"),
        ({"model": "llava-hf/llava-1.5-7b-hf"}, "llava-hf/llava-1.5-7b-hf"),
    ],
)
def test_the_picture_says_what_it_shows(
    changes: dict[str, Any], named: str, sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    kept = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(figure)
        kept(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    options = asked(**changes)
    sweep.draw_curves(rows_of(options), REFERENCE, options, tmp_path / "curves.png")
    (figure,) = drawn
    assert figure._suptitle is not None
    title = figure._suptitle.get_text()
    assert named in title and f"transformers {version('transformers')}" in title and "global batch 128" in title
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["16 x 2", "8 x 4", "1 x 32", "full batch at step 1"]
    panels = figure.get_axes()
    assert [panel.get_title().split()[0] for panel in panels] == list(FACTOR)
    for panel in panels:
        assert panel.get_legend() is None and panel.get_xlabel() == "optimizer step"
    assert panels[0].get_ylabel() == "training loss"
    shown = figure.get_window_extent()
    for text in (figure._suptitle, legend):
        extent = text.get_window_extent(FigureCanvasAgg(figure).get_renderer())
        assert shown.x0 <= extent.x0 and extent.x1 <= shown.x1 and shown.y0 <= extent.y0 and extent.y1 <= shown.y1


def test_the_quick_command_of_the_readme_is_accepted(sweep: ModuleType, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [line.strip("$ ") for line in readme.splitlines() if line.startswith("python recipes/llava_sweep.py --")]
    assert commands
    for command in commands:
        options = sweep.read_options([*command.split()[2:], "--output", str(tmp_path / "out")])
        assert options.steps <= 3, "a quick one"


def test_a_resumed_run_says_what_is_there(
    sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n{}\n")
    modes, splits = ["stock", "apply"], [sweep.Split(16, 8), sweep.Split(1, 128)]
    sweep.announce(asked(world=1, output=tmp_path, modes=modes, splits=splits))
    assert "2 modes x 2 splits x 100 steps, 2 of 4 cells are there" in capsys.readouterr().out
