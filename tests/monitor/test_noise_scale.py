"""The gradient noise scale of ragged micro-batches against its closed form, on one process; two ranks: two_ranks.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.noise_scale import NoiseScale, NoiseScaleReading
from tests.monitor.quadratic import Quadratic, micro_batches


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
