"""Check whether the values of a term add up over the parts of a batch as its factors predict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.comparison import Candidate, Comparison
from hf_accum_fix.accumulation.contract import Cause, How
from hf_accum_fix.accumulation.elements import holds_layers, sorts_elements, weights_elements
from hf_accum_fix.accumulation.items import Items, sample_count
from hf_accum_fix.accumulation.reading import TermReading
from hf_accum_fix.accumulation.rules import is_near, is_padded, matching_rules, ways_of_counting

#: Losses of other libraries that are means over targets, though their graph hides it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: Nodes that hide a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
_PADDED = "it depends on how its samples are padded, or they are coupled (as by in-batch negatives)"
COUPLED = "the samples of a batch are coupled (as by in-batch negatives): the loss is no weighted mean over its parts"


def check_term(candidate: Candidate, compared: Comparison, known: Sequence[Items], *, alone: bool) -> Candidate:
    """Check whether a term's values add up as its factors predict.

    ``known``: rules of other terms; ``alone``: it is the only term.
    """
    spec, values, whole = candidate.spec, candidate.values, candidate.seen[0]
    has_values = None not in values
    if whole.router:
        return candidate.judged(how=How.ROUTER, counts=(), rules={})
    if not candidate.matched:
        return candidate
    if whole.term.learnt and not spec.counts:
        return candidate.judged(how=How.CONSTANT)
    # Random numbers differ between a batch and its parts, so allow for noise.
    tolerance = math.inf if compared.whole.drew or not compared.apart else compared.tolerance
    if spec.how is How.NUMBER:
        sums = [(value or 0.0) / seen.product(spec.counts) for value, seen in zip(values, candidate.seen, strict=True)]
        adds_up = not has_values or _adds_up(sums, tolerance)
        return candidate if adds_up else candidate.judged(COUPLED, Cause.COUPLED)
    if spec.counts:
        return _check_mean(candidate, compared, known, tolerance, alone=alone)
    is_same = has_values and values[0] == values[1] == values[2] and compared.are_distinct
    # What cannot be read may depend on the data through a layer.
    if is_same and (whole.term.readable or not holds_layers(whole.term.leaf)):
        # Zero is inconclusive.
        return candidate.judged(how=How.CONSTANT, shows=bool(values[0]))
    if not whole.term.readable:
        return _unreadable(candidate, compared, tolerance)
    # As many means as samples may be rows, or tasks.
    are_means = spec.place is None and whole.term.divides
    # A part of zero is inconclusive, unless there is no factor that may be a count of at least 1.
    shows = 0.0 not in values
    may_add_up = has_values and compared.apart and not (whole.term.rows or are_means)
    if may_add_up and (shows or not whole.factors) and _adds_up([v or 0.0 for v in values], min(tolerance, 0.2)):
        given = next(_given_counts(whole, compared), None)
        return candidate.judged(how=How.SUM) if given is None else candidate.judged(how=How.MEAN, **given)
    return candidate.judged(f"{whole.name} is {How.PLAIN.value}", shows=shows)


def _given_counts(term: TermReading, compared: Comparison) -> Iterator[dict[str, Any]]:
    """How a term is divided by a number among the inputs, which is a count that the parts of a batch do not show.

    A Python number that counts nothing else, and that no micro-batch has another of, may as well be a coefficient.
    """
    batch = compared.whole.batch
    rules = [rule for rule in (Items((key,), given=True) for key in batch) if rule.has_targets(batch)]
    for place, (value, factor) in enumerate(zip(term.factors, term.term.factors, strict=True)):
        for rule in (rule for rule in rules if factor.divides and float(rule.count(batch)) == value):
            given = batch[rule.keys[0]]
            is_given = isinstance(given, Tensor) and given.data_ptr() == factor.memory
            its = [(each, float(rule.count(each))) for each in compared.window if rule.has_targets(each)]
            others = [each for each in ways_of_counting(batch) if all(each.has_targets(batch) for batch, _ in its)]
            counts = any(all(float(other.count(each)) == n for each, n in its) for other in others)
            is_count = is_given or counts or len({n for _, n in its}) > 1
            doubt = "" if is_count else f"its divisor {value:g} may be a constant, or the input {rule.keys[0]!r}"
            yield {"doubt": doubt, "counts": (place,), "rules": {rule: 1.0}, "counted": (value,)}


def _check_mean(
    candidate: Candidate, compared: Comparison, known: Sequence[Items], tolerance: float, *, alone: bool
) -> Candidate:
    """`tested` for a term with a factor that is not constant."""
    values, n, batches = candidate.values, candidate.counts, compared.batches
    whole, has_values = candidate.seen[0], None not in values
    rules = rules_of(n, candidate.seen, compared, known)
    if whole.is_weighted and not any(rule.mix for rule in rules):
        # The classes of this batch may weigh alike.
        rules = {}
    if rules and all(is_padded(rule, batches[0]) for rule in rules) and not alone:
        doubt = f"{whole.name} is a mean over all positions, padding among them, and depends on how a batch is padded"
        doubt = "" if compared.setting.has_z_loss else doubt
        return candidate.judged(doubt, how=How.ROUTER, rules=rules)
    if not compared.apart and whole.term.readable and (rules or whole.term.divides):
        # One batch does not show whether a tensor is constant.
        constants = (each for at, each in enumerate(whole.term.factors) if at not in candidate.spec.counts)
        hides = any(isinstance(each.value, Tensor) for each in constants)
        return candidate.judged(how=How.PLAIN if hides else How.MEAN, rules=rules)
    samples, rows = [sample_count(batch) for batch in batches], [each.term.rows for each in candidate.seen]
    if whole.term.rows and any(row * samples[0] != rows[0] * m for row, m in zip(rows, samples, strict=True)):
        doubt = "it is a mean over elements of a sample, not over the samples"
        return candidate.judged(doubt, how=How.PLAIN)
    # Lists of targets divide by at least 1.
    listed = any(rule.entry is not None for rule in rules)
    if not compared.apart or not (listed or is_near(n[0], n[1] + n[2], min(compared.rounding, 1e-5))):
        # A mean times the samples of its batch is near a sum.
        multiplied = any(not whole.term.factors[at].divides for at in candidate.spec.counts)
        grows = multiplied and compared.apart and has_values and _growth([v or 0.0 for v in values], compared)[0]
        doubt = f"a factor of {whole.name} is neither a count nor a constant"
        return candidate.judged(doubt, Cause.COUNT, how=How.PLAIN, grows=grows)
    if not whole.term.readable:
        return _unreadable(candidate, compared, tolerance)
    sums = [(value or 0.0) * count if count else 0.0 for value, count in zip(values, n, strict=True)]
    if has_values and not _adds_up(sums, tolerance):
        if compared.pads and rules:
            return candidate.judged(_PADDED, Cause.PADDING, rules=rules)
        # If stock divides it by the number, keep its weight by items.
        keeps = bool(compared.by_number and rules)
        return candidate.judged(COUPLED, Cause.COUPLED, how=How.MEAN if keeps else How.PLAIN, rules=rules)
    doubt = "" if has_values else "two of its terms have the same value, so the log cannot separate them"
    if sorts_elements(whole.term.leaf):
        doubt = f"elements of {whole.name} are sorted, and what is left out depends on the micro-batch"
    shared = [
        [each.factors[at] for each in candidate.seen] for at in candidate.spec.counts if at < whole.term.path.above
    ]
    if any(not is_near(a, b + c, 1e-5) for a, b, c in shared):
        # (a + b) / (a + b).detach() may add up where both have as many items.
        doubt = "one number that is no count divides several of its terms"
    # The same value for all samples (a policy's ratios, which begin at 1) does not show what their weights depend on;
    # a loss over its own value has that anyway.
    varies = not (has_values and compared.are_distinct and any(values)) or any(
        not is_near(values[0] or 0.0, value) for value in values[1:]
    )
    shows = varies or len(candidate.spec.counts) > 1 or not weights_elements(whole.term.leaf)
    return candidate.judged(doubt, shows=shows, rules=rules)


def rules_of(
    counts: Sequence[float], seen: Sequence[TermReading], compared: Comparison, known: Sequence[Items] = ()
) -> dict[Items, float]:
    """As `matching_rules`; if some count the targets that the leaves have saved, only those."""
    named = [rule for rule in seen[0].named if all(rule in each.named for each in seen)]
    rules = matching_rules(counts, compared.batches, compared.ignored, (*named, *known))
    return {rule: ratio for rule, ratio in rules.items() if rule in named} or rules


def _unreadable(candidate: Candidate, compared: Comparison, tolerance: float) -> Candidate:
    """A term whose divisor is hidden: use the first rule by which its parts add up to the whole."""
    name, values, batches = candidate.seen[0].name, candidate.values, compared.batches
    doubt, hidden = f"the loss contains {name}, and what is below it cannot be read", Cause.HIDDEN
    is_opaque = name.startswith(OPAQUE) and None not in values and compared.are_distinct
    for rule in dict.fromkeys(ways_of_counting(batches[0], compared.ignored)) if is_opaque else ():
        n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
        if len(n) == 3 and all(n) and is_near(n[0], n[1] + n[2]):
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=True)]
            if _adds_up(sums, tolerance):
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
