"""The mean of sample means: every sample weighs as much as another, however many targets it has.

    L = 1/N * sum over samples of  (1/T_s * sum over the T_s targets of sample s of l),     N samples with a target

In a loss call over tokens each target's loss is multiplied by 1/T_s, and samples are the items. A packed row holds the
samples that its ``position_ids`` start anew, so packed, padded and dealt micro-batches give the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract, Reduction
from hf_accum_fix.accumulation.loss_calls import weighing
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import UnsupportedSetupError


def by_sample(found: LossContract) -> LossContract:
    """The contract of the mean of sample means, from what was observed of a loss.

    Raises:
        UnsupportedSetupError: if the loss is not one loss call over targets that a rule counts.
    """
    if found.reason == NO_TARGET_SEEN:
        return found
    made_of, items = found.made_of, found.items
    one_call = made_of is not None and made_of.counted and not made_of.has_terms and made_of.per_item == 1.0
    calls = 0 if made_of is None else sum(factor != 0.0 for factor in made_of.factors)
    by_target = items is not None and bool(items.keys) and items.entry is None
    if not one_call or calls != 1 or not by_target or found.reduction not in (Reduction.NUMBER, Reduction.MEAN):
        raise UnsupportedSetupError(
            f"got per_sample=True and a loss that {found} ({found.reason}); expected one cross entropy of torch over "
            "labels, whose targets can be weighed by sample: leave per_sample out, or take a head without a fused or "
            "compiled loss"
        )
    assert items is not None
    items = replace(items, per_sample=True)
    return replace(found, items=items, alternatives=(items,))


@contextmanager
def weighed_by_sample(rule: Items | None, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Around a forward: where the rule says so, its cross entropy weighs a target by 1 / the targets of its sample."""
    if rule is None or not rule.per_sample:
        yield
        return
    with weighing(_aligned(rule, inputs)):
        yield


def _aligned(rule: Items, inputs: Mapping[str, Any]) -> dict[int, Tensor]:
    """The weights of targets, flat, by how many targets a loss call may be handed."""
    weights = rule.sample_weights(inputs)
    if not rule.shift or weights.ndim < 2:
        return {weights.numel(): weights.flatten()}
    # A head drops the first position, or moves the labels and ignores the last.
    dropped = weights[..., 1:]
    moved = weights.roll(-1, dims=-1)
    moved[..., -1] = 0
    return {dropped.numel(): dropped.flatten(), moved.numel(): moved.flatten()}
