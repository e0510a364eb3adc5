"""A trainer's own loss that takes no number: how it is reduced, and what the trainer divides it by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from hf_accum_fix.accumulation.contract import ALIKE, NO_TARGET_SEEN, Divides, LossContract, Reduction
from hf_accum_fix.accumulation.evidence.by_parts import coupling_of, reduced_by_calls
from hf_accum_fix.accumulation.evidence.forwards import Evidence, Seen
from hf_accum_fix.accumulation.evidence.probe import label_count
from hf_accum_fix.accumulation.evidence.rules import (
    composes,
    count_by,
    is_close,
    nearly_alike,
    rules_counting_as,
    told_apart,
    ways_of_counting,
)
from hf_accum_fix.accumulation.window import Items


def divides_by(ratio: float, *, with_number: bool) -> Divides:
    """How a trainer divides its loss for the window, from what `observe`'s ``more_steps`` multiply it by."""
    if abs(ratio - 1) < 1e-4 and not with_number:
        return Divides.NEVER
    # By a number of its own, that no window changes, is by the arguments' too.
    if min(abs(ratio - 1), abs(ratio - 1 / 2)) < 1e-3:
        return Divides.WITH_NUMBER_BY_ARGUMENT if with_number else Divides.BY_ARGUMENT
    if abs(ratio - 1 / 3) < 1e-3:
        return Divides.WITH_NUMBER if with_number else Divides.ALWAYS
    return Divides.UNKNOWN


def reduced_by_trainer(
    evidence: Evidence, steps: int, more_steps: Seen | None, without_number: Seen | None
) -> LossContract:
    """A trainer's own loss that does not move with the number, which labels without a target cannot show."""
    inputs, seen = evidence.batches[0], evidence.whole
    blind, finite = label_count(inputs) == 0, np.isfinite(seen.loss)
    if (blind or not finite or seen.loss == 0.0) and isinstance(inputs.get("labels"), Tensor):
        rule = next(ways_of_counting(inputs, seen.calls))
        # Stock trains on the nan too, and the log shows it.
        reason = (
            NO_TARGET_SEEN if blind and finite else f"the loss of the samples seen is {seen.loss:g}, and shows nothing"
        )
        return LossContract(Reduction.NUMBER, rule, conclusive=False, reason=reason)
    divides = Divides.NEVER
    ratio = 1.0 if more_steps is None or seen.loss == 0.0 else more_steps.loss / seen.loss
    if without_number is not None and not is_close(without_number.loss, seen.loss, 1e-4):
        came = is_close(without_number.loss, seen.loss * steps, 1e-3)
        divides = divides_by(ratio, with_number=True) if came else Divides.UNKNOWN
    elif not abs(ratio - 1) < 1e-4:
        divides = divides_by(ratio, with_number=False)
    elif steps > 1 and any(is_close(call.value, seen.loss * steps) for call in seen.calls if call.mean):
        divides = Divides.BY_ARGUMENT
    if divides is not Divides.UNKNOWN and (found := own_mean(evidence)) is not None:
        return replace(found, divides=divides)
    losses = [each.loss for each in evidence.seen]
    if evidence.in_parts and evidence.sliced and not evidence.whole.random and nearly_alike(losses, evidence.tolerance):
        return LossContract(Reduction.PLAIN, divides=divides, conclusive=False, reason=ALIKE)
    reason = "the trainer computes the loss by itself and takes no item count"
    # A part without a target may be nan, and tells no ways of counting apart.
    unlabelled = isinstance(inputs.get("labels"), Tensor) and 0 in map(label_count, evidence.batches)
    conclusive = all(np.isfinite(each.loss) for each in evidence.seen) and not unlabelled
    rules = list(ways_of_counting(inputs, seen.calls))
    means = [call for call in seen.calls if call.mean and is_close(call.value, seen.loss)]
    counted = rules_counting_as(means, rules, inputs)
    named = counted or [rule for rule in rules if means and count_by(rule, inputs) == means[0].targets]
    if not conclusive and named and divides is Divides.NEVER:
        reason = "the loss call is the mean over these items"
        return LossContract(
            Reduction.MEAN, named[0], alternatives=tuple(named), divides=divides, conclusive=False, reason=reason
        )
    coupling = coupling_of(evidence)
    return LossContract(Reduction.PLAIN, divides=divides, coupling=coupling, conclusive=conclusive, reason=reason)


def own_mean(evidence: Evidence) -> LossContract | None:
    """A trainer's own loss as a mean over items, or a sum of such means; None: it is none, or not for certain."""
    if not (evidence.in_parts and evidence.sliced) or evidence.whole.random:
        return None
    losses = [each.loss for each in evidence.seen]
    # A head that a trainer calls by itself averages its number of listed targets over ranks.
    alone = evidence.world_size == 1
    rules = [
        rule for rule in ways_of_counting(evidence.batches[0], evidence.whole.calls) if rule.entry is None or alone
    ]
    fitting = [rule for rule in rules if composes(rule, evidence.batches, losses, evidence.tolerance)]
    found = reduced_by_calls(evidence, losses, rules, fitting)
    if found.reduction is Reduction.SUM:
        return found
    if found.reduction is not Reduction.MEAN or not found.conclusive:
        return None
    if found.made_of is None:
        told = told_apart(sorted(fitting, key=_how_far_fetched), evidence.batches, losses, evidence.tolerance)
        return replace(found, items=told[0], alternatives=told) if told else None
    return found


def _how_far_fetched(rule: Items) -> int:
    """In which order ways of counting that fit are taken: labels that may be ignored, samples, anything else.

    Every batch that may come has samples.
    """
    if rule.keys == ("labels",) and rule.ignore_index is not None:
        return 0
    return 2 if rule.keys else 1
