"""Observe a trainer's loss by the same call as in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_accum_fix.accumulation.agreement import Gather, SyncedRanks
from hf_accum_fix.accumulation.conclude import OWN_NUMBERS, Setting
from hf_accum_fix.accumulation.contract import SHIFT_UNKNOWN, LossContract, Reduction
from hf_accum_fix.accumulation.declared import (
    holds_shards,
    inside_ddp,
    is_compiled,
    products_are_rounded,
    requires_number,
)
from hf_accum_fix.accumulation.observe import observe, shift_of
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.reading import LossRun
from hf_accum_fix.core.host import Observed
from hf_accum_fix.engines import ranks
from hf_accum_fix.overrides.forward import as_in_training, base_loss, training_loss_of
from hf_accum_fix.overrides.live import bare_model, declares_scale, hands_number, loss_func, names, scales_itself
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.upstream.protocols import TrainerLike

#: Why a loss is not observed: only what training runs is run.
MADE_LATER = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
MADE_BY_STEP = "its training_step computes the loss without compute_loss, and is not run except to train"

logger = logging.getLogger("hf_accum_fix")


def observed_of(session: Session, window: list[Any], upstream_number: Any = None) -> Observed:
    """The contract that this rank observes, None if it has no window; and the error that was raised."""
    # A custom loss may run collectives.
    collectives = session.world_size > 1 and training_loss_of(session) is not None
    gather = ranks.gather_object if collectives else None
    if not window:
        with SyncedRanks(gather):
            return None, None
    try:
        # The loop sets this only after fetching a window; a custom loss may divide by it.
        with overridden(session.trainer, "current_gradient_accumulation_steps", len(window)):
            return _observe(session, window, upstream_number, gather), None
    except Exception as error:
        return None, error


def _observe(session: Session, window: list[Any], upstream_number: Any, gather: Gather | None) -> LossContract:
    trainer, step, compute_loss = session.trainer, session.own_step, training_loss_of(session)
    # A forward through DDP without gradient would switch off the next one's buffer sync.
    module: nn.Module = inside_ddp(trainer.model_wrapped) or trainer.model_wrapped
    custom = compute_loss is not None
    if not all(isinstance(batch, Mapping) for batch in window):
        by_divisor = declares_scale(trainer)
        return LossContract(Reduction.PLAIN, custom=custom, by_divisor=by_divisor, reason=MADE_LATER)
    if step is not None and not (names(step, "compute_loss") and names(step, "accelerator")):
        return LossContract(Reduction.PLAIN, custom=custom, reason=MADE_BY_STEP, by_divisor=True)
    forward = as_in_training(session, module, compute_loss)
    setting = _setting(session, module, compute_loss, upstream_number)

    def call(inputs: Mapping[str, Any], number: Tensor | None) -> Tensor:
        own = None if number is None else torch.tensor(OWN_NUMBERS[float(number)], device=number.device)
        return forward(inputs, number, own)[0]

    loss = LossRun(
        call,
        module,
        session.device,
        bare_model(trainer),
        others=(trainer,),
        leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator),
        more_steps=lambda ranks: _more_steps(trainer, ranks),
    )
    try:
        _settle_shift(session, module, window)
        # Only training logs.
        with overridden(trainer, "log", silent):
            found = observe(loss, window, setting, gather)
    except Exception:
        logger.error(
            "%s: the forward that observes the loss failed. If training itself runs, pass the contract: "
            "apply(contract=LossContract(...))",
            session.head,
        )
        raise
    if any(parameter._backward_hooks for parameter in module.parameters()):
        reason = "gradient hooks run in every micro-batch; one that is not linear makes another sum"
        found = replace(found, doubt=reason, reason=reason)
    if custom and scales_itself(trainer) and found.reduction in (Reduction.MEAN, Reduction.SUM):
        reason = "the trainer declares that it scales the loss itself"
        return replace(found, reduction=Reduction.PLAIN, items=None, terms=(), doubt=reason, reason=reason)
    if trainer.label_smoother is not None and not setting.func and session.shift is None:
        found = replace(found, doubt=found.doubt or SHIFT_UNKNOWN)
    return found.by_rule() if is_compiled(module) else found


def _setting(
    session: Session, module: nn.Module, compute_loss: Callable[..., Any] | None, upstream_number: Any
) -> Setting:
    """Facts about the training that are known beforehand."""
    trainer, custom, passes = session.trainer, compute_loss is not None, session.passes_number
    func = loss_func(trainer) is not None
    required = func or (passes and requires_number(module))
    return Setting(
        hands_number=required or (custom and passes),
        hands_own=compute_loss is not None and hands_number(compute_loss),
        only_shows=not (custom or required) and passes,
        custom=custom,
        func=func,
        multiplies=bool(getattr(trainer.args, "average_tokens_across_devices", False)),
        steps=session.steps,
        world_size=session.data_ranks,
        upstream_number=None if upstream_number is None else float(upstream_number),
        rounded=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
    )


def _settle_shift(session: Session, module: nn.Module, window: list[Any]) -> None:
    """Set whether labels are shifted as they are smoothed, as in the model's own loss."""
    trainer = session.trainer
    if trainer.label_smoother is None or loss_func(trainer) is not None:
        return
    session.shift = None
    if all(getattr(batch.get("labels"), "ndim", 2) < 2 for batch in window):
        session.shift = False
        return

    def call(inputs: Mapping[str, Any], _: Tensor | None) -> Tensor:
        with trainer.compute_loss_context_manager():
            return base_loss(session, module, trainer._prepare_inputs(inputs), None, smooth=False)[0]

    session.shift = shift_of(call, window, module, sharded=holds_shards(module))


def silent(*_: Any, **__: Any) -> None:
    """Log nothing."""


@contextmanager
def _more_steps(trainer: TrainerLike, ranks: int) -> Iterator[None]:
    """Double the steps in the arguments, triple the trainer's window, and multiply the ranks."""
    steps = trainer.args.gradient_accumulation_steps
    window = getattr(trainer, "current_gradient_accumulation_steps", steps)
    processes = ranks * PartialState().num_processes
    with (
        overridden(trainer.args, "gradient_accumulation_steps", 2 * steps),
        overridden(trainer, "current_gradient_accumulation_steps", 3 * window),
        overridden(PartialState(), "num_processes", processes),
        overridden(trainer.accelerator.state, "num_processes", processes),
    ):
        yield
