"""Ranks as threads of this process: what needs several ranks and no training, without a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class OneOf:
    """One of several ranks. A sum of tensors that differ in shape or type fails, where gloo ends the process."""

    def __init__(self, rank: int, size: int, shared: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self.sums = 0
        self._shared, self._barrier = shared, barrier

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        self._shared[self.rank] = tensor
        self._barrier.wait()
        tensors = [each for each in self._shared if each is not None]
        alike = {(each.shape, each.dtype) for each in tensors}
        self._barrier.wait()
        if len(alike) > 1:
            raise AssertionError(f"ranks sum tensors that differ: {alike}")
        return torch.stack(tensors).sum(0)


def side_by_side(work: Callable[[OneOf], T], size: int = 2) -> list[T]:
    """What ``work`` returns on each rank; an error, and a rank that waits for another in vain, is raised."""
    shared: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=20)

    def one(rank: int) -> T:
        try:
            return work(OneOf(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
