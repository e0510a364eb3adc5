"""What a loss is told by its graph: the full batch's gradient, or said in time that it is not; see `Verdict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.losses.cases import CASES
from tests.losses.verdicts import UNEVEN, WHOLE, by_loop, by_trainer, faults
from tests.trainings import Case, Cut, sizes

TRAINED = [case for case in CASES if case.trainer is not None]
LOOPED = [case for case in CASES if case.looped or case.trainer is None]
#: Together these enter every statement that any of the others enters, and say every warning: the everyday tests.
_EXITS = """
    1-half-and-kl-own 2-both 2-declared 3-each-one-own 3-by-norm-own 4-uncertain-own 4-variance-own 5-detached-own
    5-both-own 6-checkpoint-own 8-classes-first-func 8-squares-second-own 10-distilled-super 11-listed-super
    11-rows-own 12-root-from-3-model 12-term-in-3-model 14-Centred 14-CentredAnew 15-Sam 15-SamByBackward
    17-hidden-mask 18-summed-own 18-macro-own 18-by-share-own 18-or-zero-own clients-bert-answers clients-rpo-own
    clients-orpo-keys easy-fours-model zero-active-func zero-constant-own shape-einsum-own found-teacher-own
    found-tokens-and-teacher-own found-free-bits-own everyday-begun-own everyday-cat-own everyday-vae-own
    everyday-own-count everyday-relabels everyday-smoothed-own everyday-sum everyday-twice
"""
EXITS = _EXITS.split()


def cells(cases: Sequence[Case], *, everyday: bool = False) -> Any:
    """Every case at its cuts: of `EXITS` one is for everyday, CI has the first and the last of all."""

    def marks(case: Case, cut: Cut) -> Any:
        ends = (case.cuts[0], case.cuts[-1])
        if everyday and case.name in EXITS and cut == (UNEVEN if UNEVEN in case.cuts else ends[0]):
            return []
        return pytest.mark.slow if everyday and cut in ends else pytest.mark.thorough

    found = [
        pytest.param(case, cut, id=f"{case.name}-{'+'.join(map(str, sizes(cut)))}", marks=marks(case, cut))
        for case in cases
        for cut in case.cuts
    ]
    return pytest.mark.parametrize(("case", "cut"), found)


def test_every_exit_is_a_case() -> None:
    assert {*EXITS} <= {case.name for case in TRAINED}


@cells(TRAINED, everyday=True)
def test_by_the_trainer(case: Case, cut: Cut) -> None:
    ours = by_trainer(case, cut, "apply")
    found = faults(ours, case, by_trainer(case, cut, "stock"), cut)
    assert not found, ours


@cells(LOOPED, everyday=True)
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
