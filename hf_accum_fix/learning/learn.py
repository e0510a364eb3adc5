"""Learn how a loss is reduced, from looks at a batch and at its two parts: plain numbers, and no tensor.

A term of the batch J and its parts A and B, of value v, whose factors that differ have the product d, is

    a mean      if d_J = d_A + d_B and v_J d_J = v_A d_A + v_B d_B; every rule on the inputs that gives d predicts it
    a sum       if no factor differs, and v_J = v_A + v_B
    a constant  if no factor differs, and v_J = v_A = v_B
    not exact   else, with the reason
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, starmap
from typing import Any, NamedTuple

from hf_accum_fix.counting.items import Items
from hf_accum_fix.counting.rules import is_near, is_padded, listed_targets, matching_rules, ways_of_counting
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, Cause, How, LossContract, Reduction, TermSpec
from hf_accum_fix.learning.look import Comparison, Setting
from hf_accum_fix.reading.loss_graph import Term
from hf_accum_fix.reading.nodes import NO_FLOOR, Factor

#: Losses of other libraries that are means over targets, though their graph hides it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
_REST = "a part without gradient is no constant (a router's: set use_reentrant=False), or its samples are coupled"
_PADDED = "it depends on how its samples are padded, or they are coupled (as by in-batch negatives)"
COUPLED = "the samples of a batch are coupled (as by in-batch negatives): the loss is no weighted mean over its parts"
#: The same term in the three looks; several of its rows.
Triple = Sequence[Sequence[Term]]


class Judged(NamedTuple):
    """A term as judged: its value in each look (None: unknown), and why it is not exact."""

    spec: TermSpec
    seen: Sequence[Term]
    values: Sequence[float | None]
    doubt: str = ""
    cause: Cause | None = None

    def but(self, doubt: str = "", cause: Cause | None = None, **spec: Any) -> Judged:
        """With a doubt, and changes of its spec."""
        return self._replace(spec=replace(self.spec, **spec), doubt=doubt, cause=cause)


def learn(compared: Comparison) -> LossContract:
    """The contract of a loss, from the looks at a batch and its two parts."""
    whole = compared.whole
    rules = list(ways_of_counting(whole.batch))
    listed = next(listed_targets(whole.batch), None)
    if listed is not None and not float(listed.count(whole.batch)):
        return LossContract(Reduction.MEAN, listed, dtype=whole.dtype, conclusive=False, reason=NO_TARGET_SEEN)
    if not whole.shows_terms or not any(each.loss for each in compared.looks):
        return _nothing_seen(compared, rules)
    return _learnt(compared, rules)


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


def _learnt(compared: Comparison, rules: Sequence[Items]) -> LossContract:
    """`learn` from looks that show a loss."""
    whole, setting = compared.whole, compared.setting
    terms, looks = whole.terms, compared.looks
    matched = [*_matched([each.terms for each in looks])]
    judged = list[Judged]()
    for triple, place, values in _with_values(matched, looks):
        judged.append(_judge(triple, place, values, compared, judged))
    specs = tuple(each.spec for each in judged)
    doubts = [(each.doubt, each.cause) for each in judged if each.doubt]
    if compared.split.blocks > 1 and any(starmap(_are_chunks, combinations(judged, 2))):
        # Blocks of rows that were chosen such that they fit.
        doubts.append(("it has a term for each chunk of the rows of a micro-batch", Cause.TERMS))
    learnt = any(factor.learnt for each in terms for factor in each.factors[: each.above])
    if learnt and len({spec.group for spec in specs}) > 1:
        # No hook separates them.
        doubts.append(("one learnt factor multiplies several of its terms, which need different weights", None))
    rest, is_mean = _rest(judged, compared) if any(each.added for each in terms) else (0.0, True)
    if rest is None:
        doubts.append(("a part of the loss has no gradient; the log averages it over micro-batches", Cause.LOG))
    # What may change the gradient comes first.
    doubt, cause = min(doubts, key=lambda each: each[1] is Cause.LOG, default=("", None))
    router = {each.router: each.product(range(len(each.factors))) for each in terms if each.router}
    shows = compared.split.shows_coupling or whole.samples == 1
    found = LossContract(
        Reduction.PLAIN,
        # A custom loss may add the router loss itself.
        router_coefficient=0.0 if setting.custom else router.get("aux_loss", 0.0),
        router_z_coefficient=0.0 if setting.custom else router.get("z_loss", 0.0),
        terms=specs,
        custom=setting.custom,
        hands_number=setting.hands_number,
        dtype=whole.dtype,
        doubt=doubt,
        cause=Cause.COUPLED if Cause.COUPLED in {each for _, each in doubts} else cause,
        grows=compared.grows,
        added=None if is_mean else rest or 0.0,
        deep=any(each.within for its in looks for each in its.terms),
        unchecked="" if shows else "its micro-batches can neither be joined nor divided into samples",
        conclusive=all(_shows(each, compared) for each in judged),
    )
    means = [each for each in specs if each.how is How.MEAN]
    if numbered := [each for each in judged if each.spec.how is How.NUMBER]:
        factors = [value for each in numbered for value in each.seen[0].numbers]
        multiplies = setting.world_size in setting.own and any(is_near(value, setting.world_size) for value in factors)
        reason, by = "its graph divides by num_items_in_batch", _rules_of_number(numbered, means, compared)
        takes = multiplies if setting.custom and setting.world_size > 1 else None
        found = replace(found, items=by[0], reduction=Reduction.NUMBER, takes_world_size=takes, reason=reason)
        return found.with_rules_of_number(by)
    if means:
        # Without a rule for the count, take one for its targets.
        near = next((each.named[0] for each in terms if each.named), rules[0])
        reduction = Reduction.NUMBER if compared.by_number else Reduction.MEAN
        reason = f"its graph divides {means[0].shape[0]} by them"
        return replace(found, reduction=reduction, items=means[0].rule or near, reason=reason)
    if specs and all(each.how is How.SUM for each in specs):
        return replace(found, reduction=Reduction.SUM, reason="its graph divides by nothing, and its parts add up")
    doubt = doubt or "none of its terms is divided by a count"
    return replace(found, doubt=doubt, reason=doubt)


def _are_chunks(one: Judged, other: Judged) -> bool:
    """Whether two terms may be one term of other rows: of blocks, or by the same rules, and then with its constants."""
    rules, others = ({replace(rule, block=None) for rule in each.spec.rules} for each in (one, other))
    alike = one.spec.shape == other.spec.shape and (not rules or not others or bool(rules & others))
    counts = {*one.spec.counts, *other.spec.counts}
    pairs = enumerate(zip(one.seen[0].numbers, other.seen[0].numbers, strict=True)) if alike else ()
    of_blocks = one.spec.rules.keys().isdisjoint(other.spec.rules)
    return alike and (of_blocks or all(at in counts or is_near(*pair) for at, pair in pairs))


def _shows(term: Judged, compared: Comparison) -> bool:
    """Whether its values are conclusive: a count or a constant of zero shows nothing."""
    if term.spec.how is How.MEAN:
        # One value of all samples (a policy's ratios, which begin at 1) does not show what their weights depend on.
        one, *others = term.values
        alike = one and all(each and is_near(one, each) for each in others)
        blank = alike and term.seen[0].weighs and len(term.spec.counts) == 1 and compared.split.are_distinct
        return not (blank or term.spec.counted[0] == 0.0)
    return term.spec.how not in (How.CONSTANT, How.PLAIN) or term.seen[0].learnt or 0.0 not in term.values


def _rest(judged: Sequence[Judged], compared: Comparison) -> tuple[float | None, bool]:
    """What is added to the terms without a gradient, None: no constant; and whether it is a mean over their items."""
    if any(None in each.values for each in judged):
        return None, False
    rests = [look.loss - math.fsum(each.values[at] or 0.0 for each in judged) for at, look in enumerate(compared.looks)]
    largest = compared.tolerance * max(abs(look.loss) for look in compared.looks)
    if {each.spec.how for each in judged} == {How.MEAN} and len({each.spec.group for each in judged}) == 1:
        n, sums = judged[0].spec.counted, [n * rest for n, rest in zip(judged[0].spec.counted, rests, strict=True)]
        if abs(sums[0] - sums[1] - sums[2]) <= largest * n[0]:
            return 0.0, True
    return (rests[0] if max(rests) - min(rests) <= largest else None), False


def _matched(seen: Triple) -> Iterator[tuple[Triple, int | None]]:
    """The same term in three looks, by shape and place; None: its rows, or the parts of one sum."""
    for shape in dict.fromkeys(each.shape for terms in seen for each in terms):
        its = [[term for term in terms if term.shape == shape] for terms in seen]
        whole, one, other = map(len, its)
        if whole == one == other and not _are_one_sum(its):
            yield from (([[term] for term in terms], place) for place, terms in enumerate(zip(*its, strict=True)))
        else:
            yield its, None


def _are_one_sum(seen: Triple) -> bool:
    """Whether terms are sums over parts of a batch (chunks of its logits) that are divided by one count."""
    alike = all(len({each.numbers for each in terms}) == 1 for terms in seen)
    divides = any(each.divides or not each.readable for terms in seen for each in terms)
    return alike and not divides and max(map(len, seen)) > 1 and len({terms[0].numbers for terms in seen}) > 1


def _are_rows(its: Triple, compared: Comparison) -> bool:
    """Whether the number of terms is proportional to the samples: then they are rows of one mean or sum."""
    (whole, one, other), samples = map(len, its), [each.samples for each in compared.looks]
    return whole == one + other and one % samples[1] == 0 and one * samples[0] == whole * samples[1]


def _with_values(
    matched: Sequence[tuple[Triple, int | None]], looks: Sequence[Any]
) -> Iterator[tuple[Triple, int | None, list[float | None]]]:
    """With the value of each; those without one share the rest of the loss, if they divide by the same."""
    values: list[list[float | None]] = [
        [None if any(t.value is None for t in its) else math.fsum(t.value or 0.0 for t in its) for its in triple]
        for triple, _ in matched
    ]
    blank = [at for at, its in enumerate(values) if None in its]
    divisors = [_moving(matched[at][0]) for at in blank]
    if divisors and all(len(each) == len(looks) and all(map(is_near, each, divisors[0])) for each in divisors):
        rest = [
            look.loss - math.fsum(its[n] or 0.0 for at, its in enumerate(values) if at not in blank)
            for n, look in enumerate(looks)
        ]
        for at in blank:
            values[at] = [*rest] if at == blank[0] else [0.0] * len(rest)
    return ((*each, its) for each, its in zip(matched, values, strict=True))


def _moving(its: Triple) -> list[float]:
    """In each look the product of a term's factors that differ between looks."""
    first = [terms[0] for terms in its if terms]
    columns = enumerate(zip(*(each.numbers for each in first), strict=True))
    places = [at for at, of_looks in columns if not all(is_near(of_looks[0], each) for each in of_looks)]
    return [each.product(places) for each in first]


def _judge(
    its: Triple, place: int | None, values: Sequence[float | None], compared: Comparison, before: Sequence[Judged]
) -> Judged:
    """What a term is, and why it is not exact; ``before``: those that were judged."""
    first = _with_common_floors([terms[0] for terms in its if terms])
    of_samples = place is None and all(its) and _are_rows(its, compared)
    # What is sorted within each sample selects none of them.
    first = [replace(each, sorts=each.sorts and not of_samples and not each.rows) for each in first]
    whole, one_sum = first[0], place is None and all(its) and _are_one_sum(its)
    term = Judged(TermSpec(whole.shape, place, How.PLAIN), first, values)
    if not all(its) or (place is None and not one_sum and not of_samples):
        a, b, c = map(len, its)
        words = f"the loss has {a}, {b} and {c} terms {whole.name} in a batch and its parts"
        return term.but(words, Cause.TERMS, place=0)
    if whole.router:
        return term.but(how=How.ROUTER)
    columns = [*enumerate(zip(*(each.numbers for each in first), strict=True))]
    number = tuple(at for at, of_looks in columns if compared.are_numbers(of_looks))
    # Each row has its own count, of the loss function or in the code.
    rows = place is None and whole.divides
    below = range(whole.above, len(columns))
    of_rows = {at for at in below for terms in its if len({each.numbers[at] for each in terms}) > 1}
    guarded = _guarded(first, compared)
    counts = tuple(
        at
        for at, of_looks in columns
        if not (rows and whole.is_own_divisor(at))
        and at not in of_rows
        and (
            not all(is_near(of_looks[0], each) for each in of_looks)
            or whole.is_own_divisor(at) > compared.split.apart
            or (whole.factors[at].divides and [*of_looks] in guarded)
        )
    )
    if whole.learnt and not counts:
        return term.but(how=How.CONSTANT)
    if number:
        return _judged_number(term.but(how=How.NUMBER, counts=number), compared)
    if not whole.readable:
        return _unreadable(term, compared)
    if counts:
        return _judged_mean(term.but(counts=counts), compared, before)
    doubt = f"{whole.name} is {How.PLAIN.value}"
    if None in values or not compared.split.apart:
        return term.but(doubt)
    v = [value or 0.0 for value in values]
    if v[0] == v[1] == v[2] and compared.split.are_distinct:
        # Zero is inconclusive.
        return term.but(how=How.CONSTANT)
    # A part of zero is inconclusive, unless there is no factor that may be a count of at least 1.
    may_add_up = not (rows or whole.rows) and (0.0 not in v or not whole.factors)
    if may_add_up and _adds_up(v, min(compared.tolerance, 0.2)):
        divisors = [value for at, value in enumerate(whole.numbers) if whole.factors[at].divides]
        given = next((key for key, n in compared.whole.numbers_among_inputs.items() if n in divisors), None)
        return term.but(how=How.SUM) if given is None else term.but(f"its divisor may be the input {given!r}")
    return term.but(doubt, None if 0.0 in v else Cause.COUPLED)


def _with_common_floors(seen: Sequence[Term]) -> Sequence[Term]:
    """Terms with what they divide by in place of the count below a floor, unless all looks show the same floor."""
    columns = zip(*([each.floor for each in term.factors] for term in seen), strict=True)
    others = [len({*floors}) > 1 for floors in columns]

    def divisor(factor: Factor, differs: bool) -> Factor:
        by = factor.floor if differs else None
        return factor if by is None else Factor(by.over(factor.value), factor.divides)

    return [replace(t, factors=tuple(map(divisor, t.factors, others))) for t in seen]


def _guarded(seen: Sequence[Term], compared: Comparison) -> list[list[float]]:
    """Counts of a term that may be the same in all looks: of its targets, of at least 1, or none below its floor."""
    rules = [*listed_targets(compared.whole.batch)][:1]
    counts = [*([float(rule.count(batch)) for batch in compared.batches] for rule in rules), [t.targets for t in seen]]
    return [*([max(n, 1.0) for n in each] for each in counts if any(each)), [0.0] * len(seen)]


def _judged_number(term: Judged, compared: Comparison) -> Judged:
    """`_judge` of a term that is divided by the number."""
    sums = [(value or 0.0) / seen.product(term.spec.counts) for value, seen in zip(term.values, term.seen, strict=True)]
    return term if None in term.values or _adds_up(sums, compared.tolerance) else term.but(COUPLED, Cause.COUPLED)


def _judged_mean(term: Judged, compared: Comparison, before: Sequence[Judged]) -> Judged:
    """`_judge` of a term with factors that differ."""
    whole, values, spec = term.seen[0], term.values, term.spec
    d = [1 / each.product(spec.counts) if all(each.numbers[at] for at in spec.counts) else 0.0 for each in term.seen]
    floors = [each.factors[spec.counts[0]].floor if len(spec.counts) == 1 else None for each in term.seen]
    # A part without items divides by at least 1, if a floor may have hidden that.
    pairs = zip(d, term.seen, floors, strict=True)
    without = [0.0 if by is None and n == 1 and each.value == 0 else n for n, each, by in pairs]
    d = without if compared.split.apart and is_near(without[0], without[1] + without[2], 1e-5) else d
    if compared.are_numbers(d):
        # A mean times items / number.
        return _judged_number(term.but(how=How.NUMBER), compared)
    # Terms that divide by the same but for rounding have one count: class weights with smoothed labels.
    counted = (each.spec.counted for each in before if each.spec.how is How.MEAN)
    d = [*next((one for one in counted if len(one) == len(d) and all(map(is_near, one, d))), d)]
    rules = rules_of(d, term.seen, compared, [r for each in before for r, n in each.spec.rules.items() if n == 1.0])
    if whole.by_classes and not any(rule.mix for rule in rules):
        # The classes of this batch may weigh alike.
        rules = {}
    # By a rule it is known before the forward.
    floor = floors[0] if len({*floors}) == 1 and not (rules and floors[0] == NO_FLOOR) else None
    mean = term.but(how=How.MEAN, rules=rules, counted=tuple(d), floor=floor)
    padded = all(is_padded(rule, compared.whole.batch) for rule in rules)
    if rules and padded and len(compared.whole.terms) > 1:
        doubt = f"{whole.name} is a mean over all positions, padding among them, and depends on how a batch is padded"
        return term.but("" if compared.setting.has_z_loss else doubt, Cause.PADDING, how=How.ROUTER, rules=rules)
    elements = whole.divides and not whole.targets and padded
    if elements and compared.is_ragged and not compared.split.shows_coupling:
        return mean.but("its micro-batches are of several widths and cannot be joined; it may be a mean over padding")
    if not compared.split.apart and (rules or whole.divides):
        return mean
    looks = zip(term.seen, compared.looks, strict=True)
    if whole.rows and any(seen.rows * compared.whole.samples != whole.rows * look.samples for seen, look in looks):
        return term.but("it is a mean over elements of a sample, not over the samples")
    # Lists of targets divide by at least 1.
    listed = any(rule.entry is not None for rule in rules)
    if not compared.split.apart or not (listed or is_near(d[0], d[1] + d[2], min(compared.rounding, 1e-5))):
        return term.but(f"a factor of {whole.name} is neither a count nor a constant", Cause.COUNT)
    if None in values:
        return mean.but("two of its terms have the same value, so the log cannot separate them", Cause.LOG)
    divisors = [n if by is None else by.over(n) for n, by in zip(d, floors, strict=True)]
    if not _adds_up([(v or 0.0) * n if n else 0.0 for v, n in zip(values, divisors, strict=True)], compared.tolerance):
        words, cause = (_PADDED, Cause.PADDING) if compared.split.pads and rules else (COUPLED, Cause.COUPLED)
        return mean.but(_REST if whole.added and whole.value is None else words, cause)
    if whole.sorts:
        return mean.but(f"elements of {whole.name} are sorted, and what is left out depends on the micro-batch")
    shared = ([each.numbers[at] for each in term.seen] for at in spec.counts if at < whole.above)
    if any(not is_near(one, other + another, 1e-5) for one, other, another in shared):
        # (a + b) / (a + b).detach() may add up where both have as many items.
        return mean.but("one number that is no count divides several of its terms")
    return mean


def _unreadable(term: Judged, compared: Comparison) -> Judged:
    """A term whose divisor is hidden: of a known kernel, the first rule by which its parts add up to the whole."""
    whole, values, batches = term.seen[0], term.values, compared.batches
    if None not in values and compared.split.are_distinct:
        if values[0] == values[1] == values[2] and not whole.layered:
            return term.but(how=How.CONSTANT)
        known = whole.name.startswith(DECLARED)
        for rule in dict.fromkeys(ways_of_counting(batches[0], compared.ignored)) if known else ():
            n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=False)]
            if len(n) == 3 and all(n) and is_near(n[0], n[1] + n[2]) and _adds_up(sums, compared.tolerance):
                return term.but("", Cause.HIDDEN, how=How.MEAN, rules={rule: 1.0}, counted=tuple(n))
    return term.but(f"the loss contains {whole.name}, and what is below it cannot be read", Cause.HIDDEN)


def _adds_up(sums: Sequence[float], tolerance: float) -> bool:
    return abs(sums[0] - sums[1] - sums[2]) <= tolerance * max(map(abs, sums))


def rules_of(
    counts: Sequence[float], seen: Sequence[Term], compared: Comparison, known: Sequence[Items] = ()
) -> dict[Items, float]:
    """As `matching_rules`; if some count the targets that the leaves have saved, only those."""
    named = [rule for rule in seen[0].named if all(rule in each.named for each in seen)]
    rules = matching_rules(counts, compared.batches, compared.ignored, (*named, *known))
    return {rule: ratio for rule, ratio in rules.items() if rule in named} or rules


def _rules_of_number(numbered: Sequence[Judged], means: Sequence[TermSpec], compared: Comparison) -> tuple[Items, ...]:
    """The rules that count the number: of targets that a term has saved, of another term, or upstream's."""
    by_total = (([seen.targets for seen in each.seen], each.seen) for each in numbered)
    of_terms = [rules_of(totals, seen, compared) for totals, seen in by_total if totals[0]]
    # A term over some of the rows, where a loss is computed in chunks, does not count the number.
    every = ([rule for rule in rules if rule.block is None] for rules in (*of_terms, *(each.rules for each in means)))
    fitting = next(filter(None, every), [])
    upstream = number_rule(compared.whole.batch, compared.window, compared.setting)
    return tuple(dict.fromkeys((upstream, *fitting))) if upstream in fitting or not fitting else tuple(fitting)


def number_rule(batch: Mapping[str, Any], window: Sequence[Mapping[str, Any]], setting: Setting) -> Items:
    """The rule that counts a window as the installed release does."""
    rules = list(ways_of_counting(batch))
    for rule in rules if setting.upstream_number else ():
        counted = [float(rule.count(batch)) for batch in window if rule.has_targets(batch)]
        if len(counted) == len(window) and sum(counted) == setting.upstream_number:
            return rule
    return rules[0]
