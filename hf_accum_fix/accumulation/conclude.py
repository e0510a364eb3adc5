"""Conclude the contract from three forwards: which factors of a loss are counts, and whether its terms add up so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Cause, How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.items import Items, sample_count
from hf_accum_fix.accumulation.loss_graph import (
    holds_layers,
    ignored_index,
    picks_elements,
    sorts_elements,
    weights_elements,
)
from hf_accum_fix.accumulation.reading import Reading, TermReading
from hf_accum_fix.accumulation.rules import is_near, is_padded, listed_targets, matching_rules, ways_of_counting

#: The numbers passed to the three forwards: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: The number passed to the last one alone: no count, and small, so that 16 bits keep what is divided by it.
SHOWN = 37.5
#: Losses of other libraries that are means over targets, though their graph hides it.
DECLARED = ("LigerCrossEntropyFunction", "LigerFusedLinearCrossEntropyFunction")
#: Nodes that hide a whole loss: compiled code, another library's kernel.
OPAQUE = (*DECLARED, "CompiledFunction", "CheckpointFunction")
#: Relative tolerance of two values computed alike, by bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}

_PADDED = "it depends on how its samples are padded, or they are coupled (as by in-batch negatives)"
_COUPLED = "the samples of a batch are coupled (as by in-batch negatives): the loss is no weighted mean over its parts"


@dataclass(frozen=True)
class Setting:
    """Facts about a training that are known before its loss is observed; "the number" is num_items_in_batch.

    Attributes:
        handed: which forwards get the number: "all", "none", or the "last" one, to see whether the model divides by it.
        hands_number: the model or the compute_loss_func cannot do without it, and gets it in training.
        custom: a custom ``compute_loss`` makes the loss.
        func: a compute_loss_func makes it.
        multiplies: a custom loss that divides by the number may multiply by the number of ranks.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products are less precise than float32.
        decoder_pad: as for `rules.targets_padding`.
        has_z_loss: the model's loss has a mean over all positions, a router's loss by convention.
        has_stock: a Trainer runs the loss, so that there is a scale to keep where it cannot be read.
    """

    handed: str = "none"
    hands_number: bool = False
    custom: bool = False
    func: bool = False
    multiplies: bool = False
    steps: int = 1
    world_size: int = 1
    upstream_number: float | None = None
    rounded: bool = False
    has_z_loss: bool = False
    decoder_pad: int | None = None
    has_stock: bool = False


@dataclass(frozen=True)
class Comparison:
    """Three forwards, of a batch and its two parts.

    Attributes:
        window: the micro-batches of this rank.
        apart: the parts are parts of the batch.
        again: another split was inconclusive, or showed coupled samples.
        by_number: the model would divide by the number, if it got it.
        pads: a part is padded further in the batch.
    """

    readings: Sequence[Reading]
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    apart: bool = True
    again: bool = False
    by_number: bool = False
    pads: bool = False

    @property
    def whole(self) -> Reading:
        """The forward of the batch."""
        return self.readings[0]

    @property
    def batches(self) -> list[Mapping[str, Any]]:
        """The batch and its parts."""
        return [each.batch for each in self.readings]

    @cached_property
    def ignored(self) -> list[int]:
        """The labels that are no targets."""
        found = (ignored_index(each.term) for each in (*self.whole.terms, *self.whole.inside))
        return list(dict.fromkeys([*(each for each in found if each is not None), -100]))

    @property
    def are_distinct(self) -> bool:
        """Whether the parts are different batches."""
        return self.readings[1].batch is not self.readings[2].batch

    @property
    def of_micro_batches(self) -> bool:
        """Whether the parts are whole micro-batches."""
        return all(any(part is each for each in self.window) for part in self.batches[1:])

    @property
    def rounding(self) -> float:
        """Relative, of the loss's values."""
        return 2e-2 if self.setting.rounded else _TOLERANCE.get(self.whole.dtype.itemsize, 2e-2)

    @property
    def tolerance(self) -> float:
        """Relative tolerance of the loss's values."""
        return self.rounding / 10 if self.again else self.rounding


@dataclass(frozen=True)
class Candidate:
    """One term, or the rows of one mean, in the three forwards."""

    spec: TermSpec
    seen: tuple[TermReading, TermReading, TermReading]
    counts: tuple[float, ...]
    values: tuple[float | None, ...]
    doubt: str = ""
    cause: Cause | None = None
    shows: bool = True
    grows: bool = False
    #: The parts have as many terms of its shape.
    matched: bool = True

    @property
    def is_unseen(self) -> bool:
        """Whether it was zero in all forwards."""
        return not any(self.values) and None not in self.values and self.spec.how is not How.ROUTER

    def judged(
        self, doubt: str = "", cause: Cause | None = None, *, shows: bool = True, grows: bool = False, **spec: Any
    ) -> Candidate:
        """With the conclusion from its values; ``grows``: a batch's is near the sum of its parts'."""
        return replace(self, spec=replace(self.spec, **spec), doubt=doubt, cause=cause, shows=shows, grows=grows)


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
    candidates, mismatch = _matched(seen, compared)
    tested = _all_tested(_with_values(candidates, compared.readings), compared)
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
        constant=_rests(tested, compared.readings)[0] if adds is How.CONSTANT else 0.0,
        deep=any(each.term.within for terms in seen for each in terms),
        warms=whole.warms,
        weighted=any(
            weights_elements(leaf) or (each.spec.is_guess and picks_elements(leaf))
            for each in tested
            for leaf in [each.seen[0].term.leaf]
        ),
        unseen=len(tested) > 1 and any(each.is_unseen for each in tested),
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
        return replace(found, reason=_COUPLED)
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
        tested.append(_tested(each, compared, known, alone=len(candidates) == 1))
    return tested


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
    if not compared.apart and sample_count(compared.whole.batch) > 1:
        doubt = "its micro-batches cannot be divided into samples, so coupled samples would not be detected"
        doubts.append((doubt, None))
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
    of_terms = [_rules_of(totals, seen, compared) for totals, seen in by_total if totals[0]]
    fitting = next(filter(None, (*of_terms, *(each.rules for each in means))), {})
    return upstream_first([*fitting], compared.whole.batch, compared.window, compared.setting)


def _rests(candidates: Sequence[Candidate], readings: Sequence[Reading]) -> tuple[float, ...]:
    """The loss of each forward minus the values of some terms."""
    return tuple(
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates) for at, reading in enumerate(readings)
    )


def _added(candidates: Sequence[Candidate], compared: Comparison) -> How:
    """Classify the part without a gradient: a mean over the terms' items, a constant, or neither."""
    if any(None in each.values for each in candidates):
        return How.PLAIN
    readings, tolerance = compared.readings, compared.tolerance
    rests, counts = _rests(candidates, readings), candidates[0].counts
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


def without_number(readings: Sequence[Reading]) -> tuple[list[Reading], bool] | None:
    """The forwards with the last one, which got the number, as it would be without; and whether it divided by that.

    None: its graph does not show where the number went.
    """
    whole, one, other = readings
    terms = _without_number(whole.terms, one.terms, other.terms, other.number)
    inside = _without_number(whole.inside, one.inside, other.inside, other.number)
    if terms is None or inside is None:
        return None
    return [whole, one, replace(other, terms=terms[0], inside=inside[0])], terms[1]


def _without_number(
    whole: Sequence[TermReading], one: Sequence[TermReading], other: Sequence[TermReading], number: float | None
) -> tuple[list[TermReading], bool] | None:
    """`without_number` for the terms of the three forwards."""
    if not len(whole) == len(one) == len(other):
        return None
    # A model in 16 bits rounds it.
    forms = {float(torch.tensor(number, dtype=each)) for each in (torch.float64, torch.bfloat16, torch.float16)}
    shown, divides, found = [], False, False
    for a, b, c in zip(whole, one, other, strict=True):
        if c.router:
            shown.append(c)
            continue
        places = [place for place, value in enumerate(c.factors) if value in forms]
        alike, lengths = a.shape == b.shape == c.shape, len(a.factors) == len(b.factors)
        moving = [place for place, (x, y) in enumerate(zip(a.factors, b.factors, strict=False)) if x != y]
        if places and not moving and alike:
            # The other part has no target.
            moving = [place for place in places if a.term.factors[place].divides][:1]
        if not c.term.readable or not lengths or (places and len(moving) != 1) or not (places or alike):
            return None
        if places:
            divides, place = True, moving[0]
            count = a.factors[place] - b.factors[place]
            value = None if c.value is None or not count else c.value * c.factors[places[0]] / count
            c = replace(b, factors=(*b.factors[:place], count, *b.factors[place + 1 :]), value=value)
        elif not all(is_near(a.factors[at], b.factors[at] + c.factors[at], 1e-5) for at in moving):
            return None
        found = found or bool(places or moving)
        shown.append(c)
    return (shown, divides) if found else None


def _matched(seen: Sequence[list[TermReading]], compared: Comparison) -> tuple[list[Candidate], str]:
    """Match the terms of the three forwards; the second value describes a mismatch."""
    found: list[Candidate] = []
    mismatch = ""
    shapes = [[each.shape for each in terms] for terms in seen]
    for shape in dict.fromkeys(each for terms in shapes for each in terms):
        each = [[term for term in terms if term.shape == shape] for terms in seen]
        whole, one, other = map(len, each)
        if _are_one_sum(each):
            found.append(_candidate(each, None, compared))
        elif whole == one == other:
            found += [
                _candidate([[term] for term in terms], place, compared)
                for place, terms in enumerate(zip(*each, strict=True))
            ]
        elif (
            _are_rows(whole, one, other, compared.readings)
            and len({term.classes for terms in each for term in terms}) == 1
        ):
            found.append(_candidate(each, None, compared))
        else:
            mismatch = f"the loss has {whole}, {one} and {other} terms {shape[0]} in a batch and its parts"
            found += [
                Candidate(TermSpec(shape, place, How.PLAIN), (term,) * 3, (), (term.value,) * 3, matched=False)
                for place, term in enumerate(each[0])
            ]
    return found, mismatch


def _are_one_sum(seen: Sequence[Sequence[TermReading]]) -> bool:
    """Whether terms are sums over parts of a batch (chunks of its logits) that are divided by one count."""
    alike = all(len({each.factors for each in terms}) == 1 for terms in seen)
    divides = any(each.term.divides or not each.term.readable for terms in seen for each in terms)
    return alike and not divides and max(map(len, seen)) > 1 and len({terms[0].factors for terms in seen}) > 1


def _are_rows(whole: int, one: int, other: int, readings: Sequence[Reading]) -> bool:
    """Whether the number of terms is proportional to the samples: then they are rows of one mean or sum."""
    rows = [sample_count(each.batch) for each in readings]
    return whole == one + other and bool(one and other) and one % rows[1] == 0 and one * rows[0] == whole * rows[1]


def _candidate(terms: Sequence[Sequence[TermReading]], place: int | None, compared: Comparison) -> Candidate:
    """Classify the factors of one term: counts, the number, constants."""
    first = (terms[0][0], terms[1][0], terms[2][0])
    numbers = [each.number for each in compared.readings]
    rule = next(listed_targets(compared.whole.batch), None)
    listed = None if rule is None else [float(rule.count(batch)) for batch in compared.batches]
    totals = [each.total for each in first]
    targets = totals if any(totals) else None
    guarded = [[max(n, 1.0) for n in each] for each in (listed, targets) if each is not None]
    numbered: list[int] = []
    moving: list[int] = []
    for at, values in enumerate(zip(*(each.factors for each in first), strict=True)):
        is_own = first[0].is_own_count(at)
        if place is None and is_own:
            # Each row has its own count.
            continue
        if _are_numbers(values, numbers, compared):
            numbered.append(at)
            continue
        # A loss function's own divisor is a count, even if it is the same in every micro-batch.
        same = is_near(values[0], values[1]) and is_near(values[0], values[2])
        is_guarded = first[0].term.factors[at].divides and list(values) in guarded
        if not same or is_guarded or (is_own and not compared.apart):
            moving.append(at)
    counts = tuple(
        1 / each.product(moving) if moving and all(each.factors[at] for at in moving) else 0.0 for each in first
    )
    if targets is not None and counts == tuple(max(n, 1.0) for n in targets):
        # It divides by at least 1.
        counts = tuple(targets)
    if moving and not numbered and compared.apart and not is_near(counts[0], counts[1] + counts[2], 1e-5):
        # A part without items divides by at least 1.
        without = tuple(0.0 if n == 1 and each.value == 0 else n for n, each in zip(counts, first, strict=True))
        counts = without if is_near(without[0], without[1] + without[2], 1e-5) else counts
    if not numbered and _are_numbers(counts, numbers, compared):
        # A mean times items / number: the product is 1 / number.
        numbered = moving
    sums = tuple(
        None if any(s.value is None for s in each) else math.fsum(s.value or 0.0 for s in each) for each in terms
    )
    if numbered:
        return Candidate(TermSpec(first[0].shape, place, How.NUMBER, tuple(numbered)), first, counts, sums)
    spec = TermSpec(first[0].shape, place, How.MEAN if moving else How.PLAIN, tuple(moving))
    return Candidate(replace(spec, counted=counts) if moving else spec, first, counts, sums)


def _with_values(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """Assign the rest of the loss to the terms without a value, if they share their counts."""
    blank = [each for each in candidates if None in each.values]
    if not blank or len({each.counts for each in blank}) > 1:
        return candidates
    rest = _rests([each for each in candidates if each not in blank], readings)
    nothing = (0.0,) * len(rest)
    given = {id(each): rest if each is blank[0] else nothing for each in blank}
    return [replace(each, values=given.get(id(each), each.values)) for each in candidates]


def _tested(candidate: Candidate, compared: Comparison, known: Sequence[Items], *, alone: bool) -> Candidate:
    """Test whether a term's values add up as its factors predict.

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
        return candidate if adds_up else candidate.judged(_COUPLED, Cause.COUPLED)
    if spec.counts:
        return _tested_mean(candidate, compared, known, tolerance, alone=alone)
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


def _tested_mean(
    candidate: Candidate, compared: Comparison, known: Sequence[Items], tolerance: float, *, alone: bool
) -> Candidate:
    """`_tested` for a term with a factor that is not constant."""
    values, n, batches = candidate.values, candidate.counts, compared.batches
    whole, has_values = candidate.seen[0], None not in values
    rules = _rules_of(n, candidate.seen, compared, known)
    if whole.is_weighted and not any(rule.mix for rule in rules):
        # The classes of this batch may weigh alike.
        rules = {}
    if rules and all(is_padded(rule, batches[0]) for rule in rules) and not alone:
        if others := matching_rules(n, batches, (), known, given=True):
            # Smoothed labels: as many classes as positions.
            by_class = next(iter(others.values()))
            doubt = f"{whole.name} is a mean over {by_class:g} classes of its items, or over all positions"
            return candidate.judged(doubt, rules=others)
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
        return candidate.judged(_COUPLED, Cause.COUPLED, how=How.MEAN if keeps else How.PLAIN, rules=rules)
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
    varies = not (has_values and compared.are_distinct) or any(
        not is_near(values[0] or 0.0, value) for value in values[1:]
    )
    shows = varies or len(candidate.spec.counts) > 1 or not weights_elements(whole.term.leaf)
    return candidate.judged(doubt, shows=shows, rules=rules)


def _rules_of(
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


def _are_numbers(values: Sequence[float], numbers: Sequence[float | None], compared: Comparison) -> bool:
    """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
    if None in numbers:
        return False
    # A model in 16 bits rounds it.
    tolerance = 1e-2 if compared.setting.rounded or compared.whole.dtype.itemsize < 4 else 1e-6
    times = [value / (number or 1) for value, number in zip(values, numbers, strict=True)]
    return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


def _coefficient(candidates: Sequence[Candidate], name: str) -> float:
    """The coefficient of a router loss in the loss."""
    seen = next((each.seen[0] for each in candidates if each.seen[0].router == name), None)
    return 0.0 if seen is None else seen.product(range(len(seen.factors)))


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
