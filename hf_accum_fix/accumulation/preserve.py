"""Run code without side effects: restore the tensors, Python values and random generators that it changes.

- *Tensors*: a dispatch mode sees every in-place operation before it runs, and copies the storage it is about to write
  to, unless that was allocated inside. Of the rest only the model's buffers are copied.
- *Python values*: the state of every object reachable from the given ones (modules, a trainer) is copied before,
  shallowly, and restored where it differs: `_KINDS` has a row for each kind of state.

Globals, closures, classes and the objects of libraries are only followed if ``thorough``, as in verification.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
import types
import warnings
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_accum_fix.accumulation.noise import GENERATORS, generator_state, random_states_kept, set_generator_state

#: Containers with more elements than this hold data: their elements are not followed.
_MOST_ELEMENTS = 1000

#: Arrays with more numbers than this hold data.
_MOST_NUMBERS = 1 << 24

_ABSENT = object()
_PLAIN = (str, int, float, bool, bytes, type(None), types.ModuleType, logging.Logger)
_CODE = (type, types.FunctionType, types.MethodType, types.GeneratorType, partial)
#: Packages whose objects hold no state that a loss depends on.
_MACHINERY = frozenset(
    {"accelerate", "datasets", "deepspeed", "hf_accum_fix", "numpy", "tokenizers", "torch", "transformers", "wrapt"}
) | (sys.stdlib_module_names - {"__main__"})
#: Exceptions to that.
_NOTED_ON = frozenset(
    {"TrainerState", "TrainerControl", "TrainingArguments", "Seq2SeqTrainingArguments", "SimpleNamespace"}
)
#: Packages whose objects other threads and processes write to.
_ALIVE = frozenset({"asyncio", "concurrent", "logging", "psutil", "subprocess", "threading", "weakref"})


#: The name of random generators in `Preserved.changed`.
RANDOM_NUMBERS = "a generator of random numbers"


class Preserved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a ``with`` block state may change; `restore`, and the end of the block, restore it.

    Args:
        model: its modes, buffers, parameters, generators and Python attributes are kept.
        others: more objects whose attributes are kept, such as a trainer.
        leave: objects that are not followed, such as data sets.
        sharded: an engine moves the parameters in every forward, and changes the modules: only buffers, modes and
            ``others`` are kept.
        thorough: also follow functions, classes and the objects of libraries.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        *others: object,
        leave: Iterable[object] = (),
        sharded: bool = False,
        thorough: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sharded = sharded
        self._made_inside: set[int] = set()
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._schemas: dict[Any, tuple[list[tuple[int, str]], list[bool]]] = {}
        roots = others if sharded else (model, *others)
        self._kept = _keep(*roots, leave=leave, follow_modules=not sharded, thorough=thorough)
        self._buffers = _copied_buffers(model)
        self._modes = [(module, module.training) for module in model.modules()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what ``func`` is about to write to, once per storage; remember what it allocates."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:
            return func(*args, **kwargs)
        if func not in self._schemas:
            self._schemas[func] = _writes(schema), [each.alias_info is None for each in schema.returns]
        writes, makes = self._schemas[func]
        for place, name in writes:
            self._copy(args[place] if place < len(args) else kwargs.get(name))
        out = func(*args, **kwargs)
        returned = out if isinstance(out, (tuple, list)) else (out,)
        for each, made in zip(returned, makes, strict=False):
            if made:
                self._made_inside.update(map(_address, _plain(each)))
        return out

    def wrote(self) -> bool:
        """Whether a tensor has changed, or a Python value that a loss may depend on.

        That excludes lists that have grown by Python numbers, which are logs, and integers, which are counters.
        """
        # A copy, since this mode also sees the comparison.
        if any(not torch.equal(*_as_bytes(storage, content)) for storage, content in [*self._written.values()]):
            return True
        return any(each.differs() and _matters(each.before, each.now()) for each in self._kept)

    def changed(self) -> list[str]:
        """Names of the attributes and variables that differ now."""
        return sorted({name for each in self._kept if each.differs() for name in each.names()})

    def lost(self) -> list[str]:
        """Names of what differs and cannot be restored."""
        return sorted({each.name for each in self._kept if each.kind.put is None and each.differs()})

    def restore(self) -> None:
        """Restore everything as it was at the start."""
        with torch.no_grad():
            for storage, content in self._written.values():
                if storage.nbytes() == content.nbytes():
                    storage.copy_(content, False)
            _restore(self._kept)
            _put_buffers(self._buffers)
            for module, mode in self._modes:
                module.training = mode

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        """Restore, also after an error."""
        super().__exit__(error_type, error, traceback)  # type: ignore[no-untyped-call]
        self.restore()
        _give_streams_back(self._kept)

    def _copy(self, value: Any) -> None:
        if self._sharded:
            return
        for tensor in _plain(value):
            address = _address(tensor)
            if address not in self._made_inside and address not in self._written:
                storage = tensor.untyped_storage()
                self._written[address] = (storage, storage.clone())  # type: ignore[no-untyped-call]


def _writes(schema: Any) -> list[tuple[int, str]]:
    """Places and names of the arguments that an operation writes to; BatchNorm's statistics are not declared."""
    return [
        (place, each.name)
        for place, each in enumerate(schema.arguments)
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in ("running_mean", "running_var")
    ]


def _as_bytes(*storages: torch.UntypedStorage) -> list[Tensor]:
    return [torch.tensor([], dtype=torch.uint8, device=each.device).set_(each) for each in storages]


def _plain(value: Any) -> list[Tensor]:
    """The tensors in a value that have their own storage: no wrappers such as DTensor."""
    return [
        each for each in tree_leaves(value) if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
    ]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _copied_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor, int | None]]:
    """The buffers of a model, which a kernel may write to unseen, their copies and versions."""
    return [
        (module, name, buffer, buffer.detach().clone(), _version(module, buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _version(module: nn.Module, buffer: Tensor) -> int | None:
    """Counts the writes; None: BatchNorm changes its statistics without a new version."""
    return None if buffer.is_inference() or isinstance(module, _BatchNorm) else buffer._version


def _put_buffers(copied: Iterable[tuple[nn.Module, str, Tensor, Tensor, int | None]]) -> None:
    for module, name, buffer, before, version in copied:
        module._buffers[name] = buffer
        if version is None or _version(module, buffer) != version:
            buffer.copy_(before)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, also after an error, without waiting for its device."""
    copied = _copied_buffers(model)
    try:
        yield
    finally:
        with torch.no_grad():
            _put_buffers(copied)


@contextmanager
def python_state_kept(*roots: object, leave: Iterable[object] = ()) -> Iterator[None]:
    """Restore attributes and containers of some objects, also after an error, except tensors and modules."""
    kept = _keep(*roots, leave=leave, follow_modules=False)
    try:
        yield
    finally:
        _restore(kept)
        _give_streams_back(kept)


# --- what is reachable ------------------------------------------------------------------------------------------------


def reached(*roots: object) -> Iterator[Any]:
    """The roots and everything reachable from them, each once."""
    return (each for each, _ in _walk(roots, follow_modules=True, thorough=True))


def _walk(
    roots: Iterable[object], leave: Iterable[object] = (), *, follow_modules: bool, thorough: bool, wrap: bool = False
) -> Iterator[tuple[Any, list[_Kept]]]:
    """Every reachable object, once, with its state; ``wrap``: replace streams by `_Stream`."""
    seen = {id(each): each for each in leave}
    pending = list(roots)
    rooted = {id(root) for root in pending}
    while pending:
        each: Any = pending.pop()
        if isinstance(each, _PLAIN) or id(each) in seen or (isinstance(each, type) and _is_machinery(each)):
            continue
        seen[id(each)] = each
        kept = []
        for holder, kind, name in _parts(each, id(each) in rooted, follow_modules, thorough):
            if wrap and kind is _ITEMS and len(holder) <= _MOST_ELEMENTS:
                holder.update({key: _Stream(value) for key, value in holder.items() if _is_stream(value)})
            kept.append(_Kept(holder, kind, name, kind.get(holder)))
        yield each, kept
        for held in (part.before for part in kept):
            if isinstance(held, (dict, list, tuple, frozenset)) and len(held) <= _MOST_ELEMENTS:
                pending.extend(held.values() if isinstance(held, dict) else held)
        if thorough and not isinstance(each, type):
            pending.extend(type(each).__mro__)


def _parts(value: Any, is_root: bool, follow_modules: bool, thorough: bool) -> Iterator[tuple[Any, Kind, str]]:
    """The parts of an object that have a state: (holder, kind of state, name in reports)."""
    cls = type(value)
    kind = next((_KINDS[each] for each in cls.__mro__ if each in _KINDS), None)
    followed = thorough or not _is_machinery(cls)
    if isinstance(value, _CODE):
        if kind is not None and thorough:
            yield value, kind, value.__name__ if isinstance(value, (type, types.GeneratorType)) else ""
        return
    if isinstance(value, Tensor):
        own_data = cls is Tensor or (cls is nn.Parameter and follow_modules)
        if own_data and value.layout is torch.strided and not value.is_nested:
            yield value, _DATA, ""
        if isinstance(value, nn.Parameter) and follow_modules:
            yield value, _GRADIENT, cls.__name__
    elif isinstance(value, np.ndarray) and value.size > _MOST_NUMBERS:
        if thorough and value.flags.writeable:
            yield value, _HUGE, f"an array of {value.size} numbers"
    elif kind is not None and (followed or cls in _KINDS):
        yield value, kind, RANDOM_NUMBERS if isinstance(value, GENERATORS) else ""
    if cls is _Stream:
        return
    follows = follow_modules if isinstance(value, nn.Module) else _holds_state(value, thorough)
    if (follows or is_root) and isinstance(getattr(value, "__dict__", None), dict):
        yield vars(value), _ITEMS, cls.__name__
    if followed and any("__slots__" in vars(each) for each in cls.__mro__):
        yield value, _SLOTS, cls.__name__


def _is_machinery(cls: Any) -> bool:
    return cls.__name__ not in _NOTED_ON and (cls.__module__ or "").partition(".")[0] in _MACHINERY


def _holds_state(value: object, thorough: bool) -> bool:
    if not hasattr(value, "__dict__") or callable(getattr(type(value), "__get__", None)):
        return False
    return type(value).__module__.partition(".")[0] not in _ALIVE if thorough else not _is_machinery(type(value))


# --- the state of one object ------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """How one kind of state is copied, shallowly, and restored; ``put`` None: it cannot be restored."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object] | None


class _Kept(NamedTuple):
    """The state that ``holder`` had before."""

    holder: Any
    kind: Kind
    name: str
    before: Any

    def now(self) -> Any:
        return self.kind.get(self.holder)

    def differs(self) -> bool:
        return not _same(self.before, self.now())

    def names(self) -> Iterator[str]:
        """Names of what differs."""
        if not isinstance(self.before, dict):
            yield from [self.name] if self.name else []
            return
        now = self.now()
        for name in _differing(self.before, now):
            yield f"{self.name}.{name}" if self.name else str(name)
            yield from [RANDOM_NUMBERS] if isinstance(now.get(name), GENERATORS) else []


def _keep(*roots: object, leave: Iterable[object], follow_modules: bool = False, thorough: bool = False) -> list[_Kept]:
    found = _walk(roots, leave, follow_modules=follow_modules, thorough=thorough, wrap=True)
    return [each for _, kept in found for each in kept]


def _restore(kept: Iterable[_Kept]) -> None:
    for each in kept:
        if each.kind.put is not None and each.differs():
            each.kind.put(each.holder, each.before)


def _same(before: Any, now: Any) -> bool:
    """Whether a state is the same: the same objects, or the same numbers."""
    if isinstance(before, dict):
        return not _differing(before, now)
    if isinstance(before, list):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    if isinstance(before, Tensor):
        return bool(now.data_ptr() == before.data_ptr())
    return bool(now.tobytes() == before.tobytes() if isinstance(before, np.ndarray) else now == before)


def _differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    return [name for name in {**before, **now} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]


def _matters(before: Any, now: Any) -> bool:
    """Whether a loss may depend on a difference."""
    if isinstance(before, list):
        is_log = all(isinstance(each, (int, float, str)) for each in now[len(before) :])
        return not (is_log and _same(before, now[: len(before)]))
    if not isinstance(before, dict):
        return isinstance(before, np.ndarray)
    pairs = [(before.get(name, _ABSENT), now.get(name)) for name in _differing(before, now)]
    # A number that was a class attribute becomes the object's with its first change.
    return any(
        isinstance(new, float) if old is _ABSENT else isinstance(old, Tensor) or (isinstance(old, float) and old != new)
        for old, new in pairs
    )


def _put_items(value: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    # Bypass the overrides of a subclass.
    methods: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    methods.clear(value)
    methods.update(value, before)


def _put_elements(value: Any, before: Iterable[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(before)


def _put_all(value: Any, before: Any) -> None:
    value[:] = before


def _named(get: Callable[[Any], dict[str, Any]]) -> Kind:
    """Values by name, which setattr restores."""

    def put(value: Any, before: Mapping[str, Any]) -> None:
        methods = type if isinstance(value, type) else object
        for name in _differing(before, get(value)):
            if name in before:
                methods.__setattr__(value, name, before[name])
            else:
                methods.__delattr__(value, name)

    return Kind(get, put)


def _slots(value: Any) -> dict[str, Any]:
    """The filled slots of an object."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value, cls)
    return found


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, and the global values that it names."""
    variables, found = function.__globals__, dict[str, Any]()
    if not _is_machinery(function):
        found.update(__defaults__=function.__defaults__, __kwdefaults__=function.__kwdefaults__)
        named = ((name, variables[name]) for name in function.__code__.co_names if name in variables)
        # Following functions and classes of a module would reach everything.
        found.update((name, value) for name, value in named if not isinstance(value, _CODE))
    for name, cell in _cells(function).items():
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _put_variables(function: types.FunctionType, before: Mapping[str, Any]) -> None:
    cells = _cells(function)
    for name in _differing(before, _variables(function)):
        if name in cells:
            cells[name].cell_contents = before[name]
        elif name in function.__globals__:
            function.__globals__[name] = before[name]


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


class _Stream(Iterator[Any]):
    """Stands for an iterator that a dict holds, such as a loader's, which cannot be rewound itself."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._seen, self.at = source, list[Any](), 0

    def __next__(self) -> Any:
        if self.at == len(self._seen):
            self._seen.append(next(self._source))
        self.at += 1
        return self._seen[self.at - 1]

    def rewound(self) -> Iterator[Any]:
        """The iterator itself if it was not used, else one over the same values."""
        return chain(self._seen, self._source) if self._seen else self._source


def _is_stream(value: object) -> bool:
    known = type(value).__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")
    return known and isinstance(value, Iterator)


def _give_streams_back(kept: Iterable[_Kept]) -> None:
    for each in kept:
        for key, value in each.before.items() if each.kind is _ITEMS else ():
            if isinstance(value, _Stream):
                each.holder[key] = value.rewound()


_ITEMS = Kind(dict, _put_items)
_SLOTS = _named(_slots)
_GRADIENT = _named(lambda value: {"grad": value.grad, "requires_grad": value.requires_grad})
_DATA = Kind(lambda value: value.data, lambda value, before: setattr(value, "data", before))
_HUGE = Kind(lambda value: crc32(value.tobytes()), None)
_IN_C = Kind(bytes, lambda value, before: ctypes.memmove(ctypes.byref(value), before, len(before)))
_KINDS: Mapping[type, Kind] = {
    **dict.fromkeys((dict, defaultdict, OrderedDict, Counter), _ITEMS),
    **dict.fromkeys((list, bytearray, array), Kind(lambda value: value[:], _put_all)),
    **dict.fromkeys((ctypes.Array, ctypes._SimpleCData), _IN_C),
    **dict.fromkeys(GENERATORS, Kind(generator_state, set_generator_state)),
    deque: Kind(list, _put_elements),
    set: Kind(frozenset, _put_elements),
    tuple: Kind(tuple, None),
    np.ndarray: Kind(np.copy, lambda value, before: np.copyto(value, before)),
    type: _named(lambda cls: dict(vars(cls))),
    types.FunctionType: Kind(_variables, _put_variables),
    types.MethodType: Kind(lambda value: (value.__self__, value.__func__), None),
    partial: Kind(lambda value: (value.func, value.args, value.keywords), None),
    types.GeneratorType: Kind(
        lambda value: value.gi_frame and (value.gi_frame.f_lasti, str(value.gi_frame.f_locals)), None
    ),
    _Stream: Kind(lambda value: value.at, lambda value, before: setattr(value, "at", before)),
}


# --- for one block ----------------------------------------------------------------------------------------------------


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


@contextmanager
def preserved_state(
    model: nn.Module, *others: object, leave: Iterable[object] = (), sharded: bool = False
) -> Iterator[Preserved]:
    """Run forwards as in training, without gradient, and restore everything; arguments as `Preserved`'s."""
    stance = getattr(torch.compiler, "set_stance", None)
    eager: AbstractContextManager[Any] = stance("force_eager") if stance is not None else nullcontext()
    with (
        random_states_kept(),
        torch.no_grad(),
        eager,
        warnings.catch_warnings(),
        Preserved(model, *others, leave=leave, sharded=sharded) as state,
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
