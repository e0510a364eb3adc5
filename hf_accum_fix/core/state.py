"""State of one training: how each task reduces its loss, and which windows were exact."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_accum_fix import observations
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract
from hf_accum_fix.accumulation.tasks import Task, describe, task_of
from hf_accum_fix.accumulation.weigh import covers

#: The first windows, in each of which the losses are observed, by other samples.
ATTEMPTS = 3
#: For all windows.
ALWAYS = sys.maxsize
#: Most windows in which a loss that changed is observed again.
RECONSIDERED = 8


@dataclass(eq=False)
class LossState:
    """How the loss of one task is reduced.

    Attributes:
        contract: None: it was not observed yet.
        attempts: windows with targets in which it was observed.
        counts_by_forwards: a window was divided by other items than its rules predicted.
        earlier: contracts that it had before its terms changed.
        first_divisor: if it is not observed, what the first micro-batch of the training divided by, the mean over
            ranks, 0-dim; None: unknown.
        without_target_in: the window in which it was last observed, and had no target.
    """

    contract: LossContract | None = None
    attempts: int = 0
    counts_by_forwards: bool = False
    earlier: list[LossContract] = field(default_factory=list)
    first_divisor: Tensor | None = None
    without_target_in: int = -1

    @property
    def has_target(self) -> bool:
        """Whether it was observed on targets."""
        return self.contract is not None and self.contract.reason != NO_TARGET_SEEN

    @property
    def is_settled(self) -> bool:
        """Whether it is not observed again."""
        return self.contract is not None and (self.contract.conclusive or self.attempts >= ATTEMPTS)

    @property
    def needs_forwards(self) -> bool:
        """Whether no rule predicts what its terms divide by, and no one number can correct them."""
        contract = self.contract
        return contract is not None and (contract.needs_forwards or (self.counts_by_forwards and contract.groups > 1))


@dataclass(eq=False)
class Losses:
    """The losses of one training, and what is due for them.

    Attributes:
        first: the loss of the first task that had a target; normally the only one.
        tasks: the loss of each task, in the same order on all ranks; tasks may share one, and those without a target
            are trained as the first. Empty: tasks are not distinguished.
        given_for: the first micro-batch's labels that a given contract counts.
        windows_to_correct: so many of the next windows have their gradient multiplied by predicted over seen items.
        may_change: a contract has changed; what has come may go.
        reconsiders: the losses are observed again in the next window.
        reconsidered: how often that was done.
    """

    first: LossState = field(default_factory=LossState)
    tasks: dict[Task, LossState] = field(default_factory=dict)
    given_for: Task | None = None
    windows_to_correct: int = 0
    may_change: bool = False
    reconsiders: bool = False
    reconsidered: int = 0

    @property
    def each(self) -> list[LossState]:
        """Each different loss that is trained, the first task's first."""
        if len(self.tasks) < 2:
            return [self.first]
        return list(dict.fromkeys((self.first, *(loss for loss in self.tasks.values() if loss.has_target))))

    @property
    def contracts(self) -> list[LossContract]:
        """Of each of these losses that was observed."""
        return [loss.contract for loss in self.each if loss.contract]

    def of(self, task: Task) -> LossState | None:
        """The loss of a task; None: it was not observed on targets."""
        loss = self.tasks.get(task) if self.tasks and task else self.first
        return loss if loss is self.first or (loss is not None and loss.has_target) else None

    def contract_of(self, batch: Any) -> LossContract:
        """Of the loss of a micro-batch; for a task that was not observed on targets, the first task's."""
        loss = self.of(task_of(batch)) if len(self.tasks) > 1 else None
        contract = (loss or self.first).contract
        assert contract is not None
        return contract

    def knows(self, task: Task, window: int) -> bool:
        """Whether a task was observed on targets, or in this window."""
        return self.of(task) is not None or (task in self.tasks and self.tasks[task].without_target_in == window)

    def use_contract(self, contract: LossContract, loss: LossState) -> None:
        """Use a contract of a loss from this window on."""
        for before in (loss.contract, *loss.earlier):
            # A loss of one term is corrected, and keeps a single rule.
            if before is not None and len(contract.terms) > 1:
                contract = contract.fitting_as_well(before)
        if loss.contract is not None and loss.contract.is_read and loss.contract not in loss.earlier:
            loss.earlier = [loss.contract, *loss.earlier][:RECONSIDERED]
            self.may_change = True
        loss.contract = contract
        always = loss is not self.first and self.windows_to_correct > ATTEMPTS
        if always or any(not (each.is_counted or each.needs_forwards) for each in (*self.contracts, contract)):
            self.windows_to_correct = ALWAYS
        else:
            # No window has confirmed its rules yet.
            self.windows_to_correct = ATTEMPTS if contract.is_read and contract.groups == 1 else 0

    def use_earlier(self, contract: LossContract, terms: Sequence[tuple[Any, int]]) -> bool:
        """Replace a contract by an earlier one of its loss that `covers` these terms; False: none does."""
        for loss in self.each:
            for before in loss.earlier if loss.contract is contract else ():
                if covers(before.terms, terms):
                    self.use_contract(before, loss)
                    return True
        return False

    def reconsider(self) -> None:
        """Observe the losses again in the next window; limited, as each time takes forwards."""
        self.reconsiders, self.may_change = self.reconsidered < RECONSIDERED, False

    def correct_from_now(self) -> None:
        """After a window with other items than predicted: correct losses of one count, count others by forwards."""
        for loss in self.each:
            if loss.contract is None or loss.contract.groups <= 1:
                self.windows_to_correct = ALWAYS
            else:
                loss.counts_by_forwards = True


@dataclass(eq=False)
class TrainingState:
    """State of one training.

    Attributes:
        losses: how they are reduced.
        differs: a window of this rank had other counts than predicted; the other ranks learn it in the next.
        unread: windows since the last log with other counts than predicted; a tensor on the device, if any.
        empty: a window had no target; a tensor on the device.
        opened: windows so far.
        inexact: those that were not exact.
        unreported: the other ranks do not know of one of them yet.
        recorded: the training is in the report.
        troubled: looking at a loss failed on this rank, and the other ranks do not know it yet.
        aside: on a rank it did, so that the training is stock's.
    """

    losses: Losses = field(default_factory=Losses)
    differs: bool = False
    unread: Tensor | int = 0
    empty: Tensor | bool = False
    opened: int = 0
    inexact: int = 0
    unreported: bool = False
    recorded: bool = False
    troubled: bool = False
    aside: bool = False
    _last_inexact: int = -1

    def note_inexact(self, number: int | None = None, windows: int = 1) -> None:
        """Count ``windows`` that are not exact, each once; the last is ``number``, from 1 (None: the last opened)."""
        number = self.opened if number is None else number
        if number > self._last_inexact:
            self._last_inexact, self.unreported = number, True
            self.inexact += windows
            self.amend(exact=False, inexact_windows=self.inexact)

    def amend(self, **facts: Any) -> None:
        """Change what is in the report, once the training is."""
        if self.recorded:
            observations.amend(facts)

    @property
    def exact(self) -> bool:
        """Whether the loss and every window so far are exact."""
        contracts = self.losses.contracts
        return bool(contracts) and not (self.inexact or self.aside) and all(each.exact for each in contracts)

    def facts(self) -> dict[str, Any]:
        """The report's entries for several losses; empty: there is one."""
        if len(self.losses.each) < 2:
            return {}
        of_tasks = ((describe(task), loss) for task, loss in self.losses.tasks.items() if loss.has_target)
        return {"tasks": {words: loss.contract.facts() for words, loss in of_tasks if loss.contract}}
