"""Learn how a loss is reduced, from looks at a batch and at its two parts: plain numbers, and no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_accum_fix.accumulation.compare import Candidate, Comparison, Setting, candidates, unexplained
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.look import TermLook
from hf_accum_fix.accumulation.rules import is_near, is_padded, listed_targets, matching_rules, ways_of_counting

#: Losses of other libraries that are means over targets, though their graph hides it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: Nodes that hide a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
_PADDED = "it depends on how its samples are padded, or they are coupled (as by in-batch negatives)"
COUPLED = "the samples of a batch are coupled (as by in-batch negatives): the loss is no weighted mean over its parts"


def learn(compared: Comparison) -> LossContract:
    """The contract of a loss, from the looks at a batch and its two parts."""
    whole = compared.whole
    rules = list(ways_of_counting(whole.batch))
    listed = next(listed_targets(whole.batch), None)
    if listed is not None and not float(listed.count(whole.batch)):
        return LossContract(Reduction.MEAN, listed, dtype=whole.dtype, conclusive=False, reason=NO_TARGET_SEEN)
    if not whole.shows_terms or not any(each.loss for each in compared.looks):
        return _nothing_seen(compared, rules)
    found = _learnt(compared, rules, inside=False)
    if found.doubt and any(each.rows for each in whole.terms):
        # Stacked numbers are rows of one mean, or several terms.
        inner = _learnt(compared, rules, inside=True)
        found = found if inner.doubt else inner
    return found


def _nothing_seen(compared: Comparison, rules: Sequence[Items]) -> LossContract:
    """The contract of a loss that is constant, zero or not finite: it is observed again in the next window."""
    whole, hands_number = compared.whole, compared.setting.hands_number
    # Another term may have targets of its own.
    shows = any(math.isfinite(each.value) for each in whole.terms if each.value and not each.router)
    of_labels = [rule for rule in rules if rule.keys == rules[0].keys and rule.block is None]
    if not shows and not min(float(rule.count(whole.batch)) for rule in of_labels):
        return LossContract(Reduction.MEAN, rules[0], dtype=whole.dtype, conclusive=False, reason=NO_TARGET_SEEN)
    reason = "the loss of samples with targets is zero, not finite or without gradient"
    return LossContract(Reduction.PLAIN, dtype=whole.dtype, hands_number=hands_number, conclusive=False, reason=reason)


def _learnt(compared: Comparison, rules: Sequence[Items], *, inside: bool) -> LossContract:
    """`learn`, with stacked numbers taken for rows, or for terms (``inside``)."""
    whole, setting = compared.whole, compared.setting
    matched, mismatch = candidates(compared, inside=inside)
    judged = list[Candidate]()
    for each in matched:
        # Terms of one loss count the same targets, where that fits.
        known = [rule for term in judged for rule, ratio in term.spec.rules.items() if ratio == 1.0]
        judged.append(judge(each, compared, known, alone=len(matched) == 1))
    terms = whole.inside if inside else whole.terms
    adds = _added(judged, compared) if any(each.adds for each in terms) else How.MEAN
    specs, doubt, cause = _specs(judged, mismatch, adds, compared)
    shows = all(each.shows for each in judged)
    found = LossContract(
        Reduction.PLAIN,
        terms=specs,
        custom=setting.custom,
        hands_number=setting.hands_number,
        dtype=whole.dtype,
        doubt=doubt,
        cause=cause,
        # A sum whose scale cannot be read.
        keeps_scale=setting.has_stock and any(each.grows for each in judged),
        # A custom loss may add the router loss itself.
        router_coefficient=0.0 if setting.custom else _coefficient(judged, "aux_loss"),
        router_z_coefficient=0.0 if setting.custom else _coefficient(judged, "z_loss"),
        inside=inside,
        added=adds is not How.MEAN,
        constant=unexplained(judged, compared.looks)[0] if adds is How.CONSTANT else 0.0,
        deep=any(each.within for its in compared.looks for each in (its.inside if inside else its.terms)),
        unchecked="" if compared.shows_coupling else "its micro-batches can neither be joined nor divided into samples",
        warms=whole.warms,
    )
    means = [each for each in specs if each.how is How.MEAN]
    numbered = [each for each in judged if each.spec.how is How.NUMBER]
    if numbered:
        factors = [value for each in numbered for value in each.seen[0].factors]
        multiplies = setting.multiplies and any(is_near(value, setting.world_size) for value in factors)
        takes = multiplies if setting.custom and setting.world_size > 1 else None
        reason, by = "its graph divides by num_items_in_batch", _rules_of_number(numbered, means, compared)
        found = replace(found, items=by[0], reduction=Reduction.NUMBER, takes_world_size=takes, reason=reason)
        return found.with_rules_of_number(by)
    if means and found.coupled:
        return replace(found, reason=COUPLED)
    if means:
        # Without a rule for the count, take one for its targets.
        near = next((each.named[0] for each in terms if each.named), rules[0])
        return replace(
            found,
            reduction=Reduction.NUMBER if compared.by_number else Reduction.MEAN,
            items=means[0].rule or near,
            conclusive=means[0].counted[0] != 0.0 and shows,
            reason=f"its graph divides {means[0].shape[0]} by them",
        )
    if specs and all(each.how is How.SUM for each in specs):
        reason = "its graph divides by nothing, and the losses of two parts add up"
        return replace(found, reduction=Reduction.SUM, reason=reason)
    doubt = doubt or "none of its terms is divided by a count"
    return replace(found, conclusive=shows, doubt=doubt, reason=doubt)


def _specs(
    judged: Sequence[Candidate], mismatch: str, adds: How, compared: Comparison
) -> tuple[tuple[TermSpec, ...], str, Cause | None]:
    """The terms' specs, and the first reason why they are not exact, with its cause."""
    specs = tuple(replace(each.spec, classes=_classes(each, compared)) for each in judged)
    doubts = [(mismatch, Cause.TERMS), *((each.doubt, each.cause) for each in judged)]
    if mismatch:
        # Where other terms come and go, a factor that no rule counts may depend on them.
        specs = tuple(
            each if each.rules or each.how is not How.MEAN else replace(each, how=How.PLAIN) for each in specs
        )
    if len({each.group for each in specs}) > 1 and any(each.seen[0].shares_learnt for each in judged):
        # No hook separates them.
        doubts.append(("one learnt factor multiplies several of its terms, which need different weights", None))
        specs = tuple(each if each.how is How.NUMBER else replace(each, how=How.PLAIN) for each in specs)
    if adds is How.PLAIN:
        doubts.append(("a part of the loss has no gradient; the log averages it over micro-batches", None))
    doubt, cause = next((each for each in doubts if each[0]), ("", None))
    return specs, doubt, Cause.COUPLED if Cause.COUPLED in {each for _, each in doubts} else cause


def _classes(candidate: Candidate, compared: Comparison) -> int:
    """The classes of a cross entropy that every micro-batch has; 0: positions are its classes, or torch hides them."""
    found, *others = [each.classes for each in candidate.seen]
    widths = [{x.shape[1] for x in batch.values() if getattr(x, "ndim", 0) > 1} for batch in compared.batches]
    return found if {*others} == {found} and not all(found in each for each in widths) else 0


def _added(judged: Sequence[Candidate], compared: Comparison) -> How:
    """Classify the part without a gradient: a mean over the terms' items, a constant, or neither."""
    if any(None in each.values for each in judged):
        return How.PLAIN
    rests, counts = unexplained(judged, compared.looks), judged[0].counts
    is_mean = judged[0].spec.how is How.MEAN and len({each.spec.group for each in judged}) == 1
    if is_mean and len(counts) == len(rests):
        sums = [n * rest for n, rest in zip(counts, rests, strict=True)]
        if abs(sums[0] - sums[1] - sums[2]) <= compared.tolerance * abs(counts[0] * compared.whole.loss):
            return How.MEAN
    is_same = max(rests) - min(rests) <= compared.tolerance * max(abs(each.loss) for each in compared.looks)
    return How.CONSTANT if is_same else How.PLAIN


def _coefficient(judged: Sequence[Candidate], name: str) -> float:
    """The coefficient of a router loss in the loss."""
    seen = next((each.seen[0] for each in judged if each.seen[0].router == name), None)
    return 0.0 if seen is None else seen.product(range(len(seen.factors)))


# ---------------------------------------------------------------------------------------------------- one term


def judge(candidate: Candidate, compared: Comparison, known: Sequence[Items], *, alone: bool) -> Candidate:
    """Judge whether a term's values add up as its factors predict.

    ``known``: rules of other terms; ``alone``: it is the only term.
    """
    spec, values, whole = candidate.spec, candidate.values, candidate.seen[0]
    if whole.router:
        return candidate.judged(how=How.ROUTER, counts=(), rules={})
    if not candidate.matched:
        return candidate
    if whole.learnt and not spec.counts:
        return candidate.judged(how=How.CONSTANT)
    if spec.how is How.NUMBER:
        sums = [(value or 0.0) / seen.product(spec.counts) for value, seen in zip(values, candidate.seen, strict=True)]
        adds_up = None in values or _adds_up(sums, compared.tolerance)
        return candidate if adds_up else candidate.judged(COUPLED, Cause.COUPLED)
    return _judged_mean(candidate, compared, known, alone=alone) if spec.counts else _judged_other(candidate, compared)


def _judged_mean(candidate: Candidate, compared: Comparison, known: Sequence[Items], *, alone: bool) -> Candidate:
    """`judge` for a term with a factor that is not constant."""
    values, n, spec = candidate.values, candidate.counts, candidate.spec
    whole, has_values = candidate.seen[0], None not in values
    rules = rules_of(n, candidate.seen, compared, known)
    if whole.by_classes and not any(rule.mix for rule in rules):
        # The classes of this batch may weigh alike.
        rules = {}
    if rules and all(is_padded(rule, compared.whole.batch) for rule in rules) and not alone:
        doubt = f"{whole.name} is a mean over all positions, padding among them, and depends on how a batch is padded"
        return candidate.judged("" if compared.setting.has_z_loss else doubt, how=How.ROUTER, rules=rules)
    if not compared.apart and whole.readable and (rules or whole.own_divisor):
        return candidate.judged(rules=rules)
    if whole.rows and any(
        seen.rows * compared.whole.samples != whole.rows * look.samples
        for seen, look in zip(candidate.seen, compared.looks, strict=True)
    ):
        return candidate.judged("it is a mean over elements of a sample, not over the samples", how=How.PLAIN)
    # Lists of targets divide by at least 1.
    listed = any(rule.entry is not None for rule in rules)
    if not compared.apart or not (listed or is_near(n[0], n[1] + n[2], min(compared.rounding, 1e-5))):
        # A mean times the samples of its batch is near a sum.
        multiplies = compared.apart and has_values and not all(map(whole.divides, spec.counts))
        grows = multiplies and _growth([v or 0.0 for v in values], compared)[0]
        doubt = f"a factor of {whole.name} is neither a count nor a constant"
        return candidate.judged(doubt, Cause.COUNT, how=How.PLAIN, grows=grows)
    if not whole.readable:
        return _unreadable(candidate, compared)
    sums = [(value or 0.0) * count if count else 0.0 for value, count in zip(values, n, strict=True)]
    if has_values and not _adds_up(sums, compared.tolerance):
        if compared.split.pads and rules:
            return candidate.judged(_PADDED, Cause.PADDING, rules=rules)
        # If stock divides it by the number, keep its weight by items.
        keeps = bool(compared.by_number and rules)
        return candidate.judged(COUPLED, Cause.COUPLED, how=How.MEAN if keeps else How.PLAIN, rules=rules)
    doubt = "" if has_values else "two of its terms have the same value, so the log cannot separate them"
    if whole.sorts:
        doubt = f"elements of {whole.name} are sorted, and what is left out depends on the micro-batch"
    shared = ([each.factors[at] for each in candidate.seen] for at in spec.counts if at < whole.above)
    if any(not is_near(one, other + another, 1e-5) for one, other, another in shared):
        # (a + b) / (a + b).detach() may add up where both have as many items.
        doubt = "one number that is no count divides several of its terms"
    # The same value for all samples (a policy's ratios, which begin at 1) does not show what their weights depend on;
    # a loss over its own value has that anyway.
    varies = not (has_values and compared.are_distinct and any(values)) or any(
        not is_near(values[0] or 0.0, value) for value in values[1:]
    )
    return candidate.judged(doubt, shows=varies or len(spec.counts) > 1 or not whole.weighs, rules=rules)


def _judged_other(candidate: Candidate, compared: Comparison) -> Candidate:
    """`judge` for a term all of whose factors are constants."""
    spec, values, whole = candidate.spec, candidate.values, candidate.seen[0]
    has_values = None not in values
    is_same = has_values and values[0] == values[1] == values[2] and compared.are_distinct
    # What cannot be read may depend on the data through a layer.
    if is_same and not whole.layered:
        # Zero is inconclusive.
        return candidate.judged(how=How.CONSTANT, shows=bool(values[0]))
    if not whole.readable:
        return _unreadable(candidate, compared)
    # As many means as samples may be rows, or tasks.
    are_means = spec.place is None and whole.own_divisor
    # A part of zero is inconclusive, unless there is no factor that may be a count of at least 1.
    shows = 0.0 not in values
    may_add_up = has_values and compared.apart and not (whole.rows or are_means)
    tolerance = min(compared.tolerance, 0.2)
    if may_add_up and (shows or not whole.factors) and _adds_up([v or 0.0 for v in values], tolerance):
        given = next(_given_counts(whole, compared), None)
        return candidate.judged(how=How.SUM) if given is None else candidate.judged(how=How.MEAN, **given)
    return candidate.judged(f"{whole.name} is {How.PLAIN.value}", shows=shows)


def _given_counts(term: TermLook, compared: Comparison) -> Iterator[dict[str, Any]]:
    """How a term is divided by a number among the inputs, which is a count that the parts of a batch do not show.

    A Python number that counts nothing else, and that no micro-batch has another of, may as well be a coefficient.
    """
    batch = compared.whole.batch
    rules = [rule for rule in (Items((key,), given=True) for key in batch) if rule.has_targets(batch)]
    for place, value in enumerate(term.factors):
        for rule in (rule for rule in rules if term.divides(place) and float(rule.count(batch)) == value):
            its = [(each, float(rule.count(each))) for each in compared.window if rule.has_targets(each)]
            others = [each for each in ways_of_counting(batch) if all(each.has_targets(batch) for batch, _ in its)]
            counts = any(all(float(other.count(each)) == n for each, n in its) for other in others)
            is_count = (place, rule.keys[0]) in term.inputs or counts or len({n for _, n in its}) > 1
            doubt = "" if is_count else f"its divisor {value:g} may be a constant, or the input {rule.keys[0]!r}"
            yield {"doubt": doubt, "counts": (place,), "rules": {rule: 1.0}, "counted": (value,)}


def _unreadable(candidate: Candidate, compared: Comparison) -> Candidate:
    """A term whose divisor is hidden: use the first rule by which its parts add up to the whole."""
    name, values, batches = candidate.seen[0].name, candidate.values, compared.batches
    doubt, hidden = f"the loss contains {name}, and what is below it cannot be read", Cause.HIDDEN
    is_opaque = name.startswith(OPAQUE) and None not in values and compared.are_distinct
    for rule in dict.fromkeys(ways_of_counting(batches[0], compared.ignored)) if is_opaque else ():
        n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
        if len(n) == 3 and all(n) and is_near(n[0], n[1] + n[2]):
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=True)]
            if _adds_up(sums, compared.tolerance):
                doubt = "" if name.startswith(DECLARED) else doubt
                return candidate.judged(doubt, hidden, how=How.MEAN, counts=(), rules={rule: 1.0}, counted=tuple(n))
    grows, shows = (False, True) if None in values else _growth([value or 0.0 for value in values], compared)
    return candidate.judged(doubt, hidden, how=How.PLAIN, shows=shows, grows=grows)


def _growth(values: Sequence[float], compared: Comparison) -> tuple[bool, bool]:
    """Whether a loss grows with its batch, and whether this split of the samples shows it.

    A mean lies between its parts. What is near their sum or beyond it grows: the absolute value of a sum, the log of a
    sum over few pairs. Over many pairs that does not, so whole micro-batches are compared.
    """
    value, one, other = values
    least, most = sorted((abs(one), abs(other)))
    margin = compared.tolerance * most
    # Equal to one of them, the other part may have no target.
    is_between = min(one, other) + margin < value < max(one, other) - margin
    # A part of zero is inconclusive, unless the value is far beyond the other.
    shows = abs(value) > 1.5 * most if 0.0 in values else is_between or compared.of_micro_batches
    return abs(value) > most + least / 2, shows


def _adds_up(sums: Sequence[float], tolerance: float) -> bool:
    return abs(sums[0] - sums[1] - sums[2]) <= tolerance * max(map(abs, sums))


# ------------------------------------------------------------------------------------------------------- rules


def rules_of(
    counts: Sequence[float], seen: Sequence[TermLook], compared: Comparison, known: Sequence[Items] = ()
) -> dict[Items, float]:
    """As `matching_rules`; if some count the targets that the leaves have saved, only those."""
    named = [rule for rule in seen[0].named if all(rule in each.named for each in seen)]
    rules = matching_rules(counts, compared.batches, compared.ignored, (*named, *known))
    return {rule: ratio for rule, ratio in rules.items() if rule in named} or rules


def _rules_of_number(
    numbered: Sequence[Candidate], means: Sequence[TermSpec], compared: Comparison
) -> tuple[Items, ...]:
    """The rules that count the number: of targets that a term has saved, of another term, or upstream's."""
    by_total = (([seen.targets for seen in each.seen], each.seen) for each in numbered)
    of_terms = [rules_of(totals, seen, compared) for totals, seen in by_total if totals[0]]
    fitting = next(filter(None, (*of_terms, *(each.rules for each in means))), {})
    return upstream_first([*fitting], compared.whole.batch, compared.window, compared.setting)


def upstream_first(
    fitting: Sequence[Items], batch: Mapping[str, Any], window: Sequence[Mapping[str, Any]], setting: Setting
) -> tuple[Items, ...]:
    """The ``fitting`` rules, upstream's first, if it is among them; upstream's alone if there are none."""
    upstream = number_rule(batch, window, setting)
    return tuple(dict.fromkeys((upstream, *fitting))) if upstream in fitting or not fitting else tuple(fitting)


def number_rule(batch: Mapping[str, Any], window: Sequence[Mapping[str, Any]], setting: Setting) -> Items:
    """The rule that counts a window as the installed release does."""
    rules = list(ways_of_counting(batch))
    for rule in rules if setting.upstream_number else ():
        counted = [float(rule.count(batch)) for batch in window if rule.has_targets(batch)]
        if len(counted) == len(window) and sum(counted) == setting.upstream_number:
            return rule
    return rules[0]
