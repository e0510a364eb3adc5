"""Run code without side effects: restore the tensors, Python values and random generators that it changes.

- *Tensors*: a dispatch mode sees every in-place operation before it runs, and copies the storage it is about to write
  to, unless that was allocated inside. What is not written to is never copied.
- *Python values*, random generators among them: `python_state`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_accum_fix.accumulation.noise import random_states_kept
from hf_accum_fix.accumulation.python_state import PythonState

_ABSENT = object()


class Preserved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a ``with`` block state may change; `restore`, and the end of the block, restore it.

    Args:
        python: the Python values to restore.
        sharded: a model whose parameters an engine moves in every forward, and whose modules it changes: of the tensors
            only its buffers are restored, of the modules their modes.
    """

    supports_higher_order_operators = True

    def __init__(self, python: PythonState, sharded: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._python, self._copies = python, sharded is None
        self._made_inside: set[int] = set()
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._restore_buffers = buffers_copied(*[] if sharded is None else sharded.modules())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what ``func`` is about to write to, once per storage; remember what it allocates."""
        kwargs = kwargs or {}
        writes, makes = _effects(func)
        for place, name in writes if self._copies else ():
            for address, storage in _storages(args[place] if place < len(args) else kwargs.get(name)):
                if address not in self._made_inside and address not in self._written:
                    self._written[address] = (storage, storage.clone())  # type: ignore[no-untyped-call]
        out = func(*args, **kwargs)
        for each, made in zip(out if isinstance(out, (tuple, list)) else (out,), makes, strict=False):
            if made:
                self._made_inside.update(address for address, _ in _storages(each))
        return out

    def wrote(self) -> bool:
        """Whether a tensor has changed, or a Python value that a loss may depend on."""
        # A copy, since this mode also sees the comparison.
        changed = any(not torch.equal(_bytes(storage), _bytes(before)) for storage, before in [*self._written.values()])
        return changed or self._python.wrote()

    def restore(self) -> None:
        """Restore everything as it was at the start."""
        with torch.no_grad():
            for storage, before in self._written.values():
                if storage.nbytes() == before.nbytes():
                    storage.copy_(before, False)
            self._python.restore()
            self._restore_buffers()

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        """Restore, also after an error."""
        super().__exit__(error_type, error, traceback)  # type: ignore[no-untyped-call]
        self.restore()
        self._python.__exit__()


@cache
def _effects(func: Any) -> tuple[list[tuple[int, str]], list[bool]]:
    """The arguments that an operation writes to, by place and name; whether each result is a new tensor."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return [], []
    writes = [
        (place, each.name)
        for place, each in enumerate(schema.arguments)
        # BatchNorm does not declare its statistics.
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in ("running_mean", "running_var")
    ]
    return writes, [each.alias_info is None for each in schema.returns]


def _storages(value: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The storages of the tensors in a value, by address; wrappers such as DTensor have none of their own."""
    for each in tree_leaves(value):
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided:
            storage = each.untyped_storage()
            yield storage._cdata, storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)


def buffers_copied(*modules: nn.Module) -> Callable[[], None]:
    """Copy the modules' own buffers and modes; the result restores them, without waiting for the device."""
    modes = [(module, module.training) for module in modules]
    held = [(module._buffers, name, each) for module in modules for name, each in module._buffers.items()]
    copied = [(buffers, name, each, each.detach().clone()) for buffers, name, each in held if each is not None]

    @torch.no_grad()
    def restore() -> None:
        for buffers, name, each, before in copied:
            buffers[name] = each.copy_(before)
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode

    return restore


class overridden(AbstractContextManager[None]):
    """Override an attribute of one object inside a ``with`` block.

    A class, since every micro-batch enters it several times, and a generator would take twice the time.
    """

    __slots__ = ("_before", "_holder", "_name", "_value")

    def __init__(self, holder: Any, name: str, value: Any) -> None:
        self._holder, self._name, self._value = holder, name, value

    def __enter__(self) -> None:
        self._before = vars(self._holder).get(self._name, _ABSENT)
        setattr(self._holder, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        if self._before is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._before)


def eagerly() -> AbstractContextManager[object]:
    """Run compiled modules without compiling them; torch before 2.6 cannot."""
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


@contextmanager
def preserved_state(
    model: nn.Module, *others: object, leave: Iterable[object] = (), sharded: bool = False
) -> Iterator[Preserved]:
    """Run forwards as in training, without gradient, and restore everything.

    Args:
        model: its modes, buffers, parameters, generators and Python attributes are kept.
        others: more objects whose attributes are kept, such as a trainer.
        leave: objects that are not followed, such as data sets.
        sharded: an engine shards the parameters (see `Preserved`).
    """
    roots = others if sharded else (model, *others)
    with (
        random_states_kept(),
        torch.no_grad(),
        eagerly(),
        warnings.catch_warnings(),
        Preserved(PythonState(*roots, leave=leave, follow_modules=not sharded), model if sharded else None) as state,
    ):
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
        model.train()
        try:
            yield state
        finally:
            if sharded:
                _without_fsdp_hooks(model)


def _without_fsdp_hooks(model: nn.Module) -> None:
    """Remove the hooks that FSDP1 sets on its parameters in a forward with gradient, since no backward follows.

    ``torch.distributed.fsdp`` does this at a backward's end; the next forward would keep them, for another dtype.
    """
    for module in model.modules():
        parameter = getattr(getattr(module, "_handle", None), "flat_param", None)
        hooks = getattr(parameter, "_post_backward_hook_state", None)
        if parameter is not None and hooks is not None:
            hooks[-1].remove()
            del parameter._post_backward_hook_state
