"""How many windows were exact is in the log beside every loss, and in the report; a window counts once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hf_accum_fix import observations
from hf_accum_fix.overrides.certifying import EXACT_WINDOWS
from tests.attacks.runs import PAIRS, WHOLE, Case, Cut, Ordered, Run, run
from tests.attacks.wild import CLASSES
from tests.numerics.heads import HEADS

STEPS = 5
HEAD = HEADS["drops-kwargs"]


class PenaltyIn(Ordered):
    """Adds a multiple of the loss's own square in some steps alone, and in one micro-batch of theirs."""

    penalised: tuple[int, ...] = (2,)
    seen = -1

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        assert isinstance(loss, Tensor)
        first, self.seen = self.seen != self.state.global_step, self.state.global_step
        return (
            loss + 0.1 * loss**2 if first and self.model.training and self.state.global_step in self.penalised else loss
        )


def of(trainer: type[Ordered], cut: Cut = PAIRS, head: Any = HEAD) -> Run:
    observations.clear()
    return run(Case("", head, trainer), cut, "apply", steps=STEPS, logging_steps=1)


def logged(ran: Run) -> list[Any]:
    return [row[EXACT_WINDOWS] for row in ran.history if "loss" in row]


def test_windows_that_are_exact_are_counted_in_the_log() -> None:
    ran = of(Ordered)
    assert logged(ran) == [1, 2, 3, 4, 5] and ran.history[-1][EXACT_WINDOWS] == STEPS
    assert ran.warned == []


@pytest.mark.parametrize("penalised", [(2,), (3, 4)], ids=str)
def test_a_window_that_is_not_exact_is_missing_from_the_log_at_once(penalised: tuple[int, ...]) -> None:
    ran = of(type("Penalises", (PenaltyIn,), {"penalised": penalised}))
    assert logged(ran) == [sum(step not in penalised for step in range(upto)) for upto in range(1, STEPS + 1)]
    assert observations.recorded()[-1]["inexact_windows"] == len(penalised)
    assert len(ran.warned) == 1 and f"window {penalised[0] + 1}" in ran.warned[0]


def test_a_loss_that_is_not_exact_has_no_exact_window() -> None:
    class Scales(Ordered):
        """By something of the batch, so that it is no mean over any items."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(*args, **kwargs)
            assert isinstance(loss, Tensor)
            return loss**2

    assert logged(of(Scales)) == [0] * STEPS


def test_other_logs_are_left_as_they_are() -> None:
    class Tells(Ordered):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.log({"mine": 1.0})
            return super().training_step(*args, **kwargs)

    rows = [row for row in of(Tells, PAIRS, CLASSES).history if "mine" in row]
    assert rows and all(EXACT_WINDOWS not in row for row in rows)


def test_the_log_of_what_is_not_cut_is_stocks() -> None:
    assert all(EXACT_WINDOWS not in row for row in of(Ordered, WHOLE).history)
