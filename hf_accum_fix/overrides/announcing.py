"""What is said of a training, once: what was observed, and what the stock Trainer would have made of it."""

from __future__ import annotations

import logging

from hf_accum_fix import counting
from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.engines.engine import reduced_in
from hf_accum_fix.overrides.live import head_name, loss_func
from hf_accum_fix.overrides.routing import convention_of
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, Window
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")


def announce(trainer: TrainerLike, session: Session, window: Window, stock_scale: float) -> None:
    """Once a run: what was observed, and what the stock Trainer would have made of it.

    Args:
        trainer: the one that trains.
        session: its state.
        window: its first one.
        stock_scale: G times what the installed Trainer multiplies a loss by before it hands it to accelerate.
    """
    if "announced" in session.said:
        return
    session.said.add("announced")
    contract = window.contract
    factor = _stock_factor(trainer, session, window, stock_scale)
    router_factor = None
    if contract.has_router_loss and contract.by_number:
        # Two terms, each off by a factor of its own: no one factor says it.
        factor, router_factor = None, _stock_factor_of_means(trainer, session, window, stock_scale)
    steps, world_size = len(window.batches), window.cut.world_size
    head = head_name(trainer)
    told = "" if factor is None else f" The stock Trainer would train at about {factor:.3g}x this gradient."
    if factor is not None and abs(factor - 1) > 0.02:
        told += " Clipping and learning rate felt it."
    if router_factor is not None:
        told = f" The stock Trainer would train its router loss at about {router_factor:.3g}x."
    counting.record(
        TrainerRun(trainer, session),
        session,
        contract,
        steps,
        trainer=type(trainer).__name__,
        router_loss=convention_of(session).value,
        reduced_in=reduced_in(trainer.accelerator, trainer.model_wrapped) if world_size > 1 else [],
        stock_gradient_factor=factor,
        stock_router_factor=router_factor,
        **session.repeated,
    )
    if trainer.args.process_index == 0:
        router = f", {convention_of(session)}" if contract.has_router_loss else ""
        logger.info("%s: the loss %s%s; G=%d, W=%d.%s", head, contract, router, steps, world_size, told)


def _stock_factor(trainer: TrainerLike, session: Session, window: Window, stock_scale: float) -> float | None:
    """About how many times the right gradient the installed Trainer would train at; None where it cannot be told.

    Its own division is read off the loss it passes on, accelerate's off the live object, its count off what it
    returned; the multiplication by W is the releases' common condition.
    """
    contract = window.contract
    if contract.reduction is Reduction.MEAN:
        return _stock_factor_of_means(trainer, session, window, stock_scale)
    undivided = _undivided(trainer, window.contract, stock_scale)
    if contract.reduction is Reduction.NUMBER and undivided is not None and window.upstream_number is not None:
        # Where upstream does not average, a rank divides by its own count: about 1/W of them all.
        counted = float(window.upstream_number)
        return undivided / len(window.batches) * float(window.total) / counted if counted else None
    return None


def _stock_factor_of_means(trainer: TrainerLike, session: Session, window: Window, stock_scale: float) -> float | None:
    """The same of a term that each micro-batch takes the mean of: a loss, or a router's loss inside it."""
    undivided = _undivided(trainer, window.contract, stock_scale)
    if undivided is None:
        return None
    handed = session.passes_number or loss_func(trainer) is not None
    averaged = getattr(trainer.args, "average_tokens_across_devices", False)
    return undivided * (window.cut.world_size if averaged and handed and window.upstream_number is not None else 1)


def _undivided(trainer: TrainerLike, contract: LossContract, stock_scale: float) -> float | None:
    """What is left of G where the installed Trainer and accelerate have divided; None where it cannot be told."""
    if contract.custom or trainer.label_smoother is not None:
        return None
    return stock_scale / int(trainer.accelerator.gradient_accumulation_steps)
