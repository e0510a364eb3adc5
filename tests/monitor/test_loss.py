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


def test_the_moving_average_weighs_logs_by_their_items_and_their_age() -> None:
    meter, found = LossMeter(), []
    for loss, items in ((4.0, 10), (2.0, 30), (math.nan, 5)):
        meter.update(loss, items)
        found.append(meter.logged(meter.read())["loss_smoothed"])
    second = (0.9 * 40 + 60) / (0.9 * 10 + 30)
    assert found == pytest.approx([4.0, second, second])


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
    assert math.isnan(reading.mean) and math.isnan(reading.spread) and reading.total == Moments()


def test_the_standard_error_is_the_one_of_simulation() -> None:
    draw = numpy.random.default_rng(0)
    means, errors = [], []
    for _ in range(300):
        meter = LossMeter()
        for items in draw.integers(1, 200, size=40):
            meter.update(2.0 + 0.3 * draw.normal() + draw.normal() / math.sqrt(items), int(items))
        reading = meter.read()
        means.append(reading.mean)
        errors.append(reading.standard_error)
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
    assert reading.mean == 2.0 and reading.spread == 2.0


@pytest.mark.parametrize(
    ("losses", "kept", "told"),
    [
        ([-1.0] * 5, 0, "all 5 losses are -1"),
        ([2.0, -1.0, 1.9, -1.0, 1.8, -1.0], 3, "3 of 6 losses are -1"),
        ([2.0, 1.9, -100.0, -100.0, -100.0], 2, "3 of 5 losses are -100"),
    ],
)
def test_sentinels_are_recognised(losses: list[float], kept: int, told: str) -> None:
    remaining, sentinel = without_sentinels(losses)
    assert len(remaining) == kept and min(remaining, default=0) >= 0
    assert sentinel is not None and told in str(sentinel) and len(sentinel.places) == len(losses) - kept


@pytest.mark.parametrize(
    "losses",
    [[2.0, 1.0, 0.5], [-0.9, -0.99, -1.0, -1.0, -1.0, -0.98], [-2.0, 2.0, 1.5, -2.0], [0.0] * 9, [-0.5] * 9, []],
    ids=["plain", "a similarity that saturates", "twice is chance", "zero", "no whole number", "empty"],
)
def test_losses_are_no_sentinels(losses: list[float]) -> None:
    assert without_sentinels(losses) == (losses, None)
