"""Log the contract once per run, and what the stock Trainer would have made of the loss."""

from __future__ import annotations

import logging

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.core.window import Part, Window
from hf_accum_fix.engines.engine import reduced_in
from hf_accum_fix.overrides.live import loss_func
from hf_accum_fix.overrides.session import Session

logger = logging.getLogger("hf_accum_fix")


def announce(session: Session, window: Window, part: Part, stock_scale: float) -> None:
    """Log and record, once a run, what was observed; ``part``: of the first micro-batch.

    ``stock_scale``: G times what the installed Trainer multiplies a loss by before it hands it to accelerate.
    """
    if session.state.recorded:
        return
    trainer, contract = session.trainer, part.contract
    factor, router_factor = _stock_factors(session, window, part, stock_scale)
    steps, world_size = len(window.batches), part.normalizer.world_size
    words = "" if factor is None else f" The stock Trainer would train at about {factor:.3g}x this gradient."
    if factor is not None and abs(factor - 1) > 0.02:
        words += " Clipping and learning rate felt it."
    if router_factor is not None:
        words = f" The stock Trainer would train its router loss at about {router_factor:.3g}x."
    convention = session.router.in_force
    session.record(
        contract,
        steps,
        trainer=type(trainer).__name__,
        router_loss=convention.value,
        reduced_in=reduced_in(trainer.accelerator, trainer.model_wrapped) if world_size > 1 else [],
        stock_gradient_factor=factor,
        stock_router_factor=router_factor,
    )
    if session.rank == 0:
        router = f", {convention}" if contract.has_router_loss else ""
        logger.info("%s: the loss %s%s; G=%d, W=%d.%s", session.head, contract, router, steps, world_size, words)


def _stock_factors(session: Session, window: Window, part: Part, scale: float) -> tuple[float | None, float | None]:
    """About how many times the right gradient the installed Trainer would train at, and the router's loss in it.

    None where it cannot be known. Its own division is read off the loss it passes on, accelerate's off the live object,
    its count off what it returned; the multiplication by W is the releases' common condition.
    """
    trainer, contract, number = session.trainer, part.contract, window.number
    if contract.custom or trainer.label_smoother is not None:
        return None, None
    undivided = scale / session.accelerator.gradient_accumulation_steps
    handed = session.passes_number or loss_func(trainer) is not None
    averaged = getattr(trainer.args, "average_tokens_across_devices", False) and handed and number is not None
    of_means = undivided * (part.normalizer.world_size if averaged else 1)
    if contract.has_router_loss and contract.by_number:
        # Two terms, each off by a factor of its own: no one factor holds for both.
        return None, of_means
    if contract.reduction is Reduction.NUMBER and number is not None and float(number):
        # Where upstream does not average, a rank divides by its own count: about 1/W of them all.
        return undivided / len(window.batches) * float(window.total) / float(number), None
    return of_means if contract.reduction is Reduction.MEAN else None, None
