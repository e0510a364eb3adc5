"""A rank that is off, of two and of four: found soon, from the first log or later, at no more false alarms."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest

from hf_accum_fix.monitor.deviation import Deviation
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.rank_gradients import RankGradients, RankGradientsReading
from hf_accum_fix.monitor.two_ranks import OF_NORMS_BESIDE_LOSSES, ShiftOfTwo

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import MONITORS, judged, rank_firsts
from simulated_runs import HEALTHY, PLANTED

#: Not the audit's; one of those that settings for two ranks were chosen on.
SEED = 9203


def delay(fault: str, count: int) -> float:
    """Median delay in logs of eight runs."""
    firsts = rank_firsts(PLANTED[fault], 8, count, SEED)
    return median(firsts + [count + 1] * (8 - len(firsts)))


@pytest.mark.parametrize("fault", [name for name in PLANTED if name.endswith("2 ranks")])
def test_a_fault_from_the_first_log_is_found_within_ten(fault: str) -> None:
    assert delay(fault, 10) <= 10


def alarms(differences: list[float], tolerance: float = 0.0) -> list[int]:
    """Readings at which `ShiftOfTwo` finds a shift, of differences in errors."""
    two = ShiftOfTwo()
    return [at for at, its in enumerate(differences, start=1) if two.add(its, 1.0, tolerance)]


@pytest.mark.parametrize(
    ("rho", "sigma", "often"), [(0.0, 0.0, 0.0), (0.7, 2.0, 0.0), (0.93, 5.0, 0.0), (0, 6.0, 0.15)]
)
def test_how_two_ranks_wander_is_learned(rho: float, sigma: float, often: float) -> None:
    """Of ranks that do not wander, a false alarm in 1,000 readings; of others, one a run at first, and fewer later."""
    draw, early, late = numpy.random.default_rng(SEED), 0, 0
    for _ in range(40):
        level, differences = sigma * draw.normal(), []
        for _ in range(150):
            differences.append(level + draw.normal())
            wandered = rho * level + math.sqrt(1 - rho**2) * sigma * draw.normal()
            level = wandered if not often else sigma * draw.normal() if draw.random() < often else level
        found = alarms(differences)
        early, late = early + sum(at <= 50 for at in found), late + sum(at > 50 for at in found)
    assert early <= (6 if sigma == 0 else 30) and late <= 8


def test_a_shift_from_the_first_reading_or_a_later_one_is_seen_by_the_eighth() -> None:
    draw = numpy.random.default_rng(SEED)
    noise = draw.normal(size=40)
    assert alarms((noise + 3).tolist()) == [8]
    later = alarms((noise + 3 * (numpy.arange(40) >= 20)).tolist())
    assert len(later) == 1 and 20 < later[0] <= 28
    assert not alarms((noise + 3).tolist(), tolerance=3.0)


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_what_another_quantity_explains_is_no_shift(shift: float) -> None:
    """Levels that are drawn anew, and differences in proportion to them; a level that lasts may explain any shift."""
    firsts = []
    for seed in range(20):
        draw, two, beside = numpy.random.default_rng(seed), ShiftOfTwo(OF_NORMS_BESIDE_LOSSES), 0.0
        slope, alarms = draw.uniform(0.2, 0.9), []
        for reading in range(1, 61):
            beside = 4 * draw.normal() if draw.random() < 0.1 else beside
            alarms += [reading] * two.add(slope * beside + shift + draw.normal(), 1.0, beside=beside)
        firsts += alarms[:1]
    assert len(firsts) >= 19 and median(firsts) <= 8 if shift else len(firsts) <= 1


def test_a_gradient_is_judged_beside_the_loss() -> None:
    """That of the last rank is half as large again, and both follow a difficulty that persists."""

    def first(seed: int, known: bool) -> int:
        draw, gradients = numpy.random.default_rng(seed), RankGradients()
        difficulty, power = 0.4 * draw.normal(size=2), draw.uniform(0.4, 0.9)
        for log in range(1, 21):
            difficulty = numpy.where(draw.random(2) < 0.1, 0.4 * draw.normal(size=2), difficulty)
            harder = difficulty + 0.1 * draw.normal(size=2)
            steps = numpy.exp(power * harder + 0.3 * draw.normal(size=(10, 2))) * [1.0, 1.5]
            losses = LossReading(tuple(Moments(10, 100, 100 * math.exp(its), 0.0, 0.0, 1000) for its in harder))
            norms = RankGradientsReading(tuple(map(tuple, steps.T.tolist())))
            if gradients.judge(norms, losses if known else None) is not None:
                return log
        return 21

    assert median(first(seed, True) for seed in range(10)) <= 6 < 9 <= median(first(seed, False) for seed in range(10))
    assert max(first(seed, True) for seed in range(10)) <= 10


def test_a_shift_of_losses_that_never_vary_is_seen() -> None:
    two = ShiftOfTwo()
    assert sum(two.add(Deviation(0, 1.0, 0.0, 1e6, 0.1).deviate, 0.0, 0.1) for _ in range(15)) == 1
    two = ShiftOfTwo()
    assert not any(two.add(Deviation(0, 0.05, 0.0, 1e6, 0.1).deviate, 0.0, 0.1) for _ in range(40))


#: The later, the less a fault differs from the other rank: a network has learned to live with other inputs.
BY = {"shuffled labels": 5, "a quarter shuffled": 10, "gradient x1.5": 10, "inputs x1.5": 20}


@pytest.mark.parametrize("since", [5, 20])
@pytest.mark.parametrize("fault", BY)
def test_a_fault_that_comes_later_does_not_hide_itself(fault: str, since: int) -> None:
    assert delay(f"{fault}, 2 ranks, from log {since}", BY[fault] + 1) <= BY[fault]


#: Of four ranks, after which so many logs are enough for each fault.
BY_OF_FOUR = {
    "shuffled from log 60": 4,
    "a quarter shuffled from log 60": 4,
    "inputs x1.5 from log 60": 30,
    "gradient x1.5 from log 60": 10,
    "gradient zero from log 60": 2,
    "loss nan from log 60": 1,
    "duplicates from log 60": 3,
}


@pytest.mark.parametrize("fault", BY_OF_FOUR)
def test_one_of_four_ranks_is_found_late_in_a_run_as_well(fault: str) -> None:
    assert delay(fault, BY_OF_FOUR[fault] + 1) <= BY_OF_FOUR[fault]


@pytest.mark.parametrize("name", ["plain, 2 ranks", "ragged, 2 ranks"])
def test_healthy_ranks_are_left_alone(name: str) -> None:
    runs = judged(HEALTHY[name], 8, 125, SEED)
    assert sum(len(run.rank_loss + run.rank_gradients) for run in runs) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_at_most_one_false_alarm_in_a_thousand_logs(name: str) -> None:
    runs = judged(HEALTHY[name], 4, 500, SEED + 1)
    for monitor in MONITORS:
        # One in 1,000 is two in these 2,000; a Poisson count of mean two is above five in 2 of 100.
        assert sum(len(getattr(run, monitor)) for run in runs) <= 5, monitor
