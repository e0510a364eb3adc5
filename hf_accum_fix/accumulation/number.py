"""num_items_in_batch in the forwards that observe a loss: what they get, where it went, and which rule counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_accum_fix.accumulation.comparison import Setting
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.reading import Reading
from hf_accum_fix.accumulation.rules import ways_of_counting

#: The numbers passed to the three forwards: no sums or multiples of one another.
NUMBERS = (7919, 3571, 5557)
#: The number passed to one forward, to see whether the loss divides by it: no count, and small, so that 16 bits keep
#: what is divided by it.
SHOWN = 37.5


def shows_number(reading: Reading) -> bool:
    """Whether a forward that got the number divides a term by it."""
    # A model in 16 bits rounds it.
    forms = {float(torch.tensor(reading.number, dtype=each)) for each in (torch.float64, torch.bfloat16, torch.float16)}
    terms = (each for each in reading.terms if each.term.readable and not each.router)
    return any(value in forms for each in terms for value in each.factors)


def divides_unseen(plain: Reading, shown: Reading) -> bool:
    """Whether a loss with a hidden divisor is a mean without the number, and with it the sum over the number."""
    items = SHOWN * shown.loss / plain.loss if plain.loss else 0.0
    return items >= 1 and abs(items - round(items)) <= 1e-3


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
