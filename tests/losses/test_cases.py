"""What a loss is told by its graph: the full batch's gradient, or said in time that it is not; see `Verdict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.losses.cases import CASES
from tests.losses.verdicts import UNEVEN, WHOLE, Verdict, by_loop, by_trainer, faults
from tests.trainings import Case, Cut, sizes

TRAINED = [case for case in CASES if case.trainer is not None]
LOOPED = [case for case in CASES if case.looped or case.trainer is None]
#: Together these enter every statement that any of the others enters, and say every warning: the everyday tests.
_EXITS = """
    alone-where-labelled-ragged-unlabelled alone-super-and-teacher-uncertain alone-super-and-teacher-product alone-sum
    alone-super-and-teacher-by-number alone-super-and-teacher-zero-first alone-mean-and-kind-detached alone-teacher
    alone-weighted-elements alone-class-weights-of-classes alone-in-batch-negatives alone-class-by-class
    alone-func-number found-teacher-own found-free-bits-own fate-two-backwards 10-contrastive
    11-listed-super 12-end-beyond-width 12-term-in-3-model 12-two-tasks 15-Sam 15-fgm 18-macro-own 8-classes-first-func
    abba-token_labels-2 scale-divided-below clamp-doremi-own clamp-fcos-own clients-rpo-own zero-constant-own
    everyday-cat-own everyday-own-count everyday-relabels splits-as-fetched swift-smoother edits-tokens-in-place
    public-a-key-that-the-step-adds public-backward-in-compute-loss public-number-plus-one public-number-in-a-kernel
    public-over-its-first-value public-a-mean-over-samples-of-sums public-squares-over-padding public-stacked-dot
    public-half-over-the-batch-size public-hardest-third public-a-vector-of-one
"""
EXITS = _EXITS.split()


def cells(cases: Sequence[Case], *, everyday: bool = False) -> Any:
    """Every case at its cuts: of `EXITS` one is for everyday, CI has the last of all."""

    def marks(case: Case, cut: Cut) -> Any:
        if everyday and case.name in EXITS and cut == (UNEVEN if UNEVEN in case.cuts else case.cuts[0]):
            return []
        return pytest.mark.slow if everyday and cut == case.cuts[-1] else pytest.mark.thorough

    found = [
        pytest.param(case, cut, id=f"{case.name}-{'+'.join(map(str, sizes(cut)))}", marks=marks(case, cut))
        for case in cases
        for cut in case.cuts
    ]
    return pytest.mark.parametrize(("case", "cut"), found)


def test_every_exit_is_a_case() -> None:
    assert {*EXITS} <= {case.name for case in CASES}
    assert len(CASES) == len({case.name for case in CASES})


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


def uncut() -> Iterator[Any]:
    """Of `EXITS` for CI."""
    for case in TRAINED:
        if case.verdict is not Verdict.AVERAGED:
            marks = pytest.mark.slow if case.name in EXITS else pytest.mark.thorough
            yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [*uncut()])
def test_uncut_ours_is_stock_to_the_bit_and_stock_the_reference(case: Case) -> None:
    """Where stock counts what the loss leaves out, ours is no further off."""
    stock, ours = (by_trainer(case, WHOLE, path) for path in ("stock", "apply"))
    if case.whole:
        assert stock.worst <= case.tolerance and stock.log_error <= 2e-5
        for one, other in zip(ours.gradients, stock.gradients, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    else:
        assert ours.worst <= stock.worst * (1 + 1e-6) + case.tolerance


@cells(TRAINED)
def test_stock_is_wrong_where_it_is_said(case: Case, cut: Cut) -> None:
    """So that no case passes because nothing can go wrong."""
    stock = by_trainer(case, cut, "stock")
    assert (stock.worst <= case.tolerance) is (cut in case.right)
    assert cut in case.right or not stock.worst <= 1e-5
