"""The gradient noise scale of ragged micro-batches against its closed form, on one process; two ranks: two_ranks.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.noise_scale import NoiseScale, NoiseScaleReading
from tests.monitor.quadratic import DEVIATIONS, Quadratic, closed_form, micro_batches

#: The aim; the standard error of 100 windows is 2 to 3 %.
CLOSE = 0.05
RAGGED = ([1, 40, 3, 25, 2, 60, 1, 30], [2, 2, 50, 7])


def test_ragged_micro_batches_give_the_closed_form_where_the_usual_formula_does_not() -> None:
    model, draw = Quadratic(), torch.Generator().manual_seed(0)
    noise, sums = NoiseScale(model, every=1), torch.zeros(2)
    for window in range(100):
        model.zero_grad()
        norms, sizes = list[float](), RAGGED[window % 2]
        for points in micro_batches(draw, sizes):
            norms.append(float((model.place.detach() - points.mean(0)).square().sum()))
            (model(points) * len(points) / sum(sizes)).backward()
            noise.micro_batch(len(points))
        noise.step()
        assert model.place.grad is not None
        # The formula for micro-batches of one size.
        small, big = sum(sizes) / len(sizes), sum(sizes)
        square, norm = sum(norms) / len(norms), float(model.place.grad.square().sum())
        sums += torch.tensor([(square - norm) / (1 / small - 1 / big), (big * norm - small * square) / (big - small)])
    reading = noise.read()
    assert reading.noise == pytest.approx(sum(its**2 for its in DEVIATIONS), rel=CLOSE)
    assert reading.scale == pytest.approx(closed_form(), rel=CLOSE)
    assert 0.001 < reading.error < 0.05 and reading.windows == 100
    assert abs(float(sums[0] / sums[1]) / closed_form() - 1) > 1


def test_there_are_no_hooks_between_the_windows_that_are_measured() -> None:
    model, seen = Quadratic(), []
    noise = NoiseScale(model, every=3)
    for _ in range(7):
        for points in micro_batches(torch.Generator().manual_seed(1), [2, 3]):
            model(points).backward()
            noise.micro_batch(len(points))
        seen.append(bool(noise._hooks))
        assert not model.place._backward_hooks
        noise.step(norm=1.0)
    assert seen == [True, False, False, True, False, False, True]
    assert noise.read().windows == 3


def test_what_tells_nothing_is_left_out() -> None:
    """One micro-batch has no spread; one without items is none; a window that is not finite."""
    model = Quadratic()
    noise = NoiseScale(model, every=1)
    assert math.isnan(noise.read().scale) and "in 0 windows" in str(noise.read())
    (points,) = micro_batches(torch.Generator().manual_seed(1), [4])
    for window in ([(1.0, 4)], [(1.0, 4), (0.0, 0)], [(1.0, 4), (math.nan, 4)]):
        for weight, items in window:
            (weight * model(points)).backward()
            noise.micro_batch(items)
        noise.step()
        assert noise.read().windows == 0


def test_noise_alone_has_no_scale() -> None:
    reading = NoiseScaleReading(10, 8.0, 3.0, -0.1, math.nan)
    assert reading.scale == math.inf and reading.gain == 0 and "no gradient above its noise" in str(reading)
    reading = NoiseScaleReading(10, 300.0, 3.0, 0.01, 0.1)
    assert str(reading) == "noise scale 300 items (+- 10%, 10 windows); a step of 300 achieves 50% of one without noise"


class Tied(nn.Module):
    """With tied, frozen and sparse parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.frozen(self.out(self.words(words)))).square().mean()


def test_tied_frozen_and_sparse_parameters_do_not_end_a_run() -> None:
    model = Tied()
    noise = NoiseScale(model, every=1)
    for number in range(3):
        model(torch.tensor([number, 4, 4])).backward()
        noise.micro_batch(torch.tensor(3))
    noise.step()
    assert noise.read().windows == 1 and noise.read().noise > 0
