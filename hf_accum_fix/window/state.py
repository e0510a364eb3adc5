"""State of one training: how its loss is reduced, and which windows were exact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_accum_fix import observations
from hf_accum_fix.counting.items import Labels
from hf_accum_fix.learning.contract import LossContract

#: Most windows in which a loss is observed that shows nothing conclusive; so many are corrected on several ranks.
ATTEMPTS = 3
#: For all windows.
ALWAYS = sys.maxsize
#: Most windows in which a loss that changed is observed again.
RECONSIDERED = 8


@dataclass(eq=False)
class LossState:
    """How the loss is reduced, and what is due for it."""

    contract: LossContract | None = None  # None: it was not observed yet
    labels: Labels | None = None  # of the micro-batches that it is observed on; None: there was none
    attempts: int = 0  # windows with targets in which it was observed
    counts_by_forwards: bool = False  # a window was divided by other items than its rules predicted
    #: so many of the next windows have their gradient multiplied by predicted over seen items.
    windows_to_correct: int = 0
    reconsiders: bool = False  # it is observed again in the next window
    reconsidered: int = 0  # how often that was done
    mixed: int = 0  # windows in a row in which micro-batches of this rank had other terms than the contract

    @property
    def is_settled(self) -> bool:
        """Whether it is not observed again."""
        return self.contract is not None and (self.contract.conclusive or self.attempts >= ATTEMPTS)

    def use_contract(self, contract: LossContract) -> None:
        """Use a contract from this window on."""
        self.contract = contract
        if not (contract.is_counted or contract.needs_forwards):
            self.windows_to_correct = ALWAYS
        else:
            # No window has confirmed its rules yet.
            self.windows_to_correct = ATTEMPTS if contract.terms and contract.groups == 1 else 0

    def takes_correction(self) -> bool:
        """Whether one more window is corrected."""
        self.windows_to_correct, before = max(self.windows_to_correct - 1, 0), self.windows_to_correct
        return before > 0

    def reconsider(self) -> None:
        """Observe it again in the next window; limited, as each time takes forwards."""
        self.reconsiders = self.reconsidered < RECONSIDERED

    def correct_from_now(self) -> None:
        """After a window with other items than predicted: correct a loss of one count, count others by forwards."""
        if self.contract is None or self.contract.groups <= 1:
            self.windows_to_correct = ALWAYS
        else:
            self.counts_by_forwards = True


@dataclass
class Told:
    """What a rank tells the others in the collective of a window; after it, what any rank told."""

    asks: bool = False  # its loss has changed, so that all look at it again
    differs: bool = False  # a window of it had other counts than predicted
    inexact: bool = False  # a window of it was not exact, which the others do not know
    troubled: bool = False  # looking at its loss failed
    mixed: bool = False  # a micro-batch of it has other labels than those that the loss was observed on


@dataclass(eq=False)
class LossSource:
    """What computes the loss of a training."""

    has_stock: bool  # a Trainer, so that there is a scale to keep where it cannot be read
    passes_number: bool = False  # the model gets num_items_in_batch
    requires_number: bool = False  # it cannot do without it
    scales_itself: bool = False  # the trainer declares that it divides its loss by the accumulation steps
    counts_items: bool = False  # the trainer counts the items of a window in its own way
    func: Callable[..., Any] | None = None  # the trainer's ``compute_loss_func``; None: it has none
    owns_labels: bool = False  # the trainer computes the loss from the labels, which the model does not get
    computed_by: tuple[Any, ...] = ()  # what computed it when it was observed
    kept_back: int = 0  # as of `learning.look.LossRun`


@dataclass(eq=False)
class TrainingState:
    """State of one training."""

    loss: LossState = field(default_factory=LossState)  # how it is reduced
    told: Told = field(default_factory=Told)  # what the other ranks learn in the next window
    #: windows since the last log with other counts than predicted; a tensor on the device, if any.
    unread: Tensor | int = 0
    empty: Tensor | bool = False  # a window had no target; a tensor on the device
    opened: int = 0  # windows so far
    inexact: int = 0  # those that were not exact
    recorded: bool = False  # the training is in the report
    aside: bool = False  # the training is stock's
    _last_inexact: int = -1

    def note_inexact(self, number: int | None = None, windows: int = 1) -> None:
        """Count ``windows`` that are not exact, each once; the last is ``number``, from 1 (None: the last opened)."""
        number = self.opened if number is None else number
        if number > self._last_inexact:
            self._last_inexact, self.told.inexact = number, True
            self.inexact += windows
            self.amend(exact=False, inexact_windows=self.inexact)

    def amend(self, **facts: Any) -> None:
        """Change what is in the report, once the training is."""
        if self.recorded:
            observations.amend(facts)

    @property
    def exact(self) -> bool:
        """Whether the loss and every window so far are exact."""
        contract = self.loss.contract
        return contract is not None and contract.exact and not (self.inexact or self.aside)
