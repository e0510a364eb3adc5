"""Scale a loss that is not read (a contract given, compiled code) by its rule: plain averaging is then exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_accum_fix.counting.items import Items, ZeroWeightBatch, scale_mean
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import Reduction
from hf_accum_fix.weighing.part import Part


def scale_of(
    part: Part, inputs: Mapping[str, Any], items: Mapping[Items | int, Tensor] | None, *, own_loss: bool = False
) -> tuple[Mapping[str, Any], Tensor | None, Tensor | float | None]:
    """How to run a micro-batch.

    Args:
        part: of the window, that has its loss.
        inputs: the micro-batch; the scaled loss of a `ZeroWeightBatch` is zero, but for router terms.
        items: n by each rule, 0-dim; None: to be counted.
        own_loss: a compute_loss_func, which gets n_mean as the number, and a target where there is none.

    Returns:
        The inputs of its forward; num_items_in_batch, 0-dim (None: not passed); the factor of its loss (None: 1).
    """
    contract, mean, number = part.contract, part.mean, part.number
    if isinstance(inputs, ZeroWeightBatch):
        return *scale_of(part, dict(inputs), items, own_loss=own_loss)[:2], 0.0
    if contract.by_number and not own_loss:
        return inputs, number, number / mean
    if contract.reduction in (Reduction.PLAIN, Reduction.WINDOW):
        return inputs, number if contract.items else None, None
    if contract.reduction is Reduction.SUM:
        return inputs, number, part.micro_batches * part.world_size
    assert contract.items is not None
    n = (contract.items.count(inputs) if items is None else items[contract.items]).to(part.device)
    # Heads with lists of targets divide by at least 1.
    ratio = (n > 0) * 1.0 if contract.by_number else (n if contract.items.entry is None else n.clamp(min=1.0)) / mean
    return contract.items.with_target(inputs, n), contract.as_number(mean), ratio


def run_by_rule(
    part: Part,
    inputs: Mapping[str, Any],
    items: Mapping[Items | int, Tensor] | None,
    run: Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]],
    *,
    own_loss: bool = False,
) -> tuple[Tensor, Any]:
    """Run a micro-batch, and scale its loss, which it returns with the outputs.

    ``run`` is its forward, (inputs, number or None) -> (loss, outputs); the other arguments are those of `scale_of`.
    """
    inputs, number, ratio = scale_of(part, inputs, items, own_loss=own_loss)
    loss, outputs = run(inputs, number)
    if ratio is None:
        return loss, outputs
    router = part.contract.weighted_router_loss(outputs)
    return scale_mean(loss, ratio, None if router is None else router.to(loss.device)), outputs


def loss_of_outputs(outputs: Any, inputs: Mapping[str, Any], model: object) -> Tensor:
    """The loss that a model returned: alone, as its output ``loss``, or the first.

    Raises:
        ContractError: if its outputs are named and none is the loss.
    """
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise ContractError(
            f"{type(model).__name__}: got outputs {sorted(outputs)} without a loss, from the inputs {sorted(inputs)}; "
            "expected a loss; add the targets to the inputs, or pass compute_loss_func"
        )
    loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss
