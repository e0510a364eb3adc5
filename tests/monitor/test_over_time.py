"""One row a curve of losses, accuracies or gradient norms, log by log: which alarm it is, if any, and by which log."""

from __future__ import annotations

import math
import random

import numpy
import pytest
import torch
from numpy import ndarray

from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter, Moments
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.series import without_sentinels


def noise(logs: int, size: float = 0.1, seed: int = 0) -> ndarray:
    return numpy.exp(size * numpy.random.default_rng(seed).normal(size=logs))


def falling(logs: int, by: int = 50) -> ndarray:
    return 0.5 + 2.0 * numpy.exp(-numpy.arange(logs) / by)


STEPS = numpy.arange(3000)
LOGS, MANY = STEPS[:1000], STEPS[:2000]
LEARNS = falling(1000, 30)
#: Of a loss a log: the curve, what judges it, and of its alarms how many, and between which logs the first.
LOSSES: dict[str, tuple[ndarray, type, int, tuple[int, int]]] = {
    "learns nothing": (2.0 * noise(2000), LossStall, 1, (300, 300)),
    "learns nothing and rises": (2.0 * noise(2000) * numpy.exp(MANY / 1e4), LossStall, 1, (300, 300)),
    **{
        name: (curve * noise(2000, 0.02, 1), LossStall, 0, (0, 0))
        for name, curve in {
            "learns": falling(2000),
            "slowly": 2.0 - 0.0002 * MANY,
            "at once": numpy.where(MANY < 3, 4.0, 2.0),
            "warm-up": 2.0 - 1.0 / (1 + numpy.exp((200 - MANY) / 20)),
            "around zero": numpy.sin(MANY / 3.0),
            "noisy": falling(2000) * noise(2000, 0.5),
        }.items()
    },
    **{
        name: (curve * numpy.exp(0.1 * numpy.random.default_rng(3).standard_t(8, size=1000)), LossTrend, count, between)
        for name, (curve, count, between) in {
            "rises for good": (LEARNS + 2.0 * (LOGS >= 200), 1, (215, 235)),
            "rises twice": (LEARNS + 2.0 * (LOGS >= 200) + 6.0 * (LOGS >= 300), 2, (215, 235)),
            "spikes": (LEARNS * (1 + 9 * (LOGS % 50 == 0)), 0, (0, 0)),
            "harder data": (LEARNS * (1 + 0.4 * (LOGS > 500)), 0, (0, 0)),
            "negative": (LEARNS - 1.0, 0, (0, 0)),
        }.items()
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_time(name: str) -> None:
    losses, judge, count, (first, last) = LOSSES[name]
    monitor = judge()
    found = [log for log, loss in enumerate(losses.tolist(), start=1) if monitor.add(loss) is not None]
    assert len(found) == count and (not count or first <= found[0] <= last), found


def noisy(size: float = 0.25) -> ndarray:
    return numpy.exp(size * numpy.random.default_rng(1).standard_t(8, size=3000))


#: Of gradient norms a step: the norms, max_norm, the alarm if any, and the step by which it is told.
NORMS: dict[str, tuple[ndarray, float | None, str, int]] = {
    "grow": (noisy() * numpy.exp(0.01 * STEPS), None, "gradient-norm-grows", 700),
    "grow slowly": (noisy() * numpy.exp(0.002 * STEPS), None, "gradient-norm-grows", 2200),
    "vanish": (noisy() * numpy.exp(-0.005 * STEPS), None, "gradient-norm-vanishes", 2300),
    "die": (noisy() * (STEPS < 1000), None, "gradient-norm-vanishes", 1500),
    "clipped": (20 * noisy(), 1.0, "gradient-norm-always-clipped", 1000),
    "clipped a little": (2 * noisy(), 1.0, "", 0),
    "clipped, but now and then": (numpy.where(STEPS % 900 == 899, 0.5, 20 * noisy()), 1.0, "", 0),
    "grow and rest": (noisy() * (1 + 5 * (1 - numpy.exp(-STEPS / 500))), None, "", 0),
    "fall as a run learns": (noisy() * (0.001 + numpy.exp(-STEPS / 500)), None, "", 0),
    "spike": (noisy(0.1) * (1 + 40 * (STEPS == 1234)), None, "gradient-norm-spike", 1240),
    "nan": (numpy.where((STEPS > 1000) & (STEPS % 10 == 0), math.nan, noisy()), None, "gradient-norm-not-f", 1080),
}


@pytest.mark.parametrize("name", NORMS)
def test_gradient_norms_over_time(name: str) -> None:
    norms, max_norm, kind, by = NORMS[name]
    monitor, found = GradientNorm(max_norm), []
    for step, norm in enumerate(norms.tolist(), start=1):
        monitor.update(norm)
        if step % 10 == 0 and (alarm := monitor.judge(monitor.read())) is not None:
            found.append((step, alarm.kind))
    assert bool(found) == bool(kind) and all(its.startswith(kind) for _, its in found), found[:2]
    assert not found or (found[0][0] <= by and (kind.endswith("f") or len(found) <= 9))


@pytest.mark.parametrize(
    ("period", "size", "by"), [(2, 0.12, 96), (3, 0.15, 96), (8, 0.15, 96), (16, 0.15, 96), (40, 0.15, None)]
)
def test_the_periods_that_are_found_are_those_the_readme_names(period: int, size: float, by: int | None) -> None:
    logs = numpy.arange(1, 800)
    for seed in range(5):
        draw = random.Random(40_000_000 + seed + 100 * period)
        judge, phase = LossOscillation(), draw.uniform(0, 2 * math.pi) if period > 2 else 0.5 * math.pi
        losses = (0.5 + 2 * numpy.exp(-logs / 200)) * (1 + size * numpy.sin(2 * math.pi * logs / period + phase))
        alarms = [judge.add(loss * math.exp(0.03 * draw.gauss(0, 1)), 1e-3) for loss in losses.tolist()]
        found = [(log, alarm.observation) for log, alarm in enumerate(alarms, start=1) if alarm is not None]
        assert found[:1] == ([] if by is None else [(by, False)])


SHORT = STEPS[:600]
COSINE = 1e-3 * (1 - SHORT / 600)
LEARNT = falling(600, 60)
RESTARTS = 1e-3 * (0.5 + 0.5 * numpy.cos(math.pi * (SHORT % 16) / 16))
BY_DESIGN = {
    "restarts": (LEARNT * (1 + 250 * RESTARTS), RESTARTS),
    "a curriculum": (LEARNT * numpy.where(SHORT < 450, 1, 1.5), COSINE),
    "a second stage": (numpy.where(SHORT < 300, LEARNT, 0.6 + 1.8 * numpy.exp(-(SHORT - 300) / 150)), COSINE),
    "learnt late": (numpy.where(SHORT < 400, 2.0, 0.01 + 2 * numpy.exp(-(SHORT - 400) / 30)), COSINE),
    "a fine-tune that gains 3 %": (1.5 - 0.045 * (1 - numpy.exp(-SHORT / 20)), COSINE),
}


@pytest.mark.parametrize("known", [True, False], ids=["rate known", "rate unknown"])
@pytest.mark.parametrize("name", BY_DESIGN)
def test_what_is_meant_so_is_no_alarm(name: str, known: bool) -> None:
    losses, rates = BY_DESIGN[name]
    found = []
    for seed in range(401, 409):
        judges = (LossTrend(), LossOscillation(), LossStall())
        rows = zip((losses * noise(600, 0.05, seed)).tolist(), rates.tolist(), strict=True)
        found += [judge.add(loss, rate if known else math.nan) for loss, rate in rows for judge in judges]
    alarms = [alarm for alarm in found if alarm is not None]
    assert all(alarm.observation for alarm in alarms) and not (known and name == "restarts" and alarms)


def test_a_swing_of_one_epoch_is_the_order_of_the_data() -> None:
    losses = LEARNT * (1 + 0.2 * numpy.sin(2 * math.pi * SHORT / 6))
    for epoch_in_logs, observation in ((6.0, True), (15.0, False)):
        judge = LossOscillation()
        rows = zip(losses.tolist(), (SHORT / epoch_in_logs).tolist(), strict=True)
        told = [alarm for loss, epoch in rows if (alarm := judge.add(loss, 1e-3, epoch)) is not None]
        assert told[0].observation == observation and ("which is one epoch" in told[0].message) == observation


def test_an_observation_is_logged_and_neither_counted_nor_an_end(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms(on_alarm="raise")
    with caplog.at_level("WARNING", logger="hf_accum_fix.monitor"):
        alarms.say(Alarm("loss-stalls", "it stalls", observation=True), 7)
    assert [its.message for its in caplog.records] == ["observed, no alarm: loss-stalls: step 7: it stalls"]
    assert alarms.count == 0 and not alarms.stop


@pytest.mark.parametrize(
    ("loss", "guess", "alarm"),
    [(12.4, math.log(500), True), (6.3, math.log(500), False), (12.4, math.nan, False), (12.4, 0.0, False),
     (math.inf, 1.0, False)],
)  # fmt: skip
def test_a_first_loss_far_above_a_guess(loss: float, guess: float, alarm: bool) -> None:
    first = FirstLoss()
    assert first.add(math.nan, guess) is None
    said = first.add(loss, guess)
    assert (said is not None) == alarm
    assert said is None or ("ln(500) = 6.21" in said.message and "2 times" in said.message)
    assert not alarm or first.add(100.0, guess) is None


#: Accuracies of 20 evaluations, and whether they are told as the loss falls.
ACCURACIES = {
    "stands": (numpy.full(20, 0.31), True),
    "noise": (0.3 + 0.01 * numpy.random.default_rng(0).normal(size=20), True),
    "rises": (0.3 + 0.02 * numpy.arange(20), False),
    "rose at first": (numpy.r_[0.1, 0.3, 0.5, 0.6, numpy.full(16, 0.62)], False),
    "near 1": (numpy.full(20, 0.98), False),
}


@pytest.mark.parametrize("name", ACCURACIES)
def test_an_accuracy_that_stands_while_the_loss_falls(name: str) -> None:
    (accuracies, told), trend, flat = ACCURACIES[name], AccuracyTrend(), AccuracyTrend()
    losses = 2.0 * numpy.exp(-numpy.arange(20) / 10)
    said = [trend.judge(*pair) for pair in zip(losses.tolist(), accuracies.tolist(), strict=True)]
    assert sum(alarm is not None for alarm in said) == told
    assert all(flat.judge(2.0, its) is None for its in accuracies.tolist())


def test_a_spike_is_told_with_its_place_and_what_is_usual() -> None:
    norms = GradientNorm(max_norm=1.0)
    usual = 0.8 * noise(100, 0.2, 1)
    for norm in (*usual, 40.0, *usual[:3]):
        norms.update(torch.tensor(norm))
    reading = norms.read()
    assert (reading.steps, reading.spikes, reading.steps_ago) == (104, 1, 3)
    assert reading.spike * reading.usual == pytest.approx(40.0)
    assert reading.median == pytest.approx(numpy.median([*usual[4:], 40.0, *usual[:3]]), rel=1e-5)
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
    # A pipeline's rank may have no loss, and a mean over no item is none.
    meter.update(None, 7)
    meter.update(None, 7, summed=True)
    meter.update(torch.tensor(math.nan), torch.tensor(0))
    reading = meter.read()
    assert reading.mean == pytest.approx((8 + 2 * 1999 + 4000) / 4000) and reading.total.micro_batches == 3
    assert meter.read().total == Moments() and math.isnan(meter.read().mean)
    meter.update(torch.tensor(math.nan), torch.tensor(2))
    assert math.isnan(meter.read().mean)


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
SENTINELS: dict[str, tuple[list[float], int]] = {
    "all": ([-1.0] * 5, 0), "every other": ([2.0, -1.0, 1.9, -1.0, 1.8, -1.0], 3), "one": ([2.0, -1.0], 1),
    "plain": ([2.0, 1.0, 0.5], 3), "a similarity that saturates": ([-0.9, -0.99, -1.0, -1.0, -1.0, -0.98], 6),
    "another number": ([-2.0, 2.0, 1.5, -2.0], 4), "no whole number": ([-0.5] * 9, 9), "empty": ([], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTINELS)
def test_sentinels_are_recognised_and_other_losses_are_none(name: str) -> None:
    losses, kept = SENTINELS[name]
    remaining, left_out = without_sentinels(losses)
    assert len(remaining) == kept == len(losses) - left_out
    assert remaining == losses or min(remaining, default=0) >= 0
