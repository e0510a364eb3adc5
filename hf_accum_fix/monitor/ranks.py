"""The one thing the monitors ask of a distributed engine: the sum of a tensor over the ranks.

A table with a row per rank is a sum too (every rank fills its own row), and so is a broadcast (the others hold
zeros). An engine needs no more than this to plug in; the README has Horovod's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks(Protocol):
    """The data-parallel ranks, or any others that hold parts of one number."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the ranks, on every rank; ``tensor`` itself stays as it is.

        Every rank calls it, with the same shape and dtype (float64, float32 or int64).
        """
        ...


@dataclass(frozen=True)
class TorchRanks:
    """All ranks of torch.distributed; one rank where it was not initialised."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return dist.get_rank() if _running() else 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return dist.get_world_size() if _running() else 1

    def sum(self, tensor: Tensor) -> Tensor:
        """One all-reduce, on a device the group's backend knows."""
        if self.size == 1:
            return tensor
        result = tensor.to(self._device(tensor), copy=True)
        dist.all_reduce(result)
        return result.to(tensor.device)

    def _device(self, tensor: Tensor) -> torch.device:
        """The tensor's device; the GPU where the backend (nccl) does not reduce on the CPU."""
        if tensor.device.type == "cpu" and "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return tensor.device


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()


def by_rank(ranks: Ranks, row: Tensor) -> Tensor:
    """The rows of all ranks, on every rank: [ranks, *row.shape], from one sum."""
    table = row.new_zeros((ranks.size, *row.shape))
    table[ranks.rank] = row
    return ranks.sum(table)


def read_together(ranks: Ranks, monitors: Sequence[Any]) -> dict[Any, Any]:
    """The reading of each of several monitors (`Gathered`), from one sum."""
    if not monitors:
        return {}
    rows = [each.row() for each in monitors]
    tables = torch.split_with_sizes(by_rank(ranks, torch.cat(rows)), [len(row) for row in rows], dim=1)
    return {each: each.reading(table) for each, table in zip(monitors, tables, strict=True)}


def fingerprint(what: object) -> int:
    """Of a description in Python's words, the same in every process, as int64 holds it."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "big", signed=True)


#: Most names that ranks compare.
_NAMES = 64


def on_every_rank(ranks: Ranks, names: Sequence[str]) -> set[str]:
    """Those of at most 64 names that every rank has: one collective of 64 numbers a rank."""
    row = torch.zeros(_NAMES, dtype=torch.int64)
    row[: len(names)] = torch.tensor([fingerprint(name) for name in names], dtype=torch.int64)
    found = [set(of_rank) for of_rank in by_rank(ranks, row).tolist()]
    return {name for name in names if all(fingerprint(name) in its for its in found)}


def alike(ranks: Ranks, what: object) -> bool:
    """Whether every rank describes what it holds in the same words: one collective."""
    return bool(on_every_rank(ranks, [repr(what)]))


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a rank holds a part of it alone (DTensor, FSDP1)."""
    return hasattr(parameter, "placements") or type(parameter).__name__ == "FlatParameter"
