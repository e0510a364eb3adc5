"""Gradients as lists of one tensor (None for zero) per trainable parameter, compared one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

Gradient: TypeAlias = Sequence[Tensor | None]


def take(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Move the gradients off the parameters, without a copy unless they are sparse or in shards."""
    taken = [_whole(parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _whole(gradient: Any) -> Tensor | None:
    """A gradient that is no longer sparse, nor in shards of tensor-parallel ranks."""
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor().cpu()  # type: ignore[no-any-return]
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()  # type: ignore[no-any-return]


def on_cpu(gradient: Gradient) -> list[Tensor | None]:
    """Copy a gradient to the CPU."""
    return [None if each is None else each.detach().to("cpu", copy=True) for each in gradient]


def summed(parameters: Sequence[nn.Parameter], before: Gradient | None) -> list[Tensor | None]:
    """Move 16-bit gradients to sums in 32 bits, because a 16-bit ``.grad`` rounds with every micro-batch."""
    sums: list[Tensor | None] = [None] * len(parameters) if before is None else list(before)
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.dtype.itemsize < 4:
            found, old = parameter.grad.detach().to_dense().to("cpu", torch.float32), sums[place]
            sums[place] = found if old is None else old.add_(found)
            parameter.grad = None
    return sums


def averaged(gradient: Gradient, parameters: Sequence[nn.Parameter], world_size: int) -> list[Tensor | None]:
    """The mean over ranks, the same on each; a parameter without gradient here may have one on another rank."""
    if world_size == 1:
        return list(gradient)
    found: list[Tensor | None] = []
    for each, parameter in zip(gradient, parameters, strict=True):
        if each is None:
            # Whole, where the parameter is in shards.
            mean = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        else:
            mean = each.detach().to(parameter.device, copy=True)
        dist.all_reduce(mean)
        found.append(mean / world_size)
    return found


def dots(*gradients: Gradient) -> Tensor:
    """Inner products of every pair: [k, k], float64, on the CPU."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for tensors in zip(*gradients, strict=True):
        rows = _rows(tensors)
        if rows is not None:
            total += rows @ rows.T
    return total


def distance(wanted: Gradient, *parts: Gradient, weights: Sequence[float] | None = None) -> float:
    """Norm of ``wanted - sum(weight * part)``, without the cancellation of inner products; None: weights of 1."""
    total, factors = 0.0, torch.tensor(weights or [1.0] * len(parts), dtype=torch.float64)
    for tensors in zip(wanted, *parts, strict=True):
        rows = _rows(tensors)
        if rows is not None:
            total += float((rows[0] - factors @ rows[1:]).square().sum())
    return math.sqrt(total) if total >= 0 else math.nan


def relative(one: Gradient, other: Gradient) -> float:
    """Norm of the difference over that of the second."""
    return distance(one, other) / (math.sqrt(float(dots(other)[0, 0])) or 1.0)


def _rows(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One parameter's gradients as rows; None if all are zero."""
    shaped = next((each for each in tensors if each is not None), None)
    if shaped is None:
        return None
    zero = torch.zeros(shaped.numel(), dtype=torch.float64)
    return torch.stack([zero if each is None else each.detach().flatten().to("cpu", torch.float64) for each in tensors])


def fit(wanted: Gradient, *parts: Gradient) -> tuple[list[float], float]:
    """The weights of the least-squares combination of parts nearest to ``wanted``; the relative norm of the rest."""
    products = dots(wanted, *parts)
    norm = math.sqrt(float(products[0, 0]))
    if not math.isfinite(float(products.sum())) or norm == 0.0:
        return [math.nan] * len(parts), math.inf
    weights = torch.linalg.lstsq(products[1:, 1:], products[1:, :1], driver="gelsd").solution.flatten().tolist()
    return weights, distance(wanted, *parts, weights=weights) / norm
