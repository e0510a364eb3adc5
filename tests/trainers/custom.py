"""Trainers as they are written in the wild, each cut down to what matters, with what each would learn uncut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.rows import EITHER, EVEN, EXACT, GRADIENT, STOCK, attack
from tests.losses.verdicts import FLOAT32, PAIRS, Verdict
from tests.numerics.heads import HEADS, Batch, Head, Sample, before, log_likelihoods, over_number
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text
from tests.numerics.parity import StockRecorder
from tests.trainings import Case, computing, in_loss

CLASSES, MLM, LLAMA, DROPS = (HEADS[name] for name in ("bert-classes", "bert-mlm", "llama", "drops-kwargs"))
#: Divides by the number it is handed, in float64, and is right in the stock Trainer.
NUMBER = dataclasses.replace(HEADS["uses-tensor"], name="number", samples=text())
#: Before 4.46 neither ``training_step`` nor ``compute_loss`` takes the number.
WITHOUT_NUMBER = before("4.46.0")
#: The loss of a batch as the full batch has it.
FullLoss = Callable[[nn.Module, Batch], Tensor]


def of_head(name: str, verdict: Verdict, head: Head, trainer: type, loss: FullLoss | None = None, **more: Any) -> Case:
    """``loss``: of the full batch; None: what the model returns for it."""
    whole = loss or head.reference_loss
    given = {"collate": head.batch, **more}
    return attack(name, verdict, lambda m, batch, _: whole(m, batch), head.build, [head.samples], trainer, **given)


# --- ms-swift's division ------------------------------------------------------------------------------------------


def divided(trainer: Any, loss: Tensor, number: Any) -> Tensor:
    """Divides by G where a number came, since the stock Trainer then leaves the loss as it is."""
    if number is not None and trainer.model_accepts_loss_kwargs:
        loss = loss / trainer.args.gradient_accumulation_steps
    return loss


def dividing(loss: FullLoss) -> type:
    """Its own mean over samples, or over pairs of them."""
    return computing(lambda trainer, base, model, inputs, number: (divided(trainer, loss(model, inputs), number), {}))


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


def preferences() -> list[Sample]:
    """Eight pairs of answers, ragged, with the prompt masked."""
    rejected = text(lengths=(7, 12, 4, 10, 15, 21, 8, 6), seed=3)
    return [{"chosen": one, "rejected": other} for one, other in zip(text(), rejected, strict=True)]


def pairs(samples: Sequence[Sample]) -> Batch:
    """The chosen answers first, then the rejected ones."""
    return collate([sample["chosen"] for sample in samples] + [sample["rejected"] for sample in samples])


def dpo(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    log_p, valid = log_likelihoods(logits, batch["labels"])
    chosen, rejected = (log_p * valid).sum(1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


# --- a division by the arguments; the number, used or replaced ------------------------------------------------------


def base_by_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss / trainer.args.gradient_accumulation_steps, outputs


def base_times_steps(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    return loss * trainer.args.gradient_accumulation_steps, outputs


def sum_over_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """Right on one rank; on W ranks 1/W of it, as it does not multiply by them."""
    logits = model(input_ids=inputs["input_ids"], labels=inputs["labels"])["logits"]
    return over_number(logits, inputs["labels"], number), {"logits": logits}


DividesTheBase = computing(base_by_steps)


class OwnNumber(in_loss(lambda batch: with_fewer_labels(batch))):  # type: ignore[misc]
    """Counts what it trains on by itself, and trains on fewer labels than were fetched."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum((with_fewer_labels(batch)["labels"] != -100).sum() for batch in batch_samples)


def with_fewer_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the labels of every third token, whatever its place; the last label of a row stays."""
    ids, labels = batch["input_ids"], batch["labels"]
    last = (labels != -100).long().flip(1).argmax(dim=1)
    chosen = ids % 3 != 0
    chosen[torch.arange(len(ids)), ids.shape[1] - 1 - last] = True
    return {**batch, "labels": torch.where(chosen, labels, -100)}


def of_fewer_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(**with_fewer_labels(batch))["loss"]


def with_other_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": (batch["input_ids"] * 7 + 3) % 44 + 4}


def of_other_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return model(**with_other_tokens(batch))["loss"]


class SplitsAsFetched(StockRecorder):
    """Makes micro-batches of one sample of those that were fetched."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, number = super().get_batch_samples(*args, **kwargs)
        rows = [(batch, row) for batch in batches for row in range(len(batch["labels"]))]
        return [{key: value[row : row + 1] for key, value in batch.items()} for batch, row in rows], number


# --- a training step of one's own ----------------------------------------------------------------------------------


class OwnStep(StockRecorder):
    """GLiNER's: no super(), its own division by the accumulation steps; the number is handed on. Right in stock."""

    divisions = 1

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            handed = {} if WITHOUT_NUMBER else {"num_items_in_batch": num_items_in_batch}
            loss = self.compute_loss(model, inputs, **handed)
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps**self.divisions
        self.accelerator.backward(loss)
        return loss.detach()


class OwnStepDividedTwice(OwnStep):
    """Divides once more than accelerate did, so that stock trains at 1/G."""

    divisions = 2


class StepByHelper(StockRecorder):
    """The base's step runs, though not by name, so that it is observed as ever."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.timed(*args, **kwargs)

    def timed(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


PREFERENCES = dataclasses.replace(LLAMA, name="pairs", samples=preferences(), collate=pairs)
SMOOTH, RIGHT = {"label_smoothing_factor": 0.1}, {"right": EVEN}
CASES = [
    of_head("swift-classes", EITHER, CLASSES, dividing(of_classes), **RIGHT),
    of_head("swift-mlm-by-super", EITHER, MLM, computing(by_super)),
    of_head("swift-dpo", EITHER, PREFERENCES, dividing(dpo), dpo, **RIGHT),
    of_head(
        "swift-smoother", EITHER, CLASSES, computing(by_super), of_smoothed_classes, arguments=SMOOTH,
        tolerance=FLOAT32, **RIGHT,
    ),
    of_head("divides-the-base", EITHER, CLASSES, DividesTheBase, **RIGHT),
    of_head("multiplies-the-base", STOCK, CLASSES, computing(base_times_steps)),
    of_head("sum-over-the-number", EITHER, NUMBER, computing(sum_over_number), **RIGHT),
    of_head("splits-as-fetched", EITHER, MLM, SplitsAsFetched, cuts=(PAIRS,), whole=False),
    of_head("edits-tokens-in-place", GRADIENT, NUMBER, in_loss(with_other_tokens, "tensor"), of_other_tokens, **RIGHT),
    of_head("own-number", EITHER, NUMBER, OwnNumber, of_fewer_labels, **RIGHT),
    of_head("step-by-helper", EXACT, CLASSES, StepByHelper),
    of_head("own-step", STOCK, CLASSES, OwnStep, **RIGHT),
    of_head("own-step-divided-twice", STOCK, CLASSES, OwnStepDividedTwice),
]  # fmt: skip
