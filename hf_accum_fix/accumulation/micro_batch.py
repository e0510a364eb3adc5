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
from hf_accum_fix.accumulation.per_sample import weighed_by_sample
from hf_accum_fix.accumulation.share import Cut, Share, share_of
from hf_accum_fix.accumulation.window import Items, share_of_mean

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
    share = share_of(
        contract,
        inputs,
        items,
        cut,
        own_loss=own_loss,
        rounded=rounded,
        weighed=certificate is None or items is None or cut.is_whole,
        counts=counts,
    )
    with (
        weighed_by_sample(contract.items, share.inputs),
        LossCalls(graded=contract.graded) if certificate is not None else nullcontext() as calls,
    ):
        loss, outputs = run(share.inputs, share.number)
    carried = None
    if share.ratio is not None or certificate is not None:
        carried = contract.carried(outputs)
    if carried is not None:
        carried = carried.to(loss.device)
        loss = loss + carried if smoothed else loss
    seen = None if calls is None or items is None else calls.seen
    weighed, shown = weigh(contract, loss, seen, counts, cut, share, certificate, carried)
    return MicroBatchLoss(weighed, outputs, shown)


def weigh(
    contract: LossContract,
    loss: Tensor,
    calls: Sequence[LossCall] | None,
    counts: Mapping[Items, Tensor],
    cut: Cut,
    share: Share,
    certificate: Certificate | None = None,
    carried: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A micro-batch's share of the global batch's loss, and its items as its loss calls counted.

    Args:
        contract: how the loss is reduced.
        loss: 0-dim, as it was computed.
        calls: of its forward; None: they were not listened to.
        counts: n by each of the contract's rules, 0-dim.
        cut: of the global batch.
        share: as the micro-batch was run.
        certificate: takes what the loss calls show.
        carried: the router's loss inside it, as in `share_of_mean`.
    """
    if certificate is None or calls is None:
        return share.of(loss, carried), None
    made_of = contract.made_of
    if made_of is not None and not share.is_weightless:
        number = share.number if contract.by_number else None
        certificate.note_loss(loss if carried is None else loss - carried, calls, number)
    dummies = not contract.by_number or share.ratio is not None
    seen = certificate.items(calls, counts, dummies=dummies)
    # The mean of the only micro-batch is right, whatever it is over.
    if contract.reduction is Reduction.MEAN and cut.is_whole:
        return share.of(loss, carried), None
    if made_of is not None and made_of.has_terms and not certificate.changed:
        rest, terms = _terms(contract, calls, counts, cut, share)
        return weighed_terms(loss, rest, terms if carried is None else [*terms, (carried, 1.0)]), None
    if contract.reduction is Reduction.MEAN:
        assert contract.items is not None
        # What is not corrected later is weighed by the rule that N was counted by, or its scale would be another.
        items = seen if cut.is_corrected else counts[contract.items]
        if not cut.is_corrected:
            certificate.note_weight(seen, items)
        weight = items if share.is_weightless else contract.items.divisor(items, contract.least_rows)
        return share_of_mean(loss, weight / cut.mean, carried), seen
    return share.of(loss, carried), seen


def _terms(
    contract: LossContract, calls: Sequence[LossCall], counts: Mapping[Items, Tensor], cut: Cut, share: Share
) -> tuple[Tensor | float, list[tuple[Tensor, Tensor | float]]]:
    """The ratio of what stands beside the loss calls, and each call's term and ratio."""
    made_of = contract.made_of
    assert made_of is not None

    def ratio(rules: tuple[Items, ...]) -> Tensor | float:
        rule = rules[0]
        return 0.0 if share.is_weightless else rule.divisor(counts[rule], contract.least_rows) / cut.means[rule]

    terms: list[tuple[Tensor, Tensor | float]] = []
    for call, factor, rules in zip(calls, made_of.factors, made_of.terms, strict=True):
        if factor and contract.by_number:
            assert share.number is not None
            terms.append((call.value / share.number * factor, 1.0 if share.ratio is None else share.ratio))
        elif factor:
            terms.append((call.mean * factor, ratio(rules)))
    return ratio(made_of.rest_terms) if made_of.rest_terms else 1.0, terms


def weighed_terms(loss: Tensor, rest: Tensor | float, terms: Sequence[tuple[Tensor, Tensor | float]]) -> Tensor:
    """``loss * rest + sum of term * (ratio - rest)``, in the loss's own precision, at least float32.

    Args:
        loss: 0-dim.
        rest: the ratio of what stands beside the terms.
        terms: each 0-dim, inside the loss, and its ratio.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)

    def cast(ratio: Tensor | float) -> Tensor | float:
        return ratio.to(device=loss.device, dtype=dtype) if isinstance(ratio, Tensor) else ratio

    rest = cast(rest)
    total = loss.to(dtype) * rest
    for term, ratio in terms:
        total = total + term.to(device=loss.device, dtype=dtype) * (cast(ratio) - rest)
    return total
