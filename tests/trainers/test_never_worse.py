"""Two rules over every trainer of `wild`: never further off than stock, and stock's own bits where nothing is cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.custom import CASES, OWN_STEPS, STEPS_OF_THE_BASE
from tests.trainers.runs import WHOLE, Case, Cut, full_batch, full_batch_loss, once

EVERY_CUT = [pytest.param(case, cut, id=f"{case.name}-{cut[0]}x{cut[1]}") for case in CASES for cut in case.cuts]
UNCUT = [pytest.param(case, WHOLE, id=f"{case.name}-8x1") for case in CASES]


def of(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.mark.parametrize(("case", "cut"), EVERY_CUT)
def test_never_further_off_than_stock(case: Case, cut: Cut) -> None:
    """Or refused while nothing has moved."""
    wanted = full_batch(case)
    stock, patched = once(case, cut, "stock"), once(case, cut, "apply")
    theirs = stock.error(wanted)
    assert (theirs <= case.floor) is case.right
    if not patched.refused:
        ours = patched.error(wanted)
        assert ours <= theirs * (1 + 1e-6) + case.floor


@pytest.mark.parametrize(("case", "cut"), [*EVERY_CUT, *UNCUT])
def test_what_is_called_exact_is_exact(case: Case, cut: Cut) -> None:
    patched = once(case, cut, "apply")
    if patched.exact and not patched.refused:
        ours = patched.error(full_batch(case))
        assert ours <= case.floor


@pytest.mark.parametrize(("case", "cut"), [each for each in EVERY_CUT if each.values[0].right])
def test_a_log_that_is_right_in_stock_stays_right(case: Case, cut: Cut) -> None:
    stock, patched = once(case, cut, "stock"), once(case, cut, "apply")
    wanted = pytest.approx(full_batch_loss(case), rel=1e-6)
    assert stock.logged_loss == wanted
    if not patched.refused:
        assert patched.logged_loss == wanted


@of(CASES)
def test_one_micro_batch_is_stock_bit_for_bit(case: Case) -> None:
    stock, patched = once(case, WHOLE, "stock"), once(case, WHOLE, "apply")
    wanted = full_batch(case)
    theirs = stock.error(wanted)
    assert (theirs <= case.floor) is case.right_uncut
    if patched.refused:
        return
    if case.right_uncut:
        same_bits = patched.same_bits(stock)
        assert same_bits
    else:
        ours = patched.error(wanted)
        assert ours <= theirs * (1 + 1e-6) + case.floor


@of(STEPS_OF_THE_BASE)
def test_a_step_that_reaches_the_bases_in_a_roundabout_way_is_exact(case: Case) -> None:
    patched = once(case, (2, 4), "apply")
    assert patched.exact and patched.error(full_batch(case)) <= case.floor < once(case, (2, 4), "stock").error(
        full_batch(case)
    )


@pytest.mark.parametrize("cut", [WHOLE, (2, 4)], ids=["8x1", "2x4"])
@of(OWN_STEPS)
def test_a_step_of_ones_own_is_not_refused_in_mid_run(case: Case, cut: Cut) -> None:
    wanted = full_batch(case, steps=2)
    stock, patched = once(case, cut, "stock", 2), once(case, cut, "apply", 2)
    if not patched.refused:
        ours, theirs = patched.error(wanted), stock.error(wanted)
        assert ours <= theirs * (1 + 1e-6) + case.floor
