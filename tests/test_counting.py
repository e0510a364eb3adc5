"""One contract from window to window, as `counting.settle` takes it; what it is made of is in accumulation/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_accum_fix import counting
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import SEVERAL_FIT, LossContract, Reduction
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.loop.run import LoopRun
from hf_accum_fix.options import Options

MEAN = LossContract(Reduction.MEAN, Items(("labels",)), alternatives=(Items(("labels",)),))
OPEN = replace(MEAN, conclusive=False, reason=SEVERAL_FIT)
BATCH = {"labels": torch.ones(2, 3, dtype=torch.long)}


def settled_in(run: LoopRun, window: Sequence[Any], seen: LossContract | None) -> LossContract:
    """The contract after a window in which this was seen; None: nothing was."""
    run.windows.opened += bool(window)
    return counting.settle(
        run,
        run,
        window,
        lambda settled, batches, again: (seen, None),
        lambda settled, batches, mine, trouble: agree([] if mine is None else [mine]),
        per_sample=False,
        matters=True,
    )


def test_a_window_that_shows_nothing_leaves_an_open_contract() -> None:
    """As the one does by which ranks learn that all of their epochs have ended."""
    run = LoopRun(None, 2, Options())
    first = settled_in(run, [BATCH, BATCH], OPEN)
    assert not first.conclusive and run.windows.inexact == 1
    assert settled_in(run, [], None) == first
    assert run.windows.inexact == 1 and run.attempts == 1


def test_another_loss_is_said_though_the_contract_was_open(caplog: pytest.LogCaptureFixture) -> None:
    run = LoopRun(None, 2, Options())
    for _ in range(3):
        settled_in(run, [BATCH, BATCH], OPEN)
    assert run.is_settled
    found = settled_in(run, [BATCH, BATCH], LossContract(Reduction.SUM))
    assert found.reduction is Reduction.SUM and not found.exact
    assert "window 4: the loss is a sum" in caplog.text and run.windows.inexact == 4
