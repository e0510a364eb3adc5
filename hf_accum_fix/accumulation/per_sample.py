"""The mean of sample means: every sample has the same weight, however many targets it has.

    L = 1/N * sum over samples of  (1/T_s * sum over the T_s targets of sample s of l),     N samples with a target

The cross entropy is read from the loss's graph, which has saved the log-probabilities, and summed again with weight
1/T_s for each target; the items are the samples. In a packed row a sample begins where ``position_ids`` are 0, so
packed, padded and length-balanced micro-batches give the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.loss_graph import ignored_index, read
from hf_accum_fix.errors import ContractError, UnsupportedSetupError


def by_sample(found: LossContract) -> LossContract:
    """The contract of the mean of sample means, from the observed one.

    Raises:
        UnsupportedSetupError: if the loss is not one unweighted cross entropy over targets that a rule counts.
    """
    if found.reason == NO_TARGET_SEEN:
        return found
    items = found.items
    one = len(found.terms) == 1 and found.terms[0].shape[0].startswith("NllLoss") and bool(found.terms[0].rules)
    if not one or items is None or not items.keys or items.entry is not None or found.terms[0].ratio != 1.0:
        raise UnsupportedSetupError(
            f"got per_sample=True and a loss that {found} ({found.reason}); expected one torch cross entropy over "
            "labels; omit per_sample, or use a head without a fused or compiled loss"
        )
    items = replace(items, per_sample=True)
    return replace(found, items=items, terms=(replace(found.terms[0], rules={items: 1.0}),))


def sum_of_samples(loss: Tensor, rule: Items, inputs: Mapping[str, Any]) -> Tensor:
    """The sum of the sample means of a micro-batch, 0-dim, with gradient; ``rule`` counts its samples.

    Raises:
        ContractError: if the loss is not one cross entropy over the targets in the inputs.
    """
    terms = read(loss)
    leaf: Any = terms[0].leaf if len(terms) == 1 else None
    if not type(leaf).__name__.startswith("NllLoss") or leaf._saved_weight is not None:
        raise ContractError(
            f"got a loss with the terms {[term.name for term in terms]}; expected one torch cross entropy over labels, "
            "without class weights; omit per_sample"
        )
    target = leaf._saved_target
    used = target != ignored_index(terms[0])
    place = torch.where(used, target, 0)
    losses = -leaf._saved_self.gather(1, place.unsqueeze(1)).squeeze(1)
    weights = _aligned(rule, inputs).get(target.numel())
    if weights is None:
        raise ContractError(
            f"got a cross entropy over {target.numel()} targets; expected the {rule} of its micro-batch; omit "
            "per_sample"
        )
    total: Tensor = (losses * (weights.to(losses.device).view_as(target) * used)).sum().to(loss.dtype)
    for factor in terms[0].factors[:-1] if terms[0].divides else terms[0].factors:
        total = total / factor.value if factor.divides else total * factor.value
    return total


def _aligned(rule: Items, inputs: Mapping[str, Any]) -> dict[int, Tensor]:
    """The weights of targets, flat, by the possible numbers of targets of a loss call."""
    weights = rule.sample_weights(inputs)
    if not rule.shift or weights.ndim < 2:
        return {weights.numel(): weights.flatten()}
    # A head drops the first position, or shifts the labels and ignores the last.
    dropped = weights[..., 1:]
    moved = weights.roll(-1, dims=-1)
    moved[..., -1] = 0
    return {dropped.numel(): dropped.flatten(), moved.numel(): moved.flatten()}
