"""``eval_loss`` as the mean over the items of the evaluation set, with ``eval_loss=True``.

The Trainer weights the mean of each batch by its samples, so the number depends on the eval batch size. Here each
batch's mean is weighted by its items, over all ranks. Samples that only fill up the ranks' last batches do not count,
nor does a router loss, which has no mean over items. Releases that pass num_items_in_batch to the evaluated model
multiply its loss by the ranks, whether or not it divides by that number (5.23.0 reports W times the loss of a BERT
classifier); here the model gets no number, and returns its own mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.counting.items import Items, as_weight, count_dtype, has_rows, sample_count
from hf_accum_fix.data.duplicates import LastRound
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.session import SESSION, Args, Kwargs, Original, Session, session_of
from hf_accum_fix.overrides.trainer_facts import compute_loss_of
from hf_accum_fix.router.router_loss import weighted_router_loss
from hf_accum_fix.trace.preserve import overridden


def evaluation_loop(wrapped: Original, trainer: Any, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Run the original loop, and replace its loss by the mean over items.

    The contract comes from training; before any training the loss is observed on the first batch.
    """
    original_step = trainer.prediction_step
    if not options.eval_loss or not enabled() or getattr(original_step, "__module__", "") == __name__:
        # The inner call of a class that is also patched.
        return wrapped(*args, **kwargs)
    session, device = session_of(trainer, options), trainer.args.device
    sums = torch.zeros(2, dtype=count_dtype(device), device=device)
    refused: list[str] = []

    def prediction_step(model: Any, inputs: Mapping[str, Any], *rest: Any, **step_kwargs: Any) -> Any:
        contract, reason = _contract_of(session, inputs)
        if reason:
            refused.append(reason)
            return original_step(model, inputs, *rest, **step_kwargs)
        rule, own_func, compute_loss = contract.items, session.source.func is not None, trainer.compute_loss
        assert rule is not None
        # A head without a number returns the mean over its own items.
        number = {"num_items_in_batch": rule.count(inputs, device)} if own_func else {}

        def with_number(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            return compute_loss(*args[:3], **kwargs, **number)

        with overridden(trainer, "compute_loss", with_number):
            # The loss may remove the labels from its inputs.
            result = original_step(model, dict(inputs), *rest, **step_kwargs)
        loss, counted = result[0], _without_filling(trainer, rule, inputs)
        if own_func or counted is not None or contract.has_router_loss:
            with torch.no_grad():
                loss, outputs = loss_alone(trainer, model, counted or dict(inputs))
            router = weighted_router_loss(contract, outputs)
            loss = loss if router is None else loss - router.to(loss.device)
        if loss is None:
            refused.append("prediction_step returned no loss")
        elif counted is None or counted:
            items = rule.count(inputs if counted is None else counted, device)
            sums.add_(torch.stack([torch.where(items > 0, loss.to(sums) * items, torch.zeros_like(items)), items]))
        return result

    with overridden(trainer, "prediction_step", prediction_step):
        output = wrapped(*args, **kwargs)
    total, items = session.summed(sums) if session.world.size > 1 else sums
    # The fifth argument in every release.
    name = f"{kwargs.get('metric_key_prefix', args[4] if len(args) > 4 else 'eval')}_loss"
    if refused:
        session.warn_once("eval_loss", f"{name} stays the Trainer's average: {refused[0]}")
    elif output.metrics is not None and name in output.metrics and bool(items > 0):
        output.metrics[name] = float(total / items)
    return output


def _contract_of(session: Session, inputs: Mapping[str, Any]) -> tuple[LossContract, str]:
    """How the loss of a batch is reduced, and why it has no mean over items; empty: it has."""
    contract = session.contract
    if contract is None or session.world.size == 1:
        contract = session.settled([inputs])
    if session.labels_of(inputs) != session.state.loss.labels:
        return contract, "its batches have other labels than those the loss was observed on"
    if contract.groups > 1 and (len(contract.rules) > 1 or contract.needs_forwards):
        return contract, "the loss has several terms, each a mean over its own items"
    has_mean = contract.reduction in (Reduction.NUMBER, Reduction.MEAN)
    return contract, "" if has_mean else f"the loss {contract.reduction.value} ({contract.reason})"


def _without_filling(trainer: Any, items: Items, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """A batch with only the targets of samples that do not fill up the ranks' last one; None: no rank has others."""
    state, rows, ranks = trainer.accelerator.gradient_state, sample_count(inputs), trainer.args.world_size
    last = LastRound(int(state.remainder), rows, ranks, trainer.args.process_index)
    if ranks == 1 or not state.end_of_dataloader or last.samples <= 0 or last.repeated <= 0:
        return None
    if not last.own:
        return {}
    target = inputs.get(items.keys[0]) if items.keys else None
    if isinstance(target, Tensor) and items.ignore_index is not None and not target.is_floating_point():
        filling = torch.arange(last.own, rows, device=target.device)
        return {**inputs, **{key: inputs[key].index_fill(0, filling, items.ignore_index) for key in items.keys}}
    return {key: each[: last.own] if has_rows(each) and len(each) == rows else each for key, each in inputs.items()}


def loss_alone(trainer: Any, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The loss of a batch that is not part of a larger one, and the model's outputs; call `settle` first.

    It is the mean over the batch's own items (or the sum), by the head, which gets no number, or by a custom
    ``compute_loss`` or a ``compute_loss_func``, which get the batch's item count.
    """
    session: Session = vars(trainer)[SESSION]
    contract, number, custom = session.contract, None, compute_loss_of(trainer)
    assert contract is not None
    if contract.items is not None and (session.source.func is not None or custom is not None):
        times = session.world.data_ranks if contract.takes_world_size else 1
        number = as_weight(contract.items.count(inputs, session.world.device), contract.dtype) * times
    with trainer.accelerator.autocast():
        return session.loss_in_training(model, inputs, number, **({} if custom is None else {"return_outputs": True}))
