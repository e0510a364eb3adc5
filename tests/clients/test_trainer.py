"""What people do around Transformers' own trainers: collators, workers, length groups, compiled steps, generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

from hf_accum_fix.trainer import GlobalBatchSeq2SeqTrainer, GlobalBatchTrainer
from tests.clients.words import tokenizer
from tests.numerics.heads import HEADS, Batch, Head, Sample
from tests.numerics.heads.head import declared_false
from tests.numerics.parity import (
    Recorder,
    Returned,
    Step,
    cut,
    reference_step,
    step_of,
    take_step,
    trainable,
    training_arguments,
)

DROPS, T5 = HEADS["drops-kwargs"], HEADS["t5"]
SPLITS = ((2, 4), (1, 8))
splits = pytest.mark.parametrize(
    "split",
    [pytest.param(each, marks=() if each == (2, 4) else pytest.mark.slow) for each in SPLITS],
    ids=lambda split: f"{split[0]}x{split[1]}",
)


# --- how the data comes -----------------------------------------------------------------------------------------


class StockInAnyOrder(Returned, Trainer):
    """All eight samples are one window, so their order is nothing to its step."""


class OursInAnyOrder(Returned, GlobalBatchTrainer):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"dataloader_num_workers": 2},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4, "train_sampling_strategy": "group_by_length"},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=["group_by_length", "workers", "both", "torch_compile"],
)
def test_how_the_data_comes_and_the_step_is_run(arguments: dict[str, Any], tmp_path: Path) -> None:
    reference = reference_step(DROPS, cut(DROPS.samples, 2))
    stock = take_step(DROPS, DROPS.samples, 2, 4, "stock", tmp_path, trainer_class=StockInAnyOrder, **arguments)
    assert stock.error(reference) > 1
    for path, cls in {"apply": StockInAnyOrder, "trainer": OursInAnyOrder}.items():
        step = take_step(DROPS, DROPS.samples, 2, 4, path, tmp_path, trainer_class=cls, **arguments)
        assert step.error(reference) <= DROPS.tolerance
        assert step.loss == pytest.approx(reference.loss, rel=DROPS.tolerance)


# --- collators --------------------------------------------------------------------------------------------------

MARK = 7


class CompletionOnly(DataCollatorForLanguageModeling):
    """Masks a row up to its first marker, as TRL's collator of that name did; a row without one has no target."""

    def torch_call(self, examples: Any) -> Batch:
        batch = super().torch_call(examples)
        seen = (batch["input_ids"] == MARK).cumsum(dim=1) > 0
        batch["labels"] = torch.where(seen, batch["labels"], -100)
        return dict(batch)


def plain(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{key: value.tolist() for key, value in sample.items()} for sample in samples]


def marked(samples: Sequence[Sample]) -> list[Sample]:
    """Only ids, the marker in the middle of all but one."""
    ids = [sample["input_ids"].clone() for sample in samples]
    for index, row in enumerate(ids):
        row[row == MARK] = MARK + 1
        if index != 3:
            row[len(row) // 2] = MARK
    return [{"input_ids": row} for row in ids]


def masked_by_hand(samples: Sequence[Sample]) -> list[Sample]:
    found = []
    for sample in samples:
        ids = sample["input_ids"]
        labels = torch.where((ids == MARK).cumsum(0) > 0, ids, -100)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


LLAMA = replace(HEADS["llama"], build=declared_false(HEADS["llama"].build))
CAUSAL = [{key: sample[key] for key in ("input_ids", "labels")} for sample in LLAMA.samples]

#: Head, the samples the collator is given, the collator, and the samples the reference is taken over.
COLLATORS: dict[str, tuple[Head, Sequence[Sample], Callable[[], Any], Sequence[Sample]]] = {
    "DataCollatorForSeq2Seq, encoder and decoder": (
        T5,
        T5.samples,
        lambda: DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100),
        T5.samples,
    ),
    "DataCollatorForSeq2Seq, causal": (
        LLAMA,
        CAUSAL,
        lambda: DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8),
        LLAMA.samples,
    ),
    "DataCollatorWithFlattening": (LLAMA, CAUSAL, DataCollatorWithFlattening, LLAMA.samples),
    "completion only": (
        LLAMA,
        marked(LLAMA.samples),
        lambda: CompletionOnly(tokenizer(), mlm=False),
        masked_by_hand(marked(LLAMA.samples)),
    ),
}


@splits
@pytest.mark.parametrize("name", COLLATORS)
def test_collators(name: str, split: tuple[int, int], tmp_path: Path) -> None:
    head, samples, make, whole = COLLATORS[name]
    collator = make()
    fed = replace(head, collate=lambda batch: dict(collator(plain(batch))))
    reference = reference_step(head, cut(whole, split[0]))
    step = take_step(fed, samples, *split, "apply", tmp_path)
    assert step.error(reference) <= head.tolerance
    assert step.loss == pytest.approx(reference.loss, rel=max(head.tolerance, 1e-6))
    if split == (2, 4):
        assert take_step(fed, samples, *split, "stock", tmp_path).error(reference) > 0.1


# --- generation -------------------------------------------------------------------------------------------------


class StockSeq2Seq(Recorder, Seq2SeqTrainer):
    pass


class OurSeq2Seq(Recorder, GlobalBatchSeq2SeqTrainer):
    pass


def generated(path: str, output: Path, **arguments: Any) -> Step:
    """One step of T5, evaluated after it by what it generates."""
    args = training_arguments(
        output,
        kind=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=6,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=3,
        **arguments,
    )

    def told(predictions: Any) -> dict[str, float]:
        return {"sum": float(predictions.predictions.sum()), "labels": float(predictions.label_ids.sum())}

    def make() -> Any:
        return (OurSeq2Seq if path == "trainer" else StockSeq2Seq)(
            model=T5.build(),
            args=args,
            train_dataset=plain(T5.samples),
            eval_dataset=plain(T5.samples),
            data_collator=DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100),
            processing_class=tokenizer(),
            compute_metrics=told,
        )

    return step_of(make, path)


def test_evaluation_by_generation(tmp_path: Path) -> None:
    reference = reference_step(T5, cut(T5.samples, 2))
    assert generated("stock", tmp_path).error(reference) > 1
    steps = {path: generated(path, tmp_path) for path in ("apply", "trainer")}
    for step in steps.values():
        assert step.error(reference) <= T5.tolerance

    def evaluated(step: Step) -> dict[str, float]:
        (metrics,) = [entry for entry in step.trainer.state.log_history if "eval_loss" in entry]
        return {key: metrics[key] for key in ("eval_loss", "eval_sum", "eval_labels")}

    # What a stock trainer finds at the very parameters that the step has left.
    left = steps["apply"].trainer
    stock = generated("stock", tmp_path, learning_rate=0.0).trainer
    stock.model.load_state_dict(left.model.state_dict())
    wanted = stock.evaluate()
    for step in steps.values():
        assert evaluated(step) == {key: wanted[key] for key in evaluated(step)}
    assert all(torch.equal(trainable(left.model)[key], trainable(stock.model)[key]) for key in trainable(left.model))
