"""One contract from window to window, as `counting.settle` takes it; what it is made of is in accumulation/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_accum_fix import counting
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract, Reduction
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError
from hf_accum_fix.known import ATTEMPTS
from hf_accum_fix.loop.run import LoopRun
from hf_accum_fix.options import Options

MEAN = LossContract(Reduction.MEAN, Items(("labels",)), reason="its graph divides NllLossBackward0 by them")
ZERO = replace(MEAN, conclusive=False, reason="the loss of samples with targets is zero")
BLANK = replace(MEAN, conclusive=False, reason=NO_TARGET_SEEN)
BATCH = {"labels": torch.ones(2, 3, dtype=torch.long)}


def settled_in(run: LoopRun, window: Sequence[Any], seen: LossContract | None) -> LossContract:
    """The contract after a window in which this was seen; None: nothing was."""
    run.windows.opened += bool(window)
    return counting.settle(run, run, window, lambda batches: (seen, None), per_sample=False, matters=True)


def test_a_window_that_shows_nothing_leaves_an_open_contract() -> None:
    """As the one does by which ranks learn that all of their epochs have ended."""
    run = LoopRun(None, 2, Options())
    first = settled_in(run, [BATCH, BATCH], ZERO)
    assert not first.conclusive and not run.exact
    assert settled_in(run, [], None) == first
    assert run.attempts == 1


@pytest.mark.parametrize(
    ("shown", "attempts", "is_settled"),
    [
        ([MEAN], 1, True),
        ([ZERO, MEAN], 2, True),
        ([BLANK, BLANK, BLANK, BLANK, MEAN], 1, True),
        ([BLANK] * 9, 0, False),
        ([ZERO, BLANK, ZERO], 2, False),
        ([ZERO] * ATTEMPTS, ATTEMPTS, True),
    ],
    ids=["at once", "later", "after blank windows", "blank windows", "blanks between", "never"],
)
def test_windows_are_observed_until_one_shows_the_loss(
    shown: Sequence[LossContract], attempts: int, is_settled: bool
) -> None:
    run = LoopRun(None, 2, Options())
    for seen in shown:
        found = settled_in(run, [BATCH, BATCH], seen)
    assert found.conclusive == shown[-1].conclusive and run.exact == (found.conclusive and ZERO not in shown)
    assert run.windows.inexact == shown.count(ZERO)
    assert (run.attempts, run.is_settled) == (attempts, is_settled)


def test_what_is_settled_is_observed_no_more() -> None:
    run = LoopRun(None, 2, Options())
    assert settled_in(run, [BATCH, BATCH], MEAN) == MEAN
    assert settled_in(run, [BATCH, BATCH], LossContract(Reduction.SUM)) == MEAN
    assert run.attempts == 1


def test_a_loss_that_no_window_has_shown_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = list(counting.remarks("Head", ZERO, ATTEMPTS))
    assert found == [
        (
            "inexact",
            f"Head: the loss {ZERO}, as far as {ATTEMPTS} windows tell: the loss of samples with targets is zero.",
        )
    ]


@pytest.mark.parametrize("trouble", [ContractError("no loss"), torch.cuda.OutOfMemoryError("out of memory")], ids=repr)
def test_trouble_that_training_would_meet_is_raised(trouble: Exception) -> None:
    run = LoopRun(None, 2, Options())
    with pytest.raises(type(trouble), match=str(trouble)):
        counting.settle(run, run, [BATCH], lambda batches: (None, trouble), per_sample=False, matters=True)


def test_other_trouble_is_left_to_training_to_show() -> None:
    """It may never run what an observation does: parts of a batch, or two batches as one."""
    run = LoopRun(None, 2, Options())
    run.windows.opened += 1
    trouble = RuntimeError("no such kernel")
    found = counting.settle(run, run, [BATCH], lambda batches: (None, trouble), per_sample=False, matters=True)
    assert found.reduction is Reduction.PLAIN and found.reason == "it could not be observed: no such kernel"
    assert not run.exact and not run.is_settled
