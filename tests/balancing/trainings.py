"""Trainings whose windows are dealt by length, on one rank or several, and the samples of each of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer

from hf_accum_fix.data.packing import pack
from hf_accum_fix.options import BalanceOptions
from tests.numerics import parity
from tests.numerics.epochs import Stream
from tests.numerics.heads import HEADS, Head, Sample
from tests.numerics.heads.samples import text
from tests.numerics.parity import Returned, Trained, training_arguments

#: One head for each way in which a loss is reduced, and for each way in which items are counted.
KINDS = (
    *("llama", "llama-position-0", "llama-smoothing", "lora", "gpt2-position-0", "llama-classification", "bert-mlm"),
    *("bert-tokens", "bert-classes", "bert-multi-label", "bert-answers", "electra", "t5", "bart-causal", "llava"),
    *("qwen-vl", "vit-regression", "masked-patches", "wav2vec2-ctc-mean", "wav2vec2-ctc-sum", "time-series"),
    *("func-with-number", "func-with-mean", "no-kwargs", "drops-kwargs", "declares-false", "uses-tensor", "uses-int"),
    *("told-false-after-init", "mean-of-sample-means", "mixtral", "llama-empty-micro-batches"),
    *("two-terms", "bert-pretraining", "yolos"),
)
#: b and G of a trajectory, and micro-batches of an epoch on every rank: windows of three, three and one.
ROWS, STEPS, MICRO_BATCHES, WINDOWS = 2, 3, 7, 3


def length_of(sample: Sample) -> int:
    """Tokens where there are any; else a power of two that the sample determines."""
    if "input_ids" in sample and "start_positions" not in sample:
        return len(sample["input_ids"])
    total = sum(float(value.double().abs().sum()) for value in sample.values() if isinstance(value, Tensor))
    return 2 ** (int(total * 1009) % 8)


BALANCE = BalanceOptions(lengths=length_of)


def dealt(head: Head, steps: int, ranks: int, rows: int) -> list[list[Sample]]:
    """The micro-batches that the head's samples are dealt into as one window, of all ranks."""
    plan = pack([length_of(sample) for sample in head.samples], steps, ranks, rows=rows)
    return [[head.samples[place] for place in micro_batch] for own in plan for micro_batch in own]


class Numbered(Dataset[Any]):
    """Texts of 1 to 40 tokens, each with its number."""

    def __init__(self, count: int) -> None:
        lengths = [3 + (index * 17) % 38 for index in range(count)]
        samples = text(lengths=lengths, masked=lambda index, _: index % 3)
        self.rows = [{**sample, "number": number} for number, sample in enumerate(samples)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class Plain(Returned, Trainer):
    """The installed Trainer, in its own order."""


class Run(Trained):
    """A training.

    Attributes:
        windows: the samples of this rank's windows, in their order.
        shapes: rows and width of each micro-batch.
    """

    def __init__(self, found: Trained, batches: Sequence[tuple[list[int], int]], in_epoch: int) -> None:
        super().__init__(found.change, found.trainer)
        self.shapes = [(len(numbers), width) for numbers, width in batches]
        self.windows: list[list[int]] = []
        at = 0
        # From the back: what was resumed lacks windows of its first epoch.
        sizes = [min(STEPS, in_epoch - start) for start in range(0, in_epoch, STEPS)]
        for size in reversed(sizes * 3):
            if at == len(batches):
                break
            own = batches[len(batches) - at - size : len(batches) - at]
            self.windows.insert(0, sorted(number for numbers, _ in own for number in numbers))
            at += size


def train(
    output: Path, *, balance: bool | BalanceOptions, head: str = "llama", world_size: int = 1, stream: bool = False,
    checkpoint: Path | None = None, patched: bool = True, rows: int = ROWS,
    prepare: Callable[[Any], object] = lambda args: None, **arguments: Any,
) -> Run:  # fmt: skip
    """Three epochs in the Trainer's own order, with the patch on."""
    count = ROWS * MICRO_BATCHES * world_size - 1
    batches: list[tuple[list[int], int]] = []
    made = HEADS[head]

    def collate(rows: Sequence[Any]) -> Any:
        batch = made.batch([{key: value for key, value in row.items() if key != "number"} for row in rows])
        batches.append(([row["number"] for row in rows], batch["input_ids"].shape[1]))
        return batch

    given: dict[str, Any] = {"num_train_epochs": 3, "max_steps": 3 * WINDOWS if stream else -1, "learning_rate": 1e-2}
    args = training_arguments(output, rows, STEPS, **{**given, **arguments})
    prepare(args)
    numbered = Numbered(count)
    data = Stream(numbered.rows) if stream else numbered

    def make() -> Trainer:
        return Plain(model=made.build(), args=args, train_dataset=data, data_collator=collate)

    found = parity.train(make, "apply" if patched else "stock", checkpoint=checkpoint, balance_windows=balance)
    return Run(found, batches, MICRO_BATCHES - bool(arguments.get("dataloader_drop_last")))
