"""Add the gradients of a window in more than the 16 bits of its parameters.

A micro-batch's gradient is taken off ``.grad`` as it arrives and added to a sum of its own; in the last micro-batch the
sum, rounded once, is what autograd is handed in the place of the last gradient, so that whatever looks at ``.grad``
from then on (the reduction over ranks, clipping, the optimizer) sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
#: Elements of each parameter that an estimate looks at.
_LOOKED_AT: Final = 1024


class Arrival(Enum):
    """How gradients come to a tensor."""

    #: By autograd; ``.grad`` is ours between two of them.
    AUTOGRAD = "autograd"
    #: By autograd; a parameter whose ``.grad`` is gone counts as unused (DDP that looks for unused parameters).
    HELD = "held"
    #: By autograd; ``.grad`` belongs to the engine until the backward has ended (FSDP1).
    FLAT = "flat"
    #: The engine adds the reduced gradient to ``.grad`` at the end of every backward (FSDP2 without ``no_sync``).
    REDUCED = "reduced"


@dataclass(frozen=True)
class Leaf:
    """A tensor that gradients arrive at; of a sharded model the one that its engine adds them up in.

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


class _Compensated:
    """A sum in the parameter's dtype beside what rounding has cut off it, twice 2 bytes an element.

    Source: W. Kahan, Further remarks on reducing truncation errors, CACM 8 (1965) 40.
    """

    def __init__(self, first: Tensor) -> None:
        self._sum, self._rest = first, torch.zeros_like(first)

    def add(self, gradient: Tensor) -> None:
        more = self._rest.add_(gradient)
        summed = self._sum + more
        # What of ``more`` did not arrive.
        more.add_(self._sum.sub_(summed))
        self._sum = summed

    def rounded(self) -> Tensor:
        return self._sum


_SUMS: Final[dict[str, Callable[[Tensor], _InFloat32 | _Compensated]]] = {
    "float32": _InFloat32,
    "compensated": _Compensated,
}


class WindowGradient:
    """The gradient of one accumulation window on this rank, added micro-batch by micro-batch.

    Hooks and sums exist between the first micro-batch of a window and its last; a window of one micro-batch has none.

    Args:
        accumulate_in: "parameter" leaves the gradients to autograd, and estimates once what that loses; "float32" or
            "compensated".

    Attributes:
        lost: relative error that adding the first window in 16 bits has cost, as estimated; None: not known (yet).
        matters: that is more than one unit in the last place.

    Raises:
        UnsupportedSetupError: as a window begins, if an optimizer steps within the backward; as a sparse gradient
            arrives; if a gradient that cannot be handed over any more is left.
    """

    def __init__(self, accumulate_in: str) -> None:
        self.lost: float | None = None
        self.matters = False
        self._kind = _SUMS.get(accumulate_in)
        self._estimate = None if self._kind else _Rounding()
        self._leaves: dict[Tensor, Leaf] = {}
        self._sums: dict[Tensor, _InFloat32 | _Compensated] = {}
        self._hooks: list[Any] = []
        self._begun = 0
        self._last = False

    @contextmanager
    def micro_batch(self, leaves: Callable[[], Iterable[Leaf]], *, first: bool, last: bool) -> Iterator[None]:
        """Around one forward and backward; ``leaves`` are where the 16-bit gradients of the model arrive.

        On entering the first of a window what an earlier one left is dropped; on leaving the last ``.grad`` is the
        window's gradient, and nothing else is kept.
        """
        if first:
            self.drop()
        if (first and last) or (self._kind is None and self._estimate is None):
            yield
            return
        self._begun += 1
        self._last = last
        # Some engines make theirs in the first forward.
        if self._begun <= 2:
            self._watch(leaves())
        if last:
            self._offer()
        try:
            yield
            self._collect()
        except BaseException:
            # Whoever forgives this error goes on with what was added; it is theirs, whatever becomes of that.
            with suppress(UnsupportedSetupError):
                self.finish()
            raise
        if last:
            if self._estimate is not None and self._estimate.sums:
                self.lost, self.matters = self._estimate.read()
                self._estimate = None
            self.drop()

    @torch.no_grad()
    def finish(self) -> None:
        """End a window before its last micro-batch, or in it: ``.grad`` has what was added, as torch would have it.

        Raises:
            UnsupportedSetupError: under FSDP1, whose parameters are shards again, so that they take no whole gradient.
        """
        shards = False
        for leaf, summed in self._sums.items():
            arrival = self._leaves[leaf].arrival
            if not self._last or arrival is Arrival.REDUCED:
                if arrival is Arrival.FLAT and leaf.shape != summed.rounded().shape:
                    shards = True
                    continue
                if leaf.grad is not None:
                    summed.add(_dense(leaf.grad))
                leaf.grad = summed.rounded()
        self.drop()
        if shards:
            raise UnsupportedSetupError(
                "got a window that ended before its last micro-batch under FSDP1, whose shards take no whole gradient; "
                "expected all of its micro-batches; take FSDP2, or accumulate_in='parameter'"
            )

    def drop(self) -> None:
        """Keep nothing of the window."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sums.clear()
        self._leaves.clear()
        self._begun, self._last = 0, False
        if self._estimate is not None:
            self._estimate = _Rounding()

    @torch.no_grad()
    def _watch(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            tensor, arrival = leaf.tensor, leaf.arrival
            if tensor in self._leaves:
                continue
            self._leaves[tensor] = leaf
            if self._estimate is not None:
                if arrival is not Arrival.REDUCED and self._begun == 1:
                    self._hooks.append(tensor.register_hook(partial(self._estimate.add, tensor)))
                continue
            _refuse_steps_within_backward(tensor)
            if tensor.grad is not None and arrival is not Arrival.FLAT:
                # It may be a view of a bucket.
                self._add(tensor, tensor.grad.clone())
            if arrival is not Arrival.REDUCED:
                self._hooks.append(tensor.register_hook(partial(self._arriving, tensor)))
            if arrival is Arrival.AUTOGRAD:
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._arrived))

    @torch.no_grad()
    def _arriving(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        """In the last micro-batch autograd is handed the sum, as if it had just been computed."""
        if not self._last or leaf not in self._sums:
            return None
        # Not held any longer, so that autograd takes it as it is, without a copy.
        summed = self._sums.pop(leaf)
        summed.add(_dense(gradient))
        leaf.grad = None
        return summed.rounded()

    @torch.no_grad()
    def _arrived(self, leaf: Tensor) -> None:
        if not self._last and leaf.grad is not None:
            self._add(leaf, leaf.grad)

    def _add(self, leaf: Tensor, gradient: Tensor) -> None:
        for each in (leaf, *self._leaves[leaf].views):
            each.grad = None
        if leaf in self._sums:
            self._sums[leaf].add(_dense(gradient))
        else:
            assert self._kind is not None
            self._sums[leaf] = self._kind(_dense(gradient))

    def _offer(self) -> None:
        """Have ``.grad`` hold the sum so far: a parameter that the last micro-batch does not use gets no gradient."""
        for leaf, summed in self._sums.items():
            if self._leaves[leaf].arrival in (Arrival.AUTOGRAD, Arrival.HELD):
                leaf.grad = summed.rounded()

    @torch.no_grad()
    def _collect(self) -> None:
        """Take what has come past the hooks."""
        if self._kind is None:
            return
        for leaf, known in self._leaves.items():
            arrival, reduced = known.arrival, known.arrival is Arrival.REDUCED
            if leaf.grad is not None and (reduced or not self._last):
                # DDP may have put a view of a bucket there.
                self._add(leaf, leaf.grad.clone() if arrival is Arrival.HELD else leaf.grad)
            if self._last and reduced and leaf in self._sums:
                leaf.grad = self._sums[leaf].rounded()
            if self._last and arrival is Arrival.FLAT and leaf in self._sums:
                raise UnsupportedSetupError(
                    "got a unit of FSDP that the last micro-batch of a window does not use, so that its gradient was "
                    "not reduced; expected every unit to be used: take FSDP2, or accumulate_in='parameter'"
                )


class _Rounding:
    """What adding a window's gradients in 16 bits loses, estimated on up to 1,024 elements of every parameter.

    Both sums are made anew of the same arriving gradients, so that nothing of the training is touched.
    """

    def __init__(self) -> None:
        self.sums: dict[Tensor, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        dense = _dense(gradient)
        # This rank's part of a distributed tensor.
        flat = (dense.to_local() if hasattr(dense, "to_local") else dense).reshape(-1)
        # Odd, so that it does not follow the columns of a matrix.
        some = flat[:: max(flat.numel() // _LOOKED_AT, 1) | 1]
        if leaf in self.sums:
            narrow, wide = self.sums[leaf]
            narrow.add_(some)
            wide.add_(some)
        else:
            self.sums[leaf] = (some.clone(), some.float())

    def read(self) -> tuple[float | None, bool]:
        """The relative error of the 16-bit sum, and whether it is more than one unit in the last place; waits.

        None: the gradient is zero or not finite.
        """
        error, norm = 0.0, 0.0
        for leaf, (narrow, wide) in self.sums.items():
            weight = leaf.numel() / max(wide.numel(), 1)
            error += weight * (narrow - wide).square().sum().item()
            norm += weight * wide.square().sum().item()
        if not (norm > 0 and math.isfinite(error)):
            return None, False
        lost = math.sqrt(error / norm)
        return lost, lost > max(torch.finfo(narrow.dtype).eps for narrow, _ in self.sums.values())


def rounding_words(lost: float, micro_batches: int) -> str:
    """What to say of a window whose gradients were added in 16 bits."""
    return (
        f"the gradients of {micro_batches} micro-batches are added in 16 bits, which puts the gradient off by about "
        f"{lost:.1%} (measured in the first window; more with more micro-batches): take accumulate_in='float32' "
        "(4 bytes more a parameter) or 'compensated' (2)"
    )


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise UnsupportedSetupError(
            f"got a gradient of layout {gradient.layout}; expected dense ones: take Embedding(sparse=False), or "
            "accumulate_in='parameter'"
        )
    return gradient


def _refuse_steps_within_backward(tensor: Any) -> None:
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    # The Trainer's own averages over ranks the gradients that FSDP2 does not; it goes by the last micro-batch.
    steps = [] if getattr(tensor, "_replicated_grad_hook_registered", False) else [*(hooks or {}).values()]
    # Those of torch.distributed.optim.
    steps += [type(each) for each in getattr(tensor, "_in_backward_optimizers", ())]
    if steps:
        named = ", ".join(sorted({getattr(each, "__qualname__", repr(each)) for each in steps}))
        raise UnsupportedSetupError(
            f"got a parameter with a hook that runs within the backward ({named}), as optimizers have that step there "
            "(layerwise GaLore, LOMO); expected none: take another optimizer, or accumulate_in='parameter'"
        )
