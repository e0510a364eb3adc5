"""The contract of a loop's loss: given by hand, or observed through the model, on every rank alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix import counting
from hf_accum_fix.accumulation.conclude import Setting
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract
from hf_accum_fix.accumulation.declared import (
    inside_ddp,
    is_compiled,
    products_are_rounded,
    requires_number,
    wants_number,
)
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.share import loss_among
from hf_accum_fix.accumulation.window import count_dtype
from hf_accum_fix.engines.engine import reduced_in
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.errors import ContractError
from hf_accum_fix.loop.run import LoopRun
from hf_accum_fix.router.router_loss import Convention

logger = logging.getLogger("hf_accum_fix")

Batch = Mapping[str, Any]


def settle(run: LoopRun, model: nn.Module | None, window: Sequence[Batch]) -> LossContract:
    """The contract as it is now; observed where it has not been or is due again.

    Args:
        run: the loop.
        model: as it is trained; None: the loss is not the model's, or this rank has no micro-batch.
        window: the micro-batches of this rank.

    Raises:
        ContractError: if the contract given does not fit the model, or none was given for a loss of one's own.
    """
    if model is not None:
        run.head = type(run.bare(model)).__name__
    if run.options.contract is not None:
        _check_given(run, model, run.options.contract)
        return run.options.contract
    if model is None and window and not run.is_settled:
        raise ContractError(
            "got a loss of your own, which cannot be observed; expected how it is reduced and what it counts; give "
            "accumulation_windows(..., contract=LossContract(Reduction.MEAN, Items(('labels',), shift=True)))"
        )

    def seen(batches: Sequence[Batch]) -> counting.Seen:
        try:
            return (None if model is None or not batches else _observe(run, model, batches)), None
        except Exception as error:
            return None, error

    was_settled, before = run.is_settled, run.contract
    contract = counting.settle(
        run,
        run,
        window,
        seen,
        per_sample=run.options.per_sample,
        matters=run.steps * run.world_size > 1,
    )
    if run.world_size == 1:
        # A loop has no log to read with; on several ranks this takes one more collective.
        run.closing.corrects = contract.is_read
    if model is not None and (not was_settled or contract is not before):
        if run.is_settled:
            _announce(run, model, len(window), contract)
        if run.is_settled or contract.reason != NO_TARGET_SEEN:
            for kind, words in counting.remarks(run.head, contract, run.attempts):
                run.warn_once(kind, words)
    return contract


def _check_given(run: LoopRun, model: nn.Module | None, given: LossContract) -> None:
    """Hold a contract given by hand against what can be known without a forward."""
    if model is None:
        return
    run.passes_number = given.by_number
    if given.by_number and not wants_number(run.bare(model)):
        raise ContractError(
            f"the contract given says that the loss {given.reduction.words}, but {run.head} does not take "
            "num_items_in_batch; give Reduction.MEAN"
        )


def _observe(run: LoopRun, model: nn.Module, window: Sequence[Batch]) -> LossContract:
    module = inside_ddp(model) or model
    run.passes_number = wants_number(run.bare(model))
    required = run.passes_number and requires_number(run.bare(model))
    setting = Setting(
        hands_number=required,
        only_shows=run.passes_number and not required,
        steps=run.steps,
        world_size=run.world_size,
        rounded=products_are_rounded(module) or getattr(run.accelerator, "mixed_precision", "no") != "no",
    )
    found = observe(
        lambda inputs, number: _forward(run, model, inputs, number)[0],
        list(window),
        module,
        setting,
        device=run.device,
        head=run.bare(model),
    )
    return found.by_rule() if is_compiled(module) else found


def _forward(run: LoopRun, model: nn.Module, inputs: Batch, number: Tensor | None) -> tuple[Tensor, Any]:
    """The loss of a batch by the model inside of DistributedDataParallel, and its outputs."""
    inputs = {key: value.to(run.device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    outputs = run_model(run, inside_ddp(model) or model, inputs, number)
    return loss_among(outputs, inputs, model), outputs


def run_model(run: LoopRun, model: nn.Module, inputs: Batch, number: Tensor | None) -> Any:
    """The outputs of a forward, which is handed the number where it takes one."""
    handed = {"num_items_in_batch": number} if run.passes_number and number is not None else {}
    with own_counts(inputs):
        return model(**{**inputs, **handed})


def routing_of(
    run: LoopRun, model: nn.Module | None, window: Sequence[Batch], contract: LossContract
) -> tuple[Tensor | None, Exception | None]:
    """This rank's numbers of a window's routing, and its trouble; None where the router's loss stays a mean."""
    if run.router.convention is Convention.MEAN:
        return None, None
    if model is None and window:
        raise ContractError(
            f"router_loss={run.router.convention.value!r} needs the model's own loss, window.loss(model, batch); of a "
            "loss of your own only the mean over micro-batches is taken"
        )

    def forward(inputs: Batch) -> Tensor:
        assert model is not None
        number = contract.as_number(torch.ones((), dtype=count_dtype(run.device), device=run.device))
        return _forward(run, model, inputs, number)[0]

    return counting.count_routing(run, contract, run.router, forward, window, model)


def _announce(run: LoopRun, model: nn.Module, steps: int, contract: LossContract) -> None:
    """Once: what was observed, in the log and for report()."""
    counting.record(
        run,
        run,
        contract,
        steps,
        trainer="accumulation_windows",
        reduced_in=reduced_in(run.accelerator, model) if run.world_size > 1 else [],
        stock_gradient_factor=None,
        **run.repeated,
    )
    logger.info("%s: the loss %s; G=%d, W=%d.", run.head, contract, steps, run.world_size)
