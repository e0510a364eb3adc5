"""Projections and hashes of tensors that are in shards: each rank makes its own part, and one sum has the whole.

The random numbers are a hash of the parameter's name and of an element's place in the whole parameter, so they are the
same for every sharding, device and release, and no vector of them is stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix.engines.engine import bare_name

#: K = ROWS x BUCKETS projections: each element is added, with a random sign, to one random bucket of each row.
ROWS: Final = 4
BUCKETS: Final = 16
#: Elements that are hashed at once.
_BLOCK: Final = 1 << 15
_BITS: Final = 5  # A bucket and a sign.


class Projected(NamedTuple):
    """A tensor's projections [ROWS x BUCKETS] and the square of its norm, float64; sums of those of its parts."""

    projections: Tensor
    square: float


def project(name: str, parts: Iterator[tuple[Tensor, Tensor]]) -> Projected:
    """Project the parts of a parameter's gradient that this rank counts.

    Args:
        name: of the parameter.
        parts: values and their places in the whole parameter, as `parts_of` gives them.
    """
    found, square = torch.zeros(ROWS, BUCKETS, dtype=torch.float64), 0.0
    for values, places in parts:
        x, drawn = values.double(), _mixed(places * _ODD + _seed(name))
        square += float(x.square().sum())
        for row in range(ROWS):
            bits = _shifted(drawn, row * _BITS)
            signed = torch.where((bits & BUCKETS) == 0, x, -x)
            found[row] += torch.bincount(bits & (BUCKETS - 1), weights=signed, minlength=BUCKETS).cpu()
    return Projected(found.flatten(), square)


def projections_of(gradients: Iterable[tuple[str, Tensor | None]]) -> dict[str, Projected]:
    """The projections of whole gradients, by name, from this rank's part of each (None: zero); one sum over ranks."""
    parts = {name: project(name, parts_of(torch.zeros(0) if each is None else each)) for name, each in gradients}
    if not parts:
        return {}
    rows = [torch.cat([each.projections, torch.tensor([each.square], dtype=torch.float64)]) for each in parts.values()]
    return {
        name: Projected(row[: ROWS * BUCKETS].clone(), float(row[-1]))
        for name, row in zip(parts, added(torch.stack(rows)), strict=True)
    }


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their names in the model itself."""
    for name, each in model.named_parameters():
        yield bare_name(name), each


def added(numbers: Tensor) -> Tensor:
    """The sum over ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return numbers
    on_device = numbers.cuda() if dist.get_backend() == "nccl" else numbers
    dist.all_reduce(on_device)
    return on_device.cpu()


def distance_squared(one: Tensor, other: Tensor) -> float:
    """The square of the norm of a difference, from projections: right on average, to sqrt(2 / K) of itself (18 %)."""
    return float((one - other).square().sum()) / ROWS


def product(one: Tensor, other: Tensor) -> float:
    """The inner product of two gradients, from their projections."""
    return float((one * other).sum()) / ROWS


def hashed(name: str, parts: Iterator[tuple[Tensor, Tensor]]) -> int:
    """A hash of the values of a parameter's parts; those of all parts add up, modulo 2**64, to that of the whole."""
    total = 0
    for values, places in parts:
        bits = values.double().view(torch.int64)
        total += int(_mixed(bits ^ _mixed(places * _ODD + _seed(name))).sum())
    return _signed(total)


# --- parts ------------------------------------------------------------------------------------------------------------


def parts_of(value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements that this rank counts, and their places in the whole tensor, block by block; both flat.

    A replicated element is counted by one rank. Call it on all ranks: a layout of shards that is not known is gathered.
    """
    placements = getattr(value, "placements", None)
    offsets, shape, strides = [0] * value.ndim, list(value.shape), _strides(value.shape)
    local = value.detach()
    if placements is None:
        counts = _is_first()
    elif all(type(each).__name__ in ("Shard", "Replicate") for each in placements):
        mesh: Any = value.device_mesh  # type: ignore[attr-defined]
        counts = _cut(offsets, shape, mesh, placements) and 0 in mesh.mesh
        local = value.to_local().detach()  # type: ignore[attr-defined]
    else:
        local, counts = value.full_tensor().detach(), _is_first()  # type: ignore[attr-defined]
    if not counts or not local.numel():
        return
    rows = local.reshape(1, 1) if local.ndim == 0 else local.reshape(local.shape[0], -1)
    inner = torch.zeros(1, dtype=torch.int64, device=local.device)
    for axis in range(1, local.ndim):
        along = torch.arange(local.shape[axis], device=local.device) + offsets[axis]
        inner = (inner[:, None] + along * strides[axis]).flatten()
    many, first, stride = max(1, _BLOCK // rows.shape[1]), (offsets or [0])[0], (strides or [1])[0]
    for start in range(0, len(rows), many):
        block = rows[start : start + many]
        outer = (torch.arange(len(block), device=local.device) + first + start) * stride
        yield block.flatten(), (outer[:, None] + inner).flatten()


def _cut(offsets: list[int], shape: list[int], mesh: Any, placements: Any) -> bool:
    """Set the offsets and the shape of this rank's shard; whether it counts the elements that are replicated."""
    counts = True
    for size, place, each in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if type(each).__name__ == "Replicate":
            counts = counts and place == 0
            continue
        length = -(-shape[each.dim] // size)
        start = min(place * length, shape[each.dim])
        offsets[each.dim] += start
        shape[each.dim] = min(length, shape[each.dim] - start)
    return counts


def _strides(shape: torch.Size) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


# --- random numbers ---------------------------------------------------------------------------------------------------


def _signed(number: int) -> int:
    """A number modulo 2**64 as int64."""
    return (number + 2**63) % 2**64 - 2**63


#: Constants of splitmix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
_ODD = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """A random int64 for each of some different ones."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1) if by else x
