"""A loss that swings, stands where it began or starts too high; an accuracy that stands; gradient norms that spike."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest
import torch

from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter, Moments
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.series import without_sentinels


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


@pytest.mark.parametrize(
    ("period", "size", "by"), [(2, 0.12, 96), (3, 0.15, 96), (8, 0.15, 96), (16, 0.15, 96), (40, 0.15, None)]
)
def test_the_periods_that_are_found_are_those_the_readme_names(period: int, size: float, by: int | None) -> None:
    logs = numpy.arange(1, 800)
    for seed in range(5):
        draw = random.Random(40_000_000 + seed + 100 * period)
        swings, phase = LossOscillation(), draw.uniform(0, 2 * math.pi) if period > 2 else 0.5 * math.pi
        losses = (0.5 + 2 * numpy.exp(-logs / 200)) * (1 + size * numpy.sin(2 * math.pi * logs / period + phase))
        alarms = [swings.add(loss * math.exp(0.03 * draw.gauss(0, 1)), 1e-3) for loss in losses.tolist()]
        found = [(log, alarm.observation) for log, alarm in enumerate(alarms, start=1) if alarm is not None]
        assert found[:1] == ([] if by is None else [(by, False)])


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


#: Losses, and how many of them remain.
SENTINELS = {
    "all": ([-1.0] * 5, 0), "every other": ([2.0, -1.0, 1.9, -1.0, 1.8, -1.0], 3), "one": ([2.0, -1.0], 1),
    "plain": ([2.0, 1.0, 0.5], 3), "a similarity that saturates": ([-0.9, -0.99, -1.0, -1.0, -1.0, -0.98], 6),
    "another number": ([-2.0, 2.0, 1.5, -2.0], 4), "zero": ([0.0] * 9, 9), "no whole number": ([-0.5] * 9, 9),
    "empty": ([], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTINELS)
def test_sentinels_are_recognised_and_other_losses_are_none(name: str) -> None:
    losses, kept = SENTINELS[name]
    remaining, left_out = without_sentinels(losses)
    assert len(remaining) == kept == len(losses) - left_out
    assert remaining == losses or min(remaining, default=0) >= 0
