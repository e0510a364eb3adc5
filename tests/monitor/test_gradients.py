"""Gradient norms, over the ranks and over time: planted faults and healthy runs."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import nn

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.rank_gradients import RankGradients, RankGradientsReading, deviations


def test_the_deviation_of_a_rank_by_hand() -> None:
    steps = [(1.0, 1.0, math.e), (2.0, 2.0, 2.0 * math.e)]
    exact = deviations(steps)
    assert [each.difference for each in exact] == pytest.approx([-0.5, -0.5, 1.0])
    assert exact[2].unusual > 6
    assert all(each.unusual == 0 for each in deviations(steps, tolerance=2.0))


def test_a_rank_whose_gradient_is_not_finite_is_named_at_once() -> None:
    alarm = RankGradients().judge(RankGradientsReading(((1.0, 1.0), (1.0, math.inf), (1.0, 2.0))))
    assert alarm is not None and alarm.kind == "rank-gradient-not-finite-1"
    scaled_down = RankGradientsReading(((1.0, math.inf), (1.0, math.inf)))
    assert RankGradients().judge(scaled_down) is None


def test_a_norm_is_made_of_its_parts() -> None:
    gradients = RankGradients()
    for scale in (1.0, 2.0):
        gradients.add(scale * torch.tensor([3.0, 0.0]))
        gradients.add(scale * torch.tensor([[4.0]], dtype=torch.bfloat16))
        gradients.end_of_step()
    assert gradients.read().norms == ((5.0, 10.0),)
    assert gradients.read().norms == ((),)


class TwoRanks:
    rank, size = 0, 2

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_what_is_not_ddp_is_refused() -> None:
    with pytest.raises(UnsupportedSetupError, match="expected DistributedDataParallel"):
        RankGradients(TwoRanks()).attach(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_spike_is_told_with_its_place_and_what_is_usual() -> None:
    norms = GradientNorm(max_norm=1.0)
    usual = 0.8 * numpy.exp(0.2 * numpy.random.default_rng(1).normal(size=100))
    for norm in (*usual, 40.0, *usual[:3]):
        norms.update(torch.tensor(norm))
    reading = norms.read()
    assert reading.spikes == 1 and reading.steps_ago == 3
    assert reading.spike * reading.usual == pytest.approx(40.0)
    window = [*usual[4:], 40.0, *usual[:3]]
    assert reading.steps == 104 and reading.median == pytest.approx(numpy.median(window), rel=1e-5)
    alarm = norms.judge(reading)
    assert alarm is not None and alarm.kind == "gradient-norm-spike" and "3 steps before this log" in alarm.message
    assert norms.judge(norms.read()) is None


def test_the_short_step_at_the_end_of_an_epoch_is_no_spike() -> None:
    """One or two samples of 16: the noise of a gradient is larger by the root, with or without many ranks."""
    for ranks in (1, 4):
        draw, norms, alarms = numpy.random.default_rng(5), GradientNorm(), 0
        for step in range(1, 10_001):
            items = int(draw.integers(1, 3)) if step % 50 == 0 else 16
            gradient = 0.05 + draw.normal(size=(items, 30)).mean(0)
            norms.update(float(numpy.linalg.norm(gradient)), items / ranks)
            if step % 10 == 0:
                alarms += norms.judge(norms.reading(torch.stack([norms.row()] * ranks))) is not None
        assert alarms <= 1
    for norm in (1.0, 1.1) * 30:
        norms.update(norm, 16)
    norms.update(100.0, 2)
    norms.update(40.0, 9)
    norms.update(50.0)
    assert norms.read().spikes == 2
