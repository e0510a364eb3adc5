"""Conclude the contract from three forwards: which factors of a loss are counts, and whether its terms add up so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hf_accum_fix.accumulation.checks import COUPLED, check_term, rules_of
from hf_accum_fix.accumulation.comparison import Candidate, Comparison, match, unexplained, with_values
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.number import upstream_first
from hf_accum_fix.accumulation.reading import Reading
from hf_accum_fix.accumulation.rules import is_near, listed_targets, ways_of_counting


def conclude(compared: Comparison) -> LossContract:
    """The contract from the forwards of a batch and its two parts."""
    whole = compared.whole
    rules = list(ways_of_counting(whole.batch))
    listed = next(listed_targets(whole.batch), None)
    if listed is not None and not float(listed.count(whole.batch)):
        return LossContract(Reduction.MEAN, listed, dtype=whole.dtype, conclusive=False, reason=NO_TARGET_SEEN)
    if not whole.shows_terms or not any(each.loss for each in compared.readings):
        return _nothing_seen(whole, rules, hands_number=compared.setting.hands_number)
    found = _concluded(compared, rules, inside=False)
    if found.doubt and any(each.term.rows for each in whole.terms):
        # Stacked numbers are rows of one mean, or several terms.
        inner = _concluded(compared, rules, inside=True)
        found = found if inner.doubt else inner
    return found


def _concluded(compared: Comparison, rules: Sequence[Items], *, inside: bool) -> LossContract:
    """`conclude`, with stacked numbers taken for rows, or for terms (``inside``)."""
    whole, setting = compared.whole, compared.setting
    seen = [reading.inside if inside else reading.terms for reading in compared.readings]
    candidates, mismatch = match(seen, compared)
    tested = _all_tested(with_values(_counted_alike(candidates), compared.readings), compared)
    adds = _added(tested, compared) if any(each.term.path.added for each in seen[0]) else How.MEAN
    specs, doubt, cause = _specs(tested, mismatch, adds, compared)
    found = LossContract(
        Reduction.PLAIN,
        terms=specs,
        custom=setting.custom,
        hands_number=setting.hands_number,
        dtype=whole.dtype,
        doubt=doubt,
        cause=cause,
        coupled=any(each.cause is Cause.COUPLED for each in tested),
        # A sum whose scale cannot be read.
        keeps_scale=setting.has_stock and any(each.grows for each in tested),
        # A custom loss may add the router loss itself.
        router_coefficient=0.0 if setting.custom else _coefficient(tested, "aux_loss"),
        router_z_coefficient=0.0 if setting.custom else _coefficient(tested, "z_loss"),
        inside=inside,
        added=adds is not How.MEAN,
        constant=unexplained(tested, compared.readings)[0] if adds is How.CONSTANT else 0.0,
        deep=any(each.term.within for terms in seen for each in terms),
        unchecked="" if compared.shows_coupling else "its micro-batches can neither be joined nor divided into samples",
        warms=whole.warms,
        shift=next((each.shift for each in seen[0] if each.shift is not None), None),
    )
    means = [each for each in specs if each.how is How.MEAN]
    numbered = [each for each in tested if each.spec.how is How.NUMBER]
    if numbered:
        takes = None
        if setting.custom and setting.world_size > 1:
            factors = [value for each in numbered for value in each.seen[0].factors]
            takes = setting.multiplies and any(is_near(value, setting.world_size) for value in factors)
        reason, rules = "its graph divides by num_items_in_batch", _rules_of_number(numbered, means, compared)
        found = replace(found, items=rules[0], reduction=Reduction.NUMBER, takes_world_size=takes, reason=reason)
        return found.with_rules_of_number(rules)
    if means and found.coupled:
        return replace(found, reason=COUPLED)
    if means:
        # Without a rule for the count, take one for its targets.
        near = next((each.named[0] for each in seen[0] if each.named), rules[0])
        return replace(
            found,
            reduction=Reduction.NUMBER if compared.by_number else Reduction.MEAN,
            items=means[0].rule or near,
            conclusive=means[0].counted[0] != 0.0 and all(each.shows for each in tested),
            reason=f"its graph divides {means[0].shape[0]} by them",
        )
    if specs and all(each.how is How.SUM for each in specs):
        reason = "its graph divides by nothing, and the losses of two parts add up"
        return replace(found, reduction=Reduction.SUM, reason=reason)
    doubt = doubt or "none of its terms is divided by a count"
    return replace(found, conclusive=all(each.shows for each in tested), doubt=doubt, reason=doubt)


def _all_tested(candidates: Sequence[Candidate], compared: Comparison) -> list[Candidate]:
    tested: list[Candidate] = []
    for each in candidates:
        # Terms of one loss count the same targets, where that fits.
        known = [rule for term in tested for rule, ratio in term.spec.rules.items() if ratio == 1.0]
        tested.append(check_term(each, compared, known, alone=len(candidates) == 1))
    return tested


def _counted_alike(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The terms, with the count of the first that divides by the same but for rounding.

    The two terms of a cross entropy with class weights and smoothed labels do.
    """
    found: list[Candidate] = []
    for each in candidates:
        alike = (one.counts for one in found if len(one.counts) == len(each.counts) > 0)
        counts = next((one for one in alike if all(map(is_near, one, each.counts))), each.counts)
        counted = counts if each.spec.counted == each.counts else each.spec.counted
        found.append(replace(each, counts=counts, spec=replace(each.spec, counted=counted)))
    return found


def _specs(
    tested: Sequence[Candidate], mismatch: str, adds: How, compared: Comparison
) -> tuple[tuple[TermSpec, ...], str, Cause | None]:
    """The terms' specs, and the first reason why they are not exact, with its cause."""
    specs = tuple(replace(each.spec, classes=_classes(each, compared)) for each in tested)
    doubts = [(mismatch, Cause.TERMS), *((each.doubt, each.cause) for each in tested)]
    if mismatch:
        # Where other terms come and go, a factor that no rule counts may depend on them.
        specs = tuple(
            each if each.rules or each.how is not How.MEAN else replace(each, how=How.PLAIN) for each in specs
        )
    if len({each.group for each in specs}) > 1 and any(each.seen[0].shares_learnt for each in tested):
        # No hook separates them.
        doubts.append(("one learnt factor multiplies several of its terms, which need different weights", None))
        specs = tuple(each if each.how is How.NUMBER else replace(each, how=How.PLAIN) for each in specs)
    if adds is How.PLAIN:
        doubts.append(("a part of the loss has no gradient; the log averages it over micro-batches", None))
    return specs, *next((each for each in doubts if each[0]), ("", None))


def _classes(candidate: Candidate, compared: Comparison) -> int:
    """The classes of a cross entropy that every micro-batch has; 0: positions are its classes, or torch hides them."""
    found, *others = [each.classes for each in candidate.seen]
    widths = [
        {x.shape[1] for x in batch.values() if isinstance(x, Tensor) and x.ndim > 1} for batch in compared.batches
    ]
    is_shown = hasattr(candidate.seen[0].term.leaf, "_input_metadata")
    return found if is_shown and {*others} == {found} and not all(found in each for each in widths) else 0


def _rules_of_number(
    numbered: Sequence[Candidate], means: Sequence[TermSpec], compared: Comparison
) -> tuple[Items, ...]:
    """The rules that count the number: of targets that a term has saved, of another term, or upstream's."""
    by_total = (([seen.total for seen in each.seen], each.seen) for each in numbered)
    of_terms = [rules_of(totals, seen, compared) for totals, seen in by_total if totals[0]]
    fitting = next(filter(None, (*of_terms, *(each.rules for each in means))), {})
    return upstream_first([*fitting], compared.whole.batch, compared.window, compared.setting)


def _added(candidates: Sequence[Candidate], compared: Comparison) -> How:
    """Classify the part without a gradient: a mean over the terms' items, a constant, or neither."""
    if any(None in each.values for each in candidates):
        return How.PLAIN
    readings, tolerance = compared.readings, compared.tolerance
    rests, counts = unexplained(candidates, readings), candidates[0].counts
    is_mean = candidates[0].spec.how is How.MEAN and len({each.spec.group for each in candidates}) == 1
    if is_mean and len(counts) == len(readings):
        sums = [n * rest for n, rest in zip(counts, rests, strict=True)]
        if abs(sums[0] - sums[1] - sums[2]) <= tolerance * abs(counts[0] * readings[0].loss):
            return How.MEAN
    is_same = max(rests) - min(rests) <= tolerance * max(abs(reading.loss) for reading in readings)
    return How.CONSTANT if is_same else How.PLAIN


def _nothing_seen(whole: Reading, rules: Sequence[Items], *, hands_number: bool) -> LossContract:
    """The contract of a loss that is constant, zero or not finite: it is observed again in the next window."""
    # Another term may have targets of its own.
    shows = any(math.isfinite(each.value) for each in whole.terms if each.value and not each.router)
    of_labels = [rule for rule in rules if rule.keys == rules[0].keys and rule.block is None]
    if not shows and not min(float(rule.count(whole.batch)) for rule in of_labels):
        return LossContract(Reduction.MEAN, rules[0], dtype=whole.dtype, conclusive=False, reason=NO_TARGET_SEEN)
    reason = "the loss of samples with targets is zero, not finite or without gradient"
    return LossContract(Reduction.PLAIN, dtype=whole.dtype, hands_number=hands_number, conclusive=False, reason=reason)


def _coefficient(candidates: Sequence[Candidate], name: str) -> float:
    """The coefficient of a router loss in the loss."""
    seen = next((each.seen[0] for each in candidates if each.seen[0].router == name), None)
    return 0.0 if seen is None else seen.product(range(len(seen.factors)))
