"""Log and record, once per run, how its loss is reduced, and at what scale the stock Trainer would train it."""

from __future__ import annotations

import logging
from typing import Any

import transformers
from torch import Tensor

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.part import Part
from hf_accum_fix.core.window import Window
from hf_accum_fix.engines.engine import reduced_in
from hf_accum_fix.overrides.live import averages_tokens
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.upstream.defects import is_present

logger = logging.getLogger("hf_accum_fix")

#: Stock passes no count to heads that would divide by it, so they return their own mean.
_NUMBER_DROPPED = is_present("item-count-dropped-again", transformers.__version__)


def factor_over(loss: Tensor, node: Any) -> float:
    """The factor on a loss since a node returned it."""
    factor = 1.0
    for term in read(loss, (node,)):
        for each in term.factors if term.leaf is node else ():
            factor = factor / float(each.value) if each.divides else factor * float(each.value)
    return factor


def announce(session: Session, window: Window, part: Part, stock_scale: float) -> None:
    """Log and record the observed contract; ``part``: of the first micro-batch.

    ``stock_scale``: G times the installed Trainer's factor on the loss that it passes to accelerate.
    """
    trainer, contract = session.trainer, part.contract
    factor, router_factor = _stock_factors(session, window, part, stock_scale)
    steps, world_size = len(window.batches), part.world_size
    session.record(
        contract,
        steps,
        trainer=type(trainer).__name__,
        router_loss=session.router.in_force.value,
        reduced_in=reduced_in(trainer.accelerator, trainer.model_wrapped) if world_size > 1 else [],
        stock_gradient_factor=factor,
        stock_router_factor=router_factor,
    )
    words = f", {session.router.in_force}" if contract.has_router_loss else ""
    words += f"; G={steps}, W={world_size}."
    if factor is not None:
        words += f" The stock Trainer would train at about {factor:.3g}x this gradient."
    if factor is not None and abs(factor - 1) > 0.02:
        words += " Learning rate and clipping were tuned at that scale."
    if router_factor is not None:
        words += f" The stock Trainer would train its router loss at about {router_factor:.3g}x."
    if session.rank == 0:
        logger.info("%s: the loss %s%s", session.head, contract, words)


def _stock_factors(session: Session, window: Window, part: Part, scale: float) -> tuple[float | None, float | None]:
    """The approximate factors of the installed Trainer on the exact gradient, and on the router loss; None: unknown.

    Its own division is read from the loss that it passes on, accelerate's from the live object, its count from what it
    returned; the multiplication by W follows the condition that all releases share.
    """
    trainer, contract, number = session.trainer, part.contract, window.counts.number
    if contract.custom or trainer.label_smoother is not None:
        return None, None
    undivided = scale / session.accelerator.gradient_accumulation_steps
    passed = session.passes_number or session.func is not None
    averaged = averages_tokens(trainer) and passed and number is not None
    of_means = undivided * (part.world_size if averaged else 1)
    if contract.has_router_loss and contract.by_number:
        # Two terms with different factors.
        return None, of_means
    by_number = contract.reduction is Reduction.NUMBER and not _NUMBER_DROPPED
    if by_number and number is not None and float(number):
        # Unless upstream averages, a rank divides by its own count, about 1/W of the total.
        return undivided / len(window.batches) * float(window.counts.total) / float(number), None
    is_mean = contract.reduction in (Reduction.MEAN, Reduction.NUMBER) and not by_number
    return of_means if is_mean else None, None
