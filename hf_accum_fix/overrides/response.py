"""What a trainer's own ``compute_loss`` makes of the base's loss, from a few forwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_accum_fix.accumulation.contract import (
    Divides,
)
from hf_accum_fix.accumulation.evidence.own_loss import divides_by
from hf_accum_fix.accumulation.evidence.rules import composing_rules, odds_of
from hf_accum_fix.accumulation.window import Items, sample_count


@dataclass(frozen=True)
class Response:
    """What a trainer's ``compute_loss`` makes of the base's loss: ``factor`` times it, and perhaps a constant.

    Attributes:
        extra: the rules that count what is added, where that is a mean over items of its own.
        odds: that these rules do not fit by chance (see `LossContract`).
        divides: when it divides it for the accumulation window.
        shown: a finite loss of the base, other than zero, showed it.
    """

    factor: float = 1.0
    constant: bool = False
    extra: tuple[Items, ...] = ()
    odds: int = 1
    divides: Divides = Divides.NEVER
    shown: bool = True


@dataclass(frozen=True)
class Asked:
    """One forward of a ``compute_loss`` that asked the base: the base's loss, and what was made of it."""

    inputs: Mapping[str, Any]
    base: float
    loss: float
    more_steps: bool
    number_came: bool


def response_of(responses: Sequence[Asked], steps: int) -> Response | None:
    """What a ``compute_loss`` makes of the base's loss; None: nothing linear.

    One of the base's losses was multiplied by a factor, which tells a factor from what is added.

    Args:
        responses: in the order of forwards, the first two of one batch.
        steps: G.
    """
    seen = [each for each in responses if math.isfinite(each.base) and math.isfinite(each.loss)]
    plain = [each for each in seen if each.number_came and not each.more_steps]
    if responses and not any(each.base for each in plain):
        return Response(shown=False)
    if all(each.loss == each.base for each in seen) or len(plain) < 2:
        return Response()
    one, other = plain[:2]
    if one.base == other.base:
        return Response() if one.loss == one.base else None
    factor = (other.loss - one.loss) / (other.base - one.base)
    added = one.loss - factor * one.base
    limit = 1e-5 * max(abs(each.loss) for each in plain)
    if abs(factor) < 1e-9:
        return Response(0.0)
    if any(abs(each.loss - factor * each.base - added) > limit for each in plain):
        extra = _extra(plain, factor)
        if not extra:
            return None
        odds = odds_of(extra[0], [plain[0].inputs, plain[-2].inputs])
        return Response(round(factor, 12), extra=extra, odds=odds, divides=_divides(seen, factor, added, steps))
    constant = abs(added) > limit
    if constant and all(_alike(each.inputs, plain[0].inputs) for each in plain):
        # Seen on other samples too, it would be a constant.
        return None
    return Response(round(factor, 12), constant, divides=_divides(seen, factor, added, steps))


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two forwards were of the same samples."""
    return all(one[key] is other.get(key) for key in one)


def _extra(plain: Sequence[Asked], factor: float) -> tuple[Items, ...]:
    """The rules by which what is added to the base's loss composes from the parts of a batch; none: it does not."""
    whole, *parts = (plain[0], *plain[-2:])
    rows = [sample_count(each.inputs) for each in (whole, *parts)]
    if len(plain) < 4 or rows[0] != rows[1] + rows[2]:
        return ()
    added = [each.loss - factor * each.base for each in (whole, *parts)]
    return composing_rules([each.inputs for each in (whole, *parts)], added)


def _divides(seen: Sequence[Asked], factor: float, added: float, steps: int) -> Divides:
    """When an override divides the base's loss for the window, from what it does with more steps and no number."""

    def compared(each: Asked | None) -> float:
        return 1.0 if each is None or each.base == 0.0 else (each.loss - added) / each.base / factor

    more_steps = compared(next((each for each in seen if each.more_steps), None))
    without = compared(next((each for each in seen if not each.number_came), None))
    if abs(without - 1) > 1e-4 and abs(without - steps) >= 1e-3 * steps:
        return Divides.UNKNOWN
    return divides_by(more_steps, with_number=abs(without - 1) > 1e-4)
