"""Run a trainer's model, then restore everything that changed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.noise import random_states_kept
from hf_accum_fix.accumulation.preserve import Preserved
from hf_accum_fix.upstream.protocols import TrainerLike

#: Loggers that report every training run; silenced during a dry run.
_LOGGERS = ("transformers.trainer", "accelerate", "hf_accum_fix")


@contextmanager
def restored(trainer: TrainerLike) -> Iterator[Preserved]:
    """Restore, also after an error, all state reachable from a trainer and the random states; clear gradients first."""
    stance = getattr(torch.compiler, "set_stance", None)
    eager: AbstractContextManager[Any] = stance("force_eager") if stance is not None else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(_observations())
        stack.enter_context(_quiet())
        stack.enter_context(eager)
        state = stack.enter_context(Preserved(trainer.model, trainer, thorough=True))
        for parameter in trainer.model.parameters():
            parameter.grad = None
        yield state


def without_dropout(model: nn.Module) -> bool:
    """Set every dropout rate of a module and its configuration to zero, layerdrop included; `restored` undoes it.

    Returns:
        Whether a rate was above zero.
    """
    found = False
    holders = [each for module in model.modules() for each in (module, vars(module).get("config"))]
    for holder in (each for each in holders if hasattr(each, "__dict__")):
        for name, value in list(vars(holder).items()):
            is_rate = "drop" in name.lower() or (name == "p" and isinstance(holder, nn.modules.dropout._DropoutNd))
            if is_rate and isinstance(value, float) and value > 0:
                setattr(holder, name, 0.0)
                found = True
    return found


def seed(number: int) -> None:
    """Seed every generator."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def random_state() -> tuple[Any, ...]:
    """The states of the generators of `seed`; unchanged unless something drew a number."""
    numpy_state: Any = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = tuple(each.numpy().tobytes() for each in (torch.get_rng_state(), *devices))
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], states


@contextmanager
def _observations() -> Iterator[None]:
    """Remove the dry run from the recorded runs: report() lists training runs only."""
    before = observations.recorded()
    try:
        yield
    finally:
        observations.clear()
        for run in before:
            observations.record(run)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
