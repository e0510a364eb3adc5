"""Observe a trainer's loss through the very call that training makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import (
    SCALED_BESIDE,
    SHIFT_UNKNOWN,
    Divides,
    LossContract,
    Reduction,
)
from hf_accum_fix.accumulation.declared import (
    inside_ddp,
    is_compiled,
    products_are_rounded,
    router_coefficients,
)
from hf_accum_fix.accumulation.evidence.forwards import HIGH
from hf_accum_fix.accumulation.evidence.rules import counted_alike
from hf_accum_fix.accumulation.loss_calls import LossCalls
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.second_look import ENOUGH
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.overrides.forward import as_in_training, compute_loss_of
from hf_accum_fix.overrides.live import (
    data_ranks,
    head_name,
    loss_func,
    scales_itself,
)
from hf_accum_fix.overrides.response import Asked, Response, response_of
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")

#: What the base's loss is multiplied by in one forward, to see what an override makes of it.
_FACTOR = 3.0


def observed_of(
    trainer: TrainerLike, session: Session, window: list[Any], *, again: int
) -> tuple[LossContract | None, Exception | None]:
    """What this rank sees of the loss; None: it has no window, or the trouble that it met."""
    if not window:
        return None, None
    response = session.response
    try:
        # The loop notes the length of a window once it was fetched; a loss of one's own may divide a term by it.
        with shadow(trainer, "current_gradient_accumulation_steps", len(window)):
            return _observe(trainer, session, window, again=again), None
    except Exception as error:
        return None, error
    finally:
        if response.shown and (again > 0 or not session.response.shown):
            session.response = response


def _observe(trainer: TrainerLike, session: Session, window: list[Any], *, again: int = 0) -> LossContract:
    """Observe the loss through the very call that training makes."""
    model = trainer.model_wrapped
    # A forward through DDP without gradient would switch off the next one's buffer sync.
    module: nn.Module = inside_ddp(model) or model
    # DeepSpeed's engine has a config of its own.
    bare: nn.Module = trainer.accelerator.unwrap_model(model)
    compute_loss = compute_loss_of(trainer)
    if not all(isinstance(batch, Mapping) for batch in window):
        reason = "the trainer makes the inputs of its loss only after a micro-batch was fetched"
        return LossContract(Reduction.PLAIN, owned_by_trainer=compute_loss is not None, reason=reason)

    def observed(owned: bool) -> tuple[LossContract, list[Asked]]:
        responses: list[Asked] = []
        forward = as_in_training(trainer, module, compute_loss)

        def call(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
            session.base_loss, session.observed_number = None, number
            session.base_factor = _FACTOR if number is not None and float(number) == HIGH and not owned else 1.0
            listens = None if owned or compute_loss is None else LossCalls.listening()
            session.base_calls = listens
            with LossCalls(graded=listens.graded) if listens is not None else nullcontext() as beside:
                loss, outputs = forward(inputs, number)
            if listens is not None and beside is not None and session.base_loss is None:
                listens.seen.extend(beside.seen)
            if session.base_loss is None or owned:
                return loss, None if compute_loss is not None else outputs
            base, outputs = session.base_loss
            asked = (session.base_factor * float(base.detach()), float(loss.detach()))
            responses.append(Asked(inputs, *asked, more_steps=session.more_steps, number_came=number is not None))
            return base, outputs

        found = observe(
            call,
            window,
            module,
            device=trainer.args.device,
            passes_number=compute_loss is not None or session.passes_number or loss_func(trainer) is not None,
            needs_number=loss_func(trainer) is not None or compute_loss is not None,
            router_coefficients=(0.0, 0.0) if loss_func(trainer) is not None else router_coefficients(bare),
            world_size=data_ranks(trainer),
            low_precision=trainer.accelerator.mixed_precision != "no" or products_are_rounded(module),
            others=(trainer,),
            leave=(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator),
            more_steps=None if compute_loss is None else lambda: _more_steps(trainer, session),
            again=again,
        )
        return found, responses

    session.observing = True
    try:
        # What it logs while it is observed is not training's.
        with shadow(trainer, "log", silent):
            found, responses = observed(owned=False)
            response = response_of(responses, len(window))
            if response is not None and response.factor == 0.0:
                # The base is asked, but the loss is not made of its answer.
                found, _ = observed(owned=True)
    except Exception:
        logger.error(
            "%s: its loss could not be run to be observed. Where training itself would run, give the contract by hand: "
            "apply(contract=LossContract(...))",
            head_name(trainer),
        )
        raise
    finally:
        session.observing, session.base_loss, session.observed_number, session.base_factor = False, None, None, 1.0
        session.base_calls = None
    if any(parameter._backward_hooks for parameter in module.parameters()):
        reason = "hooks on gradients run in every micro-batch, and one that is not linear makes another sum of them"
        found = replace(found, beside=True, reason=reason)
    if found.owned_by_trainer:
        session.response = Response()
        if found.reduction in (Reduction.MEAN, Reduction.SUM) and scales_itself(trainer):
            reason = "the trainer says that it scales the loss by itself"
            return replace(found, reduction=Reduction.PLAIN, items=None, made_of=None, reason=reason)
        return found
    session.response = response or Response()
    if response is None or response.divides is Divides.UNKNOWN:
        found = replace(found, changed_by_trainer=True)
    elif response.extra and counted_alike(response.extra, window):
        odds = min(response.odds, found.odds) if found.by_hand_rules else response.odds
        found = replace(found, extra=response.extra, odds=odds)
    elif response.extra:
        found = replace(found, changed_by_trainer=True)
    if is_compiled(module):
        found = found.without_calls()
    made_of = found.made_of
    if made_of is not None and not made_of.counted and (found.extra or session.response.constant):
        found = replace(found, beside=True, reason=SCALED_BESIDE)
    axes = {batch["labels"].ndim for batch in window if isinstance(batch.get("labels"), Tensor)}
    if trainer.label_smoother is not None and loss_func(trainer) is None and axes:
        return _smoothed(found, trainer.label_smoother.ignore_index, of_tokens=axes != {1})
    return found


def _smoothed(found: LossContract, ignore_index: int, *, of_tokens: bool) -> LossContract:
    """The contract of the smoothed loss of a model: a mean over labels, shifted where the model's own are."""
    known = (*found.alternatives, *found.rules)
    # As stock smooths them comes first.
    shifts = sorted({rule.shift for rule in known if rule.keys == ("labels",)})
    rules = tuple(Items(("labels",), ignore_index, shift=shift) for shift in shifts or [False])
    # How it is weighed is known; its shift is the loss call's, which no further look would tell better.
    smooth = replace(found, reduction=Reduction.MEAN, items=rules[0], alternatives=rules, made_of=None, odds=ENOUGH)
    # Without a loss call, samples may fit a shift by chance.
    if of_tokens and (len(shifts) != 1 or found.made_of is None):
        return replace(smooth, beside=True, reason=SHIFT_UNKNOWN)
    return replace(smooth, beside=True) if found.reduction is Reduction.PLAIN else smooth


def silent(*_: Any, **__: Any) -> None:
    """Log nothing."""


@contextmanager
def _more_steps(trainer: TrainerLike, session: Session) -> Iterator[None]:
    """Let the arguments say twice the accumulation steps, and the trainer three times the window's."""
    steps = trainer.args.gradient_accumulation_steps
    window = getattr(trainer, "current_gradient_accumulation_steps", steps)
    before = vars(trainer.args).get("gradient_accumulation_steps", steps)
    vars(trainer.args)["gradient_accumulation_steps"] = 2 * steps
    session.more_steps = True
    try:
        with shadow(trainer, "current_gradient_accumulation_steps", 3 * window):
            yield
    finally:
        session.more_steps = False
        vars(trainer.args)["gradient_accumulation_steps"] = before
