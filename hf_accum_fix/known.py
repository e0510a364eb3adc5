"""What the windows of one training have shown: how each kind of micro-batch reduces its loss, and what was exact."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.closing import Closing
from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.kinds import Kind, kind_of, words_of
from hf_accum_fix.observations import Windows

#: Windows that are observed before an inconclusive contract is taken as it is.
ATTEMPTS = 3
#: Windows at most in which a loss is observed again that was not as observed.
RECONSIDERED = 8
#: All kinds, where they are not told apart.
ALL: Kind = frozenset({("", 0)})


class Settled:
    """How one kind of micro-batch has its loss reduced, as far as that was observed.

    Attributes:
        contract: how; None: it was not observed yet.
        attempts: windows in which it was observed, and not all of their samples were without a target.
    """

    contract: LossContract | None = None
    attempts: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether the contract is taken as it is."""
        return self.contract is not None and (self.contract.conclusive or self.attempts >= ATTEMPTS)


class Known(Settled):
    """What the windows of one training have shown; itself how the first kind of micro-batch has its loss reduced.

    Attributes:
        windows: opened so far, and how many of them were not exact.
        closing: what ends them.
        empty_windows: how many had no target, of those that are not read as they end, 0-dim.
        kinds: every kind of micro-batch that was observed, on all ranks in one order; those with one loss share one.
        without_target: those that have shown no target yet, and the window in which they were last looked at; until
            then they are trained as the first kind is.
        given_for: what the first micro-batch held of the labels that a contract given by hand counts.
        asks: a rank holds a kind that was not observed, or reconsiders, and all of them know.
        reconsiders: its losses are to be observed again: they were not as observed, or two rules that fit disagree.
        reconsidered: how often that was done.
        compared: the last window that was observed for its rules.
    """

    windows: Windows
    closing: Closing
    empty_windows: Tensor | None = None
    kinds: Mapping[Kind, Settled] = MappingProxyType({})
    without_target: Mapping[Kind, int] = MappingProxyType({})
    given_for: Kind | None = None
    asks: bool = False
    reconsiders: bool = False
    reconsidered: int = 0
    compared: int = 0

    def reconsider(self) -> None:
        """Observe its losses again in the next window, some times at most: each takes three forwards."""
        self.reconsiders = self.reconsidered < RECONSIDERED

    def reconsider_if_other(self) -> None:
        """The same where the window that has just ended was not as observed."""
        if self.closing.was_other and self.kinds:
            self.reconsider()

    def begin_with(self, first: Settled) -> None:
        """Take another kind for the first one."""
        self.attempts = first.attempts
        if first.contract is not None:
            self.take(first.contract)

    def take(self, contract: LossContract, settled: Settled | None = None) -> None:
        """Train by a contract from this window on; ``settled``: of these micro-batches, None of the first kind's."""
        settled = settled or self
        settled.contract = contract
        uncounted = any(not each.is_counted for each in self.contracts)
        self.closing.corrects = uncounted or (settled is not self and self.closing.corrects)

    @property
    def losses(self) -> list[Settled]:
        """Each loss that was observed, once: the first kind's first."""
        return list({id(each): each for each in (self, *self.kinds.values())}.values())

    @property
    def contracts(self) -> list[LossContract]:
        """How each of these losses is reduced, as far as it was observed."""
        return [each.contract for each in self.losses if each.contract is not None]

    def settled_of(self, kind: Kind) -> Settled | None:
        """What is known of a kind's loss; None: it was not observed."""
        if not self.kinds or ALL in self.kinds:
            return self
        return self.kinds.get(kind, None if kind else self)

    def contract_of(self, batch: Any) -> LossContract:
        """How the loss of a micro-batch is reduced; of a kind that was not observed, as the first kind's."""
        settled = self.settled_of(kind_of(batch)) if len(self.kinds) > 1 else self
        contract = (settled or self).contract
        assert contract is not None
        return contract

    def knows(self, kind: Kind) -> bool:
        """Whether a kind was observed, where kinds are told apart: by its targets, or in this window."""
        now = self.windows.opened
        return self.without_target.get(kind, now) == now and self.settled_of(kind) is not None

    def kinds_told(self) -> dict[str, Any]:
        """What a report says of the kinds with a loss of their own; empty: there is one loss."""
        told = {words_of(kind): each.contract.facts() for kind, each in self.kinds.items() if each.contract is not None}
        return {"kinds": told} if len(self.losses) > 1 else {}

    @property
    def corrects_others(self) -> bool:
        """Whether a rank without a certificate joins as a window ends: another may hold a loss that is corrected."""
        return self.closing.corrects and len(self.losses) > 1

    @property
    def exact(self) -> bool:
        """Whether its loss, and every window so far, was exact."""
        return self.can_be_exact and not self.windows.inexact

    @property
    def can_be_exact(self) -> bool:
        """Whether every loss that was observed is, where its windows are as observed."""
        return self.contract is not None and all(each.exact for each in self.contracts)
