"""A model that runs out of memory above a number of rows, in its forward or late in its backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.counting.items import sample_count
from tests.numerics.heads import Head

#: As torch raises it; its name is newer.
OutOfMemoryError = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class Memory:
    """Makes a model run out of memory.

    Args:
        forward, backward: most rows that fit.
        only: whether it is short for these inputs; others fit at any size.

    Attributes:
        failures: how often it ran out.
        trained: the rows of each backward that was done.
        left: forwards whose tensors were still alive as the next one began.
    """

    def __init__(
        self, forward: float = float("inf"), backward: float = float("inf"),
        only: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        self.forward, self.backward, self.only = forward, backward, only
        self.failures, self.left, self.trained = 0, 0, list[int]()
        self._inputs: dict[str, Any] = {}
        self._begins = False
        self._output: Any = None

    def of(self, model: nn.Module) -> nn.Module:
        """The model, which has no more than this."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        for each in model.modules():
            if not [*each.children()]:
                each.register_forward_hook(self._after)
        return model

    def head(self, head: Head) -> Head:
        """The head with it."""
        return replace(head, build=lambda: self.of(head.build()))

    def _before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._inputs, self._begins = kwargs, True
        if self._output is not None:
            gc.collect()
            self.left += self._output() is not None
            self._output = None
        self._check(kwargs, self.forward)

    def _after(self, _: nn.Module, args: Any, output: Any) -> None:
        # Gradients reach the first layer last, when most of a backward is done.
        if self._begins and isinstance(output, Tensor) and output.requires_grad:
            self._begins, now, self._latest = False, self._inputs, weakref.ref(output)
            output.register_hook(lambda _: self._ended(now))

    def _ended(self, inputs: dict[str, Any]) -> None:
        self._check(inputs, self.backward)
        self.trained.append(sample_count(inputs))

    def _check(self, inputs: dict[str, Any], limit: float) -> None:
        rows = sample_count(inputs)
        if rows > limit and self.only(inputs):
            self.failures += 1
            self._output = getattr(self, "_latest", None)
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} rows")
