"""Capture, in the forward of a loss, the values of its terms and the nodes of its router losses.

autograd keeps neither: a torch function returned the value of a term, the model returned a router loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Values(TorchFunctionMode):
    """Inside a ``with`` block, keep every single number with a gradient that a torch function returns.

    This runs no operation. A number that is changed in place afterwards is forgotten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, tuple[Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Without gradient, a view that was changed in place has no node to ask for.
        if torch.is_grad_enabled() and isinstance(out, Tensor) and out.grad_fn is not None and out.numel() == 1:
            self._kept[out.grad_fn] = (out, out._version)
        return out

    def of(self, node: Any) -> Tensor | None:
        """What a node returned, without its graph; None: unknown, or changed since."""
        kept, version = self._kept.get(node, (None, 0))
        return None if kept is None or kept._version != version else kept.detach().reshape(())


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
