"""Observe a trainer's loss through the very call that training makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import SHIFT_UNKNOWN, LossContract, Reduction
from hf_accum_fix.accumulation.declared import inside_ddp, is_compiled, products_are_rounded, requires_number
from hf_accum_fix.accumulation.observe import Setting, observe
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.overrides.forward import as_in_training, compute_loss_of
from hf_accum_fix.overrides.live import bare_model, data_ranks, hands_number, head_name, loss_func, scales_itself
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")


def observed_of(
    trainer: TrainerLike, session: Session, window: list[Any], upstream_number: Any = None
) -> tuple[LossContract | None, Exception | None]:
    """What this rank sees of the loss; None: it has no window, or the trouble that it met."""
    if not window:
        return None, None
    try:
        # The loop notes the length of a window once it was fetched; a custom loss may divide a term by it.
        with shadow(trainer, "current_gradient_accumulation_steps", len(window)):
            return _observe(trainer, session, window, upstream_number), None
    except Exception as error:
        return None, error


def _observe(trainer: TrainerLike, session: Session, window: list[Any], upstream_number: Any) -> LossContract:
    model = trainer.model_wrapped
    # A forward through DDP without gradient would switch off the next one's buffer sync.
    module: nn.Module = inside_ddp(model) or model
    compute_loss = compute_loss_of(trainer)
    custom = compute_loss is not None
    if not all(isinstance(batch, Mapping) for batch in window):
        reason = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
        return LossContract(Reduction.PLAIN, custom=custom, reason=reason)
    func = loss_func(trainer) is not None
    forward = as_in_training(trainer, module, compute_loss)
    required = func or (session.passes_number and requires_number(module))
    setting = Setting(
        hands_number=required if compute_loss is None else hands_number(compute_loss),
        only_shows=not (custom or required) and session.passes_number,
        integer=custom,
        custom=custom,
        func=func,
        multiplies=bool(getattr(trainer.args, "average_tokens_across_devices", False)),
        steps=int(trainer.args.gradient_accumulation_steps),
        world_size=data_ranks(trainer),
        upstream_number=None if upstream_number is None else float(upstream_number),
        rounded=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
    )

    def call(inputs: Mapping[str, Any], number: Tensor | None) -> Tensor:
        session.observed_number = None if custom else number
        return forward(inputs, number)[0]

    session.observing = True
    try:
        # What it logs while it is observed is not training's.
        with shadow(trainer, "log", silent):
            found = observe(
                call,
                window,
                module,
                setting,
                device=trainer.args.device,
                head=bare_model(trainer),
                others=(trainer,),
                leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator),
                more_steps=lambda: _more_steps(trainer),
            )
    except Exception:
        logger.error(
            "%s: its loss could not be run to be observed. Where training itself would run, give the contract: "
            "apply(contract=LossContract(...))",
            head_name(trainer),
        )
        raise
    finally:
        session.observing, session.observed_number = False, None
    if any(parameter._backward_hooks for parameter in module.parameters()):
        reason = "hooks on gradients run in every micro-batch, and one that is not linear makes another sum of them"
        found = replace(found, doubt=reason, reason=reason)
    if custom and scales_itself(trainer) and found.reduction in (Reduction.MEAN, Reduction.SUM):
        reason = "the trainer declares that it scales the loss by itself"
        return replace(found, reduction=Reduction.PLAIN, items=None, terms=(), doubt=reason, reason=reason)
    axes = {batch["labels"].ndim for batch in window if isinstance(batch.get("labels"), Tensor)}
    if trainer.label_smoother is not None and not func and not custom and axes:
        return _smoothed(found, trainer.label_smoother.ignore_index, of_tokens=axes != {1})
    return found.by_rule() if is_compiled(module) else found


def _smoothed(found: LossContract, ignore_index: int, *, of_tokens: bool) -> LossContract:
    """The contract of the smoothed loss of a model: a mean over labels, shifted where the model's own are."""
    shift = found.shift
    items = Items(("labels",), ignore_index, shift=bool(shift))
    smooth = replace(found, reduction=Reduction.MEAN, items=items, terms=())
    if of_tokens and shift is None:
        return replace(smooth, doubt=SHIFT_UNKNOWN, reason=SHIFT_UNKNOWN)
    return smooth


def silent(*_: Any, **__: Any) -> None:
    """Log nothing."""


@contextmanager
def _more_steps(trainer: TrainerLike) -> Iterator[None]:
    """Let the arguments say twice the accumulation steps, and the trainer three times the window's."""
    steps = trainer.args.gradient_accumulation_steps
    window = getattr(trainer, "current_gradient_accumulation_steps", steps)
    before = vars(trainer.args).get("gradient_accumulation_steps", steps)
    vars(trainer.args)["gradient_accumulation_steps"] = 2 * steps
    try:
        with shadow(trainer, "current_gradient_accumulation_steps", 3 * window):
            yield
    finally:
        vars(trainer.args)["gradient_accumulation_steps"] = before
