"""Once a window is not exact, the log counts those that were beside every loss; a window counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_accum_fix
from hf_accum_fix import observations
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.overrides.training import EXACT_WINDOWS
from hf_accum_fix.window import window
from hf_accum_fix.window.state import ATTEMPTS
from tests.numerics.heads import HEADS
from tests.numerics.parity import training_arguments
from tests.trainers.runs import PAIRS, Case, Cut, Ordered, Run, run

STEPS = 5
HEAD = HEADS["drops-kwargs"]


class PenaltyIn(Ordered):
    """Adds a multiple of the loss's own square in some steps alone, and in one micro-batch of theirs."""

    penalised: tuple[int, ...] = (3,)
    seen = -1

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        assert isinstance(loss, Tensor)
        first, self.seen = self.seen != self.state.global_step, self.state.global_step
        return (
            loss + 0.1 * loss**2 if first and self.model.training and self.state.global_step in self.penalised else loss
        )


def of(trainer: type[Ordered], cut: Cut = PAIRS, head: Any = HEAD) -> Run:
    return run(Case("", head, trainer), cut, "apply", steps=STEPS, logging_steps=1)


def logged(ran: Run) -> list[Any]:
    return [row.get(EXACT_WINDOWS) for row in ran.history if "loss" in row]


def test_the_log_of_exact_windows_is_stocks() -> None:
    ran = of(Ordered)
    assert ran.exact and ran.warned == []
    stock = run(Case("", HEAD, Ordered), PAIRS, "stock", steps=STEPS, logging_steps=1)
    assert [[*row] for row in ran.history] == [[*row] for row in stock.history]


@pytest.mark.parametrize("penalised", [(3,), (4,)], ids=str)
def test_a_window_that_is_not_exact_is_missing_from_the_log_at_once(penalised: tuple[int, ...]) -> None:
    ran = of(type("Penalises", (PenaltyIn,), {"penalised": penalised}))
    exact = [sum(step not in penalised for step in range(upto)) for upto in range(1, STEPS + 1)]
    assert logged(ran) == [None] * penalised[0] + exact[penalised[0] :]
    assert observations.recorded()[-1]["inexact_windows"] == len(penalised)
    assert f"window {penalised[0] + 1}" in ran.warned[0]


def test_other_logs_are_left_as_they_are() -> None:
    class Tells(PenaltyIn):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.log({"mine": 1.0})
            return super().training_step(*args, **kwargs)

    ran = of(Tells)
    rows = [row for row in ran.history if "mine" in row]
    assert logged(ran)[-1] == STEPS - 1 and rows and all(EXACT_WINDOWS not in row for row in rows)


# --- where reading would wait for the device a window is read with the log; here on the CPU, which is told not ------

LEFT_OUT, CLASSES, LONG, LOGGED, BEFORE = 7, 20, 20, 10, 4


class LeavesOut(nn.Module):
    """Leaves the targets of one class out of its loss, by itself."""

    weight: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.classes(self.embedding(input_ids)).flatten(0, 1).double()
        targets = labels.masked_fill(labels == LEFT_OUT, -100).flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(logits, targets, self.weight)}
        return {"loss": F.cross_entropy(logits, targets, self.weight, reduction="sum") / num_items_in_batch}


class Weighted(LeavesOut):
    """Divides by the weights of its targets, which no rule reads off the inputs."""

    weight = torch.linspace(0.2, 1.0, CLASSES, dtype=torch.float64)


def _sample(place: int, steps: int) -> dict[str, Tensor]:
    ids = torch.randint(LEFT_OUT + 1, CLASSES, (6,))
    labels = ids.clone()
    if place >= BEFORE * steps * 2:
        labels[3 : 4 + place % 2] = LEFT_OUT
    return {"input_ids": ids, "labels": labels}


def _trained(model: nn.Module, args: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A trainer, and the steps whose gradients were corrected."""
    monkeypatch.setattr(Session, "reads_are_free", property(lambda _: False))
    corrected: list[int] = []
    monkeypatch.setattr(window, "scale_gradients", lambda *_: corrected.append(trainer.state.global_step + 1))
    with hf_accum_fix.apply(quiet=True):
        trainer = Ordered(model, args, train_dataset=data)
        trainer.train()
    return trainer, corrected


@pytest.mark.parametrize("steps", [1, 2])
def test_counts_that_differ_are_read_with_the_log_and_corrected_from_there(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    args = training_arguments(tmp_path, 2, steps, logging_steps=LOGGED, max_steps=LONG, learning_rate=0.0)
    data: Any = [_sample(place, steps) for place in range(2 * LONG * steps)]
    trainer, corrected = _trained(LeavesOut(), args, data, monkeypatch)
    # The first windows are corrected unread. The log is of a step that has been taken, so that the next window is the
    # first of the others that can be corrected. The mean of the only micro-batch is right as it is.
    assert corrected == ([*range(1, ATTEMPTS + 1), *range(LOGGED + 1, LONG + 1)] if steps > 1 else [])
    logged = [row.get(EXACT_WINDOWS) for row in trainer.state.log_history if "loss" in row]
    assert logged == ([None] * 2 if steps == 1 else [BEFORE, LONG - (LOGGED - BEFORE)])
    assert observations.recorded()[-1]["inexact_windows"] == (LOGGED - BEFORE if steps > 1 else 0)


def test_a_loss_whose_items_no_rule_counts_is_corrected_from_the_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    data: Any = [_sample(0, 2) for _ in range(12)]
    _, corrected = _trained(
        Weighted(), training_arguments(tmp_path, 2, 2, max_steps=3, learning_rate=1e-3), data, monkeypatch
    )
    assert corrected == [1, 2, 3]
