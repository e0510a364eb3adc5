"""One row a symptom and a number of ranks: which alarm it is, and by which log; and healthy runs, which raise none."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest

from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss_over_time import LossTrend

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
    "gradient x1.5 from log 60": ("rank-gradient-3", 31, 7),
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


def noisy(steps: int, noise: float = 0.25, seed: int = 1) -> numpy.ndarray:
    return numpy.exp(noise * numpy.random.default_rng(seed).standard_t(8, size=steps))


STEPS = numpy.arange(3000)
LEARNS = 0.5 + 2.0 * numpy.exp(-numpy.arange(1000) / 30)
#: Of a loss a log: the curve, the alarm if any, and between which logs it is told; alarms in all.
LOSSES = {
    "rises for good": (LEARNS + 2.0 * (STEPS[:1000] >= 200), "loss-diverges", (215, 235), 1),
    "rises twice": (LEARNS + 2.0 * (STEPS[:1000] >= 200) + 6.0 * (STEPS[:1000] >= 300), "loss-diverges", (215, 235), 2),
    "spikes": (LEARNS * (1 + 9 * (STEPS[:1000] % 50 == 0)), "", (0, 0), 0),
    "harder data": (LEARNS * (1 + 0.4 * (STEPS[:1000] > 500)), "", (0, 0), 0),
    "negative": (LEARNS - 1.0, "", (0, 0), 0),
}
#: Of gradient norms a step: the norms, max_norm, the alarm if any, and the step by which it is told.
NORMS = {
    "grow": (noisy(3000) * numpy.exp(0.01 * STEPS), None, "gradient-norm-grows", 700),
    "grow slowly": (noisy(3000) * numpy.exp(0.002 * STEPS), None, "gradient-norm-grows", 2200),
    "vanish": (noisy(3000) * numpy.exp(-0.005 * STEPS), None, "gradient-norm-vanishes", 2300),
    "die": (noisy(3000) * (STEPS < 1000), None, "gradient-norm-vanishes", 1500),
    "clipped": (20 * noisy(3000), 1.0, "gradient-norm-always-clipped", 1000),
    "clipped a little": (2 * noisy(3000), 1.0, "", 0),
    "clipped, but now and then": (numpy.where(STEPS % 900 == 899, 0.5, 20 * noisy(3000)), 1.0, "", 0),
    "grow and rest": (noisy(3000) * (1 + 5 * (1 - numpy.exp(-STEPS / 500))), None, "", 0),
    "fall as a run learns": (noisy(3000) * (0.001 + numpy.exp(-STEPS / 500)), None, "", 0),
    "spike": (noisy(3000, 0.1) * (1 + 40 * (STEPS == 1234)), None, "gradient-norm-spike", 1240),
    "nan": (numpy.where((STEPS > 1000) & (STEPS % 10 == 0), math.nan, noisy(3000)), None, "gradient-norm-not-f", 1080),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_lost_again_is_told(name: str) -> None:
    curve, kind, (first, last), count = LOSSES[name]
    trend = LossTrend()
    judged = [trend.add(loss) for loss in (curve * noisy(1000, 0.1, 3)).tolist()]
    found = [(log, its.kind) for log, its in enumerate(judged, start=1) if its is not None and not its.observation]
    assert len(found) == count and all(its == kind for _, its in found), found
    assert not count or first <= found[0][0] <= last


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
