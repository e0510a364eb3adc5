"""Run code without side effects: restore the tensors, attributes and random generators that it changes.

`PythonState` holds what was there before, and restores it. A storage is added to it when it is about to be written to,
which a dispatch mode sees; what is not written to is never copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_accum_fix.accumulation.noise import random_states_kept
from hf_accum_fix.accumulation.python_state import Kept, PythonState

_ABSENT = object()


class KeepsStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add every storage that an operation writes to to a state, unless it was allocated inside the ``with`` block."""

    supports_higher_order_operators = True

    def __init__(self, state: PythonState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        #: Addresses of the storages that were allocated inside, or are kept.
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what ``func`` is about to write to, once per storage; remember what it allocates."""
        kwargs = kwargs or {}
        writes, makes = _effects(func)
        for place, name in writes:
            for storage in _storages(args[place] if place < len(args) else kwargs.get(name)):
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._state.kept.append(Kept(storage, storage.clone()))  # type: ignore[no-untyped-call]
        out = func(*args, **kwargs)
        for each, made in zip(out if isinstance(out, (tuple, list)) else (out,), makes, strict=False):
            if made:
                self._known.update(storage._cdata for storage in _storages(each))
        return out


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


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in a value; wrappers such as DTensor have none of their own."""
    found = [each for each in tree_leaves(value) if type(each) in (Tensor, nn.Parameter)]
    return [each.untyped_storage() for each in found if each.layout is torch.strided]


def with_buffers(state: PythonState, model: nn.Module) -> PythonState:
    """Add the buffers and modes of a model to a state, which restores them without waiting for its device."""
    for module in model.modules():
        state.kept += [Kept(module, module.training), Kept(module._buffers, dict(module._buffers))]
        state.kept += [Kept(each, each.clone()) for each in _storages([*module._buffers.values()])]  # type: ignore[no-untyped-call]
    return state


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
) -> Iterator[PythonState]:
    """Run forwards as in training, without gradient, and restore everything.

    Args:
        model: its modes, buffers, parameters, generators and attributes are kept.
        others: more objects whose attributes are kept, such as a trainer.
        leave: objects that are not followed, such as data sets.
        sharded: an engine moves parameters and changes modules: only buffers, modes and ``others`` are kept.
    """
    if sharded:
        state = with_buffers(PythonState(*others, leave=leave), model)
    else:
        state = PythonState(model, *others, leave=leave, follow_modules=True)
    with (
        random_states_kept(),
        torch.no_grad(),
        eagerly(),
        warnings.catch_warnings(),
        state,
        nullcontext() if sharded else KeepsStorages(state),
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
