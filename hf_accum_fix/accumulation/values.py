"""What is listened to in the forward of a loss: the values of its terms, and the nodes of its router's losses.

autograd keeps neither: a term's value is what a function of torch returned, a router's loss what the model put out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_accum_fix.accumulation.contract import How, LossContract


class Values(TorchFunctionMode):
    """Inside a ``with`` block, keep every single number with a gradient that a function of torch returns.

    No operation is run for it. A number that is changed in place afterwards is not known any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, tuple[Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.grad_fn is not None and out.numel() == 1:
            self._kept[out.grad_fn] = (out, out._version)
        return out

    def of(self, node: Any) -> Tensor | None:
        """What a node returned, without its graph; None: it was not seen, or has changed since."""
        kept, version = self._kept.get(node, (None, 0))
        return None if kept is None or kept._version != version else kept.detach().reshape(())


@dataclass
class Captured:
    """What was heard of one forward.

    Attributes:
        values: None: they were not listened to.
        routers: the nodes of router losses, with their kinds ("aux_loss", "z_loss").
        returned: the nodes of losses that the model itself returned.
    """

    values: Values | None = None
    routers: dict[Any, str] = field(default_factory=dict)
    returned: set[Any] = field(default_factory=set)


@contextmanager
def capture(contract: LossContract | None, head: nn.Module | None) -> Iterator[Captured]:
    """Around the forward of a loss; without a contract it is observed, and everything is listened to.

    ``head`` is the model whose outputs carry a router's loss; None: there is none.
    """
    several = contract is None or contract.groups > 1 or contract.added
    captured = Captured(Values() if several else None)

    def note(module: nn.Module, given: Any, outputs: Any) -> None:
        named = outputs if isinstance(outputs, Mapping) else {"loss": outputs[0]} if isinstance(outputs, tuple) else {}
        for key, value in named.items():
            if not isinstance(value, Tensor) or value.grad_fn is None:
                continue
            if key == "loss" and value.numel() == 1:
                captured.returned.add(value.grad_fn)
            for kind in ("aux_loss", "z_loss"):
                if f"_{key}".endswith(f"_{kind}"):
                    captured.routers[value.grad_fn] = kind

    carried = contract is None or any(each.how is How.ROUTER for each in contract.terms)
    handle = head.register_forward_hook(note) if head is not None and carried else None
    try:
        with captured.values or nullcontext():
            yield captured
    finally:
        if handle is not None:
            handle.remove()
