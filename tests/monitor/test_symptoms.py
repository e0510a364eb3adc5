"""One row a symptom and a number of ranks: which alarm it is, and by which log; and healthy runs, which raise none."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import HEALTHY_PACE, LAGS, MONITORS, PACE_LOG, judged, pace_alarms, rank_firsts, skewed
from simulated_runs import HEALTHY, PLANTED

#: Neither the seeds of the thresholds nor the audit's.
SEED = 9203
#: Of a fault of the last rank the alarm; the log after it by which half of eight runs have it; runs that have it.
BY = {
    "shuffled labels on a rank": ("rank-(loss|gradient)-3", 31, 8),
    "10 % label noise on a rank": ("rank-(loss|gradient)-3", 40, 8),
    "2 % label noise on a rank": ("rank-(loss|gradient)-3", 60, 6),
    "a rank's gradient x2": ("rank-gradient-3", 31, 8),
    "a rank's gradient x1.1": ("rank-gradient-3", 110, 3),
    "a rank's gradient zero": ("rank-gradient-zero-3", 1, 8),
    "a rank's gradient zero, 16 ranks": ("rank-gradient-zero-15", 1, 8),
    "exact duplicates": ("ranks-see-the-same-data", 2, 8),
    "shuffled from log 60": ("rank-(loss|gradient)-3", 30, 8),
    "a quarter shuffled from log 60": ("rank-(loss|gradient)-3", 32, 8),
    "inputs x1.5 from log 60": ("rank-(loss|gradient)-3", 50, 6),
    "gradient x1.5 from log 60": ("rank-gradient-3", 31, 8),
    "gradient zero from log 60": ("rank-gradient-zero-3", 2, 8),
    "loss nan from log 60": ("rank-loss-not-finite-3", 1, 8),
    "duplicates from log 60": ("ranks-see-the-same-data", 3, 8),
} | {
    f"{name}, 2 ranks{f', from log {since}' if since else ''}": ("rank-(loss|gradient)-[01]", by, runs)
    for since in (0, 5, 20)
    for name, by, runs in (
        ("shuffled labels", 32, 8),
        ("a quarter shuffled", 32, 8),
        ("inputs x1.5", 110, 4),
        ("gradient x1.5", 45, 7),
    )
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_rank_that_is_off_is_named(fault: str) -> None:
    kind, by, runs = BY[fault]
    found = rank_firsts(PLANTED[fault], 8, 110 if runs < 8 else by + 10, SEED)
    assert len(found) >= runs, found
    assert median([log for log, _ in found]) <= by, found
    named = [its for _, its in found if re.fullmatch(kind, its)]
    assert len(named) >= runs, found


@pytest.mark.parametrize("name", ["plain, 2 ranks", "ragged, 4 ranks"])
def test_a_healthy_run_raises_no_alarm(name: str) -> None:
    assert sum(len(run[monitor]) for run in judged(HEALTHY[name], 8, 125, SEED) for monitor in MONITORS) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_at_most_one_false_alarm_in_a_thousand_logs(name: str) -> None:
    runs = judged(HEALTHY[name], 4, 500, SEED + 1)
    for monitor in MONITORS:
        # One in 1,000 is two in these 2,000; a Poisson count of mean two is above five in 2 of 100.
        assert sum(len(run[monitor]) for run in runs) <= 5, monitor


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("name", LAGS)
def test_a_rank_that_lags_is_named(name: str, ranks: int) -> None:
    draw, steps = numpy.random.default_rng(SEED), numpy.arange(40 * PACE_LOG)
    for _ in range(4):
        assert pace_alarms(skewed(draw, len(steps), ranks), LAGS[name](steps))[0] == (30, f"rank-lags-{ranks - 1}")


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("name", HEALTHY_PACE)
def test_lengths_that_differ_and_persist_are_no_lag(name: str, ranks: int) -> None:
    draw = numpy.random.default_rng(SEED)
    assert sum(len(pace_alarms(HEALTHY_PACE[name](draw, 500 * PACE_LOG, ranks))) for _ in range(2)) <= 1
