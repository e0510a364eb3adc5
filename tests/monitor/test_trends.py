"""What goes wrong slowly: a loss that diverges, gradient norms that grow, vanish or are always clipped."""

from __future__ import annotations

import math

import numpy
import pytest

from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.loss_over_time import LossTrend


def told(losses: numpy.ndarray) -> list[int]:
    """Logs at which a loss is said to diverge."""
    trend, found = LossTrend(), []
    for log, loss in enumerate(losses.tolist(), start=1):
        reading = LossReading((Moments(10, 100.0, 100 * loss),))
        found += [] if trend.judge(reading) is None else [log]
    return found


def learned(draw: numpy.random.Generator, logs: int, noise: float = 0.1) -> numpy.ndarray:
    return (0.5 + 2.0 * numpy.exp(-numpy.arange(logs) / 30)) * numpy.exp(noise * draw.normal(size=logs))


def test_a_loss_that_rises_for_good_is_told_once() -> None:
    curve = learned(numpy.random.default_rng(0), 400)
    curve[200:] += 2.0
    found = told(curve)
    assert len(found) == 1 and 215 <= found[0] <= 235
    curve[300:] += 6.0
    assert len(told(curve)) == 2


@pytest.mark.parametrize("name", ["noise", "spikes", "harder data", "fine-tuning", "from nothing", "negative"])
def test_a_healthy_loss_is_not(name: str) -> None:
    draw = numpy.random.default_rng(len(name))
    curve = learned(draw, 1000, 0.3 if name == "noise" else 0.1)
    if name == "spikes":
        curve[::50] *= 10
    elif name == "harder data":
        curve[500:] *= 1.4
    elif name == "fine-tuning":
        curve = 1.5 + 0.1 * draw.normal(size=1000)
    elif name == "from nothing":
        curve = 2 * numpy.exp(-numpy.arange(1000) / 50) * numpy.exp(draw.normal(size=1000)) + 1e-6
    elif name == "negative":
        curve -= 1.0
    assert told(curve) == []


def diverged(losses: numpy.ndarray) -> list[int]:
    """Logs at which a loss is called diverged: an alarm, no observation."""
    trend = LossTrend()
    judged = [trend.add(loss) for loss in losses.tolist()]
    return [log for log, alarm in enumerate(judged, start=1) if alarm is not None and not alarm.observation]


def test_a_loss_that_wanders_by_itself_has_to_rise_further() -> None:
    """Difficulty that persists for some five logs: a mean of 30 is one of six."""
    false, delays = 0, []
    for seed in range(20):
        draw = numpy.random.default_rng(seed)
        since = numpy.maximum.accumulate(numpy.where(draw.random(600) < 0.2, numpy.arange(600), 0))
        wandering = numpy.exp(0.6 * draw.normal(size=600)[since] + 0.1 * draw.normal(size=600))
        false += len(diverged(wandering))
        wandering[300:] *= 20
        delays.append(next(log for log in diverged(wandering) if log > 300) - 300)
    # Without an eye for that, 18 in these 12,000 logs.
    assert false <= 8 and max(delays) <= 40


def kinds(norms: numpy.ndarray, max_norm: float | None = None) -> list[tuple[int, str]]:
    """Steps and kinds of the alarms, at logs of ten steps."""
    monitor, found = GradientNorm(max_norm), []
    for step, norm in enumerate(norms.tolist(), start=1):
        monitor.update(norm)
        if step % 10 == 0:
            alarm = monitor.judge(monitor.read())
            found += [] if alarm is None else [(step, alarm.kind)]
    return found


def noisy(steps: int) -> numpy.ndarray:
    return numpy.exp(0.25 * numpy.random.default_rng(1).standard_t(8, size=steps))


@pytest.mark.parametrize(("pace", "by"), [(0.01, 700), (0.002, 2200)])
def test_a_norm_that_grows_steadily_is_told(pace: float, by: int) -> None:
    found = kinds(noisy(3000) * numpy.exp(pace * numpy.arange(3000)))
    assert found and {kind for _, kind in found} == {"gradient-norm-grows"} and found[0][0] <= by
    # Again after as much growth again, not at every log.
    assert len(found) <= 1 + pace * 3000 / math.log(30)


def test_a_norm_that_vanishes_is_told() -> None:
    found = kinds(noisy(3000) * numpy.exp(-0.005 * numpy.arange(3000)))
    assert found and {kind for _, kind in found} == {"gradient-norm-vanishes"} and found[0][0] <= 2300
    dead = noisy(2000)
    dead[1000:] = 0
    (first,) = kinds(dead)
    assert first[0] <= 1500 and first[1] == "gradient-norm-vanishes"


def test_norms_that_grow_and_rest_or_fall_as_a_run_learns_are_healthy() -> None:
    steps = numpy.arange(10_000)
    assert kinds(noisy(10_000) * (1 + 9 * numpy.exp(-steps / 300))) == []
    assert kinds(noisy(10_000) * (1 + 5 * (1 - numpy.exp(-steps / 2000)))) == []
    assert kinds(noisy(10_000) * (0.001 + numpy.exp(-steps / 500))) == []


def test_steps_that_are_all_clipped_far_down_are_told() -> None:
    found = kinds(20 * noisy(5000), max_norm=1.0)
    assert found == [(1000, "gradient-norm-always-clipped"), (2000, "gradient-norm-always-clipped"),
                     (4000, "gradient-norm-always-clipped")]  # fmt: skip
    assert kinds(2 * noisy(5000), max_norm=1.0) == []
    rarely = 20 * noisy(5000)
    rarely[::900] = 0.5
    assert kinds(rarely, max_norm=1.0) == []
