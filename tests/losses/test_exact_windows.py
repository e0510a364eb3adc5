"""Once a window is not exact, the log counts those that were beside every loss; a window counts once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hf_accum_fix import observations
from hf_accum_fix.overrides.training import EXACT_WINDOWS
from tests.numerics.heads import HEADS
from tests.trainers.runs import PAIRS, Case, Cut, Ordered, Run, run

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
    return [row.get(EXACT_WINDOWS) for row in ran.history if "loss" in row]


def test_the_log_of_exact_windows_is_stocks() -> None:
    ran = of(Ordered)
    assert ran.exact and ran.warned == []
    stock = run(Case("", HEAD, Ordered), PAIRS, "stock", steps=STEPS, logging_steps=1)
    assert [[*row] for row in ran.history] == [[*row] for row in stock.history]


@pytest.mark.parametrize("penalised", [(2,), (3, 4)], ids=str)
def test_a_window_that_is_not_exact_is_missing_from_the_log_at_once(penalised: tuple[int, ...]) -> None:
    ran = of(type("Penalises", (PenaltyIn,), {"penalised": penalised}))
    exact = [sum(step not in penalised for step in range(upto)) for upto in range(1, STEPS + 1)]
    assert logged(ran) == [None] * penalised[0] + exact[penalised[0] :]
    assert observations.recorded()[-1]["inexact_windows"] == len(penalised)
    # Observed again after the first of them, the loss of the next has a reason of its own.
    assert len(ran.warned) == len(penalised) and f"window {penalised[0] + 1}" in ran.warned[0]


def test_other_logs_are_left_as_they_are() -> None:
    class Tells(PenaltyIn):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.log({"mine": 1.0})
            return super().training_step(*args, **kwargs)

    ran = of(Tells)
    rows = [row for row in ran.history if "mine" in row]
    assert logged(ran)[-1] == STEPS - 1 and rows and all(EXACT_WINDOWS not in row for row in rows)
