"""A trainer's own scaling: constants of its loss that are its accumulation steps, its ranks or its batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_accum_fix.accumulation.compare import Setting
from hf_accum_fix.accumulation.contract import How, LossContract
from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.look import Look, TermLook
from hf_accum_fix.accumulation.rules import is_near


def terms_of(found: LossContract, seen: Look) -> list[TermLook]:
    """The terms of a forward in the order of a contract's."""
    terms = seen.inside if found.inside else seen.terms
    return [[each for each in terms if each.shape == spec.shape][spec.place or 0] for spec in found.terms]


def own_scale(found: LossContract, whole: Look, setting: Setting) -> float | None:
    """A constant of all terms of a custom loss that equals a number which its code names; None: there is none.

    G or W, or their product, below or above it. A loss that divides by num_items_in_batch multiplies by W, as upstream
    documents.
    """
    own = setting.own - ({setting.world_size} if found.takes_world_size else frozenset())
    terms = terms_of(found, whole)
    pairs = [*zip(found.terms, terms, strict=True)]
    for place in range(max((len(each.factors) for each in terms), default=0)):
        values = {
            each.product([place])
            for spec, each in pairs
            if place < len(each.factors) and place not in spec.counts and not each.is_own_divisor(place)
        }
        shared = len(values) == 1 and all(len(terms) == 1 or place < each.above for each in terms)
        if shared and any(is_near(abs(value), number) for number in _with_inverse(own) for value in values):
            return values.pop()
    ratios = (ratio for spec in found.terms for ratio in spec.rules.values())
    return next((ratio for ratio in ratios if any(is_near(ratio, number) for number in _with_inverse(own))), None)


def _with_inverse(own: frozenset[int]) -> set[float]:
    numbers = {float(each) for each in own}
    product = 1.0
    for each in numbers:
        product *= each
    return {scale for each in (*numbers, product) if each != 1.0 for scale in (each, 1 / each)}


def with_kept_size(found: LossContract, whole: Look, window: Sequence[Mapping[str, Any]]) -> LossContract:
    """The contract with sums over a constant that equals the samples of a micro-batch taken for a mean, and said.

    A trainer divides by its batch size, which it may have kept as it was made.
    """
    sizes = {float(sample_count(batch)) for batch in window}
    for spec, seen in zip(found.terms, terms_of(found, whole), strict=True):
        divides = (abs(seen.factors[place]) for place in range(len(seen.factors)) if seen.divides(place))
        kept = next((n for n in divides if any(is_near(n, size) for size in sizes)), None)
        if spec.how is How.SUM and kept is not None:
            why = f"the constant {kept:g} below a sum equals a micro-batch's samples: it is averaged as a batch size"
            return replace(found, doubt=found.doubt or why)
    return found
