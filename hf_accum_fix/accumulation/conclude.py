"""Conclude the contract from three forwards: which factors of a loss are counts, and whether its terms add up so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Coupling, How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.reading import Reading, TermReading
from hf_accum_fix.accumulation.rules import is_near, is_padded, listed_targets, matching_rules, ways_of_counting
from hf_accum_fix.accumulation.window import Items, sample_count

#: The numbers passed to the three forwards: fractions, and no sums or multiples of one another.
NUMBERS = (1237.5, 4111.5, 2777.5)
#: The integers passed to a custom ``compute_loss`` instead.
_OWN_NUMBERS = {1237.5: 7919, 4111.5: 3571, 2777.5: 5557}
#: Losses of other libraries that are means over targets, though their graph hides it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: Nodes that hide a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
#: Relative tolerance of two values computed alike, by bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def own_number(number: float) -> int:
    """The number passed to a custom ``compute_loss`` where the head gets ``number``; whole, as upstream passes it."""
    return _OWN_NUMBERS.get(number, int(number))


@dataclass(frozen=True)
class Setting:
    """Facts about a training that are known before its loss is observed; "the number" is num_items_in_batch.

    Attributes:
        hands_number: the model or the compute_loss_func gets the number in training.
        hands_own: a custom ``compute_loss`` gets it.
        only_shows: only the last forward gets the number, to see whether the loss would divide by it.
        custom: a custom ``compute_loss`` makes the loss.
        func: a compute_loss_func makes it.
        multiplies: a custom loss that divides by the number may multiply by the number of ranks.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products are less precise than float32.
        alone: the loss has one term.
        apart: the forwards ran a batch and its two parts.
        again: another split was inconclusive, or showed coupled samples.
        by_number: the model would divide by the number, if it got it.
        has_stock: a Trainer runs the loss, so that there is a scale to keep where it cannot be read.
    """

    hands_number: bool = False
    only_shows: bool = False
    hands_own: bool = False
    custom: bool = False
    func: bool = False
    multiplies: bool = False
    steps: int = 1
    world_size: int = 1
    upstream_number: float | None = None
    rounded: bool = False
    alone: bool = True
    apart: bool = True
    again: bool = False
    by_number: bool = False
    has_stock: bool = False


@dataclass(frozen=True)
class Candidate:
    """One term, or the rows of one mean, in the three forwards."""

    spec: TermSpec
    seen: tuple[TermReading, TermReading, TermReading]
    counts: tuple[float, ...]
    values: tuple[float | None, ...]
    doubt: str = ""
    shows: bool = True

    @property
    def is_unseen(self) -> bool:
        """Whether it was zero in all forwards."""
        return not any(self.values) and None not in self.values and self.spec.how is not How.ROUTER

    def judged(self, doubt: str = "", *, shows: bool = True, **spec: Any) -> Candidate:
        """With the conclusion from its values."""
        return replace(self, spec=replace(self.spec, **spec), doubt=doubt, shows=shows)

    def doubted(self, doubt: str, *, shows: bool = True) -> Candidate:
        """As a term that is averaged over micro-batches."""
        return self.judged(doubt, shows=shows, how=How.PLAIN)


def conclude(readings: Sequence[Reading], window: Sequence[Mapping[str, Any]], setting: Setting) -> LossContract:
    """The contract from the forwards of a batch and its two parts; ``window``: the micro-batches of this rank."""
    whole = readings[0]
    rules = list(ways_of_counting(whole.batch))
    listed = next(listed_targets(whole.batch), None)
    if listed is not None and not float(listed.count(whole.batch)):
        return replace(_nothing_seen(whole, [listed]), reason=NO_TARGET_SEEN)
    if not whole.terms or not math.isfinite(whole.loss) or not any(each.loss for each in readings):
        return _nothing_seen(whole, rules)
    found = _concluded(readings, window, setting, rules, inside=False)
    if found.doubt and any(each.rows for each in whole.terms):
        # Stacked numbers are rows of one mean, or several terms.
        inner = _concluded(readings, window, setting, rules, inside=True)
        found = found if inner.doubt else inner
    return found


def _concluded(
    readings: Sequence[Reading],
    window: Sequence[Mapping[str, Any]],
    setting: Setting,
    rules: Sequence[Items],
    *,
    inside: bool,
) -> LossContract:
    """`conclude`, with stacked numbers taken for rows, or for terms (``inside``)."""
    whole = readings[0]
    dtype, batches = whole.dtype, [each.batch for each in readings]
    seen = [reading.inside if inside else reading.terms for reading in readings]
    by_number = False
    if setting.only_shows and readings[2].number is not None:
        seen[2], by_number = _without_number(seen, readings)
        setting = replace(setting, by_number=by_number)
    candidates, mismatch = _matched(seen, readings, setting)
    candidates = _with_values(candidates, readings)
    ignored = list(dict.fromkeys([*(s.ignored for s in seen[0] if s.ignored is not None), -100]))
    tolerance = 2e-2 if setting.rounded else _TOLERANCE.get(dtype.itemsize, 2e-2)
    tolerance = tolerance / 10 if setting.again else tolerance
    setting = replace(setting, alone=len(candidates) == 1)
    tested = _all_tested(candidates, batches, ignored, math.inf if whole.drew else tolerance, setting)
    adds = _added(tested, readings, tolerance) if any(each.added for each in seen[0]) else How.MEAN
    specs, doubt = _specs(tested, mismatch, adds, setting, alone=sample_count(whole.batch) <= 1)
    found = LossContract(
        Reduction.PLAIN,
        terms=specs,
        dtype=dtype,
        doubt=doubt,
        coupling=Coupling.COUPLED if any(each.doubt == _COUPLED for each in tested) else Coupling.UNKNOWN,
        # A custom loss may add the router loss itself.
        router_coefficient=0.0 if setting.custom else _coefficient(tested, "aux_loss"),
        router_z_coefficient=0.0 if setting.custom else _coefficient(tested, "z_loss"),
        inside=inside,
        added=adds is not How.MEAN,
        deep=any(each.within for terms in seen for each in terms),
        warms=whole.warms,
        unseen=len(tested) > 1 and any(each.is_unseen for each in tested),
        shift=next((each.shift for each in seen[0] if each.shift is not None), None),
    )
    means = [each for each in specs if each.how is How.MEAN]
    numbered = [each for each in tested if each.spec.by_number]
    if numbered:
        items = next((each.rules[0] for each in (*(each.spec for each in numbered), *means) if each.rules), None)
        found = replace(found, items=items or number_rule(whole.batch, window, setting))
        return _by_number(found, numbered, setting)
    if means and found.coupling is Coupling.COUPLED:
        return replace(found, reason=_COUPLED)
    if means:
        # Without a rule for the count, take one for its targets.
        near = next((each.named[0] for each in seen[0] if each.named), rules[0])
        return replace(
            found,
            reduction=Reduction.NUMBER if by_number else Reduction.MEAN,
            items=means[0].rules[0] if means[0].rules else near,
            conclusive=means[0].count != 0.0 and all(each.shows for each in tested),
            reason=f"its graph divides {means[0].shape[0]} by them",
        )
    if specs and all(each.how is How.SUM for each in specs):
        reason = "its graph divides by nothing, and the losses of two parts add up"
        return replace(found, reduction=Reduction.SUM, reason=reason)
    doubt = doubt or "none of its terms is divided by a count"
    return replace(found, conclusive=all(each.shows for each in tested), doubt=doubt, reason=doubt)


def _all_tested(
    candidates: Sequence[Candidate],
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int],
    tolerance: float,
    setting: Setting,
) -> list[Candidate]:
    tested: list[Candidate] = []
    for each in candidates:
        # Terms of one loss count the same targets, where that fits.
        known = [rule for term in tested if term.spec.times == 1.0 for rule in term.spec.rules]
        tested.append(_tested(each, batches, ignored, known, tolerance, setting))
    return tested


def _by_number(found: LossContract, numbered: Sequence[Candidate], setting: Setting) -> LossContract:
    """The contract of a loss with terms that divide by num_items_in_batch."""
    takes: bool | None = None
    if setting.custom and setting.world_size > 1:
        factors = [value for each in numbered for value in each.seen[0].factors]
        takes = setting.multiplies and any(is_near(value, setting.world_size) for value in factors)
    reduction = Reduction.INTEGER if numbered[0].spec.whole else Reduction.NUMBER
    return replace(found, reduction=reduction, takes_world_size=takes, reason="its graph divides by num_items_in_batch")


def _specs(
    tested: Sequence[Candidate], mismatch: str, adds: How, setting: Setting, *, alone: bool
) -> tuple[tuple[TermSpec, ...], str]:
    """The terms' specs, and the first reason why they are not exact; ``alone``: the batch has one sample."""
    specs = tuple(each.spec for each in tested)
    doubts = [mismatch, *(each.doubt for each in tested)]
    if len({each.group for each in specs}) > 1 and any(each.seen[0].shares_learnt for each in tested):
        # No hook separates them.
        doubts.append("one learnt factor multiplies several of its terms, which need different weights")
        # A head's number is the mean over micro-batches; a custom loss gets the global batch's.
        specs = tuple(replace(each, how=How.PLAIN, by_number=bool(each.number)) for each in specs)
    if not setting.apart and not alone:
        doubts.append("its micro-batches cannot be divided into samples, so coupled samples would not be detected")
    if adds is How.PLAIN:
        doubts.append("a part of the loss has no gradient; the log averages it over micro-batches")
    return specs, next(filter(None, doubts), "")


def with_rules(found: LossContract, alone: Reading | None) -> LossContract:
    """Add a rule to every term that divides by num_items_in_batch.

    ``alone`` is a forward without it, in which the head divides by its own items; None: use the number's rule.
    """
    terms = list(found.terms)
    for at, spec in enumerate(terms):
        if spec.by_number and not spec.rules and alone is not None:
            # Without the number the path to the same leaf may differ.
            divisors = {
                value
                for term in alone.terms
                if term.name == spec.shape[0]
                for value, (divides, _) in zip(term.factors, term.shape[2:], strict=True)
                if divides
            }
            counted = {rule: float(rule.count(alone.batch)) for rule in ways_of_counting(alone.batch)}
            terms[at] = replace(spec, rules=tuple(rule for rule, count in counted.items() if count in divisors))
            if divisors and not terms[at].rules:
                found = replace(found, doubt=found.doubt or "its divisor cannot be predicted from the inputs")
    items = next((each.rules[0] for each in terms if each.by_number and each.rules), found.items)
    assert items is not None
    filled = (replace(each, rules=each.rules or (items,)) if each.by_number else each for each in terms)
    return replace(found, terms=tuple(filled), items=items)


NO_COUNT = "is neither a count nor a constant"
OTHER_TERMS = "in a batch and its parts"
#: Endings of doubts that may come from splitting rows that belong together.
OF_THE_SPLIT = (NO_COUNT, OTHER_TERMS)
_COUPLED = "the samples of a batch are coupled (as by in-batch negatives): the loss is no weighted mean over its parts"


def _rests(candidates: Sequence[Candidate], readings: Sequence[Reading]) -> tuple[float, ...]:
    """The loss of each forward minus the values of some terms."""
    return tuple(
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates) for at, reading in enumerate(readings)
    )


def _added(candidates: Sequence[Candidate], readings: Sequence[Reading], tolerance: float) -> How:
    """Classify the part without a gradient: a mean over the terms' items, a constant, or neither."""
    if any(None in each.values for each in candidates):
        return How.PLAIN
    rests, counts = _rests(candidates, readings), candidates[0].counts
    is_mean = candidates[0].spec.how is How.MEAN and len({each.spec.group for each in candidates}) == 1
    if is_mean and len(counts) == len(readings):
        sums = [n * rest for n, rest in zip(counts, rests, strict=True)]
        if abs(sums[0] - sums[1] - sums[2]) <= tolerance * abs(counts[0] * readings[0].loss):
            return How.MEAN
    is_same = max(rests) - min(rests) <= tolerance * max(abs(reading.loss) for reading in readings)
    return How.CONSTANT if is_same else How.PLAIN


def _nothing_seen(whole: Reading, rules: Sequence[Items]) -> LossContract:
    """The contract of a loss that is constant, zero or not finite: it is observed again in the next window."""
    empty = min(float(rule.count(whole.batch)) for rule in rules if rule.keys == rules[0].keys) == 0.0
    reason = NO_TARGET_SEEN if empty else "the loss of samples with targets is zero, not finite or without gradient"
    return LossContract(Reduction.MEAN, rules[0], dtype=whole.dtype, conclusive=False, reason=reason)


def is_understood(readings: Sequence[Reading]) -> bool:
    """Whether the last forward shows the number that it got as a divisor, or is as it would be without."""
    if len({(len(each.terms), len(each.inside)) for each in readings}) > 1:
        return False
    number, found = readings[2].number or 0.0, False
    for whole, one, other in zip(*(each.terms for each in readings), strict=True):
        if other.router:
            continue
        if not other.readable:
            return False
        shows = any(value in _forms(number) for value in other.factors)
        counts = []
        if whole.shape == one.shape == other.shape:
            factors = zip(whole.factors, one.factors, other.factors, strict=True)
            counts = [is_near(a, b + c, 1e-5) for a, b, c in factors if not a == b == c]
        elif not shows:
            return False
        if not (shows or all(counts)):
            return False
        found = found or shows or bool(counts)
    return found


def _forms(number: float) -> set[float]:
    """The number as an integer, and as a model in 16 bits rounds it."""
    return {float(int(number)), *(float(torch.tensor(number, dtype=each)) for each in _FLOATS)}


def _without_number(seen: Sequence[list[TermReading]], readings: Sequence[Reading]) -> tuple[list[TermReading], bool]:
    """The terms with the last forward as it would be without the number, and whether it divided by that."""
    number = readings[2].number
    assert number is not None
    forms = _forms(number)
    shown, by_number = [], False
    for whole, one, other in zip(*seen, strict=True):
        places = [place for place, value in enumerate(other.factors) if value in forms]
        moving = [place for place, (a, b) in enumerate(zip(whole.factors, one.factors, strict=False)) if a != b]
        if places and not moving and whole.shape == one.shape == other.shape:
            # The other part has no target.
            moving = [place for place in places if whole.shape[2:][place][0]][:1]
        if places and len(moving) == 1:
            by_number = True
            place = moving[0]
            count = whole.factors[place] - one.factors[place]
            value = None if other.value is None or not count else other.value * other.factors[places[0]] / count
            other = replace(one, factors=(*one.factors[:place], count, *one.factors[place + 1 :]), value=value)
        shown.append(other)
    return shown, by_number


def _matched(
    seen: Sequence[list[TermReading]], readings: Sequence[Reading], setting: Setting
) -> tuple[list[Candidate], str]:
    """Match the terms of the three forwards; the second value describes a mismatch."""
    found: list[Candidate] = []
    mismatch = ""
    shapes = [[each.shape for each in terms] for terms in seen]
    for shape in dict.fromkeys(each for terms in shapes for each in terms):
        each = [[term for term in terms if term.shape == shape] for terms in seen]
        whole, one, other = map(len, each)
        if whole == one == other:
            found += [
                _candidate([[term] for term in terms], place, readings, setting)
                for place, terms in enumerate(zip(*each, strict=True))
            ]
        elif _are_rows(whole, one, other, readings) and len({term.classes for terms in each for term in terms}) == 1:
            found.append(_candidate(each, None, readings, setting))
        else:
            mismatch = f"the loss has {whole}, {one} and {other} terms {shape[0]} {OTHER_TERMS}"
            found += [
                Candidate(TermSpec(shape, place, How.PLAIN), (term,) * 3, (), (term.value,) * 3)
                for place, term in enumerate(each[0])
            ]
    return found, mismatch


def _are_rows(whole: int, one: int, other: int, readings: Sequence[Reading]) -> bool:
    """Whether the number of terms is proportional to the samples: then they are rows of one mean or sum."""
    rows = [sample_count(each.batch) for each in readings]
    return whole == one + other and bool(one and other) and one % rows[1] == 0 and one * rows[0] == whole * rows[1]


def _candidate(
    terms: Sequence[Sequence[TermReading]], place: int | None, readings: Sequence[Reading], setting: Setting
) -> Candidate:
    """Classify the factors of one term: counts, the number, constants."""
    first = (terms[0][0], terms[1][0], terms[2][0])
    numbers = [None if setting.only_shows else each.number for each in readings]
    # A model in 16 bits rounds it.
    tolerance = 1e-2 if setting.rounded or readings[0].dtype.itemsize < 4 else 1e-6
    rule = next(listed_targets(readings[0].batch), None)
    listed = None if rule is None else [float(rule.count(each.batch)) for each in readings]
    targets = [each.total for each in first] if any(each.total for each in first) else None
    guarded = [[max(n, 1.0) for n in each] for each in (listed, targets) if each is not None]
    own: list[int] = []
    numbered: list[int] = []
    moving: list[int] = []
    whole = False
    for at, values in enumerate(zip(*(each.factors for each in first), strict=True)):
        is_own = first[0].is_own_count(at)
        if place is None and is_own:
            # Each row has its own count.
            continue
        if (form := _form_of_number(values, numbers, tolerance)) is not None:
            (own if form == "own" else numbered).append(at)
            whole = whole or form == "integer"
            continue
        # A loss function's own divisor is a count, even if it is the same in every micro-batch.
        same = is_near(values[0], values[1]) and is_near(values[0], values[2])
        is_guarded = first[0].shape[2:][at][0] and list(values) in guarded
        if not same or is_guarded or (is_own and not setting.apart):
            moving.append(at)
    counts = tuple(
        1 / each.product(moving) if moving and all(each.factors[at] for at in moving) else 0.0 for each in first
    )
    if targets is not None and counts == tuple(max(n, 1.0) for n in targets):
        # It divides by at least 1.
        counts = tuple(targets)
    if not own and not numbered and (form := _form_of_number(counts, numbers, tolerance)) is not None:
        # A mean times items / number: the product is 1 / number.
        own, numbered, whole = (moving, [], False) if form == "own" else ([], moving, form == "integer")
    sums = tuple(
        None if any(s.value is None for s in each) else math.fsum(s.value or 0.0 for s in each) for each in terms
    )
    spec = TermSpec(
        first[0].shape, place, How.MEAN if moving else How.PLAIN, tuple(moving), count=counts[0] if moving else 1.0
    )
    if numbered or own:
        spec = replace(spec, by_number=True, whole=whole, number=tuple(own), counts=tuple(numbered), how=How.MEAN)
    return Candidate(spec, first, counts, sums)


def _with_values(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """Assign the rest of the loss to the terms without a value, if they share their counts."""
    blank = [each for each in candidates if None in each.values]
    if not blank or len({each.counts for each in blank}) > 1:
        return candidates
    rest = _rests([each for each in candidates if each not in blank], readings)
    nothing = (0.0,) * len(rest)
    given = {id(each): rest if each is blank[0] else nothing for each in blank}
    return [replace(each, values=given.get(id(each), each.values)) for each in candidates]


def _tested(
    candidate: Candidate,
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int],
    known: Sequence[Items],
    tolerance: float,
    setting: Setting,
) -> Candidate:
    """Test whether a term's values add up as its factors predict; ``known``: rules of other terms."""
    spec, values, n = candidate.spec, candidate.values, candidate.counts
    whole = candidate.seen[0]
    if whole.router:
        return candidate.judged(how=How.ROUTER, counts=(), rules=())
    if whole.learnt:
        return candidate.judged(how=How.CONSTANT, counts=())
    has_values = None not in values
    named = [rule for rule in whole.named if all(rule in each.named for each in candidate.seen)]
    if not setting.apart:
        tolerance = math.inf
    if spec.by_number:
        places = spec.number or spec.counts
        sums = [(value or 0.0) / seen.product(places) for value, seen in zip(values, candidate.seen, strict=True)]
        totals = [each.total for each in candidate.seen]
        rules = _rules_of(totals, batches, ignored, named)[0] if whole.total else ()
        return candidate.judged("" if not has_values or _adds_up(sums, tolerance) else _COUPLED, rules=rules)
    if spec.counts:
        rules, times = _rules_of(n, batches, ignored, named, known)
        if whole.name.startswith("NllLoss") and spec.counts == (len(whole.factors) - 1,) and not is_near(times, 1.0):
            # It divides by weights of classes, which are alike in this batch.
            rules, times = (), 1.0
        if rules and all(is_padded(rule, batches[0]) for rule in rules) and not setting.alone:
            others, by_class = matching_rules(n, batches, (), known, given=True)
            if others:
                # Smoothed labels: as many classes as positions.
                doubt = f"{whole.name} is a mean over {by_class:g} classes of its items, or over all positions"
                return candidate.judged(doubt, rules=others, times=by_class)
            # A mean that includes padding is treated as a router loss (Bamba's z-loss).
            return candidate.judged(how=How.ROUTER, rules=rules[:1], times=times)
        if not setting.apart and whole.readable and (rules or whole.divides):
            return candidate.judged(rules=rules, times=times)
        samples = [sample_count(batch) for batch in batches]
        by_sample = {each.rows * samples[0] == whole.rows * m for each, m in zip(candidate.seen, samples, strict=True)}
        if whole.rows and False in by_sample:
            return candidate.doubted("it is a mean over elements of a sample, not over the samples")
        # Lists of targets divide by at least 1.
        listed = bool(rules) and rules[0].entry is not None
        if not setting.apart or not (listed or is_near(n[0], n[1] + n[2], min(tolerance, 1e-5))):
            return candidate.doubted(f"a factor of {whole.name} {NO_COUNT}")
        if not whole.readable:
            return _unreadable(candidate, batches, ignored, tolerance)
        sums = [(value or 0.0) * count if count else 0.0 for value, count in zip(values, n, strict=True)]
        if has_values and not _adds_up(sums, tolerance):
            # If stock divides it by the number, keep its weight by items.
            keeps = setting.by_number and rules
            return candidate.judged(_COUPLED, rules=rules, times=times) if keeps else candidate.doubted(_COUPLED)
        doubt = "two of its terms have the same value, so the log cannot separate them"
        return candidate.judged("" if has_values else doubt, rules=rules, times=times)
    if has_values and values[0] == values[1] == values[2] and batches[1] is not batches[2] and not whole.holds_data:
        # Zero is inconclusive.
        return candidate.judged(how=How.CONSTANT, shows=bool(values[0]))
    if not whole.readable:
        return _unreadable(candidate, batches, ignored, tolerance)
    # Random numbers differ between a batch and its parts, so allow for noise.
    if setting.apart and not whole.rows and _makes_the_whole(values, min(tolerance, 0.2)):
        return candidate.judged(how=How.SUM)
    # A part of zero is inconclusive.
    return candidate.judged(f"{whole.name} is {How.PLAIN.value}", shows=0.0 not in values)


def _rules_of(
    counts: Sequence[float],
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int],
    named: Sequence[Items],
    known: Sequence[Items] = (),
) -> tuple[tuple[Items, ...], float]:
    """As `matching_rules`; if some count the targets that the leaf has saved, only those."""
    rules, times = matching_rules(counts, batches, ignored, (*named, *known))
    return tuple(rule for rule in rules if rule in named) or rules, times


def _unreadable(
    candidate: Candidate, batches: Sequence[Mapping[str, Any]], ignored: Sequence[int], tolerance: float
) -> Candidate:
    """A term whose divisor is hidden: use the first rule by which its parts add up to the whole."""
    name, values = candidate.seen[0].name, candidate.values
    doubt = f"the loss contains {name}, and what is below it cannot be read"
    # Any weighted mean lies between its parts, also one that is written as a sum of shares.
    beyond = None not in values and abs(values[0] or 0.0) > max(abs(values[1] or 0.0), abs(values[2] or 0.0))
    if beyond and candidate.seen[0].bent_sum:
        return candidate.judged(doubt, how=How.SUM, counts=())
    is_opaque = name.startswith(OPAQUE) and None not in values and batches[1] is not batches[2]
    for rule in dict.fromkeys(ways_of_counting(batches[0], ignored)) if is_opaque else ():
        n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
        if len(n) == 3 and all(n) and is_near(n[0], n[1] + n[2]):
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=True)]
            if _adds_up(sums, tolerance):
                doubt = "" if name.startswith(DECLARED) else doubt
                return candidate.judged(doubt, how=How.MEAN, counts=(), rules=(rule,), count=n[0])
    # A part of zero is inconclusive.
    return candidate.doubted(doubt, shows=0.0 not in values)


def _makes_the_whole(values: Sequence[float | None], tolerance: float) -> bool:
    """Whether the values of two parts, none zero, add up to the whole's."""
    known = [value for value in values if value]
    return len(known) == len(values) and _adds_up(known, tolerance)


def _adds_up(sums: Sequence[float], tolerance: float) -> bool:
    return abs(sums[0] - sums[1] - sums[2]) <= tolerance * max(map(abs, sums))


def _form_of_number(values: Sequence[float], numbers: Sequence[float | None], tolerance: float) -> str | None:
    """Whether values are the numbers passed: "own" (to a custom loss), "number", "integer"; None: they are not."""
    if None in numbers:
        return None
    if _in_proportion(values, [own_number(number or 0.0) for number in numbers]):
        return "own"
    if _in_proportion(values, [float(int(number or 0.0)) for number in numbers]):
        return "integer"
    return "number" if _in_proportion(values, numbers, tolerance) else None


def _in_proportion(values: Sequence[float], numbers: Sequence[float | None], tolerance: float = 1e-6) -> bool:
    """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
    times = [value / number if number else 0.0 for value, number in zip(values, numbers, strict=True)]
    return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


def _coefficient(candidates: Sequence[Candidate], name: str) -> float:
    """The coefficient of a router loss in the loss."""
    seen = next((each.seen[0] for each in candidates if each.seen[0].router == name), None)
    return 0.0 if seen is None else seen.product(range(len(seen.factors)))


def number_rule(batch: Mapping[str, Any], window: Sequence[Mapping[str, Any]], setting: Setting) -> Items:
    """The rule that counts a window as the installed release does."""
    rules = list(ways_of_counting(batch))
    for rule in rules if setting.upstream_number else ():
        counted = [float(rule.count(batch)) for batch in window if rule.has_targets(batch)]
        if len(counted) == len(window) and sum(counted) == setting.upstream_number:
            return rule
    return rules[0]
