"""Losses with terms and owned losses on one rank; two_ranks.py has them on two."""

from __future__ import annotations

import pytest

from tests.trainers.runs import Case, Cut, full_batch, full_batch_loss, run
from tests.trainers.terms import EXACT, SAID


def cells(cases: list[Case]) -> list[object]:
    return [pytest.param(case, cut, id=f"{case.name}-{cut[0]}x{cut[1]}") for case in cases for cut in case.cuts]


@pytest.mark.parametrize(("case", "cut"), cells(EXACT))
def test_exact_and_called_so(case: Case, cut: Cut) -> None:
    wanted = full_batch(case)
    assert run(case, cut, "stock").error(wanted) > 1e-2
    patched = run(case, cut, "apply", logging_steps=1)
    assert patched.error(wanted) <= case.floor
    assert patched.logged_loss == pytest.approx(full_batch_loss(case), rel=1e-4)  # the log has four digits
    assert patched.exact and not patched.warned


@pytest.mark.parametrize(("case", "cut"), cells(SAID))
def test_said_and_no_worse_than_stock(case: Case, cut: Cut) -> None:
    wanted = full_batch(case)
    patched = run(case, cut, "apply")
    assert patched.error(wanted) <= run(case, cut, "stock").error(wanted)
    assert not patched.exact and patched.warned
