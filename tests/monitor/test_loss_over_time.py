"""A loss that swings, one that stands where it began or starts too high, and an accuracy that stands."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest

from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend


def told(monitor: Any, losses: numpy.ndarray) -> list[int]:
    """Logs with an alarm."""
    return [log for log, loss in enumerate(losses.tolist(), start=1) if monitor.add(loss) is not None]


def noise(logs: int, size: float = 0.1, seed: int = 0, correlation: float = 0.0) -> numpy.ndarray:
    draw = numpy.random.default_rng(seed).normal(size=logs)
    for place in range(1, logs):
        draw[place] = correlation * draw[place - 1] + math.sqrt(1 - correlation**2) * draw[place]
    return numpy.exp(size * draw)


def falling(logs: int) -> numpy.ndarray:
    return 0.5 + 2.0 * numpy.exp(-numpy.arange(logs) / 50)


@pytest.mark.parametrize("period", [2.0, 5.0, 7.3, 11.0])
def test_a_swing_is_told_once_as_long_as_it_lasts(period: float) -> None:
    losses = falling(600) * noise(600)
    losses[200:500] *= 1 + 0.3 * numpy.sin(2 * math.pi * numpy.arange(300) / period + 0.5 * math.pi)
    found = told(LossOscillation(), losses)
    assert len(found) == 1 and 250 <= found[0] <= 330


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("size", [0.05, 0.3, 1.0])
def test_noise_without_a_period_is_no_swing(size: float, correlation: float) -> None:
    for seed in range(2):
        assert told(LossOscillation(), falling(2000) * noise(2000, size, seed, correlation)) == []


def test_a_run_that_learns_nothing_is_told_once() -> None:
    for seed in range(5):
        assert told(LossStall(), 2.0 * noise(2000, 0.1, seed)) == [300]
    assert told(LossStall(), 2.0 * noise(2000) * numpy.exp(numpy.arange(2000) / 1e4)) == [300]


@pytest.mark.parametrize("name", ["learns", "slowly", "at once", "warm-up", "harder", "around zero", "noisy"])
def test_a_run_that_learns_is_not(name: str) -> None:
    logs = numpy.arange(2000)
    curves = {
        "learns": falling(2000),
        "slowly": 2.0 - 0.0002 * logs,
        "at once": numpy.where(logs < 3, 4.0, 2.0),
        "warm-up": 2.0 - 1.0 / (1 + numpy.exp((200 - logs) / 20)),
        "harder": falling(2000) + 0.002 * logs,
        "around zero": numpy.sin(logs / 3.0),
        "noisy": falling(2000) * noise(2000, 0.5),
    }
    assert told(LossStall(), curves[name] * noise(2000, 0.02, 1)) == []


@pytest.mark.parametrize(
    ("loss", "guess", "alarms"),
    [(12.4, math.log(500), 1), (6.3, math.log(500), 0), (12.4, math.nan, 0), (12.4, 0.0, 0), (math.inf, 1.0, 0)],
)
def test_a_first_loss_far_above_a_guess(loss: float, guess: float, alarms: int) -> None:
    first = FirstLoss()
    said = [first.add(math.nan, guess), first.add(loss, guess)]
    assert sum(alarm is not None for alarm in said) == alarms
    assert alarms == 0 or first.add(100.0, guess) is None
    if alarms:
        assert said[1] is not None and "ln(500) = 6.21" in said[1].message and "2 times" in said[1].message


ACCURACIES = {
    "stands": (numpy.full(20, 0.31), 1),
    "noise": (0.3 + 0.01 * numpy.random.default_rng(0).normal(size=20), 1),
    "rises": (0.3 + 0.02 * numpy.arange(20), 0),
    "rose at first": (numpy.r_[0.1, 0.3, 0.5, 0.6, numpy.full(16, 0.62)], 0),
    "near 1": (numpy.full(20, 0.98), 0),
}


@pytest.mark.parametrize("name", ACCURACIES)
def test_an_accuracy_that_stands_while_the_loss_falls(name: str) -> None:
    accuracies, alarms = ACCURACIES[name]
    losses, trend = 2.0 * numpy.exp(-numpy.arange(20) / 10), AccuracyTrend()
    said = [trend.judge(*pair) for pair in zip(losses.tolist(), accuracies.tolist(), strict=True)]
    assert sum(alarm is not None for alarm in said) == alarms
    flat = AccuracyTrend()
    assert all(flat.judge(2.0, its) is None for its in accuracies.tolist())


STEPS = numpy.arange(600)
COSINE = 1e-3 * (1 - STEPS / 600)
LEARNT = 0.5 + 2 * numpy.exp(-STEPS / 60)
SWINGS = 1e-3 * (0.5 + 0.5 * numpy.cos(math.pi * (STEPS % 16) / 16))
BY_DESIGN = {
    "restarts": (LEARNT * (1 + 250 * SWINGS), SWINGS),
    "a curriculum": (LEARNT * numpy.where(STEPS < 450, 1, 1.5), COSINE),
    "a second stage": (numpy.where(STEPS < 300, LEARNT, 0.6 + 1.8 * numpy.exp(-(STEPS - 300) / 150)), COSINE),
    "learnt late": (numpy.where(STEPS < 400, 2.0, 0.01 + 2 * numpy.exp(-(STEPS - 400) / 30)), COSINE),
    "a fine-tune that gains 3 %": (1.5 - 0.045 * (1 - numpy.exp(-STEPS / 20)), COSINE),
}


def said(losses: numpy.ndarray, rates: numpy.ndarray | None, seed: int) -> list[tuple[int, str, bool]]:
    """Logs, kinds, and whether it is an observation, of all that judge the loss over time."""
    judges, found = (LossTrend(), LossOscillation(), LossStall()), []
    noisy = losses * noise(len(losses), 0.05, seed)
    for log, loss in enumerate(noisy.tolist(), start=1):
        rate = math.nan if rates is None else float(rates[log - 1])
        its = [judge.add(loss, rate) for judge in judges]
        found += [(log, alarm.kind, alarm.observation) for alarm in its if alarm is not None]
    return found


@pytest.mark.parametrize("known", [True, False], ids=["rate known", "rate unknown"])
@pytest.mark.parametrize("name", BY_DESIGN)
def test_what_is_meant_so_is_no_alarm(name: str, known: bool) -> None:
    losses, rates = BY_DESIGN[name]
    found = [its for seed in range(401, 409) for its in said(losses, rates if known else None, seed)]
    assert all(observation for *_, observation in found)
    assert not (known and name == "restarts" and found)


FAULTS = {
    "20 % of period 6": (LEARNT * (1 + 0.2 * numpy.sin(2 * math.pi * STEPS / 6)), COSINE, "loss-oscillates", 96, False),
    "12 % of period 2": (LEARNT * (1 + 0.12 * (-1.0) ** STEPS), COSINE, "loss-oscillates", 96, False),
    "divergence": (LEARNT + 2.2 * (STEPS > 300), COSINE, "loss-diverges", 350, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_swing_a_jump_and_divergence_are_told(name: str) -> None:
    losses, rates, kind, by, observation = FAULTS[name]
    for seed in range(411, 415):
        first = next(its for its in said(losses, rates, seed) if its[1] == kind)
        assert first[0] <= by and first[2] == observation


def test_a_swing_of_one_epoch_is_the_order_of_the_data() -> None:
    losses = LEARNT * (1 + 0.2 * numpy.sin(2 * math.pi * STEPS / 6))
    for epoch_in_logs, observation in ((6.0, True), (15.0, False)):
        judge = LossOscillation()
        rows = zip(losses.tolist(), (STEPS / epoch_in_logs).tolist(), strict=True)
        told = [alarm for loss, epoch in rows if (alarm := judge.add(loss, 1e-3, epoch)) is not None]
        assert told[0].observation == observation and ("which is one epoch" in told[0].message) == observation


def test_an_observation_is_logged_and_neither_counted_nor_an_end(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms(on_alarm="raise")
    with caplog.at_level("WARNING", logger="hf_accum_fix.monitor"):
        alarms.say(Alarm("loss-stalls", "it stalls", observation=True), 7)
    assert [its.message for its in caplog.records] == ["observed, no alarm: loss-stalls: step 7: it stalls"]
    assert alarms.count == 0 and not alarms.stop


@pytest.mark.parametrize(("period", "by"), [(3, 96), (8, 96), (16, 96), (40, None)])
def test_the_periods_that_are_found_are_those_the_readme_names(period: int, by: int | None) -> None:
    for seed in range(5):
        draw = random.Random(40_000_000 + seed + 100 * period)
        swings, phase, found = LossOscillation(), draw.uniform(0, 2 * math.pi), None
        for log in range(1, 800):
            clean = (0.5 + 2 * math.exp(-log / 200)) * (1 + 0.15 * math.sin(2 * math.pi * log / period + phase))
            if swings.add(clean * math.exp(0.03 * draw.gauss(0, 1)), 1e-3) is not None:
                found = log
                break
        assert found == by
