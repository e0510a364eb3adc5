"""The Trainer as a host: settle how its loss is reduced, observe it, count its routing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SHIFT_UNKNOWN, LossContract
from hf_accum_fix.accumulation.declared import inside_ddp, takes_number
from hf_accum_fix.accumulation.preserve import overridden, python_state_kept
from hf_accum_fix.core import contracts
from hf_accum_fix.core.host import Observed
from hf_accum_fix.core.window import count_routing
from hf_accum_fix.data.balancing import unfit
from hf_accum_fix.errors import ContractError, UnsupportedSetupError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.forward import as_in_training, training_loss_of
from hf_accum_fix.overrides.live import accepts_number, declares_scale, loss_func, scales_itself
from hf_accum_fix.overrides.observing import MADE_LATER, observed_of, silent
from hf_accum_fix.overrides.session import SESSION, Session
from hf_accum_fix.router.load_balancing import LENDER
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.upstream.protocols import TrainerLike


class TrainerHost(Session):
    """A Trainer that runs windows."""

    def settle(self, batches: Sequence[Any], number: Any, error: Exception | None) -> None:
        trainer, state = self.trainer, self.state
        computed_by = (accepts_number(trainer), loss_func(trainer), trainer.label_smoother)
        if self.observed_for != computed_by:
            state.first.contract, state.first.attempts, self.observed_for = None, 0, computed_by
            self.passes_number = accepts_number(trainer) and takes_number(trainer.model_wrapped)
            state.correction.corrects = False
        was_settled, before = state.first.is_settled, self.contract
        if self.options.contract is None:
            contracts.settle(self, batches, number, error)
        elif not was_settled:
            state.take(self._given(self.options.contract), state.first)
        contract = self.contract
        assert contract is not None
        if was_settled and contract is before:
            return
        if state.first.is_settled and self.options.balance_windows and (reason := unfit(contract)) is not None:
            raise UnsupportedSetupError(
                f"balance_windows: got {self.head}: {reason}; length-balancing would change its loss; expected a mean "
                "over items or a sum; omit balance_windows"
            )
        if contract.reason != NO_TARGET_SEEN or state.first.is_settled:
            self._warn(contract)

    def _warn(self, found: LossContract) -> None:
        """Warn once if a loss is not exact."""
        # Even a global batch of one micro-batch may have a wrong number or shift.
        wrong_when_whole = SHIFT_UNKNOWN in (found.reason, found.doubt) or (found.by_number and not found.conclusive)
        if found.reason == MADE_LATER and declares_scale(self.trainer):
            # The trainer handles windows itself, and each is checked.
            return
        itself = found.custom and scales_itself(self.trainer)
        outcome = "stays as the trainer scales it" if itself else "gets the plain mean over micro-batches"
        for name, message in contracts.remarks(self.head, found, self.state.first.attempts, outcome=outcome):
            if name == "sum" or self.is_split or wrong_when_whole:
                self.warn_once(name, message)

    def _given(self, contract: LossContract) -> LossContract:
        """Check a given contract, without a forward."""
        if contract.by_number and not self.passes_number and loss_func(self.trainer) is None:
            raise ContractError(
                f"got a contract by which the loss {contract.reduction.words}, but {self.head} gets no "
                "num_items_in_batch; expected Reduction.MEAN, or set model_accepts_loss_kwargs = True"
            )
        if not contract.by_number:
            # A head that would divide by the number returns its own mean without it.
            self.passes_number = False
        return contract

    def observe(self, batches: Sequence[Any], number: Any) -> Observed:
        return observed_of(self, list(batches), number)

    def route(self, batches: Sequence[Any], error: Exception | None) -> tuple[Tensor | None, Exception | None]:
        router, trainer, steps = self.router, self.trainer, len(batches)
        if router.convention is Convention.MEAN:
            return None, error
        # Other libraries bind its name only once it is imported.
        import_module(LENDER)
        module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped
        if self.counting_loss is None or self.counting_loss[0] != self.observed_for:
            with overridden(trainer, "current_gradient_accumulation_steps", steps):
                self.counting_loss = (self.observed_for, training_loss_of(self))
            router.form = None
        compute_loss = self.counting_loss[1]
        run, number = as_in_training(self, module, compute_loss), torch.ones((), device=self.device)
        module.train()
        # A schedule-free optimizer evaluates at other weights than it trains at.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        kept = python_state_kept(trainer, leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator))
        with (
            kept if compute_loss is not None else nullcontext(),
            overridden(trainer, "log", silent),
            overridden(trainer, "current_gradient_accumulation_steps", steps),
        ):
            return count_routing(self, lambda inputs: run(inputs, number, number)[0], batches, module, error)

    @property
    def router_loss_depends_on_split(self) -> bool:
        """Whether the router loss depends on the split; known once the first window is counted."""
        if self.router.form is not None and self.router.form.pools:
            return self.router.depends_on_split
        return self.contract is not None and self.contract.has_router_loss


def settle(trainer: TrainerLike, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    session = session_of(trainer, options)
    session.settle(window, None, None)
    assert session.contract is not None
    return session.contract


def session_of(trainer: TrainerLike, options: Options) -> TrainerHost:
    """The session of a trainer, made at its first use."""
    return known_session(trainer) or new_session(trainer, options)


def known_session(trainer: TrainerLike) -> TrainerHost | None:
    """The session of a trainer; None: it has none, or one copied from another trainer."""
    session: TrainerHost | None = trainer.__dict__.get(SESSION)
    return session if session is not None and session.trainer is trainer else None


def new_session(trainer: TrainerLike, options: Options) -> TrainerHost:
    """Replace the session of a trainer."""
    session = trainer.__dict__[SESSION] = TrainerHost(trainer, options)
    return session
