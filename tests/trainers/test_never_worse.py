"""Two rules over every trainer of `custom`: never further off than stock, and stock's own bits where nothing is cut."""

from __future__ import annotations

import pytest

from tests.trainers.custom import CASES, OWN_STEPS, STEPS_OF_THE_BASE
from tests.trainers.runs import PAIRS, WHOLE, Case, Cut, full_batch, full_batch_loss, once

EVERY_CUT = [pytest.param(case, cut, id=f"{case.name}-{cut[0]}x{cut[1]}") for case in CASES for cut in case.cuts]


@pytest.mark.parametrize(("case", "cut"), EVERY_CUT)
def test_never_further_off_than_stock(case: Case, cut: Cut) -> None:
    """Or refused while nothing has moved; what is called exact is, and a log that is right in stock stays right."""
    wanted, log = full_batch(case), pytest.approx(full_batch_loss(case), rel=1e-6)
    stock, patched = once(case, cut, "stock"), once(case, cut, "apply")
    theirs = stock.error(wanted)
    assert (theirs <= case.floor) is case.right
    if not patched.refused:
        ours = patched.error(wanted)
        assert ours <= (case.floor if patched.exact else theirs * (1 + 1e-6) + case.floor)
    if case.right:
        assert stock.logged_loss == log
        assert patched.refused or patched.logged_loss == log


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
        assert ours <= (case.floor if patched.exact else theirs * (1 + 1e-6) + case.floor)


@pytest.mark.parametrize("case", STEPS_OF_THE_BASE, ids=lambda case: case.name)
def test_a_step_that_reaches_the_bases_in_a_roundabout_way_is_exact(case: Case) -> None:
    patched, wanted = once(case, PAIRS, "apply"), full_batch(case)
    assert patched.exact and patched.error(wanted) <= case.floor < once(case, PAIRS, "stock").error(wanted)


@pytest.mark.parametrize("case", OWN_STEPS, ids=lambda case: case.name)
def test_a_step_of_ones_own_is_not_refused_in_mid_run(case: Case) -> None:
    wanted = full_batch(case, steps=2)
    stock, patched = once(case, PAIRS, "stock", 2), once(case, PAIRS, "apply", 2)
    if not patched.refused:
        ours, theirs = patched.error(wanted), stock.error(wanted)
        assert ours <= theirs * (1 + 1e-6) + case.floor
