"""One contract from window to window, as `window.settle.settle` takes it; what it is made of is in accumulation/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_accum_fix.counting.items import Items
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, LossContract, Reduction, TermSpec
from hf_accum_fix.learning.look import Setting
from hf_accum_fix.options import Options
from hf_accum_fix.weighing.part import Part
from hf_accum_fix.window.loop_host import LoopHost
from hf_accum_fix.window.settle import settle
from hf_accum_fix.window.state import ATTEMPTS
from hf_accum_fix.window.window import Window, open_window

MEAN = LossContract(Reduction.MEAN, Items(("labels",)), reason="its graph divides NllLossBackward0 by them")
ZERO = replace(MEAN, conclusive=False, reason="the loss of samples with targets is zero")
BLANK = replace(MEAN, conclusive=False, reason=NO_TARGET_SEEN)
BATCH = {"labels": torch.ones(2, 3, dtype=torch.long)}
EMPTY = {"labels": torch.full((2, 3), -100)}


class Told(LoopHost):
    """A loop that observes what is put here."""

    seen: tuple[LossContract | None, Exception | None] = (None, None)

    def __init__(self) -> None:
        super().__init__(None, 2, Options())
        self.trained = nn.Linear(1, 1)

    def facts(self, batches: Sequence[Any], number: Any) -> Any:
        seen, error = self.seen
        if error is not None:
            raise error
        return seen or Setting()


def settled_in(host: Told, window: Sequence[Any], seen: LossContract | None) -> LossContract:
    """The contract after a window in which this was seen; None: nothing was."""
    host.state.opened += bool(window)
    host.seen = (seen, None)
    open_window(host, window)
    assert host.contract is not None
    return host.contract


@pytest.mark.parametrize(
    ("device", "ranks", "again"), [("cpu", 1, True), ("cpu", 2, True), ("meta", 1, True), ("meta", 2, False)]
)
def test_a_loss_that_may_change_is_observed_again_where_all_ranks_hear_of_it(
    device: str, ranks: int, again: bool
) -> None:
    """The collective by which they would is read on the CPU only."""
    host = Told()
    settled_in(host, [BATCH, BATCH], replace(MEAN, terms=(TermSpec(("NllLossBackward0", True)),)))
    host.world.size, host.world.device = ranks, torch.device(device)
    assert host.contract is not None
    Window(host, [], Part(host.contract, {Items(): host.zero}, 2, ranks)).close(nn.Linear(1, 1))
    assert host.state.loss.reconsiders is again


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
    host = Told()
    for seen in shown:
        found = settled_in(host, [EMPTY if seen is BLANK else BATCH] * 2, seen)
    assert found.conclusive == shown[-1].conclusive and host.state.exact == (found.conclusive and ZERO not in shown)
    assert host.state.inexact == shown.count(ZERO)
    assert (host.state.loss.attempts, host.state.loss.is_settled) == (attempts, is_settled)


@pytest.mark.parametrize("trouble", [ContractError("no loss"), torch.cuda.OutOfMemoryError("out of memory")], ids=repr)
def test_trouble_that_training_would_meet_is_raised(trouble: Exception) -> None:
    host = Told()
    host.seen = (None, trouble)
    host.refresh([BATCH])
    with pytest.raises(type(trouble), match=str(trouble)):
        settle(host, [BATCH])


def test_other_trouble_is_left_to_training_to_show() -> None:
    """It may never run what an observation does: parts of a batch, or two batches as one."""
    host = Told()
    host.state.opened += 1
    host.seen = (None, RuntimeError("no such kernel"))
    open_window(host, [BATCH])
    found = host.contract
    assert found is not None
    assert found.reduction is Reduction.PLAIN and found.reason == "its loss could not be observed: no such kernel"
    assert not host.state.exact


def test_another_loss_than_the_observed_one_is_said_on_any_device(caplog: pytest.LogCaptureFixture) -> None:
    """Which terms a loss has is known without waiting for the device."""
    host, contract = Told(), replace(MEAN, terms=(TermSpec(("MeanBackward0", True, (True, False))),))
    host.world.device = torch.device("cuda")
    host.state.loss.contract = contract
    part = Part(contract, {Items(("labels",)): torch.ones(())}, 1, 1)
    part.changed = "its loss has other terms than the observed one: SumBackward0"
    assert Window(host, [{}], part, done=1).close(nn.Linear(1, 1)) is None
    assert host.state.inexact == 1
    assert "is not exact: its loss has other terms" in caplog.text
