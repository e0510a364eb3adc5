"""Two ranks, of which one is off: found soon, from the first log or later, at no more false alarms."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest

from hf_accum_fix.monitor.deviation import Deviation, FromTheStart

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import judged, rank_firsts
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


@pytest.mark.parametrize(("rho", "sigma"), [(0.0, 0.0), (0.7, 2.0), (0.93, 8.0)])
def test_two_ranks_that_are_as_believed_hardly_ever_seem_apart(rho: float, sigma: float) -> None:
    """Ville's inequality, for the two explanations' average and so for each of its parts by its share."""
    draw, above = numpy.random.default_rng(SEED), 0
    for _ in range(300):
        early, level, largest = FromTheStart(), sigma * draw.normal(), -math.inf
        for _ in range(24):
            largest = max(largest, early.add(Deviation(0, level + draw.normal(), 1.0, 1e6)))
            level = rho * level + math.sqrt(1 - rho**2) * sigma * draw.normal()
        above += largest > math.log(1000)
    assert above <= (1 if sigma == 0 else 15)


def test_a_shift_from_the_first_reading_on_is_seen_until_the_24th() -> None:
    early = FromTheStart()
    factors = [early.add(Deviation(0, 3.0, 1.0, 1e6)) for _ in range(30)]
    assert max(factors[:7]) == -math.inf and factors[9] > math.log(1000) and max(factors[24:]) == -math.inf
    within = FromTheStart()
    assert max(within.add(Deviation(0, 3.0, 1.0, 1e6, tolerance=3.0)) for _ in range(24)) < math.log(100)


#: The later, the less a fault differs from the other rank: a network has learned to live with other inputs.
BY = {"shuffled labels": 5, "a quarter shuffled": 10, "gradient x1.5": 20, "inputs x1.5": 60}


@pytest.mark.parametrize("since", [5, 20])
@pytest.mark.parametrize("fault", BY)
def test_a_fault_that_comes_later_does_not_hide_itself(fault: str, since: int) -> None:
    assert delay(f"{fault}, 2 ranks, from log {since}", BY[fault] + 1) <= BY[fault]


@pytest.mark.parametrize("name", ["plain, 2 ranks", "ragged, 2 ranks"])
def test_healthy_ranks_are_left_alone(name: str) -> None:
    runs = judged(HEALTHY[name], 8, 125, SEED)
    assert sum(len(run.rank_loss + run.rank_gradients) for run in runs) <= 1


#: Where ranks differ for a hundred steps, two ranks cannot know that it is no fault; see the README.
UNKNOWABLE = "for 100, strong, 2 ranks"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEALTHY if name != UNKNOWABLE])
def test_a_healthy_run_has_at_most_one_false_alarm_in_a_thousand_logs(name: str) -> None:
    runs = judged(HEALTHY[name], 4, 500, SEED + 1)
    for monitor in ("rank_loss", "rank_gradients", "gradient_norm"):
        # One in 1,000 is two in these 2,000; a Poisson count of mean two is above five in 2 of 100.
        assert sum(len(getattr(run, monitor)) for run in runs) <= 5, monitor
