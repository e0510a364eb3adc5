"""The sweep: what it refuses, what it reads, and what a tiny run of it measures."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
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
        ["--stage", "pretrain"],
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
