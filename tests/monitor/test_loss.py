"""The loss meter on one process; with real ranks in test_two_ranks.py."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor

from hf_accum_fix.monitor.loss import LossMeter, Moments
from hf_accum_fix.monitor.series import without_sentinels


def test_the_mean_weighs_items_and_not_micro_batches() -> None:
    meter = LossMeter()
    meter.update(torch.tensor(8.0), 1)
    meter.update(torch.tensor(2.0), torch.tensor(1999))
    meter.update(torch.tensor(4000.0), 2000, summed=True)
    reading = meter.read()
    assert reading.mean == pytest.approx((8 + 2 * 1999 + 4000) / 4000)
    assert reading.total.micro_batches == 3
    assert meter.read().total.items == 0


def test_a_loss_over_no_item_is_none_and_a_broken_one_is_seen() -> None:
    meter = LossMeter()
    meter.update(torch.tensor(math.nan), torch.tensor(0))
    meter.update(torch.tensor(3.0), torch.tensor(5))
    assert meter.read().mean == 3.0
    meter.update(torch.tensor(math.nan), torch.tensor(2))
    assert math.isnan(meter.read().mean)


def test_no_loss_is_a_fact_and_no_number() -> None:
    meter = LossMeter()
    meter.update(None, 7)
    meter.update(None, 7, summed=True)
    reading = meter.read()
    assert math.isnan(reading.mean) and reading.total == Moments()


def test_the_standard_error_is_the_one_of_simulation() -> None:
    draw = numpy.random.default_rng(0)
    means, errors = [], []
    for _ in range(300):
        meter = LossMeter()
        for items in draw.integers(1, 200, size=40):
            meter.update(2.0 + 0.3 * draw.normal() + draw.normal() / math.sqrt(items), int(items))
        reading = meter.read()
        means.append(reading.mean)
        errors.append(reading.total.standard_error)
    assert numpy.mean(errors) == pytest.approx(numpy.std(means), rel=0.12)
    assert math.isnan(Moments(micro_batches=1, items=5, loss=5).standard_error)


class ThreeRanks:
    """Another engine, plugged in: the other two ranks hold what they were given."""

    rank, size = 2, 3

    def __init__(self, others: Tensor) -> None:
        self.others = others

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + self.others


def test_another_engine_plugs_in_by_its_sum_alone() -> None:
    others = torch.zeros(3, 9, dtype=torch.float64)
    row = torch.tensor([6.0, 2.0, 1.0], dtype=torch.float64)
    others[0] = torch.outer(row, row).flatten()
    meter = LossMeter(ThreeRanks(others))
    meter.update(torch.tensor(1.0), 2)
    reading = meter.read()
    assert [moments.mean for moments in reading.ranks if moments.items] == [3.0, 1.0]
    assert reading.mean == 2.0


@pytest.mark.parametrize(
    ("losses", "kept"), [([-1.0] * 5, 0), ([2.0, -1.0, 1.9, -1.0, 1.8, -1.0], 3), ([2.0, -1.0], 1)]
)
def test_sentinels_are_recognised(losses: list[float], kept: int) -> None:
    remaining, left_out = without_sentinels(losses)
    assert len(remaining) == kept == len(losses) - left_out and min(remaining, default=0) >= 0


@pytest.mark.parametrize(
    "losses",
    [[2.0, 1.0, 0.5], [-0.9, -0.99, -1.0, -1.0, -1.0, -0.98], [-2.0, 2.0, 1.5, -2.0], [0.0] * 9, [-0.5] * 9, []],
    ids=["plain", "a similarity that saturates", "another number", "zero", "no whole number", "empty"],
)
def test_losses_are_no_sentinels(losses: list[float]) -> None:
    assert without_sentinels(losses) == (losses, 0)
