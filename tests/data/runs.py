"""Trainings that note which samples every optimizer step had, and plain SGD over the same samples in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_accum_fix import GlobalBatchTrainer, Options
from hf_accum_fix.counting.items import ZeroWeightBatch
from tests.numerics import parity
from tests.numerics.epochs import RATE, Stream, plain_sgd
from tests.numerics.heads import HEADS, Batch, Head, Sample
from tests.numerics.heads.head import before, collate
from tests.numerics.heads.samples import masked_tokens, one_class, text, with_labels
from tests.numerics.parity import Trained, trainer_of

LENGTHS = (5, 17, 9, 3, 22, 11, 6, 14, 8, 19, 4)
LONGEST = max(LENGTHS)


def samples_of(name: str, count: int) -> list[Sample]:
    """Up to eleven ragged samples of a head."""
    base = text(lengths=LENGTHS[:count])
    labels = {"bert-mlm": masked_tokens, "bert-classes": one_class}
    return with_labels(labels[name], base) if name in labels else base


def padded(samples: Sequence[Sample]) -> Batch:
    """Every micro-batch of one width: dispatched ones are concatenated."""
    batch = collate(samples)
    for key, value in batch.items():
        if value.ndim == 2:
            fill = -100 if key == "labels" else 0
            batch[key] = nn.functional.pad(value, (0, LONGEST - value.shape[1]), value=fill)
    return batch


def head_of(name: str) -> Head:
    return replace(HEADS[name], collate=padded)


@dataclass
class Run(Trained):
    """A training.

    Attributes:
        windows: for each optimizer step the places of the samples that were run, of all ranks.
        shapes: rows and width of each micro-batch of this rank.
    """

    windows: list[list[int]]
    shapes: list[tuple[int, ...]]


class Noting(TrainerCallback):
    """Which samples each step had, told by their tokens."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.places = {tuple(sample["input_ids"].tolist()): place for place, sample in enumerate(samples)}
        self.steps: list[list[int]] = [[]]
        self.shapes: list[tuple[int, ...]] = []

    def note(self, inputs: Any) -> None:
        if isinstance(inputs, ZeroWeightBatch) or not len(inputs.get("input_ids", ())):
            return
        self.shapes.append(tuple(inputs["input_ids"].shape))
        for tokens, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            self.steps[-1].append(self.places[tuple(tokens[mask.bool()].tolist())])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append([])


class Noted:
    """A trainer that tells its callback what it runs."""

    noting: Noting

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.noting.note(inputs)
        return super().training_step(model, inputs, *args)  # type: ignore[misc]


class NotedTrainer(Noted, Trainer):
    """The installed Trainer; patched when apply() is active."""


class NotedClass(Noted, GlobalBatchTrainer):
    """The subclass."""


def by_length() -> dict[str, Any]:
    """The argument that groups samples by length, as the release spells it."""
    return {"group_by_length": True} if before("5.0.0") else {"train_sampling_strategy": "group_by_length"}


def train(
    head: Head, samples: Sequence[Sample], path: str, output: Path, *, stream: bool = False,
    checkpoint: Path | None = None, options: Mapping[str, Any] | None = None,
    prepare: Callable[[Any], object] = lambda args: None, **arguments: Any,
) -> Run:  # fmt: skip
    """Train a head in the Trainer's own order: "stock", by "apply" or by the subclass ("trainer").

    Args:
        options: of the package.
        prepare: changes the TrainingArguments.
    """
    noting, ours = Noting(samples), type("Ours", (NotedClass,), {"global_batch_options": Options(**(options or {}))})

    def made(args: Any, **given: Any) -> Any:
        prepare(args)
        return (ours if path == "trainer" else NotedTrainer)(args=args, **given)

    def make() -> Any:
        data = Stream(samples) if stream else samples
        trainer = trainer_of(
            head, output, made, samples=data, given={"callbacks": [noting]}, **{"learning_rate": RATE, **arguments}
        )
        trainer.noting = noting
        return trainer

    found = parity.train(make, path, checkpoint=checkpoint, **(options or {}))
    steps = noting.steps[:-1]
    if dist.is_initialized():
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, steps)
        steps = [[*chain.from_iterable(each)] for each in zip(*ranks, strict=True)]
    return Run(found.change, found.trainer, steps, noting.shapes)


def reference(
    name: str, samples: Sequence[Sample], windows: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], list[float]]:
    """`plain_sgd` on windows of places among the samples."""
    return plain_sgd(head_of(name), [[samples[place] for place in window] for window in windows])


def once_each(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The windows of one epoch without what an earlier place of it had already."""
    seen: set[int] = set()
    result = []
    for window in windows:
        result.append([place for place in dict.fromkeys(window) if place not in seen])
        seen.update(window)
    return result
