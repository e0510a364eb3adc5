"""The sweep: what it refuses, what it reads, and what a tiny run of it measures."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from tests.cli.processes import ROOT, python
from tests.torchrun import launcher

RECIPE = ROOT / "recipes" / "llava_sweep.py"
pytestmark = pytest.mark.usefixtures("one_process")
TRANSFORMERS = Version(Version(version("transformers")).base_version)
LLAVA_IS_RIGHT = Version("4.52.0") <= TRANSFORMERS
LLAVA_IS_G_TIMES = Version("4.49.0") <= TRANSFORMERS and not LLAVA_IS_RIGHT
TINY = ["--steps", "1", "--total-batch", "32", "--splits", "4x8,1x32"]


def start(*arguments: str, launched: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return python(*launched, RECIPE, *arguments, code=None)


def lines_of(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a tiny sweep in all modes."""
    folder = tmp_path_factory.mktemp("sweep")
    done = start(*TINY, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def cells_of(folder: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """First loss and gradient norm by (mode, accumulation), as multiples of the full batch's."""
    reference = json.loads((folder / "environment.json").read_text())["reference"]
    rows = map(json.loads, lines_of(folder))
    return {
        (row["mode"], row["accumulation"]): (
            row["losses"][0] / reference["loss"],
            row["grad_norms"][0] / reference["grad_norm"],
        )
        for row in rows
    }


@pytest.mark.slow
def test_stock_is_as_published_and_both_cures_are_exact(finished: tuple[Path, str]) -> None:
    cells = cells_of(finished[0])
    assert len(cells) == 8
    for accumulation in (8, 32):
        factor = accumulation if LLAVA_IS_G_TIMES else 1
        assert cells["stock", accumulation][0] == pytest.approx(factor, rel=1e-5 if LLAVA_IS_RIGHT else 0.5)
        for mode in ("apply", "trainer"):
            # float32 against a float64 reference
            assert cells[mode, accumulation] == pytest.approx((1, 1), rel=1e-5)
        if not LLAVA_IS_RIGHT:
            rest = cells["stock", accumulation][0] / factor
            assert rest == pytest.approx(cells["hotfix", accumulation][0], rel=1e-6)
    assert cells["hotfix", 32][0] / cells["hotfix", 8][0] > 1.05, "no rest: the sweep would show one error of two"
    assert cells["hotfix", 32][1] != pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_output_says_what_was_measured(finished: tuple[Path, str]) -> None:
    folder, output = finished
    told = " ".join(output.split())
    assert "apply: loss right, within" in told and "trainer: loss right, within" in told
    assert "hotfix: loss off by up to" in told
    stock = "right, within" if LLAVA_IS_RIGHT else "G times" if LLAVA_IS_G_TIMES else "off by up to"
    assert f"stock: loss {stock}" in told
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["transformers"] == version("transformers")
    first = json.loads(lines_of(folder)[0])
    assert first["losses"][0] != round(first["losses"][0], 4), "the loss was rounded"


@pytest.mark.slow
def test_resume_keeps_finished_cells(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "cut_off"
    shutil.copytree(finished[0], folder)
    lines = lines_of(folder)
    (folder / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (folder / "curves.png").unlink()
    done = start(*TINY, "--output", str(folder), "--resume")
    assert done.returncode == 0, done.stderr
    again = lines_of(folder)
    assert again[:-1] == lines[:-1]
    before, after = json.loads(lines[-1]), json.loads(again[-1])
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-6)
    assert (folder / "curves.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "go on with --resume"),
        (["--resume", "--seed", "1"], "was made with seed 0, this run has 1"),
    ],
)
def test_results_are_not_overwritten(
    more: list[str], message: str, finished: tuple[Path, str], sweep: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    before = lines_of(finished[0])
    assert sweep.main([*TINY, "--output", str(finished[0]), *more]) == 2
    assert message in capsys.readouterr().err
    assert lines_of(finished[0]) == before


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (["--total-batch", "128"], 3, "--total-batch 128 does not divide by 3 processes"),
        (["--splits", "16x2"], 1, "split 16x2 does not make --total-batch 128 on 1 processes"),
        (["--splits", "16by8"], 1, "--splits has '16by8'"),
        (["--modes", "stock,fixed"], 1, "unknown mode 'fixed'"),
        (["--steps", "0"], 1, "--steps is 0"),
        (["--steps", "many"], 1, "invalid int value: 'many'"),
        (["--head", "bert", "--lora"], 1, "--head bert has its own model"),
        (["--lora", "--stage", "pretrain"], 1, "--lora adapts the language model"),
        (["--data", "conversations.json"], 1, "--data and --images are given together"),
        (["--output", "{file}/results"], 1, "can't be written"),
        (["--model", "{file}"], 1, "can't be read"),
        (["--data", "{file}", "--images", "."], 1, "can't be read as JSON"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_input_ends_at_once_on_every_rank(
    arguments: list[str],
    world: int,
    message: str,
    rank: int,
    sweep: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.write_text("not JSON")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", str(rank))
    given = [argument.format(file=file) for argument in arguments]
    if "--output" not in given:
        given += ["--output", str(tmp_path / "results")]
    assert sweep.main(given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == (1 if rank == 0 else 0), "one line, from rank 0 alone"
    assert message in error or rank == 1


def test_bad_input_is_the_exit_code(tmp_path: Path) -> None:
    done = start("--modes", "fixed", "--output", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llava_sweep: unknown mode 'fixed'")


@pytest.mark.parametrize(
    ("world", "total", "expected"),
    [
        (4, 128, [(16, 2), (8, 4), (1, 32)]),
        (8, 128, [(1, 16)]),
        (1, 128, [(16, 8), (8, 16), (1, 128)]),
        (2, 128, [(16, 4), (8, 8), (1, 64)]),
        (4, 64, [(16, 1), (8, 2), (1, 16)]),
        (1, 6, [(1, 6)]),
    ],
)
def test_splits_are_the_published_ones_that_fit(
    world: int, total: int, expected: list[tuple[int, int]], sweep: ModuleType
) -> None:
    assert sweep.choose_splits(None, total, world) == expected


ASKED, ANSWERED = {"from": "human", "value": "<image>\nWhat ?"}, {"from": "gpt", "value": "A"}
GOOD = {"image": "a.png", "conversations": [ASKED, ANSWERED]}


def changed(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (GOOD | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("text", "record 1 is str, not an object"),
        (changed(image=None), "record 1 has no 'image' or 'images'"),
        (changed(image="b.png"), "record 1 has image 'b.png', which is no file in"),
        (changed(images=["a.png", "a.png"]), "record 1 has 1 <image> in its prompts and 2 images"),
        (changed(conversations=None), "record 1 has no list 'conversations' or 'messages'"),
        (changed(conversations=[]), "record 1 does not end with an answer"),
        (changed(conversations=[ASKED]), "record 1 does not end with an answer"),
        (changed(conversations=[ANSWERED]), "record 1 has message 0 from 'gpt', where human or user"),
        (changed(conversations=[{"from": "human", "value": " "}]), "record 1 has no text in message 0"),
        (changed(conversations=[ASKED, {"from": "gpt", "value": "<image>"}]), "<image> in the answer"),
    ],
)
def test_bad_record_is_named(record: Any, message: str, sweep: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([GOOD, record]))
    with pytest.raises(sweep.BadInputError) as raised:
        sweep.read_conversations(path, tmp_path)
    assert message in str(raised.value)


def test_both_formats_read_alike(sweep: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    messages = [
        {"role": "system", "content": "Be short ."},
        {"role": "user", "content": "<image> What ?"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Why ?"},
        {"role": "assistant", "content": "B"},
    ]
    (tmp_path / "c.json").write_text(json.dumps([GOOD, {"messages": messages, "images": ["a.png"]}]))
    first, second = sweep.read_conversations(tmp_path / "c.json", tmp_path)
    assert first == {"images": [str(tmp_path / "a.png")], "turns": [["<image>\nWhat ?", "A"]]}
    assert second["turns"] == [["Be short . <image> What ?", "A"], ["Why ?", "B"]]
    assert second["images"] == first["images"]


@pytest.mark.slow
def test_answers_are_the_targets_and_pictures_fit(finished: tuple[Path, str], sweep: ModuleType) -> None:
    from transformers import AutoTokenizer

    folder, checkpoint = finished[0] / "digits", str(finished[0] / "initial_model")
    conversations = sweep.read_conversations(folder / "conversations.json", folder)
    lengths = {len(answer.split()) for record in conversations for _, answer in record["turns"]}
    assert min(lengths) == 1 and max(lengths) > 30
    options = argparse.Namespace(steps=2, total_batch=4, seed=0)
    dataset, collate = sweep.llava_samples(conversations, options, checkpoint)
    order = sweep.sample_order(len(conversations), options)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for place, index in enumerate(order):
        targets = [token for token in dataset[place]["labels"] if token != sweep.IGNORED]
        answer = conversations[index]["turns"][0][1].split()
        assert tokenizer.convert_ids_to_tokens(targets) == [*answer, "</s>"]
    batch = collate([dataset[place] for place in range(4)])
    pictures = (batch["input_ids"] == tokenizer.convert_tokens_to_ids("<image>")).sum(1)
    assert pictures.tolist() == [16] * 4
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    assert collate.seen == [[0, 1, 2, 3]]


def test_a_step_with_foreign_samples_is_noticed(sweep: ModuleType) -> None:
    options = argparse.Namespace(steps=2, total_batch=4, world=1)
    sweep.check_samples([[3, 1, 0], [2], [4, 5], [7, 6]], 2, options)
    with pytest.raises(RuntimeError, match="step 2 did not have its own 4 samples"):
        sweep.check_samples([[0, 1], [2, 3], [4, 5], [6, 6]], 2, options)


def test_full_batch_is_the_mean_over_tokens(sweep: ModuleType) -> None:
    import torch

    class Table(torch.nn.Module):
        """Logits that depend on the token alone, so that the mean can be written down."""

        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([[0.0, 0.0], [0.0, math.log(3)]], dtype=torch.float64))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> argparse.Namespace:
            return argparse.Namespace(logits=self.logits[input_ids])

    samples = [
        {"place": 0, "input_ids": [0, 1], "labels": [-100, 1]},
        {"place": 1, "input_ids": [1, 1, 1, 1], "labels": [-100, 1, 1, 1]},
    ]
    reference = sweep.full_batch(Table(), samples, sweep.Collator(0, None))
    # one token costs ln 2, three cost ln 4/3
    assert reference["loss"] == pytest.approx((math.log(2) + 3 * math.log(4 / 3)) / 4, rel=1e-12)
    # d/dlogits is (p - onehot): 1/2 once on row 0, 1/4 three times on row 1, two entries each
    assert reference["grad_norm"] == pytest.approx(math.sqrt(2 * 0.5**2 + 2 * 0.75**2) / 4, rel=1e-12)
    assert reference["items"] == 4


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.0 + 1e-7], "loss right, within 1e-07 of the full batch's"),
        ([2.0, 8.0], "loss G times the full batch's"),
        ([4.0, 4.0], "loss W times the full batch's"),
        ([8.0, 32.0], "loss G x W times the full batch's"),
        ([0.5, 0.125], "loss 1/G of the full batch's"),
        ([2.02, 10.8], "loss G times the full batch's, and then off by up to 35.0%, 33.7% between splits"),
        ([1.01, 1.35], "loss off by up to 35.0%, 33.7% between splits"),
    ],
)
def test_verdict_names_factor_and_rest(ratios: list[float], verdict: str, sweep: ModuleType) -> None:
    rows = [{"accumulation": 2, "processes": 4}, {"accumulation": 8, "processes": 4}]
    assert sweep.compare("loss", rows, ratios, 1e-5) == verdict


@pytest.mark.slow
def test_bert_is_wrong_since_5_0(tmp_path: Path) -> None:
    arguments = ["--steps", "1", "--total-batch", "8", "--splits", "2x4", "--modes", "stock,apply"]
    done = start("--head", "bert", *arguments, "--output", str(tmp_path / "bert"))
    assert done.returncode == 0, done.stderr
    cells = cells_of(tmp_path / "bert")
    factor = 4 if Version("5.0.0") <= TRANSFORMERS else 1
    assert cells["stock", 4] == pytest.approx((factor, factor), rel=1e-5)
    assert cells["apply", 4] == pytest.approx((1, 1), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launched",
    [
        pytest.param(
            ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "4"),
            id="accelerate",
            marks=pytest.mark.thorough,
        ),
        pytest.param(launcher(4), id="torchrun", marks=pytest.mark.thorough),
    ],
)
def test_four_processes_see_the_same_batch(launched: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ["--steps", "2", "--total-batch", "32", "--splits", "4x2,1x8", "--modes", "stock,apply"]
    done = start(*arguments, "--output", str(tmp_path / "out"), launched=launched)
    assert done.returncode == 0, done.stderr
    rows = list(map(json.loads, lines_of(tmp_path / "out")))
    assert {row["processes"] for row in rows} == {4}
    cells = cells_of(tmp_path / "out")
    assert cells["apply", 2] == pytest.approx((1, 1), rel=1e-5)
    assert cells["apply", 8] == pytest.approx((1, 1), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--lora"],
        pytest.param(["--stage", "pretrain"], marks=pytest.mark.thorough),
        pytest.param(["--dtype", "float64"], marks=pytest.mark.thorough),
        ["--dtype", "bfloat16"],
        ["--model", "{done}/initial_model", "--data", "{done}/digits/conversations.json", "--images", "{done}/digits"],
    ],
    ids=lambda more: more[-1],
)
def test_other_ways_to_train(more: list[str], finished: tuple[Path, str], tmp_path: Path) -> None:
    given = [argument.format(done=finished[0]) for argument in more]
    done = start(*TINY, "--modes", "apply", *given, "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    cells = cells_of(tmp_path / "out")
    # bfloat16 has 8 bits, and its forward is compared with one in float64
    tolerance = {"float64": 1e-6, "bfloat16": 2e-2}.get(more[-1], 1e-5)
    assert cells["apply", 8] == pytest.approx((1, 1), rel=tolerance)
    assert cells["apply", 32] == pytest.approx((1, 1), rel=tolerance)


# --- what a first user sees of the sweep: on a terminal, in a log file, in the picture, and where something is ------

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_bad_data_leaves_no_folder_behind(sweep: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("not JSON")
    given = ["--data", str(tmp_path / "data.json"), "--images", str(tmp_path), "--output", str(tmp_path / "out")]
    assert sweep.main(given) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_quick_command_of_the_readme_is_accepted(sweep: ModuleType, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [line.strip("$ ") for line in readme.splitlines() if line.startswith("python recipes/llava_sweep.py --")]
    assert commands
    for command in commands:
        options = sweep.read_options([*command.split()[2:], "--output", str(tmp_path / "out")])
        assert options.steps <= 3, "a quick one"


@pytest.mark.slow
def test_a_resumed_run_says_what_is_there(
    sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n{}\n")
    modes, splits = ["stock", "apply"], [sweep.Split(16, 8), sweep.Split(1, 128)]
    sweep.announce(asked(world=1, output=tmp_path, modes=modes, splits=splits))
    assert "2 modes x 2 splits x 100 steps, 2 of 4 cells are there" in capsys.readouterr().out
