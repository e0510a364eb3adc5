"""Say once how a training's loss is reduced, and at what scale the stock Trainer would train it."""

from __future__ import annotations

import logging

import transformers

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.part import Part
from hf_accum_fix.core.window import Window
from hf_accum_fix.engines.engine import loses_micro_batches
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.overrides.trainer_facts import averages_tokens
from hf_accum_fix.upstream.defects import is_present

logger = logging.getLogger("hf_accum_fix")

#: Stock passes no count to heads that would divide by it, so they return their own mean.
_NUMBER_DROPPED = is_present("item-count-dropped-again", transformers.__version__)


def announce_first_loss(session: Session, window: Window, part: Part, stock_scale: float) -> None:
    """Log and record, once per run, how its loss is reduced, and at what scale the stock Trainer would train it.

    ``stock_scale``: G times the installed Trainer's factor on a loss, and its engine's.
    """
    contract, steps = part.contract, len(window.batches)
    factor, router_factor = _stock_factors(session, window, part, stock_scale)
    session.record(
        contract,
        steps,
        router_loss=session.router.in_force.value,
        stock_gradient_factor=factor,
        stock_router_factor=router_factor,
    )
    words = f", {session.router.in_force}" if contract.has_router_loss else ""
    words += f"; G={steps}, W={part.world_size}."
    if factor is not None:
        words += f" The stock Trainer would train at about {factor:.3g}x this gradient."
        if abs(factor - 1) > 0.02:
            words += " Learning rate and clipping were tuned at that scale."
    if router_factor is not None:
        words += f" The stock Trainer would train its router loss at about {router_factor:.3g}x."
    if session.rank == 0:
        logger.info("%s: the loss %s%s", session.head, contract, words)


def _stock_factors(session: Session, window: Window, part: Part, scale: float) -> tuple[float | None, float | None]:
    """The installed Trainer's approximate factors on the exact gradient, and on the router loss; None: unknown.

    Its own division is read from the loss that it passes on, its count from what it returned; the multiplication by
    W follows the condition that all releases share.
    """
    contract, number = part.contract, window.counts.number
    if contract.custom or session.trainer.label_smoother is not None or loses_micro_batches(session.accelerator):
        return None, None
    averaged = averages_tokens(session.trainer) and session.accepts_number
    of_means = scale * (part.world_size if averaged and number is not None else 1)
    if contract.has_router_loss and contract.by_number:
        # Two terms with different factors.
        return None, of_means
    by_number = contract.reduction is Reduction.NUMBER and not _NUMBER_DROPPED
    if by_number and number is not None and float(number):
        # Unless upstream averages, a rank divides by its own count, about 1/W of the total.
        return scale / len(window.batches) * float(window.counts.total) / float(number), None
    is_mean = contract.reduction in (Reduction.MEAN, Reduction.NUMBER) and not by_number
    return of_means if is_mean else None, None
