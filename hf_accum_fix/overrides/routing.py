"""The router's loss of a mixture of experts: counted once a window, and its share of the global batch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.declared import inside_ddp
from hf_accum_fix.accumulation.preserve import python_state_kept
from hf_accum_fix.counting import count_routing
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.forward import as_in_training, training_loss_of
from hf_accum_fix.overrides.live import head_name
from hf_accum_fix.overrides.observing import silent
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, Window
from hf_accum_fix.router.load_balancing import LENDER
from hf_accum_fix.router.router_loss import Convention, Forward, RouterLoss
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.protocols import TrainerLike


def routing_of(
    trainer: TrainerLike,
    session: Session,
    contract: LossContract,
    batches: list[Any],
    options: Options,
    trouble: Exception | None,
) -> tuple[Tensor | None, Exception | None]:
    """This rank's numbers of the window, to be summed over ranks, and its trouble; None where the loss stays a mean.

    In the first window the model's own load-balancing loss is looked at, on every rank alike.
    """
    if options.router_loss == Convention.MEAN.value:
        return None, trouble
    if session.router is None:
        session.router = RouterLoss(Convention(options.router_loss))
        # Its name is bound where others look it up only once it is imported.
        import_module(LENDER)
    router, model = session.router, trainer.model_wrapped
    module: nn.Module = inside_ddp(model) or model
    with _forward_alone(trainer, session, module, len(batches)) as forward:
        return count_routing(TrainerRun(trainer, session), contract, router, forward, batches, module, trouble)


@contextmanager
def _forward_alone(trainer: TrainerLike, session: Session, module: nn.Module, steps: int) -> Iterator[Forward]:
    """The forward that training makes of a micro-batch, to be run without its step."""
    if session.counting_loss is None or session.counting_loss[0] != session.observed_for:
        with shadow(trainer, "current_gradient_accumulation_steps", steps):
            session.counting_loss = (session.observed_for, training_loss_of(trainer))
        if session.router is not None:
            session.router.form = None
    compute_loss = session.counting_loss[1]
    run = as_in_training(trainer, module, compute_loss)
    number = torch.ones((), device=trainer.args.device)
    module.train()
    # A schedule-free optimizer evaluates at other weights than it trains at.
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    session.observing, session.observed_number = True, number
    kept = python_state_kept(trainer, leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator))
    try:
        with (
            kept if compute_loss is not None else nullcontext(),
            shadow(trainer, "log", silent),
            shadow(trainer, "current_gradient_accumulation_steps", steps),
        ):
            yield lambda inputs: run(inputs, number)[0]
    finally:
        session.observing, session.observed_number = False, None


def convention_of(session: Session) -> Convention:
    """The convention by which the router's loss is trained."""
    return Convention.MEAN if session.router is None else session.router.in_force


def router_loss_depends_on_the_cut(session: Session) -> bool:
    """Whether another cut of the same global batch, such as one by length, trains another router loss.

    To be asked once the first window is counted: only then it is known whether "exact" is in force.
    """
    if session.router is not None and session.router.form is not None and session.router.form.pools:
        return session.router.depends_on_the_cut
    return session.contract is not None and session.contract.has_router_loss


def in_the_window(session: Session, window: Window) -> AbstractContextManager[None]:
    """Around the forward of a micro-batch: its load-balancing loss is its share of the global batch's."""
    return nullcontext() if session.router is None else session.router.micro_batch(window.steps_run)


def note_routing(trainer: TrainerLike, session: Session) -> None:
    """Say once what the router's loss has shown that ought to be said."""
    for kind, words in () if session.router is None else session.router.remarks():
        session.warn_once(kind, f"{head_name(trainer)}: {words}")
