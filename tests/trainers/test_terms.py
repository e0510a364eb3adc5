"""Losses with terms and owned losses on one rank; two_ranks.py has them on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.trainers.runs import Case, Cut, Ordered, full_batch, full_batch_loss, run
from tests.trainers.terms import CHOSEN_BY_INPUT, EXACT, SAID, WITH_DROPOUT
from tests.trainings import cells


@cells(EXACT)
def test_exact_and_called_so(case: Case, cut: Cut) -> None:
    wanted = full_batch(case)
    assert run(case, cut, "stock").error(wanted) > 1e-2
    patched = run(case, cut, "apply", logging_steps=1)
    assert patched.error(wanted) <= case.floor
    assert patched.logged_loss == pytest.approx(full_batch_loss(case), rel=1e-4)  # the log has four digits
    assert patched.exact and not patched.warned


@cells(SAID)
def test_said_and_no_worse_than_stock(case: Case, cut: Cut) -> None:
    wanted = full_batch(case)
    patched = run(case, cut, "apply")
    assert patched.error(wanted) <= run(case, cut, "stock").error(wanted)
    assert not patched.exact and patched.warned


class Counting(Ordered):
    """Counts its losses, and keeps a sum of them."""

    calls, kept = 0, 0.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = super().compute_loss(model, inputs, *args, **kwargs)
        self.kept += float(result.detach())
        return result


def test_counting_by_forwards_leaves_no_trace() -> None:
    [case] = [each for each in EXACT if each.name == "hidden-choice"]
    counted = run(replace(case, trainer=Counting), (2, 4), "apply")
    assert counted.exact and counted.trainer.calls == 4
    assert counted.trainer.kept == pytest.approx(run(replace(case, trainer=Counting), (2, 4), "stock").trainer.kept)


def test_counting_by_forwards_draws_nothing() -> None:
    """The same dropout, whether forwards count a term or an input does."""
    hidden, given = (run(Case("", head, Ordered), (2, 4), "apply") for head in (WITH_DROPOUT, CHOSEN_BY_INPUT))
    assert hidden.error(given.change) <= 1e-12 and hidden.exact and given.exact
