"""A loss computed in chunks, to save memory: exact where the chunks are divided by one number, else said.

Chunks of rows come in the order of a micro-batch's samples, which another split deals otherwise: a mean over chunks of
their own means is another loss for every split.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import hf_accum_fix
from tests import trainings
from tests.losses.models import texts
from tests.losses.seen import ByNumber, Loss, Mean, Seen, full, holding, tokens
from tests.numerics.heads import Batch
from tests.ranks import on_ranks
from tests.trainings import Case, Cut, Training, computing, train

CUTS: tuple[Cut, ...] = ((2, 4), (4, 4), (8, 2), (1, 8))
#: Rounding of float64.
FLOOR = 1e-12


def halves(count: int) -> list[slice]:
    return [slice(count // 2), slice(count // 2, count)] if count > 1 else [slice(count)]


def pairs(count: int) -> list[slice]:
    return [slice(start, start + 2) for start in range(0, count, 2)]


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


def case(head: Any, trainer: Any, cut: Cut, ranks: int = 1, **more: Any) -> Case:
    count = cut[0] * cut[1] * ranks
    window = [sample for turn in range(-(-count // 8)) for sample in texts(turn)][:count]
    return Case("", full(tokens), head, [window, window[::-1]], trainer, **more)


def both(case: Case, cut: Cut) -> tuple[Training, Training]:
    """By stock, and by ours."""
    with tempfile.TemporaryDirectory() as folder:
        stock = train(case, cut, Path(folder))
        with hf_accum_fix.apply():
            return stock, train(case, cut, Path(folder))


SUMS = {"halves": by_rows(halves), "pairs": by_rows(pairs), "positions": computing(by_positions)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", SUMS)
def test_chunks_over_one_number_are_exact(name: str, cut: Cut) -> None:
    """As in stock, which is right here."""
    stock, ours = both(case(ByNumber, SUMS[name], cut), cut)
    assert stock.worst <= FLOOR and ours.worst <= FLOOR
    assert ours.exact and not ours.said


@pytest.mark.parametrize(("chunks", "cut"), [(halves, (2, 4)), (halves, (8, 2)), (pairs, (4, 4)), (pairs, (8, 2))])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_chunks_with_a_mean_each_are_said(chunks: Chunks, mean: bool, cut: Cut) -> None:
    stock, ours = both(case(Mean, by_rows(chunks, mean=mean), cut), cut)
    assert stock.worst > 0.1
    assert ours.exact is False and ours.said and ours.worst <= max(1.05 * stock.worst, FLOOR)


@pytest.mark.parametrize("looped", [False, True], ids=["trainer", "loop"])
@pytest.mark.parametrize("cut", CUTS)
def test_chunks_in_a_forward_are_said(cut: Cut, looped: bool) -> None:
    given = case(holding(mean_of(halves), Mean), trainings.StockRecorder, cut)
    if looped:
        stock, ours = (trainings.loop(given, cut, by) for by in (trainings.by_hand, trainings.ours))
    else:
        stock, ours = both(given, cut)
    assert ours.exact is False and ours.said and ours.worst <= max(1.05 * stock.worst, FLOOR)


def on_two_ranks(name: str, cut: Cut) -> tuple[float, float, bool]:
    stock, ours = both(case(ByNumber, SUMS[name], cut, ranks=2), cut)
    return stock.worst, ours.worst, bool(ours.exact) and not ours.said


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(2, 4), (1, 8)])
@pytest.mark.parametrize("name", ["halves", "pairs"])
def test_chunks_over_one_number_are_exact_on_two_ranks(name: str, cut: Cut) -> None:
    for stock, ours, exact in on_ranks(on_two_ranks, name, cut):
        assert stock <= FLOOR and ours <= FLOOR and exact
