"""Copy the state of every Python object reachable from some objects, and restore it where it differs.

A state is copied shallowly: attributes and elements by identity, since each of them is an object with a state of its
own; numbers by value. `_KINDS` has a row for each kind of state.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.noise import GENERATORS, generator_state, set_generator_state

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


#: The name of random generators in `PythonState.changed`.
RANDOM_NUMBERS = "a generator of random numbers"


class PythonState:
    """The state of all Python objects reachable from some roots; inside a ``with`` block it may change.

    Args:
        roots: objects whose attributes are kept, whatever they are.
        leave: objects that are not followed, such as data sets.
        follow_modules: keep modules and parameters, too.
        thorough: also follow functions, classes and the objects of libraries.
    """

    def __init__(
        self, *roots: object, leave: Iterable[object] = (), follow_modules: bool = False, thorough: bool = False
    ) -> None:
        found = _walk(roots, leave, follow_modules=follow_modules, thorough=thorough, wrap=True)
        self._kept = [each for _, kept in found for each in kept]

    def wrote(self) -> bool:
        """Whether a value has changed that a loss may depend on: no counter, and no log."""
        return any(each.differs() and _matters(each.before, each.now()) for each in self._kept)

    def changed(self) -> list[str]:
        """Names of the attributes and variables that differ now."""
        return sorted({name for each in self._kept if each.differs() for name in each.names()})

    def lost(self) -> list[str]:
        """Names of what differs and cannot be restored."""
        return sorted({each.name for each in self._kept if each.kind.put is None and each.differs()})

    def restore(self) -> None:
        """Restore everything as it was at the start."""
        for each in self._kept:
            if each.kind.put is not None and each.differs():
                each.kind.put(each.holder, each.before)

    def __enter__(self) -> PythonState:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore, also after an error, and put the streams in their places again."""
        self.restore()
        for each in self._kept:
            if each.kind is _ITEMS:
                streams = {key: value for key, value in each.before.items() if isinstance(value, _Stream)}
                _methods(each.holder).update(each.holder, {key: value.rewound() for key, value in streams.items()})


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
                streams = {key: _Stream(value) for key, value in _get_items(holder).items() if _is_stream(value)}
                _methods(holder).update(holder, streams)
            kept.append(_Kept(holder, kind, name, kind.get(holder)))
        yield each, kept
        for held in (part.before for part in kept):
            if isinstance(held, (dict, list, tuple, frozenset)) and len(held) <= _MOST_ELEMENTS:
                pending.extend(held.values() if isinstance(held, dict) else held)
        if thorough and not isinstance(each, type):
            pending.extend(type(each).__mro__)


def _parts(value: Any, is_root: bool, follow_modules: bool, thorough: bool) -> Iterator[tuple[Any, _Kind, str]]:
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
    elif isinstance(value, np.ndarray):
        is_huge = value.size > _MOST_NUMBERS
        if value.flags.writeable and (thorough or (cls is np.ndarray and not is_huge)):
            yield value, _HUGE if is_huge else _ARRAY, f"an array of {value.size} numbers" if is_huge else ""
    # Containers of libraries may make their values as these are read.
    elif kind is not None and (cls in _KINDS or not _is_machinery(cls) or (thorough and kind not in _CONTAINERS)):
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


class _Kind(NamedTuple):
    """How one kind of state is copied, shallowly, and restored; ``put`` None: it cannot be restored."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object] | None


class _Kept(NamedTuple):
    """The state that ``holder`` had before."""

    holder: Any
    kind: _Kind
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


def _same(before: Any, now: Any) -> bool:
    """Whether a state is the same: the same objects, or the same numbers."""
    if isinstance(before, dict):
        return len(now) == len(before) and all(now.get(name, _ABSENT) is each for name, each in before.items())
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
        # Words and counts may be a log.
        is_log = not any(map(_holds_numbers, now[len(before) :]))
        return not (is_log and _same(before, now[: len(before)]))
    if not isinstance(before, dict):
        return isinstance(before, np.ndarray)
    pairs = [(before.get(name, _ABSENT), now.get(name)) for name in _differing(before, now)]
    # A number that was a class attribute becomes the object's with its first change.
    return any(
        _holds_numbers(new)
        if old is _ABSENT or old is None
        else isinstance(old, Tensor) or (isinstance(old, float) and old != new)
        for old, new in pairs
    )


def _holds_numbers(value: Any) -> bool:
    """Whether a value holds numbers that a loss may use later: its first value, a moving average, a queue."""
    if isinstance(value, (list, tuple, deque, dict)):
        return any(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (float, Tensor))


def _get_items(value: dict[Any, Any]) -> dict[Any, Any]:
    return dict(_methods(value).items(value))


def _put_items(value: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    _methods(value).clear(value)
    _methods(value).update(value, before)


def _methods(value: dict[Any, Any]) -> Any:
    """Those of the class that bypass the overrides of a subclass."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _put_elements(value: Any, before: Iterable[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(before)


def _put_all(value: Any, before: Any) -> None:
    value[:] = before


def _named(get: Callable[[Any], dict[str, Any]]) -> _Kind:
    """Values by name, which setattr restores."""

    def put(value: Any, before: Mapping[str, Any]) -> None:
        methods = type if isinstance(value, type) else object
        for name in _differing(before, get(value)):
            if name in before:
                methods.__setattr__(value, name, before[name])
            else:
                methods.__delattr__(value, name)

    return _Kind(get, put)


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
    for name, value in before.items():
        if name in cells:
            cells[name].cell_contents = value
        elif name in function.__globals__:
            function.__globals__[name] = value


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


_ITEMS = _Kind(_get_items, _put_items)
_LIST = _Kind(lambda value: value[:], _put_all)
_DEQUE = _Kind(list, _put_elements)
_SET = _Kind(frozenset, _put_elements)
_TUPLE = _Kind(tuple, None)
_CONTAINERS = (_ITEMS, _LIST, _DEQUE, _SET, _TUPLE)
_ARRAY = _Kind(np.copy, lambda value, before: np.copyto(value, before))
_SLOTS = _named(_slots)
_GRADIENT = _named(lambda value: {"grad": value.grad, "requires_grad": value.requires_grad})
_DATA = _Kind(lambda value: value.data, lambda value, before: setattr(value, "data", before))
_HUGE = _Kind(lambda value: crc32(value.tobytes()), None)
_IN_C = _Kind(bytes, lambda value, before: ctypes.memmove(ctypes.byref(value), before, len(before)))
_KINDS: Mapping[type, _Kind] = {
    **dict.fromkeys((dict, defaultdict, OrderedDict, Counter), _ITEMS),
    **dict.fromkeys((list, bytearray, array), _LIST),
    **dict.fromkeys((ctypes.Array, ctypes._SimpleCData), _IN_C),
    **dict.fromkeys(GENERATORS, _Kind(generator_state, set_generator_state)),
    **{deque: _DEQUE, set: _SET, tuple: _TUPLE},
    type: _named(lambda cls: dict(vars(cls))),
    types.FunctionType: _Kind(_variables, _put_variables),
    types.MethodType: _Kind(lambda value: (value.__self__, value.__func__), None),
    partial: _Kind(lambda value: (value.func, value.args, value.keywords), None),
    types.GeneratorType: _Kind(
        lambda value: value.gi_frame and (value.gi_frame.f_lasti, str(value.gi_frame.f_locals)), None
    ),
    _Stream: _Kind(lambda value: value.at, lambda value, before: setattr(value, "at", before)),
}
