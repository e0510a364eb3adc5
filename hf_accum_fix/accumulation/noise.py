"""Random numbers: keep the generators' states, and run a forward without noise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pickle import dumps, loads
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Types of random generators.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout,
}  # fmt: skip

_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}

_RANDOM_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_}


@contextmanager
def random_states_kept(devices: Sequence[int] | None = None, device_type: str = "cuda") -> Iterator[None]:
    """Restore, also after an error, the random states of Python, numpy, torch on the CPU and on devices (None: all)."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    used = list(range(torch.cuda.device_count())) if devices is None else list(devices)
    try:
        with torch.random.fork_rng(used, device_type=device_type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed(number: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def random_state() -> bytes:
    """The states of the generators of `seed`; unchanged unless something drew a number."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    of_torch = [each.numpy() for each in (torch.get_rng_state(), *devices)]
    return dumps((random.getstate(), np.random.get_state(), of_torch))


def generator_state(value: Any) -> bytes:
    """The state of a generator; the same bytes unless it drew a number."""
    if isinstance(value, torch.Generator):
        return dumps(value.get_state().numpy())
    if isinstance(value, np.random.Generator):
        return dumps(value.bit_generator.state)
    return dumps(value.getstate() if isinstance(value, random.Random) else value.get_state())


def set_generator_state(value: Any, state: bytes) -> None:
    """Restore a state of `generator_state`."""
    before = loads(state)
    if isinstance(value, torch.Generator):
        value.set_state(torch.from_numpy(before))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before
    else:
        (value.setstate if isinstance(value, random.Random) else value.set_state)(before)


class WithoutNoise(TorchFunctionMode):
    """Make the forward a function of its inputs: no dropout, the same noise for all rows.

    ``alike``: noise depends on its shape alone, so that it is the same in every batch (points in a mask).
    """

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self._alike = alike

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS or func is F.scaled_dot_product_attention:
            position, name = (1, "p") if func in _DROPOUTS else (4, "dropout_p")
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        draws_alike = self._alike and (func in _RANDOM or func in _RANDOM_IN_PLACE)
        with random_states_kept() if draws_alike else nullcontext():
            if draws_alike:
                torch.manual_seed(0)
            out = func(*args, **kwargs)
        if func in _RANDOM and isinstance(out, Tensor) and out.ndim > 1:
            out = out[:1].expand_as(out).clone()
        elif func in _RANDOM_IN_PLACE and out.ndim > 1:
            out.copy_(out[:1].expand_as(out).clone())
        return out
