"""Run a forward without noise."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_accum_fix.accumulation.preserve import random_states

#: The place and the name of an operation's dropout rate.
_DROPOUTS = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_), (1, "p")),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}
_RANDOM = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like),
    *(Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_),
}


def seed(number: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


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
        if func in _DROPOUTS:
            position, name = _DROPOUTS[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        if func not in _RANDOM:
            return func(*args, **kwargs)
        with random_states() if self._alike else nullcontext():
            if self._alike:
                torch.manual_seed(0)
            out = func(*args, **kwargs)
        if out.ndim > 1:
            with torch.no_grad():
                out.copy_(out[:1].expand_as(out).clone())
        return out
