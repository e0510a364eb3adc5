"""A rank that is off, of two and of four: found, from the first log or later, at no more false alarms."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest

from hf_accum_fix.monitor.deviation import Deviation, TwoRanks

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import MONITORS, judged, rank_firsts
from simulated_runs import HEALTHY, PLANTED

#: Not the audit's.
SEED = 9203


def delay(fault: str, count: int) -> float:
    """Median delay in logs of eight runs."""
    firsts = rank_firsts(PLANTED[fault], 8, count, SEED)
    return median(firsts + [count + 1] * (8 - len(firsts)))


#: Logs of a run on two ranks, in which a fault is found that hardly differs from the other rank; and any other one.
LOGS_OF_A_RUN, LOGS = 130, 60


@pytest.mark.parametrize("fault", [name for name in PLANTED if ", 2 ranks" in name])
def test_a_fault_on_two_ranks_is_found_in_the_run(fault: str) -> None:
    logs = LOGS_OF_A_RUN if "inputs" in fault else LOGS
    assert delay(fault, logs) <= logs


def alarms(differences: list[float], tolerance: float = 0.0) -> list[int]:
    """Readings at which `TwoRanks` finds that two differ, of differences in errors."""
    two = TwoRanks()
    return [at for at, its in enumerate(differences, start=1) if two.add(Deviation(0, its, 1.0, 1e6, tolerance))]


@pytest.mark.parametrize(
    ("rho", "sigma", "often"), [(0.0, 0.0, 0.0), (0.7, 2.0, 0.0), (0.93, 5.0, 0.0), (0, 6.0, 0.15)]
)
def test_two_ranks_that_wander_are_left_alone(rho: float, sigma: float, often: float) -> None:
    """Of ranks that do not wander, no false alarm in 6,000 readings; of others, one in two runs of 150 at most."""
    draw, found = numpy.random.default_rng(SEED), 0
    for _ in range(40):
        level, differences = sigma * draw.normal(), []
        for _ in range(150):
            differences.append(level + draw.normal())
            wandered = rho * level + math.sqrt(1 - rho**2) * sigma * draw.normal()
            level = wandered if not often else sigma * draw.normal() if draw.random() < often else level
        found += len(alarms(differences))
    assert found <= (0 if sigma == 0 else 25)


def test_a_shift_from_the_first_reading_or_a_later_one_is_seen_once_it_lasts() -> None:
    draw = numpy.random.default_rng(SEED)
    noise = draw.normal(size=80)
    assert alarms((noise + 3).tolist()) == [30]
    later = alarms((noise + 3 * (numpy.arange(80) >= 20)).tolist())
    assert len(later) == 1 and 40 < later[0] <= 50
    assert not alarms((noise + 3).tolist(), tolerance=3.0)


def test_a_shift_of_losses_that_never_vary_is_seen() -> None:
    two = TwoRanks()
    assert sum(two.add(Deviation(0, 1.0, 0.0, 1e6, 0.1)) for _ in range(40)) == 1
    two = TwoRanks()
    assert not any(two.add(Deviation(0, 0.05, 0.0, 1e6, 0.1)) for _ in range(40))


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
