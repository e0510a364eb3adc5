"""A trainer's own scaling: constants of its loss that are its accumulation steps, its ranks or its batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_accum_fix.accumulation.compare import Setting
from hf_accum_fix.accumulation.contract import How, LossContract, TermSpec
from hf_accum_fix.accumulation.items import sample_count
from hf_accum_fix.accumulation.look import Look, TermLook
from hf_accum_fix.accumulation.rules import is_near


def terms_of(found: LossContract, seen: Look) -> list[tuple[TermSpec, TermLook]]:
    """The terms of a contract, each with that of a forward that has it."""
    terms = seen.inside if found.inside else seen.terms
    alike = ((spec, [each for each in terms if each.shape == spec.shape]) for spec in found.terms)
    return [(spec, its[spec.place or 0]) for spec, its in alike if its[spec.place or 0 :]]


def with_own_steps(found: LossContract, whole: Look, setting: Setting, *, adds: bool) -> LossContract:
    """The contract with what a custom loss divides by the steps next to a term over num_items_in_batch.

    Such losses are added up, so that TRL divides a router loss by itself. ``adds``: the base's loss is one.
    """
    if not (adds or How.NUMBER in {each.how for each in found.terms}):
        return found
    terms = list[TermSpec]()
    for spec, term in terms_of(found, whole):
        places = (at for at in range(len(term.factors)) if at not in spec.counts and not term.is_own_divisor(at))
        own = [at for at in places if any(is_near(term.product([at]), 1 / steps) for steps in setting.own_steps)]
        terms.append(spec if spec.how is How.NUMBER else replace(spec, own=tuple(own[:1])))
    # What divides all of its terms is another scale.
    is_all = len(terms) < len(found.terms) or all(each.own for each in terms)
    return found if is_all else replace(found, terms=tuple(terms))


def own_scale(found: LossContract, whole: Look, setting: Setting) -> float | None:
    """A constant of a custom loss that is a number which its code names, G, W or their product, or 1 by it; None: none.

    A loss that divides by num_items_in_batch multiplies by W, as upstream documents.
    """
    own = [float(each) for each in setting.own if not (found.takes_world_size and each == setting.world_size)]
    numbers = [scale for each in (*own, math.prod(own)) if each != 1.0 for scale in (each, 1 / each)]
    scales = [ratio for spec in found.terms for ratio in spec.rules.values()]
    for spec, term in terms_of(found, whole):
        taken = {*spec.counts, *spec.own}
        places = (at for at in range(len(term.factors)) if at not in taken and not term.is_own_divisor(at))
        scales += [abs(term.product([at])) for at in places]
    return next((scale for scale in scales if any(is_near(scale, number) for number in numbers)), None)


def with_kept_size(found: LossContract, whole: Look, window: Sequence[Mapping[str, Any]]) -> LossContract:
    """The contract with a doubt where a sum is divided by the samples of a micro-batch, which a trainer has kept."""
    sizes = {float(sample_count(batch)) for batch in window}
    for spec, seen in terms_of(found, whole):
        divides = (abs(seen.factors[place]) for place in range(len(seen.factors)) if seen.divides(place))
        kept = next((n for n in divides if any(is_near(n, size) for size in sizes)), None)
        if spec.how is How.SUM and kept is not None:
            why = f"the constant {kept:g} below a sum equals a micro-batch's samples: it is averaged as a batch size"
            return replace(found, doubt=found.doubt or why)
    return found
