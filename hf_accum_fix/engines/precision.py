"""Add the gradients of a window in more than the 16 bits of its parameters.

A micro-batch's gradient is moved from ``.grad`` to a separate sum as it arrives. In the last micro-batch autograd gets
the sum, rounded once, instead of the last gradient, so that everything that reads ``.grad`` later (the reduction over
ranks, clipping, the optimizer) sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hf_accum_fix.errors import UnsupportedSetupError

#: Dtypes whose ``.grad`` rounds with every micro-batch.
NARROW: Final = (torch.bfloat16, torch.float16)
#: Elements of each parameter that an estimate uses.
_LOOKED_AT: Final = 1024


class Arrival(Enum):
    """How gradients arrive at a tensor."""

    #: By autograd; between two of them ``.grad`` is free.
    AUTOGRAD = "autograd"
    #: By autograd; a parameter whose ``.grad`` is gone counts as unused (DDP that looks for unused parameters).
    HELD = "held"
    #: By autograd; ``.grad`` belongs to the engine until the backward has ended (FSDP1).
    FLAT = "flat"
    #: The engine adds the reduced gradient to ``.grad`` at the end of every backward (FSDP2 without ``no_sync``).
    REDUCED = "reduced"


_ADDED_BY_AUTOGRAD: Final = (Arrival.AUTOGRAD, Arrival.HELD)

_UNUSED_UNIT: Final = (
    "got an FSDP unit that the last micro-batch of a window does not use, so its gradient was not reduced; expected "
    "every unit to be used; use FSDP2, or accumulate_in='parameter'"
)
_ENDED_EARLY: Final = (
    "got a window that ended before its last micro-batch under FSDP1; expected all of its micro-batches, since shards "
    "take no whole gradient; use FSDP2, or accumulate_in='parameter'"
)


@dataclass(frozen=True)
class Leaf:
    """A tensor that gradients arrive at; of a sharded model the one in which its engine adds them.

    ``views``: parameters whose ``.grad`` is a part of the tensor's.
    """

    tensor: Any
    arrival: Arrival = Arrival.AUTOGRAD
    views: tuple[Tensor, ...] = ()


class _InFloat32:
    """A sum in float32, 4 bytes an element."""

    def __init__(self, first: Tensor) -> None:
        self._sum, self._dtype = first.float(), first.dtype

    def add(self, gradient: Tensor) -> None:
        self._sum.add_(gradient)

    def rounded(self) -> Tensor:
        return self._sum.to(self._dtype)


class _InBoth:
    """Sums in 16 bits and in 32 of up to 1,024 elements, to estimate the error of a sum in 16 bits."""

    def __init__(self, first: Tensor) -> None:
        some = self._some(first)
        self.narrow, self.wide = some.clone(), some.float()

    def add(self, gradient: Tensor) -> None:
        some = self._some(gradient)
        self.narrow.add_(some)
        self.wide.add_(some)

    def _some(self, gradient: Tensor) -> Tensor:
        # This rank's part of a DTensor.
        flat = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).reshape(-1)
        # An odd stride, which does not follow the columns of a matrix.
        return flat[:: max(flat.numel() // _LOOKED_AT, 1) | 1]


class WindowGradient:
    """The gradient of one accumulation window on this rank, added micro-batch by micro-batch.

    Hooks and sums exist between the first micro-batch of a window and its last; a window of one micro-batch has none.

    Args:
        accumulate_in: "parameter" leaves the gradients to autograd, and estimates the rounding error once; "float32"
            adds them up.

    Attributes:
        lost: estimated relative error from adding the first window in 16 bits; None: unknown.
        matters: it is more than one unit in the last place.

    Raises:
        UnsupportedSetupError: if an optimizer steps inside the backward, a gradient is sparse, or a gradient is left
            that autograd can no longer get.
    """

    def __init__(self, accumulate_in: str) -> None:
        self.lost: float | None = None
        self.matters = False
        self.idle = False  # the estimate is done, and autograd adds
        self._sum_type: Any = _InFloat32 if accumulate_in == "float32" else _InBoth
        #: Those whose ``.grad`` is moved to a sum.
        self._leaves: dict[Tensor, Leaf] = {}
        self._sums: dict[Tensor, Any] = {}
        self._hooks: list[Any] = []
        self._begun = 0
        self._last = False

    @contextmanager
    def micro_batch(self, leaves: Callable[[], Iterable[Leaf]], *, first: bool, last: bool) -> Iterator[None]:
        """Around one forward and backward; ``leaves`` are where the 16-bit gradients of the model arrive.

        The first of a window drops what an earlier window left; after the last, ``.grad`` is the window's gradient.
        """
        if first:
            self.drop()
        if (first and last) or self.idle:
            yield
            return
        self._begun += 1
        self._last = last
        estimates = self._sum_type is _InBoth
        if estimates and self._begun == 1:
            tensors = [each.tensor for each in leaves() if each.arrival is not Arrival.REDUCED]
            self._hooks += [each.register_hook(partial(self._add, each)) for each in tensors]
        # Some engines create parameters in the first forward.
        elif not estimates and self._begun <= 2:
            self._watch(leaves())
        for leaf, known in self._leaves.items() if last else ():
            # A parameter that the last micro-batch does not use gets no gradient.
            if leaf in self._sums and known.arrival in _ADDED_BY_AUTOGRAD:
                leaf.grad = self._sums[leaf].rounded()
        try:
            yield
            if not last:
                for leaf in self._leaves:
                    self._move(leaf)
                return
            if estimates:
                # Without sums nothing has 16 bits: no later window looks for it again.
                self.idle = True
            if estimates and self._sums:
                self.lost, self.matters = _rounding_error(self._sums)
            self.finish()
        except BaseException:
            # If the caller catches this error, ``.grad`` has to hold what was added.
            with suppress(UnsupportedSetupError):
                self.finish()
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """End a window, also early: put what was added into ``.grad``, as torch would have it.

        Raises:
            UnsupportedSetupError: under FSDP1, if sums are left for parameters that are shards by now.
        """
        error = ""
        for leaf, summed in [*self._sums.items()] if self._leaves else ():
            arrival = self._leaves[leaf].arrival
            if arrival is Arrival.FLAT and (self._last or leaf.shape != summed.rounded().shape):
                error = _UNUSED_UNIT if self._last else _ENDED_EARLY
            # In the last micro-batch it has its gradient.
            elif not (self._last and arrival in _ADDED_BY_AUTOGRAD):
                self._move(leaf)
                leaf.grad = summed.rounded()
        self.drop()
        if error:
            raise UnsupportedSetupError(error)

    def drop(self) -> None:
        """Drop the window's sums and hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sums.clear()
        self._leaves.clear()
        self._begun, self._last = 0, False

    def _watch(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            tensor, arrival = leaf.tensor, leaf.arrival
            if tensor in self._leaves:
                continue
            self._leaves[tensor] = leaf
            _refuse_steps_within_backward(tensor)
            if arrival is not Arrival.FLAT:
                self._move(tensor)
            if arrival is not Arrival.REDUCED:
                self._hooks.append(tensor.register_hook(partial(self._arriving, tensor)))
            if arrival is Arrival.AUTOGRAD:
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._arrived))

    @torch.no_grad()
    def _arriving(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        """In the last micro-batch, replace the gradient by the window's sum."""
        if not self._last or leaf not in self._sums:
            return None
        leaf.grad = None
        self._add(leaf, gradient)
        # Without another reference autograd takes it without a copy.
        rounded: Tensor = self._sums.pop(leaf).rounded()
        return rounded

    def _arrived(self, leaf: Tensor) -> None:
        """Free ``.grad`` at once, before those of the other parameters arrive."""
        if not self._last:
            self._move(leaf)

    def _move(self, leaf: Tensor) -> None:
        """Move a tensor's ``.grad``, if it has one, to its sum."""
        if (gradient := leaf.grad) is not None:
            for each in (leaf, *self._leaves[leaf].views):
                each.grad = None
            self._add(leaf, gradient)

    @torch.no_grad()
    def _add(self, leaf: Tensor, gradient: Tensor) -> None:
        if leaf in self._sums:
            self._sums[leaf].add(_dense(gradient))
        else:
            self._sums[leaf] = self._sum_type(_dense(gradient))


def _rounding_error(sums: Mapping[Tensor, _InBoth]) -> tuple[float | None, bool]:
    """The relative error of a sum in 16 bits, and whether it is more than one unit in the last place; waits.

    None: the gradient is zero or not finite.
    """
    error, norm = 0.0, 0.0
    for leaf, each in sums.items():
        weight = leaf.numel() / max(each.wide.numel(), 1)
        error += weight * (each.narrow - each.wide).square().sum().item()
        norm += weight * each.wide.square().sum().item()
    if not (norm > 0 and math.isfinite(error)):
        return None, False
    lost = math.sqrt(error / norm)
    return lost, lost > max(torch.finfo(each.narrow.dtype).eps for each in sums.values())


def rounding_words(lost: float, micro_batches: int) -> str:
    """The warning for a window whose gradients were added in 16 bits."""
    return (
        f"the gradients of {micro_batches} micro-batches are added in 16 bits; the gradient is off by about {lost:.1%} "
        "(first window; more with more micro-batches); use accumulate_in='float32' (4 bytes more per parameter)"
    )


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise UnsupportedSetupError(
            f"got a gradient of layout {gradient.layout}; expected dense ones; use Embedding(sparse=False), or "
            "accumulate_in='parameter'"
        )
    return gradient


def _refuse_steps_within_backward(tensor: Any) -> None:
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    # The Trainer's own hook only averages over ranks, in the last micro-batch, what FSDP2 does not.
    steps = [] if getattr(tensor, "_replicated_grad_hook_registered", False) else [*(hooks or {}).values()]
    # torch.distributed.optim keeps its own list.
    steps += [type(each) for each in getattr(tensor, "_in_backward_optimizers", ())]
    if steps:
        named = ", ".join(sorted({getattr(each, "__qualname__", repr(each)) for each in steps}))
        raise UnsupportedSetupError(
            f"got a parameter with a hook that runs inside the backward ({named}), as of optimizers that step there "
            "(layerwise GaLore, LOMO); expected none; use another optimizer, or accumulate_in='parameter'"
        )
