"""Compare looks at a batch and at its two parts: match their terms, and tell counts from constants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hf_accum_fix.accumulation.contract import Cause, How, TermSpec
from hf_accum_fix.accumulation.join import Split
from hf_accum_fix.accumulation.look import Look, TermLook
from hf_accum_fix.accumulation.rules import is_near, listed_targets

#: Relative tolerance of two values computed alike, by bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}


@dataclass(frozen=True)
class Setting:
    """Facts about a training that are known before its loss is observed; "the number" is num_items_in_batch.

    Attributes:
        handed: which forwards get the number: "all", "none", or one more ("once"), to see whether it divides the loss.
        hands_number: the model or the compute_loss_func cannot do without it, and gets it in training.
        custom: a custom ``compute_loss`` makes the loss.
        func: a compute_loss_func makes it.
        multiplies: a custom loss that divides by the number may multiply by the number of ranks.
        upstream_number: the items of this rank's window as the release counts them; None: it does not.
        rounded: matrix products are less precise than float32.
        decoder_pad: as for `rules.targets_padding`.
        has_z_loss: the model's loss has a mean over all positions, a router's loss by convention.
        has_stock: a Trainer runs the loss, so that there is a scale to keep where it cannot be read.
        is_cut: the ranks that hold a sample's parts run each forward together, of one micro-batch as it was fetched.
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
    is_cut: bool = False


@dataclass(frozen=True)
class Comparison:
    """Looks at the three batches of a split, the whole first.

    Attributes:
        window: the micro-batches of this rank.
        by_number: the model would divide by the number, if it got it.
    """

    looks: Sequence[Look]
    split: Split
    window: Sequence[Mapping[str, Any]]
    setting: Setting
    by_number: bool = False

    @property
    def whole(self) -> Look:
        """The look at the batch."""
        return self.looks[0]

    @property
    def apart(self) -> bool:
        """Whether the parts are parts of the batch."""
        return self.split.apart

    @property
    def batches(self) -> list[Mapping[str, Any]]:
        """The batch and its parts."""
        return [each.batch for each in self.looks]

    @cached_property
    def ignored(self) -> list[int]:
        """The labels that are no targets."""
        found = (each.ignored for each in (*self.whole.terms, *self.whole.inside))
        return list(dict.fromkeys([*(each for each in found if each is not None), -100]))

    @property
    def shows_coupling(self) -> bool:
        """Whether coupled samples would be detected."""
        return (self.apart and self.are_distinct) or self.whole.samples == 1

    @property
    def are_distinct(self) -> bool:
        """Whether the parts are different batches."""
        return self.looks[1].batch is not self.looks[2].batch

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
        """Relative tolerance of the loss's values; random numbers differ between a batch and its parts."""
        return math.inf if self.whole.drew or not self.apart else self.rounding

    def are_numbers(self, values: Sequence[float]) -> bool:
        """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
        numbers = [each.number for each in self.looks]
        if None in numbers:
            return False
        # A model in 16 bits rounds it.
        tolerance = 1e-2 if self.setting.rounded or self.whole.dtype.itemsize < 4 else 1e-6
        times = [value / (number or 1) for value, number in zip(values, numbers, strict=True)]
        return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


@dataclass(frozen=True)
class Candidate:
    """One term, or the rows of one mean, in the three looks.

    Attributes:
        spec: as concluded so far.
        seen: in each look.
        counts: the product of what divides it, of the factors that are no constants.
        values: its part of each loss; None: unknown.
        doubt, cause: why it is not exact.
        shows: its values are conclusive.
        grows: a batch's is near the sum of its parts', or beyond it.
        matched: the parts have as many terms of its shape.
    """

    spec: TermSpec
    seen: tuple[TermLook, TermLook, TermLook]
    counts: tuple[float, ...]
    values: tuple[float | None, ...]
    doubt: str = ""
    cause: Cause | None = None
    shows: bool = True
    grows: bool = False
    matched: bool = True

    def judged(
        self, doubt: str = "", cause: Cause | None = None, *, shows: bool = True, grows: bool = False, **spec: Any
    ) -> Candidate:
        """With the conclusion from its values, and what that changes in its spec."""
        return replace(self, spec=replace(self.spec, **spec), doubt=doubt, cause=cause, shows=shows, grows=grows)


def candidates(compared: Comparison, *, inside: bool) -> tuple[list[Candidate], str]:
    """The terms of three looks, matched; the second value describes a mismatch.

    ``inside``: stacked numbers are terms, not rows.
    """
    seen = [each.inside if inside else each.terms for each in compared.looks]
    found, mismatch = list[Candidate](), ""
    for shape in dict.fromkeys(each.shape for terms in seen for each in terms):
        its = [[term for term in terms if term.shape == shape] for terms in seen]
        whole, one, other = map(len, its)
        if _are_one_sum(its) or (not whole == one == other and _are_rows(its, compared)):
            found.append(_classified(its, None, compared))
        elif whole == one == other:
            by_place = enumerate(zip(*its, strict=True))
            found += [_classified([[term] for term in terms], place, compared) for place, terms in by_place]
        else:
            mismatch = f"the loss has {whole}, {one} and {other} terms {shape[0]} in a batch and its parts"
            for place, term in enumerate(its[0]):
                spec = TermSpec(shape, place, How.PLAIN)
                found.append(Candidate(spec, (term,) * 3, (), (term.value,) * 3, matched=False))
    return _with_values(_counted_alike(found), compared.looks), mismatch


def unexplained(found: Sequence[Candidate], looks: Sequence[Look]) -> tuple[float, ...]:
    """Each loss minus the values of some terms."""
    return tuple(each.loss - math.fsum(one.values[at] or 0.0 for one in found) for at, each in enumerate(looks))


def _are_one_sum(seen: Sequence[Sequence[TermLook]]) -> bool:
    """Whether terms are sums over parts of a batch (chunks of its logits) that are divided by one count."""
    alike = all(len({each.factors for each in terms}) == 1 for terms in seen)
    divides = any(each.own_divisor or not each.readable for terms in seen for each in terms)
    return alike and not divides and max(map(len, seen)) > 1 and len({terms[0].factors for terms in seen}) > 1


def _are_rows(seen: Sequence[Sequence[TermLook]], compared: Comparison) -> bool:
    """Whether the number of terms is proportional to the samples: then they are rows of one mean or sum."""
    (whole, one, other), samples = map(len, seen), [each.samples for each in compared.looks]
    by_sample = one % samples[1] == 0 and one * samples[0] == whole * samples[1]
    return (
        whole == one + other
        and min(one, other) > 0
        and by_sample
        and len({t.classes for its in seen for t in its}) == 1
    )


def _classified(terms: Sequence[Sequence[TermLook]], place: int | None, compared: Comparison) -> Candidate:
    """Tell the factors of one term apart: counts, the number, constants."""
    first = (terms[0][0], terms[1][0], terms[2][0])
    rule = next(listed_targets(compared.whole.batch), None)
    listed = [] if rule is None else [float(rule.count(batch)) for batch in compared.batches]
    targets = [each.targets for each in first] if any(each.targets for each in first) else []
    guarded = [[max(n, 1.0) for n in each] for each in (listed, targets) if each]
    numbered, moving = list[int](), list[int]()
    for at, values in enumerate(zip(*(each.factors for each in first), strict=True)):
        is_own = first[0].is_own_divisor(at)
        if place is None and is_own:
            # Each row has its own count.
            continue
        if compared.are_numbers(values):
            numbered.append(at)
            continue
        same = is_near(values[0], values[1]) and is_near(values[0], values[2])
        # A loss function's own divisor is a count, even if it is the same in every micro-batch.
        is_count = (is_own and not compared.apart) or (first[0].divides(at) and list(values) in guarded)
        if not same or is_count:
            moving.append(at)
    counts = tuple(
        1 / each.product(moving) if moving and all(each.factors[at] for at in moving) else 0.0 for each in first
    )
    if moving and not numbered and compared.apart and not is_near(counts[0], counts[1] + counts[2], 1e-5):
        # A part without items divides by at least 1.
        without = tuple(0.0 if n == 1 and each.value == 0 else n for n, each in zip(counts, first, strict=True))
        counts = without if is_near(without[0], without[1] + without[2], 1e-5) else counts
    if not numbered and compared.are_numbers(counts):
        # A mean times items / number: the product is 1 / number.
        numbered = moving
    of_looks = [[each.value for each in its] for its in terms]
    values = tuple(None if None in its else math.fsum(each or 0.0 for each in its) for its in of_looks)
    how = How.NUMBER if numbered else How.MEAN if moving else How.PLAIN
    spec = TermSpec(first[0].shape, place, how, tuple(numbered or moving))
    return Candidate(replace(spec, counted=counts) if how is How.MEAN else spec, first, counts, values)


def _counted_alike(found: Sequence[Candidate]) -> list[Candidate]:
    """The terms, with the count of the first that divides by the same but for rounding.

    The two terms of a cross entropy with class weights and smoothed labels do.
    """
    alike = list[Candidate]()
    for each in found:
        before = (one.counts for one in alike if len(one.counts) == len(each.counts) > 0)
        counts = next((one for one in before if all(map(is_near, one, each.counts))), each.counts)
        counted = counts if each.spec.counted == each.counts else each.spec.counted
        alike.append(replace(each, counts=counts, spec=replace(each.spec, counted=counted)))
    return alike


def _with_values(found: list[Candidate], looks: Sequence[Look]) -> list[Candidate]:
    """Assign the rest of the loss to the terms without a value, if they share their counts."""
    blank = [each for each in found if None in each.values]
    if not blank or len({each.counts for each in blank}) > 1:
        return found
    rest = unexplained([each for each in found if each not in blank], looks)
    nothing = (0.0,) * len(rest)
    return [
        each if each not in blank else replace(each, values=rest if each is blank[0] else nothing) for each in found
    ]
