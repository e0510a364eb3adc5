"""Run code without side effects: restore the tensors, Python values and random generators that it changes.

Tensors and Python values are kept in different ways:

- *tensors*: a dispatch mode sees every in-place operation before it runs, and copies the storage it is about to write
  to, unless that was allocated inside. What is not written to is never copied.
- *Python values*: attributes, containers, slots and arrays reachable from the given objects (modules, a trainer) are
  recorded before, and restored, shallowly, where they differ; random generators among them get their state back.

Globals, closures, classes and the objects of libraries are only followed if ``thorough``, as in verification.
"""

from __future__ import annotations

import logging
import operator
import random
import sys
import types
import warnings
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from ctypes import Array, byref, memmove, sizeof
from ctypes import _SimpleCData as Scalar
from functools import partial
from itertools import islice, tee
from pickle import dumps
from types import MemberDescriptorType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_accum_fix.accumulation.noise import random_states_kept

#: Containers with more elements than this hold data: their elements are not followed.
_MOST_ELEMENTS = 1000

#: Arrays with more numbers than this hold data.
_MOST_NUMBERS = 1 << 24

_ABSENT = object()
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_SEQUENCES = (list, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (str, int, float, bool, bytes, type(None), types.ModuleType, logging.Logger)
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
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


class Kept(NamedTuple):
    """One piece of Python state.

    Attributes:
        undo: restores it.
        differs: whether it differs so that a loss may depend on it.
        changed: names of all that differs.
        lost: names of what differs and cannot be restored.
    """

    undo: Callable[[], object] = bool
    differs: Callable[[], bool] = bool
    changed: Callable[[], list[str]] = list
    lost: Callable[[], list[str]] = list


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
        modules = list(model.modules())
        self._sharded = sharded
        self._made_inside: set[int] = set()
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._schemas: dict[Any, tuple[list[tuple[int, str]], list[bool]]] = {}
        roots = others if sharded else (*modules, *others)
        self._kept = _noted(roots, leave, follow_modules=not sharded, thorough=thorough)
        if sharded:
            self._kept += [each for module in modules for each in _buffers_kept(module)]
        for parameter in () if sharded else model.parameters():
            self._kept += [_data_kept(parameter), _attribute_kept(parameter, "grad")]
        self._kept += [_attribute_kept(module, "training") for module in modules]

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
            self._keep(args[place] if place < len(args) else kwargs.get(name))
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
        return any(each.differs() for each in self._kept)

    def changed(self) -> list[str]:
        """Names of the attributes and variables that differ now."""
        return sorted({name for each in self._kept for name in each.changed()})

    def lost(self) -> list[str]:
        """Names of what differs and cannot be restored."""
        return sorted({name for each in self._kept for name in each.lost()})

    def restore(self) -> None:
        """Restore everything as it was at the start."""
        with torch.no_grad():
            for storage, content in self._written.values():
                if storage.nbytes() == content.nbytes():
                    storage.copy_(content, False)
            for each in self._kept:
                each.undo()

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        """Restore, also after an error."""
        super().__exit__(error_type, error, traceback)  # type: ignore[no-untyped-call]
        self.restore()

    def _keep(self, value: Any) -> None:
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


def python_state_kept(*roots: object, leave: Iterable[object] = ()) -> ExitStack:
    """A context that restores attributes and containers of some objects, except tensors and modules."""
    stack = ExitStack()
    for each in _noted(roots, leave, follow_modules=False):
        stack.callback(each.undo)
    return stack


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, also after an error, without waiting for its device."""
    kept = [each for module in model.modules() for each in _buffers_kept(module)]
    try:
        yield
    finally:
        with torch.no_grad():
            for each in kept:
                each.undo()


# --- what is reachable ------------------------------------------------------------------------------------------------


def reached(
    *roots: object, leave: Iterable[object] = (), follow_modules: bool = True, thorough: bool = True
) -> Iterator[Any]:
    """The roots and everything reachable from them, each once; arguments as `Preserved`'s."""
    seen = {id(each): each for each in leave}
    pending = list(roots)
    rooted = {id(root) for root in pending}
    while pending:
        each: Any = pending.pop()
        if isinstance(each, _PLAIN) or id(each) in seen or (isinstance(each, type) and _is_machinery(each)):
            continue
        seen[id(each)] = each
        yield each
        cls = type(each)
        follows = follow_modules if isinstance(each, nn.Module) else _holds_state(each, thorough)
        if _is_container(each, _DICTS):
            pending.extend(each.values() if len(each) <= _MOST_ELEMENTS else ())
            pending.append(vars(each) if cls not in _DICTS and hasattr(each, "__dict__") else None)
        elif _is_container(each, _SEQUENCES):
            pending.extend(each if len(each) <= _MOST_ELEMENTS else ())
            pending.append(vars(each) if cls not in _SEQUENCES and hasattr(each, "__dict__") else None)
        elif cls in (tuple, set):
            pending.extend(islice(each, _MOST_ELEMENTS))
        elif isinstance(each, _FUNCTIONS):
            pending.extend(_held_by_function(each) if thorough else ())
        elif isinstance(each, type):
            pending.extend(vars(each).values() if thorough else ())
        elif follows or (id(each) in rooted and hasattr(each, "__dict__")):
            pending.append(vars(each))
            pending.extend(cls.__mro__ if thorough else ())
        if not isinstance(each, type) and (thorough or not _is_machinery(cls)):
            pending.extend(value for _, value in _slots(each))


def _is_container(value: object, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds or (isinstance(value, kinds) and not _is_machinery(type(value)))


def _held_by_function(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if _is_machinery(value):
        return [held for _, held in _cells(value)]
    named = [value.__globals__.get(name) for name in value.__code__.co_names]
    # Following functions and classes of a module would reach everything.
    held = [each for each in named if not isinstance(each, (type, *_FUNCTIONS))]
    return [*(each for _, each in _cells(value)), value.__defaults__, value.__kwdefaults__, *held]


def _cells(function: types.FunctionType) -> list[tuple[types.CellType, Any]]:
    """The filled variables that a function closes over."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append((cell, cell.cell_contents))
        except ValueError:
            continue
    return found


def _noted(
    roots: Iterable[object], leave: Iterable[object], *, follow_modules: bool = True, thorough: bool = False
) -> list[Kept]:
    """What restores everything reachable from the roots."""
    kept: list[Kept] = []
    names: dict[int, str] = {}
    for each in reached(*roots, leave=leave, follow_modules=follow_modules, thorough=thorough):
        cls = type(each)
        if isinstance(each, Tensor):
            kept += _tensor_kept(each, thorough)
        elif isinstance(each, np.ndarray):
            kept += _array_kept(each, thorough) if thorough or cls is np.ndarray else []
        elif _is_container(each, _DICTS):
            kept += _dict_kept(each, names.get(id(each), ""))
        elif _is_container(each, _SEQUENCES):
            kept.append(_sequence_kept(each))
        elif cls is set:
            kept.append(_set_kept(each))
        elif isinstance(each, _GENERATORS):
            kept.append(_generator_kept(each))
        elif isinstance(each, (bytearray, array, Array, Scalar)):
            kept.append(_bytes_kept(each))
        elif thorough and isinstance(each, type):
            kept.append(_class_kept(each))
        elif thorough and isinstance(each, types.FunctionType):
            kept += _variables_kept(each)
        elif thorough and isinstance(each, types.GeneratorType):
            kept.append(_generator_watched(each))
        elif hasattr(each, "__dict__") and not isinstance(each, (type, *_FUNCTIONS)):
            names[id(vars(each))] = cls.__name__
        if isinstance(each, nn.Module) and follow_modules:
            kept += _buffers_kept(each)
        if not isinstance(each, type) and (thorough or not _is_machinery(cls)):
            kept += [Kept(partial(slot.__set__, each, value)) for slot, value in _slots(each)]
    return kept


def _is_machinery(cls: Any) -> bool:
    return cls.__name__ not in _NOTED_ON and (cls.__module__ or "").partition(".")[0] in _MACHINERY


def _holds_state(value: object, thorough: bool) -> bool:
    is_code = isinstance(value, type) or callable(getattr(type(value), "__get__", None))
    if not hasattr(value, "__dict__") or is_code:
        return False
    return type(value).__module__.partition(".")[0] not in _ALIVE if thorough else not _is_machinery(type(value))


# --- restoring one value ----------------------------------------------------------------------------------------------


def _is_stream(value: object) -> bool:
    known = type(value).__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")
    return known and isinstance(value, Iterator)


def _streams_kept(holder: Any, items: Iterable[tuple[Any, Any]]) -> list[Kept]:
    """Generators and iterators, such as a loader's, that a dict holds: afterwards they yield the same values again.

    One that was used cannot be rewound, so it is replaced by an iterator over the same values.
    """
    undo: list[Kept] = []
    for name, stream in [(name, value) for name, value in items if _is_stream(value)]:
        drawn: list[bool] = []

        def values(stream: Any = stream, drawn: list[bool] = drawn) -> Iterator[Any]:
            for value in stream:
                drawn.append(True)
                yield value

        (kept,) = tee(values(), 1)
        holder[name] = copy(kept)

        def restore(name: Any = name, stream: Any = stream, drawn: list[bool] = drawn, kept: Any = kept) -> None:
            holder[name] = copy(kept) if drawn else stream

        undo.append(Kept(restore))
    return undo


def _dict_kept(value: dict[Any, Any], owner: str) -> list[Kept]:
    streams = _streams_kept(value, value.items())
    before = dict(value)
    values = [(key, each) for key, each in before.items() if isinstance(each, (float, Tensor))]

    def undo() -> None:
        if len(value) != len(before) or any(value.get(key, _ABSENT) is not kept for key, kept in before.items()):
            # Bypass the overrides of a subclass.
            methods: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            methods.clear(value)
            methods.update(value, before)

    def differs() -> bool:
        # A number that was a class attribute becomes the object's with its first change.
        begun = any(isinstance(each, float) for key, each in value.items() if key not in before)
        now = ((value.get(key, _ABSENT), each) for key, each in values)
        return begun or any(new is not old and not (isinstance(new, float) and new == old) for new, old in now)

    def changed() -> list[str]:
        names = [key for key in {**before, **value} if value.get(key, _ABSENT) is not before.get(key, _ABSENT)]
        new = [RANDOM_NUMBERS for name in names if isinstance(value.get(name), _GENERATORS)]
        return [*new, *(f"{owner}.{name}" if owner else repr(name) for name in names)]

    return [Kept(undo, differs, changed), *streams]


def _class_kept(value: type) -> Kept:
    """The attributes of a class."""
    before = dict(vars(value))

    def changed() -> list[str]:
        now = vars(value)
        return [name for name in {**before, **now} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]

    def undo() -> None:
        for name in changed():
            if name in before:
                setattr(value, name, before[name])
            else:
                delattr(value, name)

    return Kept(undo, changed=lambda: [f"{value.__name__}.{name}" for name in changed()])


def _variables_kept(function: types.FunctionType) -> list[Kept]:
    """The variables that a function closes over, and the global values that it names."""
    kept = [
        Kept(
            partial(setattr, cell, "cell_contents", value),
            changed=lambda cell=cell, value=value, name=name: [name] * (cell.cell_contents is not value),  # type: ignore[misc]
        )
        for name, (cell, value) in zip(function.__code__.co_freevars, _cells(function), strict=False)
    ]
    if _is_machinery(function):
        return kept
    variables = function.__globals__
    named = {name: variables[name] for name in function.__code__.co_names if name in variables}
    for name, value in named.items():
        if value is None or isinstance(value, (int, float, str, tuple, Tensor)):
            kept.append(
                Kept(
                    partial(variables.__setitem__, name, value),
                    changed=lambda name=name, value=value: [name] * (variables.get(name) is not value),  # type: ignore[misc]
                )
            )
    return kept


def _attribute_kept(value: Any, name: str, is_same: Callable[[Any, Any], bool] = operator.is_) -> Kept:
    before = getattr(value, name)

    def undo() -> None:
        if not is_same(getattr(value, name), before):
            setattr(value, name, before)

    return Kept(undo)


def _tensor_kept(value: Tensor, thorough: bool) -> list[Kept]:
    if value.layout is not torch.strided or value.is_nested:
        return []
    if type(value) is Tensor:
        return [_data_kept(value)]
    if type(value) is nn.Parameter and thorough:
        return [_data_kept(value), _attribute_kept(value, "grad"), _attribute_kept(value, "requires_grad")]
    return []


def _data_kept(value: Tensor) -> Kept:
    """The assignment of ``.data``; the dispatch mode sees what is written in place."""
    return _attribute_kept(value, "data", lambda now, before: now.data_ptr() == before.data_ptr())


def _buffers_kept(module: nn.Module) -> list[Kept]:
    held = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    return [_buffer_kept(module, name, buffer) for name, buffer in held]


def _buffer_kept(module: nn.Module, name: str, buffer: Tensor) -> Kept:
    before = buffer.detach().clone()
    # BatchNorm changes its statistics without a new version.
    counts = not buffer.is_inference() and not isinstance(module, _BatchNorm)
    version = buffer._version if counts else -1

    def undo() -> None:
        module._buffers[name] = buffer
        if not counts or buffer._version != version:
            buffer.copy_(before)

    return Kept(undo)


def _generator_watched(value: types.GeneratorType[Any, Any, Any]) -> Kept:
    """A generator that no dict holds, so that it cannot be replaced."""

    def place() -> int:
        return -1 if value.gi_frame is None else hash((value.gi_frame.f_lasti, str(value.gi_frame.f_locals)))

    before = place()
    return Kept(lost=lambda: [f"the generator {value.__name__}"] * (place() != before))


def _array_kept(value: np.ndarray[Any, Any], thorough: bool) -> list[Kept]:
    if not value.flags.writeable or (value.size > _MOST_NUMBERS and not thorough):
        return []
    if value.size > _MOST_NUMBERS:
        total = crc32(value.tobytes())
        return [Kept(lost=lambda: [f"an array of {value.size} numbers"] * (crc32(value.tobytes()) != total))]
    before = value.copy()

    def differs() -> bool:
        return bool(value.tobytes() != before.tobytes())

    return [Kept(lambda: np.copyto(value, before) if differs() else None, differs)]


def _bytes_kept(value: Any) -> Kept:
    """A Python buffer, which may be shared memory."""
    before = bytes(value)
    if isinstance(value, (Array, Scalar)):
        return Kept(lambda: memmove(byref(value), before, sizeof(value)))
    if isinstance(value, bytearray):
        return Kept(partial(value.__setitem__, slice(None), before))
    kept = value[:]
    return Kept(partial(value.__setitem__, slice(None), kept))


def _slots(value: object) -> Iterator[tuple[Any, Any]]:
    """The filled slots of an object, and their values."""
    for cls in type(value).__mro__:
        slots = vars(cls).values() if "__slots__" in vars(cls) else ()
        for slot in (each for each in slots if isinstance(each, MemberDescriptorType)):
            try:
                yield slot, slot.__get__(value, cls)
            except AttributeError:
                continue


def _sequence_kept(value: Any) -> Kept:
    before = list(value)

    def is_log() -> bool:
        begins = len(value) >= len(before) and all(map(operator.is_, value, before))
        return begins and all(isinstance(each, (int, float, str)) for each in islice(value, len(before), None))

    def undo() -> None:
        if len(value) != len(before) or not all(map(operator.is_, value, before)):
            value.clear()
            value.extend(before)

    return Kept(undo, lambda: not is_log())


def _set_kept(value: set[Any]) -> Kept:
    before = set(value)

    def undo() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return Kept(undo)


def _generator_kept(value: Any) -> Kept:
    get, put = _state_of(value)
    before = get()
    return Kept(partial(put, before), changed=lambda: [RANDOM_NUMBERS] * (dumps(get()) != dumps(before)))


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Getter and setter of a generator's state."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    return partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")


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
