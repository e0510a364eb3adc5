"""What a loss is told by its graph: the full batch's gradient, or said in time that it is not; see `Verdict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.losses.cases import CASES
from tests.losses.verdicts import WHOLE, by_loop, by_trainer, faults
from tests.trainings import Case, Cut, sizes


def cells(cases: Sequence[Case], *, everyday: bool = False) -> Any:
    return pytest.mark.parametrize(
        ("case", "cut"),
        [
            pytest.param(
                case,
                cut,
                id=f"{case.name}-{'+'.join(map(str, sizes(cut)))}",
                marks=[] if everyday and cut in (case.cuts[0], case.cuts[-1]) else marks(case),
            )
            for case in cases
            for cut in case.cuts
        ],
    )


def marks(case: Case) -> pytest.MarkDecorator:
    """CI runs losses that change from window to window; there are two thousand trainings."""
    return pytest.mark.slow if case.name.startswith(("12-", "16-")) else pytest.mark.thorough


TRAINED = [case for case in CASES if case.trainer is not None]
LOOPED = [case for case in CASES if case.looped or case.trainer is None]


@cells(TRAINED, everyday=True)
def test_by_the_trainer(case: Case, cut: Cut) -> None:
    ours = by_trainer(case, cut, "apply")
    found = faults(ours, case, by_trainer(case, cut, "stock"), cut)
    assert not found, ours


@cells(LOOPED)
def test_by_a_loop(case: Case, cut: Cut) -> None:
    ours = by_loop(case, cut, "apply")
    found = faults(ours, case, by_loop(case, cut, "stock"), cut)
    assert not found, ours


@pytest.mark.thorough
@pytest.mark.parametrize("case", [each for each in TRAINED if each.whole], ids=lambda case: case.name)
def test_the_reference_is_stock_uncut(case: Case) -> None:
    stock = by_trainer(case, WHOLE, "stock")
    assert stock.worst <= case.tolerance
    assert stock.log_error <= 2e-5


@cells(TRAINED)
def test_stock_is_wrong_where_it_is_said(case: Case, cut: Cut) -> None:
    """So that no case passes because nothing can go wrong."""
    stock = by_trainer(case, cut, "stock")
    assert (stock.worst <= case.tolerance) is (cut in case.right)
    assert cut in case.right or stock.worst > 1e-5
