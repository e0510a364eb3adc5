"""What an object holds: by its attributes, containers, bound methods, and what its functions close over."""

from __future__ import annotations

import functools
import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from torch import Tensor

#: Containers to look into and to copy.
CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, set, deque)
#: Longer ones hold data.
_LONG: Final = 1000
#: Shared by many objects, or without content.
_CLOSED: Final = (str, bytes, int, float, bool, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_SHARED: Final = (Tensor, np.ndarray, np.generic, logging.Logger)


def reachable(*roots: Any) -> Iterator[Any]:
    """The roots and all that they hold, each once; for functions among the roots also the globals they name."""
    seen: dict[int, Any] = {}
    waiting = [*roots, *(held for root in roots if isinstance(root, types.FunctionType) for held in _globals(root))]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if not isinstance(value, _SHARED):
            waiting += _held(value)


def _held(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        return [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.GeneratorType):
        return []
    found: list[Any] = []
    if type(value) in (*CONTAINERS, tuple) and len(value) <= _LONG:
        found += value.values() if isinstance(value, dict) else value
    if hasattr(value, "__dict__"):
        found += vars(value).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += (object.__getattribute__(value, name) for name in names if _is_set(value, name))
    return found


def _is_set(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return found


def _globals(function: types.FunctionType) -> list[Any]:
    """Variables, without functions and classes of a module, which lead everywhere."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [each for each in named if not isinstance(each, types.FunctionType)]
