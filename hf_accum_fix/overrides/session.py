"""What is known of one trainer between its windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.closing import Closing
from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.precision import WindowGradient
from hf_accum_fix.accumulation.share import Cut
from hf_accum_fix.accumulation.weigh import Weighed, WindowCheck
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.known import Known
from hf_accum_fix.observations import Windows
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import own_step
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.router.router_loss import RouterLoss
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import VERIFY

logger = logging.getLogger("hf_accum_fix")

#: Where a trainer keeps its session.
SESSION = "_hf_accum_fix_session"


@dataclass
class MicroBatch:
    """One forward and backward, while it runs.

    Attributes:
        counts: items of it, 0-dim, by each rule; None: it is not one of the window's.
        weightless: it counts nothing.
        share: its loss, such that the sum over the window, averaged over ranks, is the global batch's.
        value: the same for the log, without a graph.
        node: of the loss that was computed.
        weighed: the loss, as it was read.
        reported: ``value``, once the loss was handed to the engine.
    """

    counts: dict[Items, Tensor] | None
    weightless: bool = False
    share: Tensor | None = None
    value: Any = None
    node: Any = None
    weighed: Weighed | None = None
    reported: Tensor | None = None


@dataclass
class Part:
    """What the micro-batches of one kind have in common.

    Attributes:
        contract: how their loss is reduced.
        cut: n_mean, G and W.
        check: what their losses divided by.
    """

    contract: LossContract
    cut: Cut
    check: WindowCheck


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        contract: how the loss of the micro-batch that is run is reduced.
        batches: as the loop will hand them to ``training_step``.
        by_rule: items of each, 0-dim, by each of the contract's rules.
        total: N over all ranks.
        cut: n_mean, G and W, for that micro-batch.
        upstream_number: what the installed release counted, over all ranks; None: nothing.
        check: what the losses of its micro-batches divided by; of those of one kind.
        reported: the sum of what was returned for the log, 0-dim.
        gradients: `gradient_versions` after its last micro-batch so far; None: not looked at.
        ended: what its losses divided by was compared with what was predicted.
        parts: of each micro-batch, its kind's; empty: they have one loss.
    """

    contract: LossContract
    batches: list[Any]
    total: Tensor
    cut: Cut
    upstream_number: Any = None
    steps_run: int = 0
    check: WindowCheck | None = None
    reported: Tensor | None = None
    gradients: int | None = None
    ended: bool = False
    by_rule: list[dict[Items, Tensor]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def turn_to(self, inputs: Any) -> None:
        """Take the contract, the cut and the check of a micro-batch that is about to be run."""
        if self.parts:
            at = next((at for at, batch in enumerate(self.batches) if batch is inputs), self.steps_run)
            part = self.parts[min(at, len(self.parts) - 1)]
            self.contract, self.cut, self.check = part.contract, part.cut, part.check

    @property
    def checks(self) -> list[WindowCheck]:
        """One for each loss of its micro-batches that is read."""
        all_of: list[WindowCheck | None] = [part.check for part in self.parts] or [self.check]
        return list(
            {
                id(each): each
                for each in all_of
                if each is not None and (each.contract.is_read or each.counted or each.changed)
            }.values()
        )

    def counts_of(self, inputs: Any) -> dict[Items, Tensor] | None:
        """Items of this micro-batch, told by identity; None where somebody handed over another object."""
        return next((each for batch, each in zip(self.batches, self.by_rule, strict=False) if batch is inputs), None)


@dataclass
class Session(Known):
    """What is known of one trainer between its windows.

    Attributes:
        entered: whether a micro-batch of this training came through ``training_step``.
        observed_number: what the base hands its model while the loss is observed.
        shift: labels are shifted as they are smoothed; None: that is not known.
        deferred: the window as a ``get_batch_samples`` of the trainer's own was given it, before it is counted.
        gradient: what the gradients of a window are added in.
        own_step: see `live.own_step`.
        refused: an error of ours in a micro-batch, which the step of a trainer's own may have caught.
    """

    options: Options
    own_step: Callable[..., Any] | None = None
    refused: AccumFixError | None = None
    contract: LossContract | None = None
    observed_for: tuple[Any, ...] = ()
    passes_number: bool = False
    attempts: int = 0
    window: Window | None = None
    micro_batch: MicroBatch | None = None
    windows: Windows = field(default_factory=Windows)
    entered: bool = False
    observing: bool = False
    observed_number: Tensor | None = None
    closing: Closing = field(default_factory=Closing)
    shift: bool | None = None
    deferred: list[Any] | None = None
    busy: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    empty_windows: Tensor | None = None
    loss_log: LossLog | None = None
    repeated: dict[str, Any] = field(default_factory=dict)
    router: RouterLoss | None = None
    counting_loss: tuple[tuple[Any, ...], Callable[..., Any] | None] | None = None
    gradient: WindowGradient = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = WindowGradient(self.options.accumulate_in)

    def warn_once(self, kind: str, message: str) -> None:
        """Warn once for each kind and run."""
        if kind not in self.said:
            self.said.add(kind)
            logger.warning(message)

    def say_off(self, off: Mapping[str, str]) -> None:
        """Say once what is off in this training, and why."""
        for what, why in off.items():
            if what != VERIFY:
                self.warn_once(what, why)

    @property
    def contract_now(self) -> LossContract | None:
        """How the loss that is computed now is reduced."""
        return self.contract if self.window is None or self.micro_batch is None else self.window.contract

    @property
    def inexact_windows(self) -> int:
        """Windows found to be made in another way than observed."""
        return self.windows.inexact


def session_of(trainer: TrainerLike, options: Options) -> Session:
    """The session of a trainer, made at its first use."""
    session: Session | None = trainer.__dict__.get(SESSION)
    return session or new_session(trainer, options)


def new_session(trainer: TrainerLike, options: Options) -> Session:
    """A session of a trainer in the place of the one before."""
    session = trainer.__dict__[SESSION] = Session(options, own_step=own_step(trainer))
    return session


@contextmanager
def busy(session: Session, what: str) -> Iterator[None]:
    """Let a nested call of the same override pass through."""
    session.busy.add(what)
    try:
        yield
    finally:
        session.busy.discard(what)
