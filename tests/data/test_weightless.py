"""A micro-batch that is run and counts nothing: the step is the others', whoever computes the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from hf_accum_fix.accumulation.items import ZeroWeightBatch
from tests.numerics.heads import HEADS, Batch, Head, Sample, before
from tests.numerics.parity import Step, StockRecorder, cut, reference_step, take_step


def with_a_weightless_one(head: Head) -> Head:
    """The third sample's micro-batch counts nothing."""
    third = head.samples[2]

    def collated(samples: Sequence[Sample]) -> Batch:
        batch = head.batch(samples)
        return ZeroWeightBatch(batch) if samples[0] is third else batch

    return replace(head, collate=collated)


def others(head: Head) -> Step:
    """The full batch of the other seven."""
    return reference_step(head, cut([*head.samples[:2], *head.samples[3:]], 1))


@pytest.mark.parametrize(
    "name",
    ["llama", "bert-mlm", "bert-classes", "no-kwargs", "uses-int", "wav2vec2-ctc-sum", "llama-smoothing",
     *([] if before("4.46") else ["func-with-mean", "func-with-number"])],
)  # fmt: skip
def test_the_step_is_that_of_the_others(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    step = take_step(with_a_weightless_one(head), head.samples, 1, 8, "apply", tmp_path)
    wanted = others(head)
    assert step.error(wanted) <= head.tolerance
    assert step.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert take_step(head, head.samples, 1, 8, "apply", tmp_path).error(wanted) > 1e-3


class Own(StockRecorder):
    """Computes its loss by itself, and divides by the count, as TRL's SFTTrainer does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        summed = F.cross_entropy(outputs["logits"].flatten(0, 1).double(), labels.flatten(), reduction="sum")
        loss = summed / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.skipif(before("4.46"), reason="a release that hands nobody the count")
def test_a_trainer_that_owns_its_loss(tmp_path: Path) -> None:
    head = HEADS["bert-mlm"]
    step = take_step(with_a_weightless_one(head), head.samples, 1, 8, "apply", tmp_path, trainer_class=Own)
    assert step.error(others(head)) <= head.tolerance
