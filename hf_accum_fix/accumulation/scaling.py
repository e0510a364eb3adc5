"""Scale the loss of one micro-batch by its rule, so that plain averaging gives the global batch's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.items import Items, ZeroWeightBatch, mean_item_count, scale_mean
from hf_accum_fix.errors import ContractError


@dataclass(frozen=True)
class Normalizer:
    """The denominators of all micro-batches in one rank's window.

    Attributes:
        mean: n_mean, 0-dim.
        number: num_items_in_batch for a loss that cannot do without: N / W, rounded up; a loss that divides by it is
            multiplied by number / n_mean.
        micro_batches: G, of this rank's window; 1 where it has none.
        is_corrected: the gradient is corrected at the end of the window; else a mean is weighted by its rule's items.
        engine_divisor: the number that the engine divides a loss by.
        means: n_mean times `remaining_divisor`: by rule, and by the place of its `TermSpec` for a term that forwards
            have counted.
    """

    mean: Tensor
    number: Tensor
    micro_batches: int
    world_size: int
    is_corrected: bool = True
    engine_divisor: int = 1
    means: Mapping[Items | int, Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the global batch."""
        return self.micro_batches * self.world_size == 1

    @classmethod
    def of(
        cls,
        contract: LossContract,
        totals: Sequence[Tensor],
        micro_batches: int,
        world_size: int,
        *,
        is_corrected: bool = True,
        engine_divisor: int = 1,
    ) -> Normalizer:
        """For a global batch of N items: ``totals`` by each of the contract's rules, its first the one in use."""
        steps = max(micro_batches, 1)
        means = [mean_item_count(each, steps, world_size) for each in totals]
        left = steps / engine_divisor
        by_rule: dict[Items | int, Tensor] = {
            rule: contract.as_number(mean if left == 1 else mean * left)
            for rule, mean in zip(contract.rules, means, strict=len(means) > 1)
        }
        number = (means[0] * steps).ceil().long() if contract.hands_number else means[0]
        return cls(means[0], number, steps, world_size, is_corrected, engine_divisor, by_rule)

    def counted(self, contract: LossContract, totals: Mapping[int, Tensor]) -> Normalizer:
        """With ``totals``, N of some terms by the place of their `TermSpec`, which may be sums of any weights."""
        parts = self.engine_divisor * self.world_size
        means = dict(self.means)
        for place, total in totals.items():
            means[place] = contract.as_number(torch.where(total == 0, 1.0, total) / parts)
        return replace(self, means=means)

    @property
    def remaining_divisor(self) -> float:
        """The part of G that the engine does not divide a loss by."""
        return self.micro_batches / self.engine_divisor


@dataclass(frozen=True)
class LossScale:
    """How one micro-batch is run, so that the plain mean over micro-batches and ranks is the global batch's loss.

    Attributes:
        inputs: of the forward.
        number: num_items_in_batch, 0-dim; None: not passed.
        ratio: factor of the loss; None: 1.
    """

    inputs: Mapping[str, Any]
    number: Tensor | None
    ratio: Tensor | float | None

    def apply(self, loss: Tensor, router: Tensor | None = None) -> Tensor:
        """The scaled loss, 0-dim; ``router`` as in `scale_mean`."""
        return loss if self.ratio is None else scale_mean(loss, self.ratio, router)


def scale_of(
    contract: LossContract,
    inputs: Mapping[str, Any],
    items: Tensor | None,
    normalizer: Normalizer,
    *,
    own_loss: bool = False,
) -> LossScale:
    """How to run a micro-batch of n ``items``; the scaled loss of a `ZeroWeightBatch` is zero, but for router terms.

    ``own_loss``: a compute_loss_func, which may return a constant without a graph where it finds no target, so it gets
    one, and n_mean as the number.
    """
    if isinstance(inputs, ZeroWeightBatch):
        counted = scale_of(contract, dict(inputs), items, normalizer, own_loss=own_loss)
        return replace(counted, ratio=0.0)
    mean, number = normalizer.mean, normalizer.number
    if contract.by_number and not own_loss:
        return LossScale(inputs, number, number / mean)
    if contract.reduction is Reduction.PLAIN:
        return LossScale(inputs, number if contract.items else None, None)
    if contract.reduction is Reduction.SUM:
        return LossScale(inputs, number, normalizer.micro_batches * normalizer.world_size)
    assert contract.items is not None
    items = (contract.items.count(inputs) if items is None else items).to(mean.device)
    ratio = (items > 0) * 1.0 if contract.by_number else contract.items.divisor(items) / mean
    return LossScale(contract.items.with_target(inputs, items), contract.as_number(mean), ratio)


def run_by_rule(
    contract: LossContract,
    inputs: Mapping[str, Any],
    items: Tensor | None,
    normalizer: Normalizer,
    run: Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]],
    *,
    own_loss: bool = False,
) -> tuple[Tensor, Any]:
    """Run a micro-batch whose loss is not read (a contract given, compiled code), and scale the loss by its rule.

    ``run`` is its forward, (inputs, number or None) -> (loss, outputs); the other arguments are those of `scale_of`.
    """
    scale = scale_of(contract, inputs, items, normalizer, own_loss=own_loss)
    loss, outputs = run(scale.inputs, scale.number)
    router = contract.weighted_router_loss(outputs) if scale.ratio is not None else None
    return scale.apply(loss, None if router is None else router.to(loss.device)), outputs


def loss_among(outputs: Any, inputs: Mapping[str, Any], model: object) -> Tensor:
    """The loss that a model returned: its output ``loss``, or the first.

    Raises:
        ContractError: if its outputs are named and none is the loss.
    """
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise ContractError(
            f"{type(model).__name__}: got outputs {sorted(outputs)} without a loss, from the inputs {sorted(inputs)}; "
            "expected a loss; add the targets to the inputs, or pass compute_loss_func"
        )
    loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss
