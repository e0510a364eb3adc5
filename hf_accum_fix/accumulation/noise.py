"""A forward that is a function of its inputs: no dropout, one noise for all rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_accum_fix.accumulation.random_states import random_states_kept

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout,
}  # fmt: skip

_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}

_RANDOM_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_}


class WithoutNoise(TorchFunctionMode):
    """Make the forward a function of its inputs: no dropout, one noise for all rows.

    Args:
        dropout: let it drop, the same of every row: a term that is zero without it (R-Drop's) is then seen.
        alike: noise is a function of its shape, so that a row meets the same in every batch (points in a mask).
    """

    def __init__(self, *, dropout: bool = False, alike: bool = False) -> None:
        super().__init__()
        self.dropout, self.alike = dropout, alike

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.dropout and func is F.dropout and args[0].ndim > 1:
            kept = func(torch.ones_like(args[0][:1]), *args[1:], **{**kwargs, "inplace": False})
            return args[0] * kept
        if func in _DROPOUTS:
            args, kwargs = _without_dropout(args, kwargs, position=1, name="p")
        elif func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs, position=4, name="dropout_p")
        if self.alike and (func in _RANDOM or func in _RANDOM_IN_PLACE):
            with random_states_kept():
                torch.manual_seed(0)
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if func in _RANDOM and isinstance(out, Tensor) and out.ndim > 1:
            out = out[:1].expand_as(out).clone()
        elif func in _RANDOM_IN_PLACE and out.ndim > 1:
            out.copy_(out[:1].expand_as(out).clone())
        return out


def _without_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > position:
        return (*args[:position], 0.0, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}
