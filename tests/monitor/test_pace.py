"""A rank that keeps the others waiting, by a clock that the test turns."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from hf_accum_fix.monitor.pace import Pace, PaceReading
from tests.monitor.side_by_side import OneOf, side_by_side


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lags(ranks: int, extra: float, logs: int = 31, usual: float = 0.1) -> list[tuple[int, str]]:
    """Logs and kinds of the alarms where the last rank takes so much longer; every rank's own time is skewed noise.

    Args:
        ranks: how many.
        extra: [s] of the last rank.
        logs: of ten steps.
        usual: [s] that a rank takes by itself, and that the last backward takes.
    """

    def work(its: OneOf) -> list[tuple[int, str]]:
        model, clock = nn.Linear(1, 1), Clock()
        pace = Pace(model, its, clock=clock)
        draw = numpy.random.default_rng(7)
        found = []
        for step in range(1, 10 * logs + 1):
            own = usual * draw.lognormal(0, 0.3, size=ranks)
            own[-1] += extra
            own[0] += 5.0 * (step % 10 == 0)  # it saves, it evaluates
            clock.now += own[its.rank]
            model(torch.ones(1, 1))
            clock.now += own.max() - own[its.rank] + usual  # the last backward, and the wait for the slowest
            pace.step()
            model.eval()
            model(torch.ones(1, 1))
            model.train()
            if step % 10 == 0:
                alarm = pace.judge(pace.read())
                found += [] if alarm is None else [(step // 10, alarm.kind)]
        return found

    results = side_by_side(work, ranks)
    assert all(its == results[0] for its in results)
    return results[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_lags_is_named_and_a_healthy_run_is_not(ranks: int) -> None:
    found = lags(ranks, 0.1)
    assert found[0] == (30, f"rank-lags-{ranks - 1}") and {kind for _, kind in found} == {f"rank-lags-{ranks - 1}"}
    assert lags(ranks, 0.0) == []


def test_the_lag_is_told_in_seconds_however_large() -> None:
    pace = Pace(nn.Identity())
    alarms = [pace.judge(PaceReading((0.1, 1.1), 1.3, 10)) for _ in range(30)]
    assert alarms[-1] is not None and alarms[-1].message.startswith("rank 1: ready 1 s later than the others")


def test_one_process_and_a_run_without_forwards_say_nothing() -> None:
    pace = Pace(nn.Linear(1, 1))
    pace.step()
    reading = pace.read()
    assert reading == PaceReading((0.0,), 0.0, 0) and pace.judge(reading) is None and reading.lag(0) == 0
