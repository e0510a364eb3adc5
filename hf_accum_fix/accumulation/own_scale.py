"""Find a trainer's own scaling: constants of its loss that change with steps, ranks or batch size in its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_accum_fix.accumulation.compare import Setting
from hf_accum_fix.accumulation.contract import How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.items import Items, sample_count
from hf_accum_fix.accumulation.look import Look, TermLook
from hf_accum_fix.accumulation.rules import is_near

#: Factors of ranks and batch size in the test forward; the steps are doubled, or tripled.
RANKS, BATCH_SIZE = 5, 7
#: How a count may move as the steps in the arguments are doubled, and the power of the steps in it then.
_INSIDE = {1.0: 0, 2.0: 1, 0.5: -1}


def scale_candidates(found: LossContract, whole: Look, setting: Setting) -> list[tuple[int, int]]:
    """Constants that may depend on the accumulation steps: places of terms, and of their factors."""
    if setting.steps * setting.world_size == 1:
        return []
    terms = terms_of(found, whole)
    return [
        (at, place)
        for at, (spec, seen) in enumerate(zip(found.terms, terms, strict=True))
        for place, value in enumerate(seen.factors)
        if (place not in spec.counts or _may_hold_steps(spec))
        and value
        # A sum over the batch size, which may be 1.
        and (spec.how is How.SUM or not is_near(abs(value), 1.0))
        # Neither a torch loss function's own divisor nor the model's is the trainer's.
        and not seen.is_own_divisor(place)
        and place < seen.outer
    ]


def _may_hold_steps(spec: TermSpec) -> bool:
    """Whether the accumulation steps may be a part of a mean's divisor: it is no rule's count itself."""
    return spec.how is How.MEAN and not any(is_near(ratio, 1.0) for ratio in spec.rules.values())


def terms_of(found: LossContract, seen: Look) -> list[TermLook]:
    """The terms of a forward in the order of a contract's."""
    terms = seen.inside if found.inside else seen.terms
    return [[each for each in terms if each.shape == spec.shape][spec.place or 0] for spec in found.terms]


def own_scale(
    found: LossContract, candidates: Sequence[tuple[int, int]], whole: Look, more: Look, setting: Setting
) -> LossContract:
    """Mark those `scale_candidates` as the trainer's division that changed with the steps in the arguments.

    A constant that did not change is a coefficient, unless all that the trainer scales is times 1/G or 1/W (G or W if
    it divides by the number): then it may be either. One that changed with the ranks multiplies a loss that divides by
    the items of all ranks. A sum over the batch size of the arguments is a mean over the samples of a full micro-batch,
    so its micro-batches are averaged.
    """
    steps, ranks = setting.steps, setting.world_size
    telling = {float(number) for number in (steps, ranks, steps * ranks) if number > 1}
    terms, before, after = list(found.terms), terms_of(found, whole), terms_of(found, more)
    for at, spec in enumerate(terms):
        times = [
            (a / b if divides else b / a) if a and b else 0.0
            for b, a, (divides, _) in zip(before[at].factors, after[at].factors, spec.shape[2:], strict=True)
        ]
        numbers = spec.counts if spec.how is How.NUMBER else ()
        elsewhere = []
        if numbers and _is_any(1 / RANKS, times):
            found = replace(found, takes_world_size=setting.multiplies)
            elsewhere.append(1 / RANKS)
        # A number that moved is N / G, the mean items per micro-batch: a G after it undoes that.
        elsewhere += [1 / times[place] for place in numbers if times[place] and not is_near(times[place], 1.0)]
        its = [place for term, place in candidates if term == at]
        places = [place for place in its if place not in spec.counts and not _is_any(times[place], elsewhere)]
        inside = [times[place] for place in its if place in spec.counts]
        still = [place for place in places if is_near(times[place], 1.0)]
        own = [place for place in places if _is_any(times[place], (2.0, 3.0))]
        by_size = [place for place in places if _is_any(times[place], [BATCH_SIZE * each for each in (1, 2, 3)])]
        unknown = len(own) + len(still) + len(by_size) < len(places) or (by_size and spec.how is not How.SUM)
        unknown = unknown or not all(_is_any(each, _INSIDE) for each in inside)
        # The steps inside a divisor, as in sum / (count * steps).
        within = math.prod(steps ** _INSIDE[each] for moved in inside for each in _INSIDE if is_near(moved, each))
        of_all = [place for place in still if all(_has(each, place, before[at]) for each in before)]
        scales = [*(before[at].product([place]) for place in of_all), before[at].product(of_all)]
        either = [scale for scale in scales if _is_any(abs(scale if numbers else 1 / scale), telling)]
        if inside and within == 1.0:
            either += [ratio for ratio in spec.rules.values() if _is_any(ratio, (steps, 1 / steps))]
        why = ""
        if unknown:
            why = "it is scaled by the accumulation steps or the batch size in an unknown way; the scale is kept"
        elif own and spec.how is How.PLAIN:
            why = "it is divided by the accumulation steps, and cannot be read; the stock Trainer's scale is kept"
        elif either and not own and not (numbers and found.takes_world_size):
            why = (
                f"the constant {either[0]:g} may be a coefficient or the trainer's division by the accumulation steps; "
                "the stock Trainer's scale is kept"
            )
        if by_size and spec.how is How.SUM:
            # With the steps in it as well, it is the size of the global batch.
            with_steps = any(not is_near(times[place], BATCH_SIZE) for place in by_size)
            spec = replace(spec, how=How.NUMBER if with_steps else How.CONSTANT)
        terms[at] = replace(spec, own=(*spec.own, *own), steps=within)
        found = replace(found, doubt=found.doubt or why, keeps_scale=found.keeps_scale or bool(why))
    found = replace(found, terms=tuple(terms))
    if found.reduction is Reduction.SUM and any(each.how is not How.SUM for each in terms):
        reason = "it is a sum over the batch size in the arguments"
        found = replace(found, reduction=Reduction.MEAN, items=Items(), reason=reason)
    return found


def with_kept_size(found: LossContract, whole: Look, window: Sequence[Mapping[str, Any]]) -> LossContract:
    """The contract with sums over a constant that equals the samples of a micro-batch averaged, and said.

    A trainer may have kept its batch size as it was made, so that the constant does not move with the arguments.
    """
    sizes = {float(sample_count(batch)) for batch in window}
    terms = list(found.terms)
    for at, (spec, seen) in enumerate(zip(found.terms, terms_of(found, whole), strict=True)):
        # What moved with the steps in the arguments is the steps, not a batch size.
        places = (place for place in range(len(seen.factors)) if seen.divides(place) and place not in spec.own)
        divides = (abs(seen.factors[place]) for place in places)
        kept = next((n for n in divides if _is_any(n, sizes)), None)
        if spec.how is How.SUM and kept is not None:
            why = f"the constant {kept:g} below a sum equals a micro-batch's samples: it is averaged as a batch size"
            terms[at] = replace(spec, how=How.CONSTANT)
            found = replace(found, doubt=found.doubt or why, terms=tuple(terms))
    if found.reduction is Reduction.SUM and any(each.how is not How.SUM for each in terms):
        return replace(found, reduction=Reduction.PLAIN, reason=found.doubt)
    return found


def _has(other: TermLook, place: int, term: TermLook) -> bool:
    """Whether another term has the factor in this place, too, or is the model's own loss."""
    return not other.outer or (place < other.outer and is_near(other.product([place]), term.product([place])))


def _is_any(value: float, numbers: Iterable[float]) -> bool:
    return any(is_near(value, each) for each in numbers)
