"""A planted bad rank is named, and a healthy run alarms at most once in 1,000 logs."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy
import pytest

from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.rank_loss import RankLoss, deviations

ITEMS = {
    "even": lambda draw, shape: numpy.full(shape, 128.0),
    "ragged": lambda draw, shape: draw.integers(1, 400, size=shape).astype(float),
    "heavy": lambda draw, shape: numpy.ceil(draw.lognormal(4, 1.2, size=shape)),
    "one rank short": lambda draw, shape: numpy.where(
        numpy.arange(shape[0])[:, None] == 0, 4.0, numpy.full(shape, 400.0)
    ),
}


def a_reading(
    draw: numpy.random.Generator, ranks: int, micro_batches: int, items: str, log: int, shift: float = 0.0
) -> LossReading:
    """Losses of micro-batches whose difficulty differs, heavy tails now and then, of a run that learns."""
    n = ITEMS[items](draw, (ranks, micro_batches))
    x = 2 + 3 * math.exp(-log / 20) + 0.3 * draw.standard_t(4, size=n.shape)
    x += 1.5 * (draw.exponential(size=n.shape) - 1) / numpy.sqrt(n)
    x[-1] += shift
    s = x * n
    sums = zip(n.sum(1), s.sum(1), (s * s).sum(1), (s * n).sum(1), (n * n).sum(1), strict=True)
    return LossReading(tuple(Moments(micro_batches, *map(float, of_rank)) for of_rank in sums))


def test_a_rank_with_few_items_is_as_usual_as_any() -> None:
    draw = numpy.random.default_rng(8)
    unusual = []
    for log in range(300):
        reading = a_reading(draw, 4, 10, "one rank short", 100 + log)
        found = deviations(reading.ranks, [0, 1, 2, 3])
        assert abs(found[0].difference) > 0
        unusual.append(found[0].deviate)
    # Its mean is off by several times what the others' are; in its own standard errors it is not.
    assert numpy.std(unusual) < 1.1


def test_short_readings_are_put_together() -> None:
    draw = numpy.random.default_rng(9)
    judge = RankLoss()
    for log in range(7):
        judge.judge(a_reading(draw, 2, 1, "even", log))
        assert not judge._shifts._past
    judge.judge(a_reading(draw, 2, 1, "even", 8))
    assert len(judge._shifts._past) == 1


def test_ranks_that_are_given_the_same_samples() -> None:
    draw = numpy.random.default_rng(10)
    judge = RankLoss()
    alarms = []
    for log in range(3):
        ranks = list(a_reading(draw, 4, 10, "ragged", log).ranks)
        ranks[3] = replace(ranks[1], loss=ranks[1].loss * (1 + 1e-9))
        alarms.append(judge.judge(LossReading(tuple(ranks))))
    assert alarms[0] is None and alarms[1] is not None
    assert alarms[1].kind == "ranks-see-the-same-data" and "ranks 1, 3" in alarms[1].message


def test_one_rank_and_ranks_without_a_loss_are_not_judged() -> None:
    judge = RankLoss()
    full = Moments(10, 100, 200, 4000, 2000, 1000)
    assert judge.judge(LossReading((full,))) is None
    assert judge.judge(LossReading((Moments(), Moments(), full))) is None
    assert not judge._shifts._past


def test_the_same_alarm_is_told_at_its_1st_2nd_4th_and_8th_time(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms()
    with caplog.at_level(logging.WARNING, logger="hf_accum_fix.monitor"):
        for _ in range(10):
            alarms.say(Alarm("rank-loss-3", "rank 3 is off"))
            alarms.say(None)
        alarms.say(Alarm("rank-loss-4", "rank 4 is off"))
    told = [record.message for record in caplog.records]
    assert told == [
        "rank-loss-3: rank 3 is off",
        *(f"rank-loss-3: rank 3 is off (time {times})" for times in (2, 4, 8)),
        "rank-loss-4: rank 4 is off",
    ]
    assert alarms.count == 11
