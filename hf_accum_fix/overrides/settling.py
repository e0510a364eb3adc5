"""How a trainer's loss is reduced: given by hand, or observed through the very call that training makes."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix import ranks
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.declared import inside_ddp, products_are_rounded, router_coefficients, takes_number
from hf_accum_fix.accumulation.observe import ATTEMPTS, NO_TARGET_SEEN, LossCall, observe
from hf_accum_fix.accumulation.share import loss_among
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError, RankError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import (
    accepts_number,
    data_ranks,
    hands_number,
    head_name,
    loss_func,
    place,
    scales_itself,
)
from hf_accum_fix.overrides.loader import check_dealing
from hf_accum_fix.overrides.session import SESSION, Session, session_of
from hf_accum_fix.shadow import shadow

logger = logging.getLogger("hf_accum_fix")


def settle(trainer: Any, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    return settle_contract(trainer, session_of(trainer, options), window, options)


def settle_contract(
    trainer: Any, session: Session, window: list[Any], options: Options, trouble: Exception | None = None
) -> LossContract:
    """The contract of this trainer's loss as it is now; observed where it has not been, on every rank alike."""
    computed_by = (accepts_number(trainer), loss_func(trainer), trainer.label_smoother)
    if session.observed_for != computed_by:
        session.contract, session.observed_for, session.attempts = None, computed_by, 0
        session.passes_number = accepts_number(trainer) and takes_number(trainer.model_wrapped)
    known = session.contract
    if known is not None and (known.conclusive or session.attempts >= ATTEMPTS):
        return known
    if options.contract is not None:
        found = _given(trainer, session, options.contract)
    else:
        _check_alike(trainer, window, trouble)
        seen = None
        try:
            # The loop notes the length of a window once it was fetched; a loss of one's own may divide a term by it.
            with shadow(trainer, "current_gradient_accumulation_steps", len(window)):
                seen = _observe(trainer, session, window) if window else None
        except Exception as error:
            trouble = error
        found = _agreed(trainer, seen, trouble)
        session.attempts += found.reason != NO_TARGET_SEEN
    session.contract = found
    if not found.conclusive and session.attempts < ATTEMPTS:
        return found
    check_dealing(trainer, found, options)
    head = head_name(trainer)
    if found.reduction is Reduction.PLAIN:
        if found.owned_by_trainer and scales_itself(trainer):
            outcome = "stays as the trainer scales it"
        elif found.items is None:
            outcome = "gets the plain mean over micro-batches"
        else:
            outcome = "gets each micro-batch weighed by its items"
        session.warn_once("inexact", f"{head}: {found.reason}. It {outcome}.")
    elif found.changed_by_trainer:
        words = f"{type(trainer).__name__}.compute_loss changes the base's loss, so that it is not called exact."
        session.warn_once("inexact", f"{head}: {words}")
    elif not found.conclusive:
        session.warn_once("inexact", f"{head}: the loss {found}, as far as {ATTEMPTS} windows tell.")
    if found.reduction is Reduction.SUM:
        session.warn_once("sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch.")
    return found


def _check_alike(trainer: Any, window: list[Any], trouble: Exception | None) -> None:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does."""
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    lengths_and_labels = ranks.agreed((len(window), sorted(labels), told), trouble, **place(trainer))
    if len({bool(length) for length, _, _ in lengths_and_labels}) > 1:
        raise ranks.uneven({rank: length for rank, (length, _, _) in enumerate(lengths_and_labels)})
    if len({tuple(each) for _, each, _ in lengths_and_labels}) > 1:
        raise RankError(
            f"the ranks hold different labels: {ranks.by_rank([each for _, _, each in lengths_and_labels])}; every "
            "rank needs the same; look at the collator, and at what it was given on the rank without"
        )


def _given(trainer: Any, session: Session, contract: LossContract) -> LossContract:
    """A contract given by hand, held against what can be known without a forward."""
    if contract.by_number and not session.passes_number and loss_func(trainer) is None:
        raise ContractError(
            f"the contract given says that the loss {contract.reduction.value}, but {head_name(trainer)} is not "
            "handed the number; give Reduction.MEAN, or let model_accepts_loss_kwargs be True"
        )
    if not contract.by_number:
        # A head that would divide by the number returns its own mean without it.
        session.passes_number = False
    return contract


def _observe(trainer: Any, session: Session, window: list[Any]) -> LossContract:
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
    changed = False

    forward = as_in_training(trainer, module, compute_loss)

    def call(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        nonlocal changed
        session.base_loss = None
        loss, outputs = forward(inputs, number)
        if session.base_loss is None:
            return loss, outputs
        # Both nan, where there was no target, is no change.
        changed = changed or not torch.allclose(loss, session.base_loss[0], rtol=1e-6, atol=0.0, equal_nan=True)
        return session.base_loss

    session.observing = True
    try:
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
        )
    except Exception:
        logger.error(
            "%s: its loss could not be run to be observed. Where training itself would run, give the contract by hand: "
            "apply(contract=LossContract(...))",
            head_name(trainer),
        )
        raise
    finally:
        session.observing, session.base_loss = False, None
    if found.owned_by_trainer:
        return found
    if changed:
        found = replace(found, changed_by_trainer=True)
    smoothed = trainer.label_smoother is not None and loss_func(trainer) is None
    if smoothed and found.reduction is not Reduction.PLAIN:
        shift = found.items is not None and found.items.shift
        items = Items(("labels",), trainer.label_smoother.ignore_index, shift=shift)
        return replace(found, reduction=Reduction.MEAN, items=items, alternatives=(items,))
    return found


def _agreed(trainer: Any, found: LossContract | None, trouble: Exception | None = None) -> LossContract:
    """The ranks' one contract; None: this rank had no window to observe."""
    gathered = ranks.agreed(found, trouble, **place(trainer))
    return agree([each for each in gathered if each is not None])


def as_in_training(trainer: Any, module: nn.Module, compute_loss: Callable[..., Any] | None) -> LossCall:
    """The forward that training makes of a micro-batch, unsmoothed; without outputs where the loss is the trainer's."""
    handed = compute_loss is not None and hands_number(compute_loss)

    def forward(inputs: Mapping[str, Any], number: Tensor | None) -> tuple[Tensor, Any]:
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            if compute_loss is None:
                return base_loss(trainer, module, inputs, number, smooth=False)
            result = compute_loss(module, inputs, **({"num_items_in_batch": number} if handed else {}))
        return (result[0] if isinstance(result, tuple) else result), None

    return forward


def base_loss(
    trainer: Any, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None, *, smooth: bool = True
) -> tuple[Tensor, Any]:
    """The loss as the base Trainer comes by it, before any release's scaling.

    Source: the contract of ``Trainer.compute_loss``, which the releases share: the number goes to a model that accepts
    it; ``compute_loss_func`` owns its loss; the label smoother takes the labels out of the model's sight.
    """
    inputs = dict(inputs)
    func, smoother = loss_func(trainer), trainer.label_smoother if smooth else None
    labels = inputs.pop("labels", None) if func is not None or smoother is not None else None
    session: Session = trainer.__dict__[SESSION]
    if session.passes_number and number is not None:
        inputs["num_items_in_batch"] = number
    outputs = model(**inputs)
    if getattr(trainer.args, "past_index", -1) >= 0:
        trainer._past = outputs[trainer.args.past_index]
    if func is not None:
        return func(outputs, labels, num_items_in_batch=number), outputs
    if smoother is not None and labels is not None:
        contract = session.contract
        shift = contract is not None and contract.items is not None and contract.items.shift
        return smoother(outputs, labels, shift_labels=shift), outputs
    return loss_among(outputs, inputs, model), outputs


def loss_alone(trainer: Any, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The loss of a batch that is not part of a larger one, and the model's outputs; `settle` comes first.

    It is the mean over the batch's own items (or the sum), by the head itself, which is handed no number, or by the
    trainer's own ``compute_loss``; a ``compute_loss_func`` is handed the batch's own item count.
    """
    session: Session = trainer.__dict__[SESSION]
    contract = session.contract
    assert contract is not None
    inputs = trainer._prepare_inputs(inputs)
    compute_loss = compute_loss_of(trainer)
    with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
        if compute_loss is not None:
            return compute_loss(model, inputs, return_outputs=True)  # type: ignore[no-any-return]
        counted = loss_func(trainer) is not None and contract.items is not None
        number = contract.items.count(inputs) if counted and contract.items is not None else None
        loss, outputs = base_loss(trainer, model, inputs, None if number is None else contract.as_number(number))
    router = contract.carried(outputs)
    # A smoothed loss is made from the logits alone.
    smoothed = trainer.label_smoother is not None and loss_func(trainer) is None
    return (loss + router.to(loss.device) if smoothed and router is not None else loss), outputs


def compute_loss_of(trainer: Any) -> Callable[..., Any] | None:
    """The trainer's own ``compute_loss`` where something overrides the base; None where the base is all there is.

    It is bound to a copy, containers and all, so that what it notes on the trainer while it is observed is dropped.
    """
    if "compute_loss" in vars(trainer):
        return trainer.compute_loss  # type: ignore[no-any-return]
    ours = ("hf_accum_fix.trainer", Trainer.__module__)
    defining = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    if defining.__module__ in ours:
        return None
    return unshared(trainer).compute_loss  # type: ignore[no-any-return]


def unshared(trainer: Any) -> Any:
    """A copy of a trainer: the same model and data, but containers, and containers in them, are its own."""
    copied = object.__new__(type(trainer))  # copy.copy would leave a note on the class
    vars(copied).update((name, _without_sharing(value)) for name, value in vars(trainer).items())
    return copied


def _without_sharing(value: Any) -> Any:
    """The same, but containers, and containers in them, are new ones."""
    if type(value) in (dict, defaultdict, OrderedDict):
        copied = copy.copy(value)
        copied.update((key, _without_sharing(each)) for key, each in value.items())
        return copied
    if type(value) in (list, deque, set):
        copied = copy.copy(value)
        if type(value) is list:
            copied[:] = map(_without_sharing, value)
        return copied
    return value
