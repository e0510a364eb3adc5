"""Weight a loss that is not observed before it trains, by what each micro-batch's divides by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.part import Number, Part
from hf_accum_fix.overrides.session import Session


def weigh_by_divisor(loss: Tensor, session: Session, part: Part, place: int) -> Tensor:
    """The loss times its divisor over the first micro-batch's, on several ranks over the mean of their first.

    At its end the window is corrected by the sums of both, as for every loss that no rule counts. ``place``: among the
    losses that a step passes of its micro-batch.
    """
    terms, divisor, state = read(loss), None, session.state.losses.first
    if len(terms) == 1 and terms[0].readable:
        divides = (each.value for each in terms[0].factors if each.divides and not each.learnt)
        divisor = math.prod(divides, start=1.0)
    if part.is_corrected and session.data_ranks > 1 and state.first_divisor is None:
        state.first_divisor = _mean_over_ranks(session, divisor)
    if divisor is None:
        names = ", ".join(sorted({each.name for each in terms}))
        part.changed = f"the number it divides by cannot be read: {names}"
        return loss
    first = part.first(place, divisor) if state.first_divisor is None or place else state.first_divisor
    part.note(place, divisor, first)
    times = divisor / first
    return loss * (times.to(loss) if isinstance(times, Tensor) else times) if part.is_corrected else loss


def _mean_over_ranks(session: Session, divisor: Number | None) -> Tensor:
    """The mean of a number over the ranks that have one, 0-dim: a collective."""
    zero = session.zero
    known = torch.stack([zero, zero] if divisor is None else [zero + divisor, zero + 1])
    total, ranks = session.summed(known).unbind()
    return torch.where(ranks > 0, total / ranks.clamp(min=1), torch.ones_like(total))


def divides_by(loss: Tensor, steps: set[int]) -> bool:
    """Whether a loss has a factor 1/G: then the trainer may have divided by the accumulation steps already."""
    numbers = {float(each) for each in steps if each > 1}
    return any(
        float(each.value) in numbers or (each.value and 1 / float(each.value) in numbers)
        for term in read(loss)
        for each in (term.factors[:-1] if term.divides else term.factors)
        if not each.learnt
    )
