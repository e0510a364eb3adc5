"""What three forwards of a loss show: which of its factors are counts, and whether its terms compose as those say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Coupling, How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.reading import Reading, TermReading
from hf_accum_fix.accumulation.rules import is_near, is_padded, listed_targets, matching_rules, ways_of_counting
from hf_accum_fix.accumulation.window import Items, sample_count

#: What the three forwards are handed: no sums, multiples or counts of one another, with a fraction.
NUMBERS = (1237.5, 4111.5, 2777.5)
#: What a trainer's own ``compute_loss`` is handed then, an integer as upstream's.
OWN_NUMBERS = {1237.5: 7919, 4111.5: 3571, 2777.5: 5557}
#: Losses of other libraries that are known to be means over targets, though their graph does not show it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: What hides a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
#: What two values that were computed alike may differ by, relative, by the bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}
#: So near to the sum of its parts, relative, what cannot be read is scaled as a sum.
_LIKE_A_SUM = 0.25
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Setting:
    """What is known of a training before its loss is observed.

    Attributes:
        hands_number: the model, or a function of the user's, is handed the number in training.
        hands_own: a trainer's own ``compute_loss`` is.
        only_shows: the number is handed in the last forward alone, to see what the loss would do with it.
        custom: a trainer's own ``compute_loss`` makes the loss.
        func: a function of the user's makes it of the model's outputs.
        multiplies: a custom loss that divides by the number may multiply by the number of ranks.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products keep fewer than float32's digits.
        alone: the loss has one term.
        apart: what was run were a batch and its parts.
        again: another split of the samples has shown that they are coupled, or something else.
        by_number: the model would divide by the number, if it were handed it.
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


@dataclass(frozen=True)
class Candidate:
    """One term, or the rows of one mean, in the three forwards."""

    spec: TermSpec
    seen: tuple[TermReading, TermReading, TermReading]
    counts: tuple[float, ...]
    values: tuple[float | None, ...]
    trouble: str = ""
    shows: bool = True

    def judged(self, trouble: str = "", *, shows: bool = True, **spec: Any) -> Candidate:
        """The same with what its values have shown."""
        return replace(self, spec=replace(self.spec, **spec), trouble=trouble, shows=shows)

    def doubted(self, trouble: str, *, shows: bool = True) -> Candidate:
        """The same as a term that is averaged over micro-batches."""
        return self.judged(trouble, shows=shows, how=How.PLAIN, counts=())


def conclude(readings: Sequence[Reading], window: Sequence[Mapping[str, Any]], setting: Setting) -> LossContract:
    """The contract that the forwards of a batch and its two parts show; ``window``: the micro-batches of this rank."""
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
    """The same with stacked numbers taken for rows, or for terms."""
    whole = readings[0]
    dtype, batches = whole.dtype, [each.batch for each in readings]
    seen = [reading.inside if inside else reading.terms for reading in readings]
    by_number = False
    if setting.only_shows and readings[2].number is not None:
        seen[2], by_number = _without_number(seen, readings)
        setting = replace(setting, by_number=by_number)
    candidates, trouble = _matched(seen, readings, setting)
    candidates = _with_values(candidates, readings)
    ignored = list(dict.fromkeys([*(s.ignored for s in seen[0] if s.ignored is not None), -100]))
    tolerance = 2e-2 if setting.rounded else _TOLERANCE.get(dtype.itemsize, 2e-2)
    tolerance = tolerance / 10 if setting.again else tolerance
    setting = replace(setting, alone=len(candidates) == 1)
    tested: list[Candidate] = []
    for each in candidates:
        # Terms of one loss count the same targets, where that fits.
        known = [rule for term in tested if term.spec.times == 1.0 for rule in term.spec.rules]
        tested.append(_tested(each, batches, ignored, known, math.inf if whole.drew else tolerance, setting))
    specs = tuple(each.spec for each in tested)
    doubt = trouble or next((each.trouble for each in tested if each.trouble), "")
    adds = _added(tested, readings, tolerance) if any(each.added for each in seen[0]) else How.MEAN
    if adds is How.PLAIN:
        doubt = doubt or "what has no gradient is added to it, and is averaged over micro-batches in the log"
    if not setting.apart and not doubt and sample_count(whole.batch) > 1:
        doubt = "its micro-batches cannot be taken apart, so that coupled samples would not show"
    coupled = any(each.trouble == _COUPLED for each in tested)
    means = [each for each in specs if each.how is How.MEAN]
    handed = [each for each in specs if each.handed]
    if len({each.group for each in specs}) > 1 and any(each.seen[0].shares_learnt for each in tested):
        doubt = doubt or "a learnt factor multiplies several of its terms at once, which have weights of their own"
    if len({each.group for each in specs}) > 1 and not all(each.rules for each in means if not each.handed):
        # No one number corrects several terms.
        doubt = doubt or "no rule counts the items of one of its terms beforehand"
        specs = tuple(
            replace(each, how=How.PLAIN, counts=())
            if each.how is How.MEAN and not (each.rules or each.handed)
            else each
            for each in specs
        )
    contract = partial(
        LossContract,
        terms=specs,
        dtype=dtype,
        doubt=doubt,
        coupling=Coupling.COUPLED if coupled else Coupling.UNKNOWN,
        # What a trainer adds itself is no part of the model's loss.
        router_coefficient=0.0 if setting.custom else _coefficient(tested, "aux_loss"),
        router_z_coefficient=0.0 if setting.custom else _coefficient(tested, "z_loss"),
        inside=inside,
        added=adds is not How.MEAN,
        deep=any(each.within for terms in seen for each in terms),
        shift=next((each.shift for each in seen[0] if each.shift is not None), None),
    )
    if handed:
        items = next((each.rules[0] for each in (*handed, *means) if each.rules), None)
        items = items or number_rule(whole.batch, window, setting)
        kind = Reduction.INTEGER if handed[0].whole else Reduction.NUMBER
        takes = any(
            is_near(value, setting.world_size) for each in tested if each.spec.handed for value in each.seen[0].factors
        )
        takes_world_size = takes and setting.multiplies if setting.custom and setting.world_size > 1 else None
        return contract(
            kind, items, takes_world_size=takes_world_size, reason="its graph divides by the number handed in"
        )
    if means:
        empty = means[0].count == 0.0 or not all(each.shows for each in tested)
        # Where none counts as the loss does, the nearest is one that counts its targets.
        near = next((each.named[0] for each in seen[0] if each.named), rules[0])
        rule = means[0].rules[0] if means[0].rules else near
        if coupled:
            return contract(Reduction.PLAIN, reason=_COUPLED)
        kind = Reduction.NUMBER if by_number else Reduction.MEAN
        return contract(kind, rule, conclusive=not empty, reason=f"its graph divides {means[0].shape[0]} by them")
    if specs and all(each.how is How.SUM for each in specs):
        return contract(Reduction.SUM, reason="its graph divides by nothing, and the losses of two parts add up")
    doubt = doubt or "none of its terms is divided by a count"
    return contract(Reduction.PLAIN, conclusive=all(each.shows for each in tested), doubt=doubt, reason=doubt)


def with_rules(found: LossContract, alone: Reading | None) -> LossContract:
    """The same with a rule for every term that divides by the number it is handed.

    ``alone`` is a forward without it, in which the head divides by its own items; None: the number's own rule.
    """
    terms = list(found.terms)
    for at, spec in enumerate(terms):
        if spec.handed and not spec.rules and alone is not None:
            # Without the number it may take another way to the same leaf.
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
                found = replace(found, doubt=found.doubt or "no rule counts the items that it divides by")
    items = next((each.rules[0] for each in terms if each.handed and each.rules), found.items)
    assert items is not None
    filled = (replace(each, rules=each.rules or (items,)) if each.handed else each for each in terms)
    return replace(found, terms=tuple(filled), items=items)


NO_COUNT = "is neither a count nor a constant"
OTHER_TERMS = "in a batch and its parts"
#: How a doubt ends that may come from rows that belong together, and were taken apart.
OF_THE_SPLIT = (NO_COUNT, OTHER_TERMS)
_COUPLED = "the samples of a batch are coupled: its loss is no weighted mean of its parts' losses (in-batch negatives)"


def _rests(candidates: Sequence[Candidate], readings: Sequence[Reading]) -> tuple[float, ...]:
    """What the values of some terms leave of the loss of each forward."""
    return tuple(
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates) for at, reading in enumerate(readings)
    )


def _added(candidates: Sequence[Candidate], readings: Sequence[Reading], tolerance: float) -> How:
    """What is added to the terms without a gradient: a mean over the items of them all, a constant, or neither."""
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
    """The loss is a constant, zero or not finite: it is observed again in the next window."""
    empty = min(float(rule.count(whole.batch)) for rule in rules if rule.keys == rules[0].keys) == 0.0
    reason = NO_TARGET_SEEN if empty else "the loss of samples with targets is zero, not finite or without gradient"
    return LossContract(Reduction.MEAN, rules[0], dtype=whole.dtype, conclusive=False, reason=reason)


def _without_number(seen: Sequence[list[TermReading]], readings: Sequence[Reading]) -> tuple[list[TermReading], bool]:
    """The last forward as it would be without the number, and whether it divided by that."""
    number = readings[2].number
    assert number is not None
    # A model in 16 bits may round it.
    forms = {float(int(number)), *(float(torch.tensor(number, dtype=each)) for each in _FLOATS)}
    shown, by_number = [], False
    for whole, one, other in zip(*seen, strict=True):
        places = [place for place, value in enumerate(other.factors) if value in forms]
        moving = [place for place, (a, b) in enumerate(zip(whole.factors, one.factors, strict=False)) if a != b]
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
    """The terms of the three forwards, each beside the same term of the others; in words, what cannot be matched."""
    found: list[Candidate] = []
    trouble = ""
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
            trouble = f"the loss has {whole}, {one} and {other} terms {shape[0]} {OTHER_TERMS}"
            found += [
                Candidate(TermSpec(shape, place, How.PLAIN), (term,) * 3, (), (term.value,) * 3)
                for place, term in enumerate(each[0])
            ]
    return found, trouble


def _are_rows(whole: int, one: int, other: int, readings: Sequence[Reading]) -> bool:
    """Whether a loss has so many terms for every sample: they are the rows of one mean or sum."""
    rows = [sample_count(each.batch) for each in readings]
    return whole == one + other and bool(one and other) and one % rows[1] == 0 and one * rows[0] == whole * rows[1]


def _candidate(
    terms: Sequence[Sequence[TermReading]], place: int | None, readings: Sequence[Reading], setting: Setting
) -> Candidate:
    """What is a count, a number or a constant among the factors of one term."""
    first = (terms[0][0], terms[1][0], terms[2][0])
    numbers = [None if setting.only_shows else each.number for each in readings]
    rule = next(listed_targets(readings[0].batch), None)
    listed = None if rule is None else [float(rule.count(each.batch)) for each in readings]
    targets = [each.total for each in first] if any(each.total for each in first) else None
    guarded = [[max(n, 1.0) for n in each] for each in (listed, targets) if each is not None]
    own: list[int] = []
    handed: list[int] = []
    moving: list[int] = []
    whole = False
    for at, values in enumerate(zip(*(each.factors for each in first), strict=True)):
        is_own = first[0].is_own_count(at)
        if place is None and is_own:
            # The items of a row are its own.
            continue
        if (form := _form_of_number(values, numbers)) is not None:
            (own if form == "own" else handed).append(at)
            whole = whole or form == "integer"
            continue
        # A loss function's own count is one, though it may be the same in every micro-batch.
        same = is_near(values[0], values[1]) and is_near(values[0], values[2])
        is_guarded = first[0].shape[2:][at][0] and list(values) in guarded
        if not same or is_guarded or (is_own and not setting.apart):
            moving.append(at)
    counts = tuple(
        1 / each.product(moving) if moving and all(each.factors[at] for at in moving) else 0.0 for each in first
    )
    if targets is not None and counts == tuple(max(n, 1.0) for n in targets):
        # It divides by 1 where it has none.
        counts = tuple(targets)
    if not own and not handed and (form := _form_of_number(counts, numbers)) is not None:
        # A mean times items / number: together they are the number.
        own, handed, whole = (moving, [], False) if form == "own" else ([], moving, form == "integer")
    sums = tuple(
        None if any(s.value is None for s in each) else math.fsum(s.value or 0.0 for s in each) for each in terms
    )
    spec = TermSpec(
        first[0].shape, place, How.MEAN if moving else How.PLAIN, tuple(moving), count=counts[0] if moving else 1.0
    )
    if handed or own:
        spec = replace(spec, handed=True, whole=whole, number=tuple(own), counts=tuple(handed), how=How.MEAN)
    return Candidate(spec, first, counts, sums)


def _with_values(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """Give what is left of the loss to the terms without a value, if they share their counts."""
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
    """Hold a term against its values: does it compose as its factors say; ``known``: rules of other terms."""
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
    if spec.handed:
        places = spec.number or spec.counts
        sums = [(value or 0.0) / seen.product(places) for value, seen in zip(values, candidate.seen, strict=True)]
        totals = [each.total for each in candidate.seen]
        rules = _rules_of(totals, batches, ignored, named)[0] if whole.total else ()
        return candidate.judged("" if not has_values or _adds_up(sums, tolerance) else _COUPLED, rules=rules)
    if spec.counts:
        rules, times = _rules_of(n, batches, ignored, named, known)
        if rules and all(is_padded(rule, batches[0]) for rule in rules) and not setting.alone:
            # Over padding, too: a mean per micro-batch whatever the batch, as a router's is (Bamba's z-loss).
            return candidate.judged(how=How.ROUTER, rules=rules[:1], times=times)
        if not setting.apart and whole.readable and (rules or whole.divides):
            return candidate.judged(rules=rules, times=times)
        samples = [sample_count(batch) for batch in batches]
        by_sample = {each.rows * samples[0] == whole.rows * m for each, m in zip(candidate.seen, samples, strict=True)}
        if whole.rows and False in by_sample:
            return candidate.doubted("it is a mean over what its samples have, not over the samples")
        # Lists of targets are divided by 1 where they are empty.
        listed = bool(rules) and rules[0].entry is not None
        if not setting.apart or not (listed or is_near(n[0], n[1] + n[2], 1e-5)):
            return candidate.doubted(f"a factor of {whole.name} {NO_COUNT}")
        if not whole.readable:
            return _unreadable(candidate, batches, ignored, tolerance)
        sums = [(value or 0.0) * count if count else 0.0 for value, count in zip(values, n, strict=True)]
        if has_values and not _adds_up(sums, tolerance):
            # One that stock divides by the number is weighed by its items all the same.
            keeps = setting.by_number and rules
            return candidate.judged(_COUPLED, rules=rules, times=times) if keeps else candidate.doubted(_COUPLED)
        doubt = "the values of two of its terms could not be told from each other"
        return candidate.judged("" if has_values else doubt, rules=rules, times=times)
    if has_values and values[0] == values[1] == values[2] and batches[1] is not batches[2] and not whole.holds_data:
        # Zero says nothing, unless it is multiplied by zero.
        return candidate.judged(how=How.CONSTANT, shows=bool(values[0]) or 0.0 in whole.factors)
    if not whole.readable:
        return _unreadable(candidate, batches, ignored, tolerance)
    # A forward that draws at random has no parts: its sum adds up but for the noise.
    if setting.apart and not whole.rows and _makes_the_whole(values, min(tolerance, 0.2)):
        return candidate.judged(how=How.SUM)
    # A part of zero adds up to anything.
    return candidate.judged(f"{whole.name} is {How.PLAIN.value}", shows=0.0 not in values)


def _rules_of(
    counts: Sequence[float],
    batches: Sequence[Mapping[str, Any]],
    ignored: Sequence[int],
    named: Sequence[Items],
    known: Sequence[Items] = (),
) -> tuple[tuple[Items, ...], float]:
    """As `matching_rules`, and of those with the targets that a leaf has kept, if any has, no others."""
    rules, times = matching_rules(counts, batches, ignored, (*named, *known))
    return tuple(rule for rule in rules if rule in named) or rules, times


def _unreadable(
    candidate: Candidate, batches: Sequence[Mapping[str, Any]], ignored: Sequence[int], tolerance: float
) -> Candidate:
    """A term that hides what it divides by: it is weighed by the first rule by which its parts make the whole."""
    name, values = candidate.seen[0].name, candidate.values
    trouble = f"{name} stands in the loss: what is under it cannot be read"
    # A mean, however it is weighed, lies between its parts.
    beyond = None not in values and abs(values[0] or 0.0) > max(abs(values[1] or 0.0), abs(values[2] or 0.0))
    if beyond and _makes_the_whole(values, _LIKE_A_SUM):
        return candidate.judged(trouble, how=How.SUM, counts=())
    is_opaque = name.startswith(OPAQUE) and None not in values and batches[1] is not batches[2]
    for rule in dict.fromkeys(ways_of_counting(batches[0], ignored)) if is_opaque else ():
        n = [float(rule.count(batch)) for batch in batches if rule.has_targets(batch)]
        if len(n) == 3 and all(n) and is_near(n[0], n[1] + n[2]):
            sums = [(value or 0.0) * count for value, count in zip(values, n, strict=True)]
            if _adds_up(sums, tolerance):
                trouble = "" if name.startswith(DECLARED) else trouble
                return candidate.judged(trouble, how=How.MEAN, counts=(), rules=(rule,), count=n[0])
    # A part of zero adds up to anything.
    return candidate.doubted(trouble, shows=0.0 not in values)


def _makes_the_whole(values: Sequence[float | None], tolerance: float) -> bool:
    """Whether the values of two parts, none of them zero, add up to the whole's."""
    known = [value for value in values if value]
    return len(known) == len(values) and _adds_up(known, tolerance)


def _adds_up(sums: Sequence[float], tolerance: float) -> bool:
    return abs(sums[0] - sums[1] - sums[2]) <= tolerance * max(map(abs, sums))


def _form_of_number(values: Sequence[float], numbers: Sequence[float | None]) -> str | None:
    """In which form values are the numbers handed in: "own" (a custom loss's), "number", "integer"; None: in none."""
    if None in numbers:
        return None
    if _in_proportion(values, [OWN_NUMBERS[number or 0.0] for number in numbers]):
        return "own"
    if _in_proportion(values, [float(int(number or 0.0)) for number in numbers]):
        return "integer"
    # A model in 16 bits may round it.
    return "number" if _in_proportion(values, numbers, 1e-2) else None


def _in_proportion(values: Sequence[float], numbers: Sequence[float | None], tolerance: float = 1e-6) -> bool:
    """Whether values are the numbers handed in, perhaps times a constant (the classes of a smoothed loss)."""
    times = [value / number if number else 0.0 for value, number in zip(values, numbers, strict=True)]
    return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


def _coefficient(candidates: Sequence[Candidate], kind: str) -> float:
    """What a router's loss is multiplied by inside the loss."""
    seen = next((each.seen[0] for each in candidates if each.seen[0].router == kind), None)
    return 0.0 if seen is None else seen.product(range(len(seen.factors)))


def number_rule(batch: Mapping[str, Any], window: Sequence[Mapping[str, Any]], setting: Setting) -> Items:
    """The rule that counts a window as the installed release does, whose number the loss was written for."""
    rules = list(ways_of_counting(batch))
    for rule in rules if setting.upstream_number else ():
        counted = [float(rule.count(batch)) for batch in window if rule.has_targets(batch)]
        if len(counted) == len(window) and sum(counted) == setting.upstream_number:
            return rule
    return rules[0]
