"""A loss computed in chunks, to save memory: exact where the chunks are divided by one number, else said.

Chunks of rows come in the order of a micro-batch's samples, which another split deals otherwise: a mean over chunks of
their own means is another loss for every split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.losses.models import texts
from tests.losses.seen import ByNumber, Loss, Mean, Seen, full, holding, tokens
from tests.losses.verdicts import RATE, Verdict, by_loop, by_trainer, faults
from tests.numerics.heads import Batch
from tests.numerics.parity import StockRecorder
from tests.trainings import Case, Cut, computing


def halves(count: int) -> list[slice]:
    return [slice(count // 2), slice(count // 2, count)] if count > 1 else [slice(count)]


def pairs(count: int) -> list[slice]:
    return [slice(start, start + 2) for start in range(0, count, 2)]


#: Rounding of float64, of a change at this rate.
FLOOR = 1e-9
#: The chunks of so many rows, or of so many positions.
Chunks = Callable[[int], list[slice]]


def by_rows(chunks: Chunks, *, mean: bool = False) -> type:
    """A compute_loss that calls super() on some of the rows at a time."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Batch, number: Any) -> Any:
        parts = [{key: value[rows] for key, value in inputs.items()} for rows in chunks(len(inputs["labels"]))]
        losses = [base(model, part, num_items_in_batch=number) for part in parts]
        return sum(losses) / (len(losses) if mean else 1), None

    return computing(compute)


def by_positions(trainer: Any, base: Any, model: Any, inputs: Batch, number: Any) -> Any:
    """A compute_loss of one's own, over half of the positions at a time."""
    seen = Seen(model(input_ids=inputs["input_ids"])["logits"], inputs)
    logits, labels = seen.logits[:, :-1], seen.batch["labels"][:, 1:]
    sums = [
        F.cross_entropy(logits[:, part].flatten(0, 1), labels[:, part].flatten(), reduction="sum")
        for part in halves(labels.shape[1])
    ]
    return sum(sums) / number, None


def mean_of(chunks: Chunks) -> Loss:
    """In a forward: the mean of the chunks' means."""

    def loss(s: Seen) -> Tensor:
        means = [s.rows(rows).tokens for rows in chunks(len(s.logits))]
        return sum(means[1:], start=means[0]) / len(means)

    return loss


#: By name: the model, the trainer, and whether it is exact. Stock is right where chunks are divided by one number.
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "halves": (ByNumber, by_rows(halves), True),
    "pairs": (ByNumber, by_rows(pairs), True),
    "positions": (ByNumber, computing(by_positions), True),
    "sum-of-means": (Mean, by_rows(halves), False),
    "mean-of-means": (Mean, by_rows(pairs, mean=True), False),
    "in-a-forward": (holding(mean_of(halves), Mean), StockRecorder, False),
}


def case(name: str, cut: Cut, ranks: int = 1) -> Case:
    head, trainer, exact = KINDS[name]
    count = cut[0] * cut[1] * ranks
    window = [sample for turn in range(-(-count // 8)) for sample in texts(turn)][:count]
    given = {"verdict": Verdict.EXACT if exact else Verdict.INEXACT, "tolerance": FLOOR, "rate": RATE}
    return Case(name, full(tokens), head, [window, window[::-1]], trainer, **given)


@pytest.mark.parametrize("cut", [(2, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_chunks_are_exact_over_one_number_and_said_else(name: str, cut: Cut) -> None:
    given = case(name, cut)
    stock, ours = (by_trainer(given, cut, path) for path in ("stock", "apply"))
    assert not faults(ours, given, stock, cut)
    assert stock.worst <= FLOOR if KINDS[name][2] else stock.worst > 0.1


def test_chunks_in_a_forward_of_a_loop_are_said() -> None:
    given = case("in-a-forward", (4, 4))
    stock, ours = (by_loop(given, (4, 4), path) for path in ("stock", "apply"))
    assert not faults(ours, given, stock, (4, 4))
