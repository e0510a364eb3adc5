"""The Trainer's loss: in training, of a single batch, by the base or by a custom ``compute_loss``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix.accumulation.contract import router_loss
from hf_accum_fix.accumulation.declared import has_parameter, router_coefficients
from hf_accum_fix.accumulation.per_sample import sum_of_samples
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.scaling import loss_among
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.overrides.live import bare_model, data_ranks, hands_number, loss_func
from hf_accum_fix.overrides.session import SESSION, Session
from hf_accum_fix.upstream.protocols import TrainerLike

#: One forward: (inputs, number, number for a custom ``compute_loss``) -> (loss, outputs or None).
Forward = Callable[[Mapping[str, Any], Tensor | None, Tensor | None], tuple[Tensor, Any]]


def as_in_training(session: Session, module: nn.Module, compute_loss: Callable[..., Any] | None) -> Forward:
    """The forward of a micro-batch in training; without outputs if the loss is custom."""
    trainer, by_itself = session.trainer, session.own_step is not None
    takes_number = compute_loss is not None and hands_number(compute_loss)

    def forward(inputs: Mapping[str, Any], number: Tensor | None, own: Tensor | None) -> tuple[Tensor, Any]:
        def base(model: nn.Module, inputs: Mapping[str, Any], given: Any) -> tuple[Tensor, Any]:
            # A ``compute_loss`` that passes on no number gets none.
            asks = given is not None or loss_func(trainer) is not None
            return base_loss(session, model, inputs, number if asks else None)

        # A custom training_step prepares them itself.
        inputs = inputs if by_itself else trainer._prepare_inputs(inputs)
        with nullcontext() if by_itself else trainer.compute_loss_context_manager():
            if compute_loss is None:
                return base_loss(session, module, inputs, number)
            with overridden(session, "base_loss", base):
                result = compute_loss(module, inputs, **({"num_items_in_batch": own} if takes_number else {}))
        return (result[0] if isinstance(result, tuple) else result), None

    return forward


def base_loss(
    session: Session, model: nn.Module, inputs: Mapping[str, Any], number: Tensor | None, *, smooth: bool = True
) -> tuple[Tensor, Any]:
    """The base Trainer's loss, before any release's scaling.

    Source: ``Trainer.compute_loss`` in all releases: a model that accepts the number gets it, ``compute_loss_func``
    computes its own loss, and the label smoother hides the labels from the model.
    """
    trainer, given, inputs, labels = session.trainer, inputs, dict(inputs), None
    func, smoother = loss_func(trainer), trainer.label_smoother if smooth else None
    if func is not None or smoother is not None:
        labels = inputs.pop("labels", None)
    if session.passes_number and number is not None:
        inputs["num_items_in_batch"] = number
    with own_counts(given):
        outputs = model(**inputs)
        if (past := getattr(trainer.args, "past_index", -1)) >= 0:
            vars(trainer)["_past"] = outputs[past]
        if func is not None:
            return func(outputs, labels, num_items_in_batch=number), outputs
    if smoother is not None and labels is not None:
        loss: Tensor = smoother(outputs, labels, shift_labels=bool(session.shift))
        # The smoothed loss uses the logits alone.
        for name, coefficient in zip(("aux_loss", "z_loss"), router_coefficients(bare_model(trainer)), strict=True):
            if coefficient and (router := router_loss(outputs, name)) is not None:
                loss = loss + coefficient * router.to(loss.device)
        return loss, outputs
    return loss_among(outputs, inputs, model), outputs


def loss_alone(trainer: TrainerLike, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The loss of a batch that is not part of a larger one, and the model's outputs; call `settle` first.

    It is the mean over the batch's own items (or the sum), by the head, which gets no number, or by a custom
    ``compute_loss``; a ``compute_loss_func`` gets the batch's item count.
    """
    session: Session = trainer.__dict__[SESSION]
    assert session.contract is not None
    inputs = inputs if session.own_step is not None and model.training else trainer._prepare_inputs(inputs)
    rule = session.contract.items
    by_sample = rule is not None and rule.per_sample
    with (
        torch.enable_grad() if by_sample else nullcontext(),
        trainer.accelerator.autocast(),
        trainer.compute_loss_context_manager(),
    ):
        loss, outputs = _loss_alone(session, model, inputs)
        if rule is not None and by_sample:
            loss = sum_of_samples(loss, rule, inputs) / rule.count(inputs)
    return loss if torch.is_grad_enabled() or not by_sample else loss.detach(), outputs


def _loss_alone(session: Session, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    trainer, contract = session.trainer, session.contract
    assert contract is not None
    compute_loss = training_loss_of(session) if model.training else compute_loss_of(trainer)
    count = None if contract.items is None else contract.items.count
    if compute_loss is not None:
        own: dict[str, Any] = {}
        if contract.by_number and count is not None and hands_number(compute_loss):
            # It may need one; if it multiplies by W, the number is W times this count.
            own["num_items_in_batch"] = count(inputs) * (data_ranks(trainer) if contract.takes_world_size else 1)
        return compute_loss(model, inputs, return_outputs=True, **own)  # type: ignore[no-any-return]
    counted = loss_func(trainer) is not None and count is not None
    return base_loss(session, model, inputs, contract.as_number(count(inputs)) if counted and count else None)


def training_loss_of(session: Session) -> Callable[..., Any] | None:
    """The custom loss that a trainer trains; None: it is the base's.

    With a ``training_step`` that never calls the base's, it is the loss that this passes to ``accelerator.backward``.
    """
    trainer, step = session.trainer, session.own_step
    if step is None:
        return compute_loss_of(trainer)
    original = trainer.compute_loss

    def compute_loss(
        model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> tuple[Tensor, Any]:
        passed: list[Tensor] = []
        caught: list[Exception] = []
        outputs: Any = None

        def kept(*args: Any, **kwargs: Any) -> Any:
            nonlocal outputs
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                # The step may catch it.
                caught.append(error)
                raise
            outputs = result[1] if isinstance(result, tuple) else outputs
            return result

        given = {"num_items_in_batch": num_items_in_batch} if has_parameter(step, "num_items_in_batch") else {}
        with (
            overridden(trainer, "compute_loss", kept),
            overridden(trainer.accelerator, "backward", lambda loss, **_: passed.append(loss)),
        ):
            step(model, inputs, **given)
        if caught:
            raise caught[0]
        if not passed:
            raise RuntimeError(f"{type(trainer).__name__}.training_step passed no loss to accelerator.backward")
        return passed[0], outputs

    return compute_loss


def compute_loss_of(trainer: TrainerLike) -> Callable[..., Any] | None:
    """A trainer's custom ``compute_loss``; None: it is the base's."""
    if "compute_loss" in vars(trainer):
        return trainer.compute_loss
    ours = ("hf_accum_fix.trainer", Trainer.__module__)
    defining = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return None if defining.__module__ in ours else trainer.compute_loss
