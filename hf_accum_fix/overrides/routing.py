"""The router's loss of a mixture of experts: counted once a window."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.declared import inside_ddp
from hf_accum_fix.accumulation.preserve import overridden, python_state_kept
from hf_accum_fix.core.window import count_routing
from hf_accum_fix.overrides.forward import as_in_training, training_loss_of
from hf_accum_fix.overrides.observing import silent
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.router.load_balancing import LENDER
from hf_accum_fix.router.router_loss import Convention


def routing_of(session: Session, batches: list[Any], error: Exception | None) -> tuple[Tensor | None, Exception | None]:
    """This rank's numbers of the window, to be summed over ranks, and its error; None where the loss stays a mean.

    In the first window the model's own load-balancing loss is looked at, on every rank alike.
    """
    router, trainer, steps = session.router, session.trainer, len(batches)
    if router.convention is Convention.MEAN:
        return None, error
    if router.form is None:
        # Its name is bound where others look it up only once it is imported.
        import_module(LENDER)
    module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped
    if session.counting_loss is None or session.counting_loss[0] != session.observed_for:
        with overridden(trainer, "current_gradient_accumulation_steps", steps):
            session.counting_loss = (session.observed_for, training_loss_of(session))
        router.form = None
    compute_loss = session.counting_loss[1]
    run = as_in_training(session, module, compute_loss)
    number = torch.ones((), device=session.device)
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
        return count_routing(session, lambda inputs: run(inputs, number, number)[0], batches, module, error)


def router_loss_depends_on_the_cut(session: Session) -> bool:
    """Whether another cut of the same global batch, such as one by length, trains another router loss.

    To be asked once the first window is counted: only then it is known whether "exact" is in force.
    """
    if session.router.form is not None and session.router.form.pools:
        return session.router.depends_on_the_cut
    return session.contract is not None and session.contract.has_router_loss


def note_routing(session: Session) -> None:
    """Warn once of what the router's loss has shown."""
    for name, message in session.router.remarks():
        session.warn_once(name, f"{session.head}: {message}")
