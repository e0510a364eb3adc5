"""The paired test of one rank against the others."""

from __future__ import annotations

import numpy
import pytest

from hf_accum_fix.monitor.deviation import Deviation, Shifts


def alarms(means: numpy.ndarray, error: float = 1.0, tolerance: float = 0.0) -> list[tuple[int, int]]:
    """Readings and ranks of the alarms, of the ranks' means: [readings, ranks], in their errors."""
    shifts, found, ranks = Shifts(), [], means.shape[1]
    for reading, row in enumerate(means.tolist(), start=1):
        differences = [its - (sum(row) - its) / (ranks - 1) for its in row]
        error_of = error * (ranks / (ranks - 1)) ** 0.5
        named = shifts.add([Deviation(rank, its, error_of, 40, tolerance) for rank, its in enumerate(differences)])
        found += [] if named is None else [(reading, named.rank)]
    return found


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize(("persists", "size"), [(1, 0.0), (2, 2.0), (2, 5.0), (10, 2.0), (30, 3.0)])
def test_ranks_that_all_wander_are_left_alone(ranks: int, persists: int, size: float) -> None:
    draw = numpy.random.default_rng(ranks * 10 + persists)
    levels = numpy.repeat(draw.normal(size=(1000 // persists + 1, ranks)), persists, axis=0)[:1000]
    found = alarms(size * levels + draw.normal(size=(1000, ranks)))
    # One false alarm in 1,000 logs at most.
    assert len(found) <= (1 if persists > 1 else 0), found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("since", [0, 40])
def test_a_shift_is_named_once_it_has_lasted_and_again_after_twice_as_long(ranks: int, since: int) -> None:
    means = numpy.random.default_rng(1).normal(size=(since + 130, ranks))
    means[since:, -1] += 4.0
    found = alarms(means)
    assert {rank for _, rank in found} == {ranks - 1}
    assert since + 20 < found[0][0] <= since + 30 and all(later >= found[0][0] + 60 for later, _ in found[1:])


def test_a_rank_that_is_off_is_named_among_ranks_that_differ_by_design_and_wander() -> None:
    draw = numpy.random.default_rng(2)
    means = 2.0 * draw.normal(size=(200, 8)) + 3.0 * draw.normal(size=8)
    means[100:, 3] += 20.0
    assert 100 < alarms(means)[0][0] <= 130 and alarms(means)[0][1] == 3


def test_what_is_within_the_tolerance_is_no_shift_and_losses_that_never_vary_may_be_one() -> None:
    still = numpy.tile([0.0, 1.0], (40, 1))
    assert alarms(still, error=0.0, tolerance=0.1) == [(30, 1)] and alarms(still, error=0.0, tolerance=1.1) == []
    noisy = still * 3 + numpy.random.default_rng(3).normal(size=(40, 2))
    assert alarms(noisy) == [(30, 1)] and alarms(noisy, tolerance=3.0) == []


def test_ranks_that_come_and_go_begin_anew() -> None:
    shifts, off = Shifts(), [Deviation(0, -5.0, 1.0), Deviation(1, 5.0, 1.0)]
    for _ in range(29):
        assert shifts.add(off) is None
    assert shifts.add([*off, Deviation(2, 0.0, 1.0)]) is None
    assert [shifts.add(off) is not None for _ in range(30)] == [False] * 29 + [True]


def test_a_rank_that_is_early_is_none_that_lags() -> None:
    shifts, either = Shifts(only_above=True), Shifts()
    early = [Deviation(rank, its, 1.0) for rank, its in enumerate((-6.0, 2.0, 2.0, 2.0))]
    named = [(shifts.add(early), either.add(early)) for _ in range(60)]
    assert all(above is None for above, _ in named) and any(its is not None and its.rank == 0 for _, its in named)
