"""A loss that moves with the number handed in: ``L(k) = S / k + x``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_accum_fix.accumulation.contract import Composition, LossContract, Reduction
from hf_accum_fix.accumulation.evidence.forwards import NUMBERS, Evidence, RouterPair, Seen, WatchedLoss
from hf_accum_fix.accumulation.evidence.router_terms import fitted_coefficients
from hf_accum_fix.accumulation.evidence.rules import (
    composing_rules,
    count_by,
    is_close,
    nearest_rules,
    ways_of_counting,
)
from hf_accum_fix.accumulation.window import Items


def _summed(at_low: float, at_high: float, cut: bool) -> float:
    """S of  L(k) = S / k + x  from the losses with the first two numbers, as handed in or cut to integers."""
    low, high, _ = NUMBERS
    return (at_low - at_high) / (1 / low - 1 / (int(high) if cut else high))


def summing_call(first: Seen, second: Seen) -> int | None:
    """Place of the loss call that made the sum which the number divides; it tells the count, and rows apart."""
    sums = [_summed(first.loss, second.loss, cut) for cut in (False, True)]
    sought = ((i, s) for i, c in enumerate(first.calls) for s in sums if c.reduction == "sum")
    return next((i for i, s in sought if is_close(first.calls[i].value, s, first.rounding)), None)


def reduced_by_number(
    evidence: Evidence, second: Seen, fourth: Seen | None, third: Seen | None, needs_number: bool
) -> LossContract:
    """The loss moves with the number: L(k) = S / k + x, with k as handed in or cut to an integer.

    The first two forwards were made with the first two numbers. The fourth, with the number between, is None where a
    loss call tells S, and so whether the number is cut. The third is without a number, or without the labels at
    position 0; it is None where neither was run.
    """
    low, _, between = NUMBERS
    inputs, first = evidence.batches[0], evidence.whole
    sums = [call for call in first.calls if call.reduction in ("sum", "none")]

    def telling(summed: float) -> list[tuple[WatchedLoss, int]]:
        ways = dict.fromkeys((1, evidence.world_size))
        return [(each, w) for each in sums for w in ways if is_close(each.value * w, summed, first.rounding)]

    cut = fourth.loss == first.loss if fourth is not None else not telling(_summed(first.loss, second.loss, False))
    summed = _summed(first.loss, second.loss, cut)
    rest = first.loss - summed / low
    if not cut and fourth is not None and not is_close(summed / between + rest, fourth.loss, 10 * first.rounding):
        return LossContract(Reduction.PLAIN, reason="the loss moves with the number handed in, but is no sum over it")
    rules = list(ways_of_counting(inputs, first.calls))
    called = telling(summed)
    counts: list[float] = [call.items for call, _ in called]
    if not counts and not needs_number and third is not None and third.loss != rest:
        counts = [summed / (third.loss - rest), summed / (third.loss - rest) / evidence.world_size]
    fitting = next((near for count in counts if (near := nearest_rules(rules, inputs, count))), [])
    conclusive = bool(fitting or called)
    if not fitting:
        # No count to compare with: whether position 0 of "labels" moves the loss tells if they are shifted.
        of_labels = [rule for rule in rules if rule.keys == ("labels",)]
        conclusive = conclusive or (needs_number and any(rule.shift for rule in of_labels))
        # Up to its last digits, which may be others on another rank.
        shifted = needs_number and third is not None and is_close(third.loss, first.loss, first.rounding)
        fitting = [rule for rule in of_labels if rule.shift == shifted] or of_labels or rules
    aux, z = (0.0, 0.0)
    if abs(rest) > 1e-5 * abs(summed / low) and any(first.router):
        aux, z = fitted_coefficients(rest, first, evidence.configured)
    found = LossContract(
        Reduction.INTEGER if cut else Reduction.NUMBER,
        fitting[0],
        alternatives=tuple(fitting),
        router_coefficient=aux,
        router_z_coefficient=z,
        takes_world_size=called[0][1] > 1 if called and evidence.world_size > 1 else None,
        made_of=_of_sums(evidence, called[0][0] if called else None, (aux, z), fitting[0]),
        conclusive=conclusive,
        reason="the loss moves with the number handed in" + ("" if conclusive else ", what it counts was not seen"),
    )
    losses = evidence.without((aux, z))
    beside = losses[0] - summed / low
    beside = 0.0 if abs(beside) <= evidence.tolerance * abs(losses[0]) else beside
    if beside and any(evidence.configured) and not any(first.router):
        # A router's loss that the outputs do not carry: its mean over micro-batches is the convention.
        return found
    comparable = evidence.in_parts and evidence.sliced and not first.random
    if comparable and not evidence.adds_up(losses, beside):
        if not beside:
            reason = "the rows of a batch change one another's loss, so that no cut of it adds up to the whole"
            return replace(
                found, reduction=found.reduction if first.own else Reduction.PLAIN, beside=True, reason=reason
            )
        if (with_rest := _with_rest(evidence, called[0][0] if called else None, found, losses, rules)) is not None:
            return with_rest
        reason = "a term beside the sum that the number divides is no function of single items"
        return replace(found, beside=True, reason=reason)
    if beside and (first.own or not comparable or (called and found.made_of is None)):
        # A trainer's own is taken as often as there are micro-batches, since nothing divides it.
        return replace(found, beside=True, reason="a term stands beside the sum that the number divides")
    return found


def _of_sums(evidence: Evidence, call: WatchedLoss | None, router: RouterPair, rule: Items) -> Composition | None:
    """How a loss that divides by the number is made of the call that made its sum; None: no call shows it."""
    whole = evidence.whole
    if call is None or call.reduction != "sum" or whole.own:
        return None
    place = whole.calls.index(call)
    values = [each.calls[place].value / NUMBERS[0] if place < len(each.calls) else np.nan for each in evidence.seen]
    rests = [loss - value for loss, value in zip(evidence.without(router), values, strict=True)]
    made_of = Composition(tuple(float(at == place) for at in range(len(whole.calls))))
    limit = made_of.rounding(whole.dtype) * max(abs(each.loss) for each in evidence.seen)
    if not all(abs(rest - rests[0]) <= limit for rest in rests):
        return None
    return replace(made_of, rest=abs(rests[0]) > limit, counted=count_by(rule, evidence.batches[0]) == call.items)


def _with_rest(
    evidence: Evidence,
    call: WatchedLoss | None,
    found: LossContract,
    losses: Sequence[float],
    rules: Sequence[Items],
) -> LossContract | None:
    """A sum that the number divides, as a call shows it, beside a mean over items of its own; None: it is no such."""
    whole = evidence.whole
    if call is None or call.reduction != "sum" or whole.own or len({len(each.calls) for each in evidence.seen}) > 1:
        return None
    place = whole.calls.index(call)
    rests = [each - seen.calls[place].value / NUMBERS[0] for each, seen in zip(losses, evidence.seen, strict=True)]
    rest_terms = composing_rules(evidence.batches, rests, rules, evidence.tolerance)
    if not rest_terms or found.items is None:
        return None
    factors = tuple(float(at == place) for at in range(len(whole.calls)))
    terms = tuple(found.alternatives if factor else () for factor in factors)
    counted = count_by(found.items, evidence.batches[0]) == call.items
    made_of = Composition(factors, counted=counted, terms=terms, rest_terms=rest_terms)
    return replace(found, made_of=made_of, reason="a sum that the number divides, beside a mean over other items")
