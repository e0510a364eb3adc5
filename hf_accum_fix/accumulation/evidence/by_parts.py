"""A loss that does not move with the number handed in: a mean over something, a sum, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Coupling, LossContract, Reduction
from hf_accum_fix.accumulation.evidence.forwards import Evidence, call_counts, weighed_router
from hf_accum_fix.accumulation.evidence.router_terms import router_terms
from hf_accum_fix.accumulation.evidence.rules import (
    composes,
    count_by,
    is_close,
    rules_counting_as,
    ways_of_counting,
    weighs_up,
)
from hf_accum_fix.accumulation.evidence.terms import counted_at_the_call, sum_of_means, sum_of_terms
from hf_accum_fix.accumulation.window import Items


def coupling_of(evidence: Evidence) -> Coupling:
    """What another cut does to the plain mean of a loss over micro-batches."""
    if not (evidence.in_parts and evidence.sliced) or evidence.whole.random:
        return Coupling.UNKNOWN
    losses = [each.loss for each in evidence.seen]
    if composes(Items(), evidence.batches, losses, evidence.tolerance):
        return Coupling.SAMPLES
    rules = list(ways_of_counting(evidence.batches[0], evidence.whole.calls))
    if any(composes(rule, evidence.batches, losses, evidence.tolerance) for rule in rules):
        return Coupling.ITEMS
    counted = call_counts(evidence, [1.0 if call.mean else 0.0 for call in evidence.whole.calls])
    if counted is not None and weighs_up(losses, counted, evidence.tolerance):
        return Coupling.ITEMS
    return Coupling.COUPLED


def reduced_by_parts(evidence: Evidence) -> LossContract:
    """The loss does not move with the number: a mean over something, a sum, or neither."""
    inputs, whole, configured = evidence.batches[0], evidence.whole, evidence.configured
    rules = list(ways_of_counting(inputs, whole.calls))
    listed = [rule for rule in rules if rule.entry is not None]
    if listed and not any(count_by(rule, inputs) for rule in listed):
        # Divided by 1 where there is none, such a loss looks like a sum.
        return LossContract(Reduction.MEAN, listed[0], conclusive=False, reason=NO_TARGET_SEEN)
    if not np.isfinite(whole.loss) or is_close(whole.loss, weighed_router(configured, whole.router), 1e-6):
        # Weighed by its items, of which there are none, such a window is an exact zero whatever the loss does.
        aux, z = (c if value else 0.0 for c, value in zip(configured, whole.router, strict=True))
        # Where labels count, targets were taken out on the way, or another term has none.
        empty = min(count_by(rule, inputs) for rule in rules if rule.keys == rules[0].keys) == 0.0
        reason = NO_TARGET_SEEN if empty else "the loss of samples with targets is nan or zero, and shows nothing"
        return LossContract(Reduction.MEAN, rules[0], aux, z, conclusive=False, reason=reason)
    for coefficients in router_terms(whole, configured):
        losses = evidence.without(coefficients)
        fitting = [rule for rule in rules if composes(rule, evidence.batches, losses, evidence.tolerance)]
        if fitting:
            break
    found = reduced_by_calls(evidence, losses, rules, fitting)
    if found.reduction is Reduction.PLAIN:
        return replace(found, coupling=coupling_of(evidence))
    return replace(found, router_coefficient=coefficients[0], router_z_coefficient=coefficients[1])


def reduced_by_calls(
    evidence: Evidence, losses: Sequence[float], rules: Sequence[Items], fitting: Sequence[Items]
) -> LossContract:
    """How a loss is reduced that its loss calls and its parts are known of, without its router losses.

    Args:
        evidence: what was run.
        losses: of the batch and its parts, without the router's.
        rules: every way of counting there is.
        fitting: those by which the parts' losses compose to the batch's.
    """
    inputs, whole = evidence.batches[0], evidence.whole
    means = [call for call in whole.calls if call.mean]
    named = rules_counting_as([call for call in means if is_close(call.value, losses[0])], rules, inputs)
    summed = any(call.reduction == "sum" and is_close(call.value, losses[0]) for call in whole.calls)
    if evidence.in_parts:
        # A part without a target adds nothing to a sum, and weighs nothing in a mean.
        adds_up = is_close(losses[1] + losses[2], losses[0], evidence.tolerance) and (summed or 0.0 not in losses)
        if (adds_up and (not fitting or summed)) or (summed and whole.random):
            return LossContract(Reduction.SUM, reason="the losses of two parts add up")
        made_of = sum_of_means(evidence, losses)
        if made_of is not None:
            counts = call_counts(evidence, made_of.factors)
            assert counts is not None
            found = counted_at_the_call(evidence, made_of, counts, rules, fitting)
            # Factors that were estimated may fit by chance where no rule counts as the calls do.
            if found is not None:
                return found
        if (of_terms := sum_of_terms(evidence, losses, rules)) is not None:
            return of_terms
        if not fitting and named and (whole.random or not evidence.sliced):
            # Noise differs from part to part, and masked labels may be inputs too (a decoder's): the call decides.
            reason = "the loss call is the mean over these items"
            return LossContract(Reduction.MEAN, named[0], alternatives=tuple(named), reason=reason)
        if not fitting:
            return LossContract(
                Reduction.PLAIN,
                # What stands beside the calls may be nearly alike in these lists, and other in others.
                conclusive=all(rule.entry is None for rule in rules),
                reason="the loss of a batch is no weighted mean of the losses of its parts (in-batch negatives, the "
                "root of a mean, or several terms with different counts)",
            )
        # A loss made of several terms equals no call: what all calls count alike tells as well.
        alike = len({call.items for call in means}) == 1
        telling = named or (rules_counting_as(means, rules, inputs) if alike else [])
        agreed = [rule for rule in fitting if rule in telling]
        return LossContract(
            Reduction.MEAN,
            (agreed or fitting)[0],
            alternatives=tuple(agreed or fitting),
            conclusive=not means
            or (bool(agreed) and (whole.random or len(means) > 2))
            or fitting[0].width_of is not None,
            reason="the losses of two parts compose to the whole's as the mean over these items",
        )
    if summed:
        return LossContract(Reduction.SUM, reason="the loss call is a sum")
    if named:
        reason = "the loss call is the mean over these items"
        return LossContract(Reduction.MEAN, named[0], alternatives=tuple(named), conclusive=False, reason=reason)
    return LossContract(Reduction.PLAIN, conclusive=False, reason="the samples seen do not tell how it is reduced")
