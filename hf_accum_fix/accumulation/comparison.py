"""Compare three forwards of a loss, of a batch and its two parts: match their terms, and classify the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hf_accum_fix.accumulation.contract import Cause, How, TermSpec
from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.loss_graph import ignored_index
from hf_accum_fix.accumulation.reading import Reading, TermReading
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
    def shows_coupling(self) -> bool:
        """Whether coupled samples would be detected."""
        return (self.apart and self.are_distinct) or sample_count(self.whole.batch) == 1

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

    def are_numbers(self, values: Sequence[float]) -> bool:
        """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
        numbers = [each.number for each in self.readings]
        if None in numbers:
            return False
        # A model in 16 bits rounds it.
        tolerance = 1e-2 if self.setting.rounded or self.whole.dtype.itemsize < 4 else 1e-6
        times = [value / (number or 1) for value, number in zip(values, numbers, strict=True)]
        return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


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

    def judged(
        self, doubt: str = "", cause: Cause | None = None, *, shows: bool = True, grows: bool = False, **spec: Any
    ) -> Candidate:
        """With the conclusion from its values; ``grows``: a batch's is near the sum of its parts'."""
        return replace(self, spec=replace(self.spec, **spec), doubt=doubt, cause=cause, shows=shows, grows=grows)


def unexplained(candidates: Sequence[Candidate], readings: Sequence[Reading]) -> tuple[float, ...]:
    """The loss of each forward minus the values of some terms."""
    return tuple(
        reading.loss - math.fsum(each.values[at] or 0.0 for each in candidates) for at, reading in enumerate(readings)
    )


def match(seen: Sequence[list[TermReading]], compared: Comparison) -> tuple[list[Candidate], str]:
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
        if compared.are_numbers(values):
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
    if not numbered and compared.are_numbers(counts):
        # A mean times items / number: the product is 1 / number.
        numbered = moving
    sums = tuple(
        None if any(s.value is None for s in each) else math.fsum(s.value or 0.0 for s in each) for each in terms
    )
    if numbered:
        return Candidate(TermSpec(first[0].shape, place, How.NUMBER, tuple(numbered)), first, counts, sums)
    spec = TermSpec(first[0].shape, place, How.MEAN if moving else How.PLAIN, tuple(moving))
    return Candidate(replace(spec, counted=counts) if moving else spec, first, counts, sums)


def with_values(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """Assign the rest of the loss to the terms without a value, if they share their counts."""
    blank = [each for each in candidates if None in each.values]
    if not blank or len({each.counts for each in blank}) > 1:
        return candidates
    rest = unexplained([each for each in candidates if each not in blank], readings)
    nothing = (0.0,) * len(rest)
    given = {id(each): rest if each is blank[0] else nothing for each in blank}
    return [replace(each, values=given.get(id(each), each.values)) for each in candidates]
