"""Run one micro-batch, and weigh its loss so that the plain mean over micro-batches and ranks is the global batch's.

A loss is a sum of terms, each a mean over items of its own, and every term has an ``n / n_mean`` of its own (`window`):

    loss * r  +  sum over terms of  t * (r_t - r),        r of the rest beside the terms (1 for a constant)

which is  sum of t * r_t  where there is no rest, and  loss * r  where all terms count the same items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.loss_calls import LossCall, LossCalls
from hf_accum_fix.accumulation.share import Cut, share_of
from hf_accum_fix.accumulation.window import Items, Weightless, share_of_mean

#: (inputs, the number a loss divides by, or None) -> (loss, outputs).
Run = Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]]


@dataclass(frozen=True)
class MicroBatchLoss:
    """What a micro-batch came to.

    Attributes:
        loss: its share of the global batch's, 0-dim, with gradient.
        outputs: the model's.
        items: n, as its loss calls counted; None: they do not show it, or its terms count items of their own.
    """

    loss: Tensor
    outputs: Any
    items: Tensor | None


def run_micro_batch(
    contract: LossContract,
    inputs: Mapping[str, Any],
    counts: Mapping[Items, Tensor],
    cut: Cut,
    run: Run,
    certificate: Certificate | None,
    *,
    own_loss: bool = False,
    rounded: bool = False,
    smoothed: bool = False,
) -> MicroBatchLoss:
    """Run one micro-batch of a window, and weigh its loss.

    Args:
        contract: how the loss is reduced.
        inputs: of the forward; `Weightless`: it counts nothing.
        counts: n by each of the contract's rules, 0-dim.
        cut: of the global batch.
        run: the forward.
        certificate: takes what the loss calls show; None: nothing is listened to.
        own_loss: as for `share_of`.
        rounded: as for `share_of`.
        smoothed: the loss was made from the logits alone, so that a router's loss is added to it.
    """
    items = counts.get(contract.items) if contract.items is not None else None
    # The mean of the only micro-batch is right, whatever it is over.
    alone = cut.micro_batches * cut.world_size == 1 and contract.reduction is Reduction.MEAN
    share = share_of(
        contract,
        inputs,
        items,
        cut,
        own_loss=own_loss,
        rounded=rounded,
        weighed=certificate is None or items is None or alone,
        counts=counts,
    )
    with LossCalls() if certificate is not None else nullcontext() as calls:
        loss, outputs = run(share.inputs, share.number)
    carried, ratio, seen = None, share.ratio, None
    if ratio is not None or contract.made_of is not None:
        carried = contract.carried(outputs)
        carried = None if carried is None else carried.to(loss.device)
    if carried is not None and smoothed:
        loss = loss + carried
    if certificate is not None and calls is not None and items is not None:
        if contract.made_of is not None and ratio != 0.0:
            number = share.number if contract.by_number else None
            certificate.note_loss(loss if carried is None else loss - carried, calls.seen, number)
        seen = certificate.items(calls.seen, counts)
        if contract.reduction is Reduction.MEAN and not alone:
            ratio = seen / cut.mean
        if not alone and contract.made_of is not None and contract.made_of.has_terms and not certificate.changed:
            terms = _terms(contract, calls.seen, counts, cut, share.number, isinstance(inputs, Weightless))
            return MicroBatchLoss(_weighed(loss, carried, *terms), outputs, None)
    weighed = loss if ratio is None else share_of_mean(loss, ratio, carried)
    return MicroBatchLoss(weighed, outputs, None if alone else seen)


def _terms(
    contract: LossContract,
    calls: Sequence[LossCall],
    counts: Mapping[Items, Tensor],
    cut: Cut,
    number: Tensor | None,
    weightless: bool,
) -> tuple[Tensor | float, list[tuple[Tensor, Tensor | float]]]:
    """The ratio of what stands beside the loss calls, and each call's term and ratio."""
    made_of = contract.made_of
    assert made_of is not None
    nothing = 0.0 if weightless else None
    rest: Tensor | float = 1.0
    if made_of.rest_terms:
        rule = made_of.rest_terms[0]
        rest = counts[rule] / cut.means[rule] if nothing is None else nothing
    terms: list[tuple[Tensor, Tensor | float]] = []
    for call, factor, rules in zip(calls, made_of.factors, made_of.terms, strict=True):
        if not factor:
            continue
        if contract.by_number:
            assert number is not None
            terms.append((call.value / number * factor, 1.0 if nothing is None else nothing))
        else:
            ratio = counts[rules[0]] / cut.means[rules[0]] if nothing is None else nothing
            terms.append((call.mean * factor, ratio))
    return rest, terms


def _weighed(
    loss: Tensor,
    carried: Tensor | None,
    rest: Tensor | float,
    terms: Sequence[tuple[Tensor, Tensor | float]],
) -> Tensor:
    """``loss * rest + sum of term * (ratio - rest)``, in the loss's own precision, at least float32."""
    dtype = torch.promote_types(loss.dtype, torch.float32)

    def cast(ratio: Tensor | float) -> Tensor | float:
        return ratio.to(device=loss.device, dtype=dtype) if isinstance(ratio, Tensor) else ratio

    rest = cast(rest)
    total = loss.to(dtype) * rest
    for term, ratio in (*terms, *([(carried, 1.0)] if carried is not None else [])):
        total = total + term.to(device=loss.device, dtype=dtype) * (cast(ratio) - rest)
    return total
