"""Capture, in the forward of a loss, the values of its terms, counts below a floor, and the nodes of its router losses.

autograd keeps none of them: torch functions returned the value and took the count, the model returned a router loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_accum_fix.reading.nodes import NO_FLOOR, Factor, Floor, on_host

#: Torch functions that keep a count from zero, that make a constant or a count, and that pass a number on.
_FLOORS = ["clamp", "clamp_min", "clip", "maximum", "max", "where", "masked_fill", "add", "radd"]
_MAKES = ["tensor", "new_tensor", "scalar_tensor", "ones", "new_ones", "ones_like", "full", "new_full", "full_like"]
_SUMS = ["sum", "count_nonzero"]
_CASTS = ["to", "float", "double", "type", "type_as"]
#: What Python's max asks a number, and what makes it a number of Python.
_COMPARES = ["lt", "gt", "le", "ge"]
_READS = ["item", "int", "float", "index"]


class Values(TorchFunctionMode):
    """Inside a ``with`` block, keep every single number with a gradient that a torch function returns.

    Of one without, the count that it was made of, if a floor did. What is changed in place afterwards is forgotten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, tuple[Tensor, int]] = {}
        #: by place in memory a number, its version, the count that made it, perhaps itself, and the floor, if one did;
        #: `NO_FLOOR`: it is a sum; without both: a constant.
        self._made: dict[Any, tuple[Tensor, int, Tensor | None, Floor | None]] = {}
        #: counts that Python has read, or compared with a floor; without one: there may be one of 1.
        self._read: list[tuple[Any, Floor | None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        # Before the count is changed in place.
        made = self._made_of(name, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if name in _COMPARES:
            # Python's max takes one of the two; the elements of a batch of one sample are compared by torch.
            if made is not None and out.ndim == 0:
                self._read.append(made)
                count = max(*args, *(kwargs or {}).values(), key=self._rank)
                self._made[_place(count)] = (count, count._version, *made)
        elif name in _READS and isinstance(out, (int, float)) and (place := _place(args[0])) is not None:
            *_, count, floor = self._made.get(place, (None, None))
            self._read.append((out, None) if floor is None or floor is NO_FLOOR else (count, floor))
        # Without gradient, a view that was changed in place has no node to ask for.
        if torch.is_grad_enabled() and isinstance(out, Tensor) and out.grad_fn is not None and out.numel() == 1:
            self._kept[out.grad_fn] = (out, out._version)
        elif (place := _place(out)) is not None and name not in _COMPARES:
            self._made[place] = (out, out._version, *(made or (out, NO_FLOOR if name in _SUMS else None)))
        return out

    def _made_of(self, name: str, args: Any, kwargs: Any) -> tuple[Tensor | None, Floor | None] | None:
        """The count that a torch function takes, and its floor; neither: it makes a constant; None: anything else."""
        if name in _CASTS and args and (known := self._made.get(_place(args[0]))) is not None:
            return known[2:]
        given = (*args, *kwargs.values()) if name in (*_FLOORS, *_COMPARES) and kwargs.get("max") is None else ()
        # No ceiling.
        given = given[:2] if [*given[2:]] == [None] else given
        pair = sorted((each for each in given if getattr(each, "dtype", None) is not torch.bool), key=self._rank)
        if len(pair) != 2 or not 0 < self._rank(pair[0]) < self._rank(pair[1]) > 1:
            return (None, None) if name in _MAKES else None
        by, count = pair
        # A larger one may be part of a count; one that rounding drops keeps nothing but zero from it.
        is_sum = self._made.get(_place(count), (None,))[-1] is NO_FLOOR
        if "add" in name and not (isinstance(by, (int, float)) and (is_sum or abs(by) < 1e-2)):
            return None
        eps = torch.finfo(count.dtype if count.is_floating_point() else torch.get_default_dtype()).eps
        return count.clone(), Floor(by, 0.0) if "add" in name and abs(by) > eps else Floor(0.0, by, name in _COMPARES)

    def _rank(self, given: Any) -> int:
        """3: a count; 2: a constant, which may be one; 1: a number of Python, which is none; 0: anything else."""
        if (place := _place(given)) is None:
            return int(isinstance(given, (int, float)) and given != 0)
        return 2 if place in self._made and self._made[place][2] is None else 3

    def below(self, factors: Sequence[Factor]) -> list[Factor]:
        """A term's factors, with the counts that they were made of, and the floors, where known."""
        unknown, found = bool(self._read), list[Factor]()
        # From the leaf up.
        for factor in reversed(factors):
            value, made = factor.value, self._made.get(_place(factor.value)) if factor.divides else None
            count, floor = (None, None) if made is None or made[0]._version != made[1] else made[2:]
            if factor.divides and unknown and (made is None or made[2] is None):
                # What has read a count has waited for it.
                count, floor = self._read_as(float(value))
                unknown = floor is None
            # It may be compared with another number than its floor.
            elif floor is not None and floor.read and on_host(value) and floor.over(count) != float(value):
                floor = None
            found.append(factor if floor is None else factor._replace(floor=floor, below=count))
        return found[::-1]

    def _read_as(self, value: float) -> tuple[Tensor | None, Floor | None]:
        """The count that Python may have kept from zero to get a value, and the floor; None: unknown."""
        read = [(float(count), floor) for count, floor in self._read]
        fits = {count: floor for count, floor in read if floor is not None and floor.over(count) == value}
        bare = [count for count, floor in read if floor is None and count.is_integer()]
        if not fits and bare and max(sum(bare), 1.0) == value:
            fits = {sum(bare): Floor(0.0, 1.0, read=True)}
        if len(fits) != 1:
            return None, None
        [(count, floor)] = fits.items()
        return torch.tensor(count, dtype=torch.float64), floor

    def of(self, node: Any) -> Tensor | None:
        """What a node returned, without its graph; None: unknown, or changed since."""
        kept, version = self._kept.get(node, (None, 0))
        return None if kept is None or kept._version != version else kept.detach().reshape(())


def _place(value: Any) -> tuple[int, int] | None:
    """Where a number without gradient is in memory: autograd may save another tensor. None: nowhere, as in vmap."""
    if isinstance(value, Tensor) and value.numel() == 1 and not (value.requires_grad or value.is_inference()):
        with suppress(RuntimeError):
            return value.untyped_storage()._cdata, int(value.storage_offset())
    return None


@dataclass
class Captured:
    """What was captured of one forward."""

    values: Values | None = None  # None: not captured
    #: the nodes of router losses, with their names ("aux_loss", "z_loss").
    routers: dict[Any, str] = field(default_factory=dict)


@contextmanager
def capture(head: nn.Module | None, *, values: bool = True, routers: bool = True) -> Iterator[Captured]:
    """Around the forward of a loss: capture the ``values`` of its terms and the nodes of its ``routers``.

    ``head``: the model whose outputs have a router loss; None: there is none.
    """
    captured = Captured(Values() if values else None)

    def note(module: nn.Module, given: Any, outputs: Any) -> None:
        for key, value in outputs.items() if isinstance(outputs, Mapping) else ():
            for name in ("aux_loss", "z_loss"):
                if isinstance(value, Tensor) and value.grad_fn is not None and f"_{key}".endswith(f"_{name}"):
                    captured.routers[value.grad_fn] = name

    # Before the hooks of ZeRO-3, which give all outputs another node.
    handle = head.register_forward_hook(note, prepend=True) if head is not None and routers else None
    try:
        with captured.values or nullcontext():
            yield captured
    finally:
        if handle is not None:
            handle.remove()
