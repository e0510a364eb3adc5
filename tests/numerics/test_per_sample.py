"""per_sample: the mean of sample means, whatever the cut; padded, packed and dealt alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

import hf_accum_fix
from hf_accum_fix import accumulation_windows
from hf_accum_fix.errors import AccumFixError, ContractError, OptionsError, UnsupportedSetupError
from tests.numerics.heads import HEADS, Head
from tests.numerics.heads.samples import Sample
from tests.numerics.parity import Step, reference_step, take_step, trainable

SPLITS = [(8, 1), (2, 4), (1, 8), (3, 3)]


def sample_means(head: Head, samples: Sequence[Sample]) -> Step:
    """One sample after the other, each by the mean over its own targets."""
    model = head.build()
    model.train()
    losses = []
    for sample in samples:
        batch = head.batch([sample])
        logits, labels = model(**{k: v for k, v in batch.items() if k != "labels"})["logits"], batch["labels"]
        if "llama" in head.name:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if bool((labels != -100).any()):
            losses.append(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100))
    loss = torch.stack(losses).mean()
    loss.backward()
    return Step(
        {name: -p.grad for name, p in model.named_parameters() if p.grad is not None}, float(loss.detach()), 0.0
    )


@pytest.mark.parametrize(
    "split",
    [pytest.param(each, marks=() if each in SPLITS[1::2] else pytest.mark.slow) for each in SPLITS],
    ids=lambda split: "x".join(map(str, split)),
)
@pytest.mark.parametrize("name", ["llama", "bert-mlm", "llama-empty-micro-batches"])
def test_every_cut_takes_the_step_of_the_sample_means(name: str, split: tuple[int, int], tmp_path: Path) -> None:
    head = HEADS[name]
    wanted = sample_means(head, head.samples)
    # Stock, and the patch without the option, weigh every target alike.
    assert reference_step(head, [head.samples]).error(wanted) > 0.05
    with hf_accum_fix.apply(per_sample=True):
        step = take_step(head, head.samples, *split, "stock", tmp_path)
    assert step.error(wanted) <= max(head.tolerance, 1e-7 if "llama" in name else 0.0)
    assert step.loss == pytest.approx(wanted.loss, rel=1e-6)


def packed(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row, whose samples start anew in its position_ids."""
    rows = [{key: each.tolist() for key, each in sample.items() if key != "attention_mask"} for sample in samples]
    return DataCollatorWithFlattening()(rows, return_tensors="pt")


@pytest.mark.parametrize("split", [(8, 1), (2, 4), (3, 3)], ids=lambda split: "x".join(map(str, split)))
def test_packed_rows_weigh_samples_as_padded_ones(split: tuple[int, int], tmp_path: Path) -> None:
    head = HEADS["llama"]
    wanted = sample_means(head, head.samples)
    with hf_accum_fix.apply(per_sample=True):
        step = take_step(replace(head, collate=packed), head.samples, *split, "stock", tmp_path)
    assert step.error(wanted) <= 1e-6


def test_dealt_windows_weigh_samples_too(tmp_path: Path) -> None:
    head = HEADS["llama"]
    wanted = sample_means(head, head.samples)
    with hf_accum_fix.apply(per_sample=True, balance_windows=True):
        step = take_step(head, head.samples, 2, 4, "stock", tmp_path)
    assert step.error(wanted) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_a_loop_by_hand(name: str) -> None:
    head = HEADS[name]
    wanted = sample_means(head, head.samples)
    model = head.build()
    before = trainable(model)
    loader = DataLoader(head.samples, batch_size=2, collate_fn=head.batch)  # type: ignore[arg-type]
    for window in accumulation_windows(loader, steps=4, per_sample=True):
        for batch in window:
            with window.micro_batch(model):
                window.loss(model, batch).backward()
        assert float(window.mean_loss()) == pytest.approx(wanted.loss, rel=1e-6)
    change = {name: -p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert change.keys() == before.keys()
    assert Step(change, wanted.loss, 0.0).error(wanted) <= 1e-6


@pytest.mark.parametrize("name", ["bert-pretraining", "no-call", "two-terms"])
def test_what_is_no_cross_entropy_over_labels_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    head = HEADS["func-by-hand" if name == "no-call" else name]
    with (
        hf_accum_fix.apply(per_sample=True),
        pytest.raises(UnsupportedSetupError, match="expected one torch cross entropy"),
    ):
        take_step(head, head.samples, 2, 4, "stock", tmp_path)


class WithClassWeights(nn.Module):
    """A head whose cross entropy has class weights from one of its forwards on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.logits, self.begins, self.weights = nn.Embedding(6, 6), begins, torch.rand(6)
        self.window = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = self.weights if self.window >= self.begins else None
        return {"loss": F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten(), weight=weights)}


@pytest.mark.parametrize(("begins", "error"), [(0, UnsupportedSetupError), (1, ContractError)])
def test_class_weights_are_refused_also_from_a_later_window_on(begins: int, error: type[AccumFixError]) -> None:
    """What a sample's mean of weighted losses divides by is not said anywhere."""
    torch.manual_seed(0)
    model = WithClassWeights(begins)
    batches = [{key: torch.randint(6, (2, 5)) for key in ("input_ids", "labels")} for _ in range(4)]
    with pytest.raises(error, match="expected one torch cross entropy"):
        for model.window, window in enumerate(accumulation_windows(batches, steps=2, per_sample=True)):
            for batch in window:
                with window.micro_batch(model):
                    window.loss(model, batch).backward()
    assert model.window == begins


def test_options_are_checked() -> None:
    with pytest.raises(OptionsError, match="per_sample"):
        hf_accum_fix.Options(per_sample=1)  # type: ignore[arg-type]
    contract = hf_accum_fix.LossContract(hf_accum_fix.Reduction.SUM)
    with pytest.raises(OptionsError, match="expected only one of them"):
        hf_accum_fix.Options(contract, per_sample=True)
    with pytest.raises(OptionsError, match="expected only one of them"):
        accumulation_windows([], steps=1, contract=contract, per_sample=True)
