"""Trainers as they are written in the wild, each cut down to what matters, with what each would learn uncut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.heads import HEADS, Batch, Sample, before, log_likelihoods, over_number
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text
from tests.trainers.runs import PAIRS, Case, FullLoss, Ordered, owning
from tests.trainings import in_loss

CLASSES, MLM, LLAMA, DROPS = (HEADS[name] for name in ("bert-classes", "bert-mlm", "llama", "drops-kwargs"))
#: Divides by the number it is handed, in float64, and is right in the stock Trainer.
NUMBER = dataclasses.replace(HEADS["uses-tensor"], name="number", samples=text())
#: The library computes Llama's loss in float32.
FLOAT32 = 1e-6
#: Before 4.46 neither ``training_step`` nor ``compute_loss`` takes the number.
WITHOUT_NUMBER = before("4.46.0")


# --- ms-swift's division ------------------------------------------------------------------------------------------


def divided(trainer: Any, loss: Tensor, number: Any) -> Tensor:
    """Divides by G where a number came, since the stock Trainer then leaves the loss as it is."""
    if number is not None and trainer.model_accepts_loss_kwargs:
        loss = loss / trainer.args.gradient_accumulation_steps
    return loss


def dividing(loss: FullLoss) -> Any:
    """Its own mean over samples, or over pairs of them."""
    return owning(lambda trainer, base, model, inputs, number: (divided(trainer, loss(model, inputs), number), {}))


def of_classes(model: nn.Module, inputs: Batch) -> Tensor:
    labels = inputs.pop("labels")
    return F.cross_entropy(model(**inputs).logits, labels)


def by_super(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The base's loss, asked for without the number; accuracy where the base has left labels behind."""
    loss, outputs = base(model, inputs, return_outputs=True)
    if inputs.get("labels") is not None:
        trainer.accuracy = float((outputs["logits"].argmax(-1) == inputs["labels"]).double().mean())
    return divided(trainer, loss, number), outputs


def of_smoothed_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(**{**batch, "labels": None}).logits, batch["labels"], label_smoothing=0.1)


# --- preferences: rows that belong together -------------------------------------------------------------------------


def preferences() -> list[Sample]:
    """Eight pairs of answers, ragged, with the prompt masked."""
    return [
        {"chosen": one, "rejected": other}
        for one, other in zip(text(), text(lengths=(7, 12, 4, 10, 15, 21, 8, 6), seed=3), strict=True)
    ]


def pairs(samples: Sequence[Sample]) -> Batch:
    """The chosen answers first, then the rejected ones."""
    return collate([sample["chosen"] for sample in samples] + [sample["rejected"] for sample in samples])


PREFERENCES = dataclasses.replace(LLAMA, name="pairs", samples=preferences(), collate=pairs)


def dpo(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    log_p, valid = log_likelihoods(logits, batch["labels"])
    chosen, rejected = (log_p * valid).sum(1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


# --- a division by the arguments, whatever comes ---------------------------------------------------------------------


def base_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss / trainer.args.gradient_accumulation_steps, outputs


DividesTheBase = owning(base_by_steps)


# --- the number, used or replaced -----------------------------------------------------------------------------------


class SumOverTheNumber(Ordered):
    """Right on one rank; on W ranks 1/W of it, as it does not multiply by them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        logits = model(input_ids=inputs["input_ids"], labels=inputs["labels"])["logits"]
        loss = over_number(logits, inputs["labels"], num_items_in_batch)
        return (loss, {"logits": logits}) if return_outputs else loss


class OwnNumber(Ordered):
    """Counts what it trains on by itself, and trains on fewer labels than were fetched."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum((with_fewer_labels(batch)["labels"] != -100).sum() for batch in batch_samples)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return super().compute_loss(model, with_fewer_labels(inputs), return_outputs, num_items_in_batch)


# --- another batch than the one that was fetched -------------------------------------------------------------------


def with_fewer_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the labels of every third token, whatever its place; the last label of a row stays."""
    ids, labels = batch["input_ids"], batch["labels"]
    last = (labels != -100).long().flip(1).argmax(dim=1)
    chosen = ids % 3 != 0
    chosen[torch.arange(len(ids)), ids.shape[1] - 1 - last] = True
    return {**batch, "labels": torch.where(chosen, labels, -100)}


class SplitsAsFetched(Ordered):
    """Makes micro-batches of one sample of those that were fetched."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, number = super().get_batch_samples(*args, **kwargs)
        rows = [(batch, row) for batch in batches for row in range(len(batch["labels"]))]
        return [{key: value[row : row + 1] for key, value in batch.items()} for batch, row in rows], number


def with_other_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": (batch["input_ids"] * 7 + 3) % 44 + 4}


def of_other_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return model(**with_other_tokens(batch))["loss"]


def of_fewer_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(**with_fewer_labels(batch))["loss"]


# --- a training step of one's own ----------------------------------------------------------------------------------


class OwnStep(Ordered):
    """GLiNER's: no super(), its own division by the accumulation steps; the number is handed on. Right in stock."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            handed = {} if WITHOUT_NUMBER else {"num_items_in_batch": num_items_in_batch}
            loss = self.compute_loss(model, inputs, **handed)
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class OwnStepDividedTwice(Ordered):
    """Divides once more than accelerate did, so that stock trains at 1/G."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss / self.args.gradient_accumulation_steps)
        return loss.detach()


class StepByHelper(Ordered):
    """The base's step runs, though not by name."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.timed(*args, **kwargs)

    def timed(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


#: The base's step runs, so that these are observed as ever, and exact.
STEPS_OF_THE_BASE = [Case("step-by-helper", CLASSES, StepByHelper)]
OWN_STEPS = [
    Case("own-step", CLASSES, OwnStep, right=True),
    Case("own-step-divided-twice", CLASSES, OwnStepDividedTwice),
]


CASES = [
    Case("swift-classes", CLASSES, dividing(of_classes), right=True),
    Case("swift-mlm-by-super", MLM, owning(by_super)),
    Case("swift-dpo", PREFERENCES, dividing(dpo), loss=dpo, right=True),
    Case(
        "swift-smoother",
        CLASSES,
        owning(by_super),
        loss=of_smoothed_classes,
        arguments={"label_smoothing_factor": 0.1},
        floor=FLOAT32,
        right=True,
    ),
    Case("divides-the-base", CLASSES, DividesTheBase, right=True),
    Case("sum-over-the-number", NUMBER, SumOverTheNumber, right=True),
    Case("splits-as-fetched", MLM, SplitsAsFetched, cuts=(PAIRS,), right_uncut=False),
    Case("edits-tokens-in-place", NUMBER, in_loss(with_other_tokens, "tensor"), loss=of_other_tokens, right=True),
    Case("own-number", NUMBER, OwnNumber, loss=of_fewer_labels, right=True),
    *STEPS_OF_THE_BASE,
    *OWN_STEPS,
]
