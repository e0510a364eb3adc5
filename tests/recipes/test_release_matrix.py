"""The matrix's own part: what is resumed, summarised, printed and drawn; its cells are tested by running them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers import Trainer

from hf_accum_fix.upstream.seams import TESTED_RELEASES
from recipes import add_release
from tests.numerics.heads import HEADS
from tests.recipes import load
from tests.releases.cells import CHOSEN, EPOCHS


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return load("release_matrix", known_as="release_matrix")


def cell(path: str, error: float | None, **changes: Any) -> dict[str, Any]:
    row = {"head": "llama", "split": [1, 8], "tolerance": 1e-6, "router": 0.0, "path": path, "error": error}
    return {**row, "loss": 1.0, "why": None if error is not None else "ValueError: no such head", **changes}


def write(matrix: ModuleType, output: Path, release: str, rows: list[dict[str, Any]]) -> None:
    for ranks in matrix.WORLD_SIZES:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        matrix.cells_file(output, release, ranks).write_text(text)


def test_the_worst_cut_is_what_counts(matrix: ModuleType, tmp_path: Path) -> None:
    ours = [cell(path, error) for path in ("apply", "trainer") for error in (1e-16, 3e-8)]
    write(matrix, tmp_path, "5.4.0", [cell("stock", 0.1), cell("stock", 0.75), *ours])
    summary = matrix.summarise(["5.4.0"], tmp_path)["5.4.0", 1, "llama"]
    assert (summary.stock, summary.ours, summary.within) == (0.75, 3e-8, True)
    assert "0.75 / 3e-08" in matrix.table(matrix.summarise(["5.4.0"], tmp_path))


@pytest.mark.parametrize(
    ("ours", "within", "words"),
    [
        ([cell("apply", 1e-16), cell("trainer", 1e-3)], False, "**1e-03**"),
        ([cell("apply", 1e-16), cell("trainer", None)], False, "**1e-16**"),
        ([cell("apply", None), cell("trainer", None)], False, "not runnable"),
    ],
)
def test_a_cell_of_ours_that_is_off_or_fails_where_stock_runs_is_not_within(
    matrix: ModuleType, tmp_path: Path, ours: list[dict[str, Any]], within: bool, words: str
) -> None:
    write(matrix, tmp_path, "5.4.0", [cell("stock", 0.1), *ours])
    summaries = matrix.summarise(["5.4.0"], tmp_path)
    assert summaries["5.4.0", 2, "llama"].within is within
    assert words in matrix.table(summaries)


def test_a_release_that_is_refused_is_no_failure(matrix: ModuleType, tmp_path: Path) -> None:
    ours = [cell(path, None, why="UnsupportedSetupError: got transformers 4.46.2") for path in ("apply", "trainer")]
    write(matrix, tmp_path, "4.46.2", [cell("stock", 0.95), *ours])
    summaries = matrix.summarise(["4.46.2"], tmp_path)
    assert summaries["4.46.2", 2, "llama"].within and "0.95 / refused" in matrix.table(summaries)


def test_what_a_release_cannot_run_at_all_says_why(matrix: ModuleType, tmp_path: Path) -> None:
    write(matrix, tmp_path, "4.41.0", [cell(path, None) for path in ("stock", "apply", "trainer")])
    summaries = matrix.summarise(["4.41.0"], tmp_path)
    assert all(summary.within for summary in summaries.values())
    assert "llama on 4.41.0: `ValueError: no such head`" in matrix.table(summaries)


def test_a_finished_matrix_starts_nothing_and_is_drawn_again(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(matrix.subprocess, "run", started)
    monkeypatch.setattr(matrix.in_release, "environment", lambda release: tmp_path)
    write(matrix, tmp_path, "5.4.0", [cell(path, 1e-9) for path in ("stock", "apply", "trainer")])
    assert matrix.main(["5.4.0", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "matrix.png").stat().st_size > 1000
    assert (tmp_path / "table.md").read_text().startswith("| release | ranks | llama |")


@pytest.mark.parametrize("arguments", [["5.4"], ["5.4.0", "--workers", "0"]])
def test_a_wrong_call_exits_with_2(matrix: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        matrix.main(arguments)
    assert ended.value.code == 2


def test_pins_are_part_of_an_environments_name(matrix: ModuleType) -> None:
    label = "4.46.3@accelerate==0.26.0@peft==0.13.2"
    assert matrix.in_release.RELEASE.fullmatch(label)
    assert matrix.in_release.folder_of(label).name == "4.46.3@accelerate-0.26.0@peft-0.13.2"


def test_the_cells_name_heads_there_are() -> None:
    assert {*CHOSEN, *EPOCHS} <= set(HEADS)


# --- a release is added with the bodies of its methods where everything fits; else nothing is -----------------------


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data without the installed release."""
    releases = json.loads(add_release.RELEASES.read_text())
    for kind in ("published", "tested"):
        releases[kind].remove(transformers.__version__)
    releases["bodies"]["train"].clear()
    file = tmp_path / "releases.json"
    file.write_text(json.dumps(releases))
    script = tmp_path / "in_release.py"
    script.write_text(add_release.IN_RELEASE.read_text().replace('NEWEST = "5.', 'NEWEST = "4.'))
    monkeypatch.setattr(add_release, "RELEASES", file)
    monkeypatch.setattr(add_release, "IN_RELEASE", script)
    return file


@pytest.mark.skipif(transformers.__version__ not in TESTED_RELEASES, reason="the installed release is no tested one")
def test_the_data_have_the_release_and_what_is_new_of_it(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(
        Path(add_release.__file__).parents[1].joinpath("hf_accum_fix/upstream/releases.json").read_text()
    )
    assert add_release.main() == 0
    added = json.loads(known.read_text())
    assert added["tested"] == whole["tested"] and added["published"] == whole["published"]
    [body] = added["bodies"].pop("train")
    assert body in whole["bodies"].pop("train") and added["bodies"] == whole["bodies"]
    assert "their bodies are new: train. Left" in capsys.readouterr().out
    recipe = Path(add_release.__file__).with_name("in_release.py").read_text()
    assert add_release.IN_RELEASE.read_text() == recipe and f'NEWEST = "{whole["tested"][-1]}"' in recipe


def test_a_release_that_lacks_a_seam_is_not_added(
    known: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = known.read_text()
    monkeypatch.delattr(Trainer, "get_train_dataloader")
    assert add_release.main() == 1 and known.read_text() == before
    assert "without Trainer.get_train_dataloader" in capsys.readouterr().err
