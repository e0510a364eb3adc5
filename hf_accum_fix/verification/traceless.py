"""Run a trainer's model, then restore everything that changed."""

from __future__ import annotations

import copy
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_accum_fix import observations
from hf_accum_fix.accumulation.noise import random_states_kept
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.reachable import CONTAINERS, reachable

#: Loggers that describe every run: silent here, because a dry run is no run.
_TALKATIVE = ("transformers.trainer", "accelerate", "hf_accum_fix")


@contextmanager
def traceless(trainer: TrainerLike) -> Iterator[None]:
    """Restore, also after an error, all that running a trainer's model, data and loss may change.

    That is: parameters, buffers, gradients, modules; random states of every device, and the user's own generators;
    attributes and containers of whatever the trainer holds (collator, sampler, meters, configuration); accelerate's
    shared state.
    """
    model = trainer.model
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(_objects(trainer))
        stack.enter_context(_modules(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(_shared_states())
        stack.enter_context(_observations())
        stack.enter_context(_quiet())
        stance = getattr(torch.compiler, "set_stance", None)
        eager: AbstractContextManager[Any] = stance("force_eager") if stance is not None else nullcontext()
        stack.enter_context(eager)
        stack.enter_context(_parameters(model))
        yield


def without_dropout(model: nn.Module) -> bool:
    """Set every dropout rate of a module and its configuration to zero, layerdrop's as well.

    `traceless` puts them back.

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


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copy a tensor just before an operation first writes to it, so that untouched tensors cost nothing.

    Args:
        tensors: the ones to restore.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self.before: list[tuple[Tensor, Tensor]] = []
        self._writes: dict[Any, list[tuple[int, str]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places = self._writes.get(func)
        if places is None:
            named = enumerate(func._schema.arguments)
            places = [(at, each.name) for at, each in named if each.alias_info is not None and each.alias_info.is_write]
            self._writes[func] = places
        for at, name in places:
            for value in tree_leaves(args[at] if at < len(args) else kwargs.get(name)):
                if isinstance(value, Tensor) and self._by_storage:
                    self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, written: Tensor) -> None:
        try:
            storage = written.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # A tensor without storage is not ours.
            return
        self.before += [(each, each.clone()) for each in self._by_storage.pop(storage, ())]


@contextmanager
def _parameters(model: nn.Module) -> Iterator[None]:
    """Restore the values of parameters: a forward may normalise them, or copy some from others."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    watch = _CopyOnWrite([data for _, data in kept])
    try:
        with watch:
            yield
    finally:
        for parameter, data in kept:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for data, before in watch.before:
            data.copy_(before)


@contextmanager
def _objects(trainer: TrainerLike) -> Iterator[None]:
    """Attributes, containers and generators of all that a trainer holds."""
    back: list[Callable[[], None]] = []
    for value in reachable(trainer, *trainer.model.modules()):
        if type(value) in CONTAINERS:
            back.append(_container_back(value))
        elif isinstance(value, _GENERATORS):
            back.append(_generator_back(value))
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            back.append(_container_back(vars(value)))
    try:
        yield
    finally:
        for put_back in back:
            put_back()


def _container_back(value: Any) -> Callable[[], None]:
    content = list(value.items()) if isinstance(value, dict) else list(value)

    def put_back() -> None:
        now = list(value.items()) if isinstance(value, dict) else list(value)
        if len(now) == len(content) and all(map(_is_same, now, content)):
            return
        if isinstance(value, list):
            value[:] = content
            return
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)

    return put_back


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


#: Types of generators that a user may hold.
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _generator_back(value: Any) -> Callable[[], None]:
    if isinstance(value, torch.Generator):
        return partial(_set_state, value, value.get_state())
    if isinstance(value, np.random.Generator):
        bits, content = value.bit_generator, copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(bits, "state", content)
    if isinstance(value, np.random.RandomState):
        before = value.get_state()
        return lambda: value.set_state(before)
    kept = value.getstate()
    return lambda: value.setstate(kept)


@contextmanager
def _modules(model: nn.Module) -> Iterator[None]:
    """Restore modes, hooks, rates, replaced forwards, buffers: all that a module holds but its parameters' values."""
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
            # BatchNorm changes its statistics without a new tensor version.
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
    """Restore accelerate's process-wide state, which a second Accelerator writes to."""
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
