"""A loss as a sum of the loss calls seen in it, each a mean over items of its own, and of what no call shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_accum_fix.accumulation.contract import Composition, LossContract, Reduction
from hf_accum_fix.accumulation.evidence.forwards import Evidence, call_counts, mean_of
from hf_accum_fix.accumulation.evidence.rules import composing_rules, count_by, is_close, listed_targets, weighs_up
from hf_accum_fix.accumulation.window import Items


def sum_of_means(evidence: Evidence, losses: Sequence[float]) -> Composition | None:
    """A loss as a combination of mean calls that reduce over the same items, and compose; None: it is none."""
    if len({len(each.calls) for each in evidence.seen}) > 1 or evidence.whole.random:
        return None
    values = np.array([[mean_of(call) for call in each.calls] for each in evidence.seen]).reshape(len(losses), -1)
    wanted = np.array(losses)
    # Beside listed targets stands what no call shows, which factors would be fitted to.
    listed = next(listed_targets(evidence.batches[0]), None) is not None
    for factors, rest in _combinations(values, wanted, fitted=not listed):
        made_of = Composition(tuple(map(float, factors)))
        limit = made_of.rounding(evidence.whole.dtype) * max(map(abs, losses))
        used = np.where(factors == 0, 0, values)
        if not np.isfinite(factors).all() or not np.abs(used @ factors + rest - wanted).max() <= limit:
            continue
        counts = call_counts(evidence, factors)
        if counts is None or not weighs_up(list(wanted - rest), counts, evidence.tolerance):
            continue
        return replace(made_of, rest=abs(rest) > limit)
    return None


def sum_of_terms(evidence: Evidence, losses: Sequence[float], rules: Sequence[Items]) -> LossContract | None:
    """A loss as a sum of mean calls over items of their own, and perhaps of a mean that no call shows.

    Each call has to compose by what it counts, a rule has to count that before a window is run, and a rest has to
    compose by a rule. None: it is no such sum.
    """
    calls = len(evidence.whole.calls)
    if not calls or {len(each.calls) for each in evidence.seen} != {calls} or evidence.whole.random:
        return None
    values = np.array([[mean_of(call) for call in each.calls] for each in evidence.seen])
    wanted = np.array(losses)
    limit = evidence.tolerance * max(map(abs, losses))
    terms = [_rules_of_call(evidence, place, rules) for place in range(calls)]
    listed = tuple(rule for rule in rules if rule.entry is not None)
    # A part that lists nothing has nothing of such a term.
    shown = [not listed or any(count_by(rule, batch) for rule in listed) for batch in evidence.batches]
    sums = _sums_of_calls(values, wanted, [bool(each) for each in terms], bool(listed))
    others = (*_times_of_calls(evidence, values, wanted, terms, listed), *_means_of_calls(terms))
    for factors, rest_composes in (*sums, *others):
        made_of = Composition(tuple(map(float, factors)), terms=tuple(terms))
        rests = wanted - np.where(factors == 0, 0, values) @ factors
        near = made_of.rounding(evidence.whole.dtype) * max(map(abs, losses))
        if np.abs(rests - rests[0]).max() <= near:
            made_of = replace(made_of, rest=bool(abs(rests[0]) > near))
        elif rest_composes and evidence.sliced and np.abs(rests[shown]).min() > limit:
            # What is not made of any call is taken for a mean only where a list of targets is counted.
            offered = rules if factors.any() else listed
            found = composing_rules(evidence.batches, list(rests), offered, evidence.tolerance)
            left_out = values[:, (factors == 0) & np.isfinite(values).all(axis=0)].sum(axis=1)
            is_made_of_calls = np.abs(rests - left_out).max() <= near
            # A call that no rule counts is weighed by no other rule either, though it may compose so by chance.
            if not found or (is_made_of_calls and not any(rule.entry is not None for rule in found)):
                continue
            made_of = replace(made_of, rest_terms=found)
        else:
            continue
        used = tuple(each if factor else () for each, factor in zip(terms, factors, strict=True))
        main = next((each for each in used if each), made_of.rest_terms)
        return LossContract(
            Reduction.MEAN,
            main[0],
            alternatives=main,
            made_of=replace(made_of, terms=used),
            reason="the loss is a sum of terms, each a mean over items of its own",
        )
    return None


def _sums_of_calls(values: Any, wanted: Any, countable: Sequence[bool], alone: bool) -> Iterator[tuple[Any, bool]]:
    """Factors of the calls that might make the losses, and whether a rest may stand beside them; the fullest first.

    Args:
        values: of the calls, a row for each forward.
        wanted: the losses.
        countable: whether a rule counts what a call reduces over.
        alone: a rest may be all there is.
    """
    places = [place for place, each in enumerate(countable) if each and np.isfinite(values[:, place]).all()]
    several = values.shape[1] > 1
    singles = [{place} for place in places if several]

    def taken(subset: Iterable[int]) -> Any:
        return np.array([float(place in subset) for place in range(values.shape[1])])

    for subset in [set(places), *singles] if places else []:
        yield taken(subset), False
    for one, other in itertools.permutations(places, 2):
        factors = taken([one])
        if values[0, other]:
            factors[other] = (wanted[0] - values[0, one]) / values[0, other]
            yield factors, False
    # A call that is only logged (a detector's count of boxes) may compose as the rest does: fewest calls first there.
    for subset in [*singles, set(places)] if places else []:
        yield taken(subset), True
    if alone:
        yield np.zeros(values.shape[1]), True
    if 0 < len(places) < len(wanted):
        factors = np.zeros(values.shape[1])
        factors[places] = np.linalg.lstsq(values[:, places], wanted, rcond=None)[0]
        if np.abs(factors).max() < 1e6:
            yield np.where(np.abs(factors) < 1e-9, 0.0, factors), False


def _means_of_calls(terms: Sequence[tuple[Items, ...]]) -> Iterator[tuple[Any, bool]]:
    """As `_sums_of_calls`, but the loss holds the mean of the calls over the same items: R-Drop's, of two draws."""
    for rules in dict.fromkeys(each for each in terms if each):
        alike = np.array([each == rules for each in terms])
        if alike.sum() > 1:
            yield alike / alike.sum(), True


def _times_of_calls(
    evidence: Evidence, values: Any, wanted: Any, terms: Sequence[tuple[Items, ...]], listed: Sequence[Items]
) -> Iterator[tuple[Any, bool]]:
    """As `_sums_of_calls`, but the loss holds the calls several times: Mask2Former's takes its cross entropies twice.

    The one equation that a batch and its parts give is no evidence for just any factor; it is for a whole number, where
    the next one would be 50 roundings away.
    """
    rounding = 16 * torch.finfo(evidence.whole.dtype).eps * max(map(abs, wanted))
    for rule in listed:
        whole, *parts = [count_by(rule, batch) for batch in evidence.batches]
        signed = np.array([whole, *(-each for each in parts)])
        others = [bool(each) and rule not in each for each in terms]
        once = float(signed @ values[:, others].sum(axis=1)) if any(others) else 0.0
        if abs(once) < 50 * rounding * whole:
            continue
        times = float(signed @ wanted) / once
        if abs(times - round(times)) * abs(once) <= rounding * whole:
            yield np.where(others, float(round(times)), 0.0), True


def _rules_of_call(evidence: Evidence, place: int, rules: Sequence[Items]) -> tuple[Items, ...]:
    """The rules that count what a mean call reduces over, where it composes by that."""
    calls = [each.calls[place] for each in evidence.seen]
    counts = [call.items for call in calls]
    if not weighs_up([mean_of(call) for call in calls], counts, evidence.tolerance):
        return ()
    by_rule = {rule: [count_by(rule, batch) for batch in evidence.batches] for rule in rules}
    found = tuple(rule for rule in rules if by_rule[rule] == counts)
    if found or not calls[0].weighted:
        return found
    return tuple(_mixed(by_rule, counts))


def _mixed(by_rule: Mapping[Items, Sequence[float]], weights: Sequence[float]) -> Iterator[Items]:
    """What a call weighs its targets by, as a sum of rows listed for each sample and of samples.

    Every target of a list is matched, and has a weight of its own kind; the others share what is left of a sample's.
    """
    for rule, counts in by_rule.items():
        if rule.entry is None:
            continue
        rows = np.array([counts, by_rule[Items()]]).T
        factors, _, rank, _ = np.linalg.lstsq(rows, np.array(weights), rcond=None)
        # Samples with as many rows each do not tell the two apart.
        if rank == 2 and np.abs(rows @ factors - weights).max() <= 1e-5 * max(weights):
            of_rows, of_samples = map(_without_noise, map(float, factors))
            yield Items(mix=((of_rows, rule), (of_samples, Items())))


def _without_noise(factor: float) -> float:
    """A factor by as few digits as it has: weights in float32 have other last ones on another rank."""
    found = (round(factor, digits) for digits in range(2, 6))
    return next((each for each in found if abs(each - factor) <= 2e-6 * max(1, abs(factor))), round(factor, 6))


def _combinations(values: Any, wanted: Any, *, fitted: bool) -> Iterator[tuple[Any, float]]:
    """Factors of the calls, and a constant beside them, that might make the losses; the simplest first.

    Args:
        values: of the calls, a row for each forward.
        wanted: the losses.
        fitted: try a factor for each call.
    """
    runs, calls = values.shape
    units = [np.eye(calls)[place] for place in range(calls)]
    masks = [*units, *([np.ones(calls)] if calls > 1 else [])]
    usable = [mask for mask in masks if (values @ mask != 0).all() and np.isfinite(values @ mask).all()]
    yield from ((unit, 0.0) for unit in units)
    for mask in usable:
        yield mask * (wanted[0] / (values[0] @ mask)), 0.0
    if fitted and 1 < calls < runs and np.isfinite(values).all():
        factors = np.linalg.lstsq(values, wanted, rcond=None)[0]
        # Calls that compose as the loss does fit it by factors that all but cancel each other.
        if np.abs(values * factors).max() <= 10 * np.abs(wanted).max():
            yield factors, 0.0
    # A factor estimated beside a constant would fit whatever composes by the same items.
    yield from ((mask, float(wanted[0] - values[0] @ mask)) for mask in usable)


def _targets(evidence: Evidence, factors: Sequence[float]) -> list[float]:
    """The targets of the first call with a factor, in each forward."""
    place = next(place for place, factor in enumerate(factors) if abs(factor) > 1e-12)
    return [each.calls[place].targets for each in evidence.seen]


def counted_at_the_call(
    evidence: Evidence,
    made_of: Composition,
    counts: Sequence[float],
    rules: Sequence[Items],
    fitting: Sequence[Items],
) -> LossContract | None:
    """A mean whose loss calls tell what it is made of: which rule counts their items before a window is run."""
    by_rule = {rule: [count_by(rule, batch) for batch in evidence.batches] for rule in rules}

    def per_item(rule: Items) -> float | None:
        if 0.0 in by_rule[rule]:
            return None
        ratios = [count / items for count, items in zip(counts, by_rule[rule], strict=True)]
        return ratios[0] if all(is_close(ratio, ratios[0], 1e-9) for ratio in ratios) else None

    alike = [rule for rule in rules if by_rule[rule] == list(counts)]
    scaled = [rule for rule in rules if per_item(rule) is not None]
    if alike or scaled:
        agreed = tuple([rule for rule in alike or scaled if rule in fitting] or alike or scaled)
        reason = "the losses of two parts compose to the whole's as the mean over these items"
        made_of = replace(made_of, per_item=1.0 if alike else per_item(agreed[0]) or 1.0)
        return LossContract(Reduction.MEAN, agreed[0], alternatives=agreed, made_of=made_of, reason=reason)
    if made_of.rest or any(factor not in (0.0, 1.0) for factor in made_of.factors):
        return None
    # What tells a micro-batch without a target: the rule that counts targets as the call does, whatever they weigh.
    counting = [rule for rule in rules if by_rule[rule] == _targets(evidence, made_of.factors)]
    whole = [rule for rule in rules if not rule.shift and rule.mask is None]
    agreed = tuple(counting or fitting or whole or rules)
    return LossContract(
        Reduction.MEAN,
        agreed[0],
        alternatives=agreed,
        made_of=replace(made_of, counted=False),
        reason="the loss call is a mean over items, or weights, that are counted as it is made",
    )
