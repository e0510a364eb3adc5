"""num_items_in_batch in the forwards that observe a loss: what they get, where it went, and which rule counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_accum_fix.accumulation.comparison import Setting
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.reading import Reading, TermReading
from hf_accum_fix.accumulation.rules import is_near, ways_of_counting

#: The numbers passed to the three forwards: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: The number passed to the last one alone: no count, and small, so that 16 bits keep what is divided by it.
SHOWN = 37.5


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
