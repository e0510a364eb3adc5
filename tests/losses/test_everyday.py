"""Everyday losses: stock trains them, so ours does; see `everyday`."""

from __future__ import annotations

from tests.losses.everyday import CASES
from tests.losses.verdicts import by_loop, by_trainer, faults
from tests.trainings import Case, Cut, cells


@cells(CASES)
def test_by_the_trainer(case: Case, cut: Cut) -> None:
    ours = by_trainer(case, cut, "apply")
    try:
        stock = by_trainer(case, cut, "stock")
    except RuntimeError as error:
        # Releases differ in whether a loss of shape [1] can be added to the log.
        assert "broadcast shape [1" in str(error)
        stock = ours
    found = faults(ours, case, stock, cut)
    assert not found


@cells([case for case in CASES if case.looped])
def test_by_a_loop(case: Case, cut: Cut) -> None:
    found = faults(by_loop(case, cut, "apply"), case, by_loop(case, cut, "stock"), cut)
    assert not found
