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

#: Loggers that describe every run: silent here, because a dry run is no run.
_TALKATIVE = ("transformers.trainer", "accelerate", "hf_accum_fix")


@contextmanager
def restored(trainer: TrainerLike) -> Iterator[Preserved]:
    """Restore, also after an error, whatever is reachable from a trainer, and the random states; gradients are off."""
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
    """Set every dropout rate of a module and its configuration to zero, layerdrop's as well.

    `restored` puts them back.

    Returns:
        Whether there was one.
    """
    found = False
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        found |= _without(module, names)
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            found |= _without(config, [])
    return found


def _without(holder: Any, names: list[str]) -> bool:
    held = vars(holder)
    rates = [*names, *(name for name in held if "drop" in name.lower())]
    positive = [name for name in rates if isinstance(held.get(name), float) and held[name] > 0]
    for name in positive:
        setattr(holder, name, 0.0)
    return bool(positive)


def seed(number: int) -> None:
    """Seed every generator."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def random_state() -> tuple[Any, ...]:
    """States of the generators of `seed`; equal to earlier ones if nothing was drawn between."""
    numpy_state: Any = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = tuple(each.numpy().tobytes() for each in (torch.get_rng_state(), *devices))
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], states


@contextmanager
def _observations() -> Iterator[None]:
    """Forget what the dry run showed: report() lists training runs alone."""
    before = observations.recorded()
    try:
        yield
    finally:
        observations.clear()
        for run in before:
            observations.record(run)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
