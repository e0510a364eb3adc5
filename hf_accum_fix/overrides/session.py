"""What is known of one trainer between its windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.accumulation.closing import Closing
from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.loss_calls import LossCalls
from hf_accum_fix.accumulation.precision import WindowGradient
from hf_accum_fix.accumulation.share import Cut
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.known import Known, Settled
from hf_accum_fix.observations import Windows
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.overrides.response import Response
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
        counts: items of it, 0-dim, by each rule; None: it is not one of the window's, and is counted again.
        run_counts: the same of the inputs that its loss was computed from.
        base: the loss that the base handed to a ``compute_loss`` of the trainer's own; of several calls the sum.
        base_calls: how often that asked for it.
        seen: its items as its loss counted them, and as the rule did.
        number_came: whether its ``compute_loss`` was handed a number.
        share: its loss, such that the sum over the window, averaged over ranks, is the global batch's.
        reported: that without its graph, once it was handed to the engine.
    """

    counts: dict[Items, Tensor] | None
    weightless: bool = False
    share: Tensor | None = None
    run_counts: dict[Items, Tensor] = field(default_factory=dict)
    base: Tensor | None = None
    base_calls: int = 0
    seen: tuple[Tensor, Tensor] | None = None
    number_came: bool = False
    reported: Tensor | None = None


class Task(Settled):
    """What is known of another kind of micro-batch.

    Attributes:
        response: what the trainer's ``compute_loss`` makes of the base's loss of these.
    """

    def __init__(self) -> None:
        self.response = Response(shown=False)

    def is_trained_as(self, other: Settled) -> bool:
        """Whether the trainer makes the same of both losses, as far as both have shown it."""
        assert isinstance(other, (Session, Task))
        return not (other.response.shown and self.response.shown) or other.response == self.response


@dataclass
class Part:
    """What the micro-batches of one kind have in common.

    Attributes:
        contract: how their loss is reduced.
        cut: n_mean, G and W.
        response: what the trainer's ``compute_loss`` makes of the base's loss.
        certificate: what they have shown of their loss.
    """

    contract: LossContract
    cut: Cut
    response: Response
    certificate: Certificate | None


@dataclass
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        contract: how the loss of the micro-batch that is run is reduced.
        batches: as the loop will hand them to ``training_step``.
        counts: items of each, 0-dim, on the training device; empty where the contract counts none.
        by_rule: the same by each of the contract's rules.
        total: N over all ranks.
        cut: n_mean, G and W, for that micro-batch.
        upstream_number: what the installed release counted, over all ranks; None: nothing.
        certificate: what its micro-batches have shown of their loss; those of one kind.
        reported: the sum of what was returned for the log, 0-dim.
        gradients: `gradient_versions` after its last micro-batch so far; None: not looked at.
        ended: its certificate was held against the observation.
        parts: of each micro-batch, its kind's; empty: they have one loss.
        response: what the trainer makes of the base's loss of the micro-batch that is run; None: the session's.
    """

    contract: LossContract
    batches: list[Any]
    counts: list[Tensor]
    total: Tensor
    cut: Cut
    upstream_number: Any = None
    steps_run: int = 0
    certificate: Certificate | None = None
    reported: Tensor | None = None
    gradients: int | None = None
    ended: bool = False
    by_rule: list[dict[Items, Tensor]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    response: Response | None = None

    def turn_to(self, inputs: Any) -> None:
        """Take the contract, the cut and the certificate of a micro-batch that is about to be run."""
        if self.parts:
            at = next((at for at, batch in enumerate(self.batches) if batch is inputs), self.steps_run)
            part = self.parts[min(at, len(self.parts) - 1)]
            self.contract, self.cut = part.contract, part.cut
            self.response, self.certificate = part.response, part.certificate

    @property
    def certificates(self) -> list[Certificate]:
        """One for each loss of its micro-batches."""
        all_of = [part.certificate for part in self.parts] or [self.certificate]
        return list({id(each): each for each in all_of if each is not None}.values())

    def counts_of(self, inputs: Any) -> dict[Items, Tensor] | None:
        """Items of this micro-batch, told by identity; None where somebody handed over another object."""
        return next((each for batch, each in zip(self.batches, self.by_rule, strict=False) if batch is inputs), None)


@dataclass
class Session(Known):
    """What is known of one trainer between its windows.

    Attributes:
        entered: whether a micro-batch of this training came through ``training_step``.
        observed_number: what the base hands its model while the loss is observed.
        base_calls: listens to the base's own loss calls meanwhile, and to no others.
        base_factor: what the base's loss is multiplied by meanwhile, to see what an override makes of it.
        response: what it makes of it.
        more_steps: the trainer says more accumulation steps, to see what an override makes of them.
        deferred: the window as a ``get_batch_samples`` of the trainer's own was given it, before it is counted.
        gradient: what the gradients of a window are added in.
    """

    options: Options
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
    base_calls: LossCalls | None = None
    base_factor: float = 1.0
    more_steps: bool = False
    base_loss: tuple[Tensor, Any] | None = None
    response: Response = field(default_factory=lambda: Response(shown=False))
    closing: Closing = field(default_factory=Closing)
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

    def another(self) -> Settled:
        """Begin to keep what another kind shows."""
        return Task()

    def begin_with(self, first: Settled) -> None:
        """Take another kind, and what the trainer makes of its loss, for the first one."""
        super().begin_with(first)
        assert isinstance(first, Task)
        self.response = first.response

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
    if session is None:
        session = trainer.__dict__[SESSION] = Session(options)
    return session


@contextmanager
def busy(session: Session, what: str) -> Iterator[None]:
    """Let a nested call of the same override pass through."""
    session.busy.add(what)
    try:
        yield
    finally:
        session.busy.discard(what)
