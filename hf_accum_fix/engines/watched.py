"""A few parameters of a model: where autograd delivers their gradients, and where the optimizer reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_accum_fix.counting.items import count_dtype
from hf_accum_fix.engines.engine import bare_name, is_deepspeed, parameters_of_fsdp2
from hf_accum_fix.trace.preserve import KeepsStorages, PythonState

logger = logging.getLogger("hf_accum_fix")

PARAMETERS: Final = 8
#: Torch's attribute of the hooks that see a gradient once it is added.
AFTER: Final = "_post_accumulate_grad_hooks"
#: Modules whose hooks are not the user's.
_ENGINES: Final = ("hf_accum_fix.", "torch.distributed.", "accelerate.", "deepspeed.")
#: One megabyte in float64.
ELEMENTS: Final = 2**17


@dataclass(eq=False)
class Watched:
    """One parameter, or a sample of FSDP1's flat one.

    Attributes:
        name: of the parameter.
        leaf: the tensor that autograd delivers its gradient to.
        used: what the optimizer is about to use, flat; None: it has no gradient. A collective under sharding.
        pick: the elements of a delivered gradient that are compared, flat.
        own: the part of these elements that is used on this rank; None: all.
        numel: of these elements.
        total: their sum over micro-batches; None: nothing was delivered.
        size: the norms of all that was added, summed; 0-dim.
        dtype: of what was delivered.
        failed: something on the way failed, on this rank.
        shown: that the optimizer has no gradient shows as None; else None is also what cannot be read (DeepSpeed).
    """

    name: str
    leaf: Tensor
    used: Callable[[], Tensor | None]
    numel: int
    pick: Callable[[Tensor], Tensor]
    own: slice | None = None
    total: Tensor | None = None
    size: Tensor | None = None
    dtype: torch.dtype | None = None
    failed: bool = False
    shown: bool = True

    def deliver(self, gradient: Tensor) -> None:
        """A hook on the leaf; an error in it would end the backward."""
        try:
            self._add(gradient)
        except Exception:
            logger.debug("adding the gradient of %s failed", self.name, exc_info=True)
            self.failed = True

    def read(self) -> Tensor | None:
        """What the optimizer is about to use; None: nothing, or it cannot be read."""
        try:
            gradient = self.used()
            hidden = gradient is None and not self.shown and self.total is not None and bool(self.total.any())
            self.failed = self.failed or hidden
            return gradient
        except Exception:
            logger.debug("reading the gradient of %s failed", self.name, exc_info=True)
            self.failed = True
            return None

    @torch.no_grad()
    def _add(self, gradient: Tensor) -> None:
        wide = count_dtype(gradient.device)
        added = self.pick(plain(gradient.detach())).to(wide, copy=True)
        self.dtype = gradient.dtype
        self.total = added if self.total is None else self.total.add_(added)
        size = torch.linalg.vector_norm(added)
        self.size = size if self.size is None else self.size + size


def choose(accelerator: Any, model: nn.Module) -> list[Watched]:
    """At most `PARAMETERS` trainable parameters spread over the depth, the same ones on every rank."""
    if flat := list(_flat_parameters(model)):
        return flat[:: -(-len(flat) // PARAMETERS)]
    # After a forward without backward the root's own are whole.
    fsdp2 = [each for module in model.modules() for each in parameters_of_fsdp2(module)]
    whole = {id(one): each for each in fsdp2 for one in (each.sharded_param, getattr(each, "_unsharded_param", None))}
    found = list[Watched]()
    for name, parameter in model.named_parameters():
        # DeepSpeed's experts are of some ranks alone.
        if not parameter.requires_grad or not getattr(parameter, "allreduce", True):
            continue
        leaf: Any = parameter
        used: Callable[[], Tensor | None] = partial(_gradient, parameter)
        if (sharded := whole.get(id(parameter))) is not None:
            if (leaf := getattr(sharded, "_unsharded_param", None)) is None:
                continue
            used = partial(_whole_gradient, sharded.sharded_param, leaf.device)
        elif is_deepspeed(accelerator):
            used = partial(import_module("deepspeed").utils.safe_get_full_grad, parameter)
        # ZeRO-3 keeps the number of elements apart.
        numel = getattr(parameter, "ds_numel", None) or plain(leaf).numel()
        found.append(Watched(bare_name(name), leaf, used, numel, _flat, shown=not is_deepspeed(accelerator)))
    return spread(found)


def spread(found: Sequence[Watched]) -> list[Watched]:
    """Small ones from the first to the last, both of LoRA's; the smallest one if none is small."""
    small = [each for each in found if 0 < each.numel <= ELEMENTS // PARAMETERS]
    if not small:
        return [each for each in sorted(found, key=lambda each: each.numel)[:1] if each.numel <= ELEMENTS]
    count = min(PARAMETERS, len(small))
    return [small[place * (len(small) - 1) // max(count - 1, 1)] for place in range(count)]


def _flat_parameters(model: nn.Module) -> Iterator[Watched]:
    """Of FSDP1: the first elements of every rank's shard of a unit."""
    module: Any
    for where, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param") or not handle.flat_param.requires_grad:
            continue
        flat = handle.flat_param
        name = bare_name(f"{where}.{flat._fqns[0]}")
        if not handle.uses_sharded_strategy:
            few = min(flat.numel(), ELEMENTS // PARAMETERS)
            yield Watched(name, flat, partial(_sample, handle, few), few, partial(_first, few))
            continue
        pieces = handle.world_size
        few = min(flat._local_shard.numel(), max(ELEMENTS // PARAMETERS // pieces, 1))
        own = slice(handle.rank * few, (handle.rank + 1) * few)
        pick, used = partial(_pieces, few, pieces), partial(_sample, handle, few)
        yield Watched(name, flat, used, few * pieces, pick, own)


def _pieces(few: int, pieces: int, gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    # FSDP1 pads the last shard.
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % pieces))
    return padded.view(pieces, -1)[:, :few].reshape(-1)


def _first(few: int, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[:few]


def _flat(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)


def _sample(handle: Any, few: int) -> Tensor | None:
    gradient = handle.sharded_grad
    return None if gradient is None else _first(few, gradient)


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else plain(parameter.grad)


def _whole_gradient(parameter: Tensor, device: torch.device) -> Tensor | None:
    gradient: Any = parameter.grad
    # Offloaded shards are gathered where the ranks can.
    return None if gradient is None else gradient.to(device).full_tensor()


def plain(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, and every element of a sparse gradient."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.to_dense() if local.layout is not torch.strided else local


def own_hooks(parameter: Tensor, kind: str = "_backward_hooks") -> list[Any]:
    """The hooks on its gradient but for those of this package and of engines; ``kind``: torch's attribute of them."""
    hooks: Any = getattr(parameter, kind, None) or {}
    return [each for each in hooks.values() if not _module_of(each).startswith(_ENGINES)]


def _module_of(hook: Any) -> str:
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


@torch.no_grad()
def add_up(hooks: Sequence[Any], parameter: Tensor) -> bool:
    """Whether hooks make the same of a sum as of its parts, by two made-up gradients; what they note is put back."""
    like = parameter.detach()
    large = torch.arange(1, like.numel() + 1, device=like.device).sin().reshape(like.shape).to(like.dtype) * 1e4
    small = large.cos()
    held = [each.cell_contents for hook in hooks for each in getattr(hook, "__closure__", None) or ()]
    try:
        with PythonState(*hooks, *held) as state, KeepsStorages(state):
            whole, *parts = (_through(hooks, each) for each in (large + small, large, small))
    except Exception:
        logger.debug("a gradient hook failed on a made-up gradient", exc_info=True)
        return False
    error = torch.linalg.vector_norm(whole - sum(parts))
    return bool(error <= 8 * torch.finfo(like.dtype).eps * torch.linalg.vector_norm(whole))


def _through(hooks: Sequence[Any], gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    for each in hooks:
        changed = each(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def watch(watched: Sequence[Watched]) -> list[Any]:
    """Hooks that see a gradient before the hooks that are there, if these may make another sum; to be removed."""
    handles = []
    for each in watched:
        try:
            own = own_hooks(each.leaf)
            own = own if own and add_up(own, each.leaf) else []
            handles.append(each.leaf.register_hook(each.deliver))  # type: ignore[no-untyped-call]
            hooks: Any = each.leaf._backward_hooks
            # Torch reads the order of insertion, which `OrderedDict.move_to_end` leaves as it is.
            *before, ours = hooks.items()
            after = [one for one in before if not any(one[1] is hook for hook in own)]
            hooks.clear()
            hooks.update([*(one for one in before if one not in after), ours, *after])
        except Exception:
            logger.debug("watching %s failed", each.name, exc_info=True)
            each.failed = True
    return handles
