"""LLaMA-Factory's ways with the Trainer, and its real command line in an environment of its own.

Its trainers set ``model_accepts_loss_kwargs`` and ``compute_loss_func`` after ``Trainer.__init__``, hand
``compute_loss`` through with ``*args, **kwargs``, call ``Trainer.get_batch_samples`` past their other bases, and have
one loss that never calls the base and ignores the count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import hf_accum_fix
from hf_accum_fix import SeamError, observations
from hf_accum_fix.trainer import GlobalBatchSeq2SeqTrainer
from tests.numerics.heads import HEADS, shifted_cross_entropy
from tests.numerics.parity import Recorder, cut, reference_step, step_along, take_step

ROOT = Path(__file__).parents[2]
SPLITS = ((2, 4), (1, 8))
seq2seq_step = partial(take_step, kind=Seq2SeqTrainingArguments)
splits = pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}x{split[1]}")


class FlagAfterInit(Recorder, Seq2SeqTrainer):
    """As its trainer is with a processor: the flag that is to avoid a wrong loss, set once the Trainer is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class OurFlagAfterInit(FlagAfterInit, GlobalBatchSeq2SeqTrainer):
    pass


@splits
def test_a_flag_set_after_init_and_a_loss_passed_through(split: tuple[int, int], tmp_path: Path) -> None:
    head = HEADS["llava"]
    reference = reference_step(head, cut(head.samples, split[0]))
    step = seq2seq_step(head, head.samples, *split, "apply", tmp_path, trainer_class=FlagAfterInit)
    assert step.error(reference) <= head.tolerance
    assert step.loss == pytest.approx(reference.loss, rel=head.tolerance)
    if split == (2, 4):
        stock = seq2seq_step(head, head.samples, *split, "stock", tmp_path, trainer_class=FlagAfterInit)
        assert stock.error(reference) > 0.3
        ours = seq2seq_step(head, head.samples, *split, "trainer", tmp_path, trainer_class=OurFlagAfterInit)
        assert all(torch.equal(ours.change[key], step.change[key]) for key in step.change)


class OwnLoss(Recorder, Seq2SeqTrainer):
    """As its trainer is under ``use_asft_loss``: its own loss, a mean, and a ``compute_loss_func`` set beside it.

    For the one, the Trainer hands it a count; for the other, it leaves out its division by the steps.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss_func = partial(shifted_cross_entropy, smoothing=0.0)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.compute_loss_func(model(**inputs)["logits"], inputs["labels"])


@splits
def test_a_loss_that_ignores_the_count_is_weighed_by_its_items(split: tuple[int, int], tmp_path: Path) -> None:
    head = HEADS["llama"]
    model = head.build()
    whole = head.batch(head.samples)
    wanted = step_along(model, shifted_cross_entropy(model(**whole)["logits"], whole["labels"]))
    step = seq2seq_step(head, head.samples, *split, "apply", tmp_path, trainer_class=OwnLoss)
    assert step.error(wanted) <= 1e-12
    assert step.loss == pytest.approx(wanted.loss, rel=1e-12)
    (run,) = observations.recorded()
    assert run["exact"] and run["reduction"] == "mean"
    stock = seq2seq_step(head, head.samples, *split, "stock", tmp_path, trainer_class=OwnLoss)
    assert stock.error(wanted) > 0.9 or split == (8, 1)


class FetchesFromTrainer(FlagAfterInit):
    """As its DPO and KTO trainers are: past every other base, straight from the Trainer."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.get_batch_samples(self, *args, **kwargs)


def test_a_window_fetched_straight_from_the_trainer(tmp_path: Path) -> None:
    """The patch is there too; a subclass of ours is passed by, which is refused before a step is taken."""
    head = HEADS["bert-mlm"]
    reference = reference_step(head, cut(head.samples, 2))
    step = seq2seq_step(head, head.samples, 2, 4, "apply", tmp_path, trainer_class=FetchesFromTrainer)
    assert step.error(reference) <= head.tolerance
    passed_by = type("PassedBy", (FetchesFromTrainer, GlobalBatchSeq2SeqTrainer), {})
    with pytest.raises(SeamError, match="without a counted window"):
        seq2seq_step(head, head.samples, 2, 4, "trainer", tmp_path, trainer_class=passed_by)
    assert hf_accum_fix.active_handle() is None


@pytest.mark.llama_factory
@pytest.mark.timeout(5400)
def test_its_command_line_on_one_process_and_two(tmp_path: Path) -> None:
    """Every split within 1e-3 of (16, 1) in loss and gradient norm, or the recipe's exit code says so."""
    recipe = [sys.executable, str(ROOT / "recipes" / "llama_factory.py"), "--output", str(tmp_path)]
    done = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * (1 + 6 + 5)
    worst = {
        (mode, case): max(max(row["off"].values()) for row in rows if (row["mode"], row["case"]) == (mode, case))
        for mode in ("stock", "corrected")
        for case in ("text", "llava", "asft")
    }
    assert all(worst["corrected", case] <= 1e-3 for case in ("text", "llava", "asft"))
    assert worst["stock", "text"] <= 1e-3 and worst["stock", "llava"] > 1e-2 and worst["stock", "asft"] > 10
