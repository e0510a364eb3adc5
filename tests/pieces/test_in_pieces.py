"""A micro-batch that runs out of memory runs in pieces: the step of the full batch, whatever failed and where.

Errors are relative to the float64 full batch; a head's tolerance is the rounding of the loss that the library computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_accum_fix
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.pieces.in_pieces import KEPT
from tests.numerics.epochs import Stream
from tests.numerics.heads import HEADS, Head, Sample, seeded
from tests.numerics.heads.head import FLOAT64
from tests.numerics.parity import (
    ClassRecorder,
    Step,
    StockRecorder,
    cut,
    pass_over_imports,
    reference_step,
    take_step,
    trainer_of,
)
from tests.pieces.memory import Memory, OutOfMemoryError
from tests.ranks import on_ranks, same_on_all_ranks

SHORT: dict[str, dict[str, float]] = {
    "forward": {"forward": 2},
    "backward": {"backward": 2},
    "both": {"forward": 3, "backward": 1},
}
EVERYDAY = ("llama", "bert-classes", "t5")
#: One of each kind of loss, of inputs, and of who computes it.
OTHERS = (
    *("llama-position-0", "llama-empty-micro-batches", "llama-smoothing", "lora", "prompt-tuning", "bert-mlm"),
    *(
        "bert-multi-label",
        "bert-answers",
        "bert-pretraining",
        "bart-causal",
        "llava",
        "vit-regression",
        "masked-patches",
    ),
    *("wav2vec2-ctc-mean", "wav2vec2-ctc-sum", "time-series", "func-with-number", "func-with-mean", "no-kwargs"),
    *("declares-false", "uses-tensor", "told-false-after-init", "mean-of-sample-means", "two-terms"),
)


def split(
    head: Head | str, short: Memory, at: tuple[int, int], folder: Path, *, samples: Any = None, **more: Any
) -> Step:  # fmt: skip
    """One step of a head that is short of memory."""
    options, head = more.pop("options", {}), head if isinstance(head, Head) else HEADS[head]
    with hf_accum_fix.apply(out_of_memory="split", quiet=True, **options):
        return take_step(short.head(head), samples or head.samples, *at, "stock", folder, **more)


def is_exact(step: Step) -> bool:
    return bool(step.trainer.__dict__[SESSION].state.exact)


def in_pieces() -> Iterator[Any]:
    """Of the others CI has one kind."""
    for name, at in (*((name, (4, 2)) for name in (*EVERYDAY, *OTHERS)), ("llama", (8, 1))):
        for kind in SHORT:
            yield pytest.param(name, at, kind, marks=[pytest.mark.thorough] * (name in OTHERS and kind != "both"))


@pytest.mark.parametrize(("name", "at", "kind"), [*in_pieces()])
def test_pieces_take_the_step_of_the_full_batch(name: str, at: tuple[int, int], kind: str, tmp_path: Path) -> None:
    head, short = HEADS[name], Memory(**SHORT[kind])
    step = split(name, short, at, tmp_path)
    found = step.errors(reference_step(head, cut(head.samples, at[0])))
    assert max(found.values()) <= head.tolerance, found
    assert short.failures and not short.left and is_exact(step)
    assert max(short.trained) <= min(SHORT[kind].values())


class Pairs(nn.Module):
    """Chosen texts against rejected ones: in two blocks of rows, or next to one another."""

    def __init__(self, *, blocks: bool) -> None:
        super().__init__()
        self.blocks, self.embed, self.score = blocks, nn.Embedding(48, 16), nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask[..., None].double()
        scores = self.score(torch.tanh((self.embed(input_ids) * mask).sum(1) / mask.sum(1)))[:, 0]
        chosen, rejected = scores.chunk(2) if self.blocks else (scores[::2], scores[1::2])
        return {"loss": -nn.functional.logsigmoid(chosen - rejected - 0.1).mean()}


def pairs(*, blocks: bool) -> Head:
    """Eight pairs of texts of two to nine tokens."""
    texts = [torch.arange(1 + place, 3 + place + place * 5 % 8) % 47 + 1 for place in range(16)]

    def batch(samples: Sequence[Sample]) -> dict[str, Any]:
        kinds = ("chosen", "rejected")
        of_blocks, of_pairs = ([s[k] for k in kinds for s in samples], [s[k] for s in samples for k in kinds])
        rows = of_blocks if blocks else of_pairs
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    samples = [{"chosen": a, "rejected": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    return Head("pairs", seeded(partial(Pairs, blocks=blocks)), samples, collate=batch, tolerance=FLOAT64)


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("blocks", (False, True))
@pytest.mark.parametrize("at", ((4, 2), (8, 1)))
def test_pairs_stay_together(blocks: bool, at: tuple[int, int], kind: str, tmp_path: Path) -> None:
    head, short = pairs(blocks=blocks), Memory(**{where: 2 * rows for where, rows in SHORT[kind].items()})
    step = split(head, short, at, tmp_path)
    found = step.errors(reference_step(head, cut(head.samples, at[0])))
    assert max(found.values()) <= head.tolerance and short.failures and is_exact(step), found


def test_stock_ends_where_it_runs_out_of_memory(tmp_path: Path) -> None:
    with hf_accum_fix.apply(quiet=True), pytest.raises(OutOfMemoryError):
        take_step(Memory(forward=2).head(HEADS["llama"]), HEADS["llama"].samples, 4, 2, "stock", tmp_path)


@pytest.mark.parametrize("kind", ("forward", "backward"))
@pytest.mark.parametrize("place", (0, 1, 3))
def test_any_micro_batch_of_a_window(place: int, kind: str, tmp_path: Path) -> None:
    """The first, a middle and the last one; what ran before a backward that failed runs once more."""
    head, samples = HEADS["llama"], [*HEADS["llama"].samples, *HEADS["llama"].samples[::-1]]
    samples[4 * place] = {**samples[4 * place], "input_ids": samples[4 * place]["input_ids"].clone().fill_(7)}
    short = Memory(**{kind: 2}, only=lambda inputs: bool((inputs["input_ids"][:, :3] == 7).all(1).any()))
    step = split("llama", short, (4, 4), tmp_path, samples=samples)
    assert step.error(reference_step(head, cut(samples, 4))) <= head.tolerance
    assert short.failures and not short.left and is_exact(step)
    assert len(short.trained) >= 5 + (place if kind == "backward" else 0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("clip", "coupled"),
        ("segformer-batch-norm", "BatchNorm"),
        ("root-of-mean", "cannot be read"),
        ("qwen-vl", "rows are no samples"),
    ],
)
def test_what_may_not_be_cut_raises_its_error(name: str, why: str, tmp_path: Path, said: Any) -> None:
    with pytest.raises(OutOfMemoryError):
        split(name, Memory(backward=2), (4, 2), tmp_path)
    assert any(why in each for each in said("runs out of memory"))


class LeavesGradients(StockRecorder):
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        for each in self.model.parameters():
            each.grad = torch.ones_like(each)
        return super().get_batch_samples(*args, **kwargs)


class StepsInside(StockRecorder):
    def create_optimizer(self, *args: Any) -> Any:
        for each in self.model.parameters():
            each.register_post_accumulate_grad_hook(lambda _: None)
        return super().create_optimizer(*args)


@pytest.mark.parametrize(
    ("kind", "why"), [(LeavesGradients, "gradients were there"), (StepsInside, "runs inside the backward")]
)
def test_a_window_that_cannot_run_again_raises_its_error(kind: type, why: str, tmp_path: Path, said: Any) -> None:
    with pytest.raises(OutOfMemoryError):
        split("llama", Memory(backward=2), (4, 2), tmp_path, trainer_class=kind)
    assert any(why in each for each in said("runs out of memory"))
    # Nothing was added in a forward that failed.
    if kind is LeavesGradients:
        split("llama", Memory(forward=2), (4, 2), tmp_path, trainer_class=kind)


def test_a_window_with_other_labels_is_not_cut(tmp_path: Path, said: Any) -> None:
    """It is averaged, and a mean of pieces would be another."""
    samples = [{**each} for each in HEADS["bert-pretraining"].samples]
    for each in samples[4:]:
        del each["next_sentence_label"]
    with pytest.raises(OutOfMemoryError):
        split("bert-pretraining", Memory(backward=2), (4, 2), tmp_path, samples=samples)
    assert said("its labels differ")


def test_a_sample_that_does_not_fit_alone_is_named(tmp_path: Path, said: Any) -> None:
    last = HEADS["llama"].samples[2]["input_ids"][:3]
    short = Memory(backward=0, only=lambda inputs: bool((inputs["input_ids"][:, :3] == last).all(1).any()))
    with pytest.raises(OutOfMemoryError):
        split("llama", short, (4, 2), tmp_path)
    assert said("a single sample, at 2 of its micro-batch, is too large")


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("llama", {}, {"gradient_checkpointing": True}),
        ("llama", {"accumulate_in": "float32"}, {"bf16": True}),
        ("mixtral", {"router_loss": "exact"}, {}),
        ("llama", {"balance_windows": True}, {}),
        ("bert-classes", {"drop_duplicates": True}, {}),
    ],
)
def test_with_other_options(name: str, options: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    """The same step as where memory suffices, of the whole global batch."""
    short = Memory(backward=2)
    whole, found = (split(name, its, (4, 2), tmp_path, options=options, **more) for its in (Memory(), short))
    assert short.failures and is_exact(found)
    assert found.error(whole) <= (2e-2 if "bf16" in more else HEADS[name].tolerance)


def test_what_was_learnt_holds_in_later_windows_and_after_a_resume(tmp_path: Path) -> None:
    short, again = Memory(backward=2), Memory(backward=2)
    given = {"steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    uncut = split("llama", Memory(), (4, 2), tmp_path / "uncut", **given)
    found = split("llama", short, (4, 2), tmp_path / "found", **given)
    assert found.error(uncut) <= 1e-6
    kept = found.trainer.state.stateful_callbacks[KEPT]["attributes"]
    assert short.failures and kept["fails"] > kept["limit"]
    at = {"per_device": 4, "accumulate": 2, "max_steps": 3, "learning_rate": 0.1}
    with hf_accum_fix.apply(out_of_memory="split", quiet=True):
        resumed = trainer_of(again.head(HEADS["llama"]), tmp_path / "resumed", **at)
        resumed.train(resume_from_checkpoint=str(tmp_path / "found" / "checkpoint-2"))
    assert resumed.__dict__[SESSION].in_pieces.cap.fails == kept["fails"]
    assert again.failures == 0


# --- micro_batch="auto" ----------------------------------------------------------------------------------------------

#: Of what fits: everything, or three rows in a backward.
FITS = (Memory, partial(Memory, backward=3))


@pytest.mark.parametrize("memory", FITS, ids=("all", "three"))
@pytest.mark.parametrize("at", (pytest.param((1, 8), marks=pytest.mark.thorough), (2, 4)))
@pytest.mark.parametrize("name", (*EVERYDAY, "llava", "wav2vec2-ctc-mean", "func-with-number", "lora", "two-terms"))
def test_auto_takes_the_same_steps_in_fewer_micro_batches(
    name: str, at: tuple[int, int], memory: Any, tmp_path: Path
) -> None:
    """Three windows: the first, which shows how the loss is reduced, as it comes."""
    head, short = HEADS[name], memory()
    given = {"samples": [*head.samples, *head.samples[::-1], *head.samples], "steps": 3, "learning_rate": 0.1}
    whole = split(head, Memory(), at, tmp_path, **given)
    found = split(head, short, at, tmp_path, options={"micro_batch": "auto"}, **given)
    assert found.error(whole) <= head.tolerance and is_exact(found)
    if memory is Memory:
        assert short.trained == [at[0]] * at[1] + [8, 8]
    else:
        assert max(short.trained[at[1] :]) <= 3 and len(short.trained) <= at[1] + 8 + 2


class Copies(StockRecorder):
    """Its step hands on other objects than were fetched."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(model, {**inputs}, *args, **kwargs)


def test_auto_with_a_step_that_makes_its_batches_anew(tmp_path: Path) -> None:
    head, short = HEADS["bert-mlm"], Memory(backward=3)
    given = {"steps": 3, "learning_rate": 0.1, "trainer_class": Copies}
    whole = split(head, Memory(), (1, 4), tmp_path, **given)
    found = split(head, short, (1, 4), tmp_path, options={"micro_batch": "auto"}, **given)
    assert found.error(whole) <= head.tolerance and is_exact(found)
    assert max(short.trained) > 1


@pytest.mark.parametrize("kind", ("tail", "stream", "pairs", "what is not cut", "the class"))
def test_auto_where_windows_are_special(kind: str, tmp_path: Path) -> None:
    """Short windows, streams; pairs stay together; what cannot be cut comes as it is."""
    head = pairs(blocks=True) if kind == "pairs" else HEADS["qwen-vl" if kind == "what is not cut" else "bert-mlm"]
    samples: Any = head.samples[:6] if kind == "tail" else head.samples
    given = {"samples": Stream(samples) if kind == "stream" else samples, "steps": 4, "learning_rate": 0.1}
    short, whole = Memory(), split(head, Memory(), (1, 4), tmp_path, **given)
    if kind == "the class":
        cls = type("Ours", (ClassRecorder,), {"global_batch_options": Options(micro_batch="auto")})
        found = take_step(
            short.head(head), samples, 1, 4, "trainer", tmp_path, trainer_class=cls, steps=4, learning_rate=0.1
        )
    else:
        found = split(head, short, (1, 4), tmp_path, options={"micro_batch": "auto"}, **given)
    assert found.error(whole) <= head.tolerance and is_exact(found)
    rows = 2 if kind == "pairs" else 1
    merged = {"tail": [2, 4, 2], "what is not cut": [1] * 12}.get(kind, [4 * rows] * 3)
    assert short.trained == [rows] * 4 + merged


# --- two ranks --------------------------------------------------------------------------------------------------------


def rows_of_ranks(cases: Sequence[tuple[str, int, str, dict[str, Any]]], folder: str) -> list[dict[str, Any]]:
    pass_over_imports()
    return [row_of_rank(*case, Path(folder)) for case in cases]


def row_of_rank(name: str, place: int, kind: str, more: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A training, where micro-batch ``place`` of the second rank is too large."""
    samples = [*HEADS[name].samples, *HEADS[name].samples[::-1]]
    sample = 4 * (2 * place + 1)
    key = next(iter(samples[0]))
    mark = samples[sample][key].reshape(-1)[:3]
    head, rank = HEADS[name], torch.distributed.get_rank()

    def only(inputs: dict[str, Any]) -> bool:
        return rank == 1 and any(torch.equal(row.reshape(-1)[:3], mark) for row in inputs[key])

    given = {"samples": samples, "ddp_backend": "gloo", **more}
    reference = reference_step(head, cut(samples, 4)) if not more else split(name, Memory(), (4, 2), folder, **given)
    short = Memory(**SHORT[kind], only=only)
    step = split(name, short, (4, 2), folder, **given)
    return {
        "error": step.error(reference),
        "failures": short.failures,
        "alike": same_on_all_ranks(step.change),
        "exact": is_exact(step),
    }


CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    *((name, place, kind, {}) for name in ("llama", "bert-classes", "llava") for place in (0, 1) for kind in SHORT),
    # Compared with the same training where memory suffices; a parameter that nothing uses.
    ("lora", 1, "backward", {"steps": 3, "learning_rate": 0.1}),
    ("bert-classes", 1, "both", {"steps": 3, "learning_rate": 0.1, "ddp_find_unused_parameters": True}),
    ("llama", 1, "backward", {"steps": 3, "learning_rate": 0.1, "options": {"micro_batch": "auto"}}),
]


def test_one_rank_of_two_runs_out_of_memory(tmp_path: Path) -> None:
    """Under DistributedDataParallel, in its first micro-batch or its last, after which ranks average."""
    for case, rows in zip(CASES, zip(*on_ranks(rows_of_ranks, CASES, str(tmp_path)), strict=True), strict=True):
        assert max(row["error"] for row in rows) <= HEADS[case[0]].tolerance, case
        assert [bool(row["failures"]) for row in rows] == [False, True], case
        assert all(row["exact"] and row["alike"] for row in rows), case
