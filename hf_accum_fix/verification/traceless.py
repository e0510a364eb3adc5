"""Running a trainer's model without leaving a trace: what is kept, and how it comes back."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.random_states import random_states_kept

#: What the trainer's own loop says of every run, and we of every head: a rehearsal is no run, and the report says it.
_TALKATIVE = ("transformers.trainer", "accelerate", "hf_accum_fix")


@contextmanager
def traceless(model: nn.Module) -> Iterator[None]:
    """Put back, also after an error: modules, buffers, gradients, RNG of every device, accelerate's shared state."""
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(_modules(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(_shared_states())
        stack.enter_context(_observations())
        stack.enter_context(_quiet())
        stance = getattr(torch.compiler, "set_stance", None)
        eager: AbstractContextManager[Any] = stance("force_eager") if stance is not None else nullcontext()
        stack.enter_context(eager)
        yield


def without_dropout(model: nn.Module) -> bool:
    """Set every rate of dropout that a module holds to zero; whether there was one. `traceless` puts them back."""
    found = False
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        names += [name for name in vars(module) if "drop" in name.lower()]
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found


def seed(number: int) -> None:
    """Start every generator there is from the same place."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@contextmanager
def _modules(model: nn.Module) -> Iterator[None]:
    """Modes, hooks, rates, replaced forwards: all that a module holds but its parameters' values."""
    kept = [(module, {name: _own(value) for name, value in vars(module).items()}) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, before in kept:
            held = vars(module)
            for name in [name for name in held if name not in before]:
                del held[name]
            for name, (value, content) in before.items():
                held[name] = value
                if content is not None:
                    value.clear()
                    value.update(content)
        for buffer, content in buffers:
            # BatchNorm changes its statistics without counting the version up.
            if not torch.equal(buffer, content):
                with torch.no_grad():
                    buffer.copy_(content)


def _own(value: Any) -> tuple[Any, Any]:
    """The object, and its content where it is one of the dictionaries that a module changes in place."""
    return value, copy.copy(value) if isinstance(value, dict) else None


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    aside = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


@contextmanager
def _shared_states() -> Iterator[None]:
    """Accelerate's processes-wide state, which a second Accelerator writes to."""
    states = [state._shared_state for state in (PartialState, AcceleratorState, GradientState)]
    before = [{name: copy.copy(v) if isinstance(v, (list, dict)) else v for name, v in s.items()} for s in states]
    try:
        yield
    finally:
        for state, kept in zip(states, before, strict=True):
            state.clear()
            state.update(kept)


@contextmanager
def _observations() -> Iterator[None]:
    """A rehearsal is no training run, and report() tells of those."""
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
