"""The state of code and of the objects of libraries, too, which only a verification restores."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from hf_accum_fix.accumulation.python_state import (
    ARRAY,
    GENERATORS,
    ITEMS,
    MOST_NUMBERS,
    Kept,
    Kind,
    PythonState,
    Stream,
    differing,
    is_machinery,
    lose,
    named,
)

#: The name of random generators in `WholeState.changed`.
RANDOM_NUMBERS = "a generator of random numbers"

#: Packages whose objects other threads and processes write to.
_ALIVE = frozenset({"asyncio", "concurrent", "logging", "psutil", "subprocess", "threading", "weakref"})


class WholeState(PythonState):
    """`PythonState` that also follows functions, classes and the objects of libraries."""

    def changed(self) -> list[str]:
        """Names of the attributes and variables that differ now."""
        return sorted({name for each in self.kept if each.differs() for name in _names(each)})

    def lost(self) -> list[str]:
        """Names of what differs and cannot be restored."""
        return sorted({name for each in self.kept if each.kind.put is lose and each.differs() for name in _names(each)})

    def kinds_of(self, value: Any) -> Iterator[Kind]:
        """The kinds of state that an object has."""
        if isinstance(value, tuple(_CODE)):
            if not (isinstance(value, type) and is_machinery(value)):
                yield from [_CODE[base] for base in type(value).__mro__ if base in _CODE]
        else:
            yield from super().kinds_of(value)
        if isinstance(value, (ctypes.Array, ctypes._SimpleCData)):
            yield _IN_C
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            yield from [_HUGE] if value.size > MOST_NUMBERS else [ARRAY] if type(value) is not np.ndarray else []
        if not isinstance(value, type):
            yield _CLASSES

    def follows(self, value: Any) -> bool:
        """Whether the attributes of an object are state."""
        cls = type(value)
        passes = isinstance(value, Stream) or callable(getattr(cls, "__get__", None))
        return not passes and cls.__module__.partition(".")[0] not in _ALIVE


def _names(kept: Kept) -> Iterator[str]:
    """Names of what differs."""
    holder, kind, before = kept
    if isinstance(before, dict):
        now, cls = kept.now(), holder if isinstance(holder, type) else type(holder)
        for name in differing(before, now):
            yield str(name) if kind in (ITEMS, _VARIABLES) else f"{cls.__name__}.{name}"
            yield from [RANDOM_NUMBERS] if isinstance(now.get(name), tuple(GENERATORS)) else []
    elif isinstance(holder, tuple(GENERATORS)):
        yield RANDOM_NUMBERS
    elif isinstance(holder, types.GeneratorType):
        yield holder.__name__
    elif kind is _HUGE:
        yield f"an array of {holder.size} numbers"


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, and the global values that it names."""
    variables, found = function.__globals__, dict[str, Any]()
    if not is_machinery(function):
        found.update(__defaults__=function.__defaults__, __kwdefaults__=function.__kwdefaults__)
        known = ((name, variables[name]) for name in function.__code__.co_names if name in variables)
        # Following functions and classes of a module would reach everything.
        found.update((name, value) for name, value in known if not isinstance(value, tuple(_CODE)))
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


_CLASSES = Kind(lambda value: type(value).__mro__)
_HUGE = Kind(lambda value: crc32(value.tobytes()))
_IN_C = Kind(bytes, lambda value, before: ctypes.memmove(ctypes.byref(value), before, len(before)))
_VARIABLES = Kind(_variables, _put_variables)
_CODE: Mapping[type, Kind] = {
    type: named(lambda cls: dict(vars(cls))),
    types.FunctionType: _VARIABLES,
    types.MethodType: Kind(lambda value: (value.__self__, value.__func__)),
    partial: Kind(lambda value: (value.func, value.args, value.keywords)),
    types.GeneratorType: Kind(lambda value: value.gi_frame and (value.gi_frame.f_lasti, str(value.gi_frame.f_locals))),
}
