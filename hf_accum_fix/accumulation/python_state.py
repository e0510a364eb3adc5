"""Copy the state of every Python object reachable from some objects, and restore it where it differs.

A state is copied shallowly: attributes and elements by identity, since each of them is an object with a state of its
own; numbers by value. There is a `Kind` for each way of keeping a state; verification adds those of code.
"""

from __future__ import annotations

import logging
import operator
import random
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pickle import dumps, loads
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

#: Containers with more elements than this hold data: their elements are not followed.
_MOST_ELEMENTS = 1000

#: Arrays with more numbers than this hold data.
MOST_NUMBERS = 1 << 24

Own = TypeVar("Own", bound="PythonState")

_ABSENT = object()
_PLAIN = (str, int, float, bool, bytes, type(None), types.ModuleType, logging.Logger)
#: Packages whose objects hold no state that a loss depends on.
_MACHINERY = frozenset(
    {"accelerate", "datasets", "deepspeed", "hf_accum_fix", "numpy", "tokenizers", "torch", "transformers", "wrapt"}
) | (sys.stdlib_module_names - {"__main__"})
#: Exceptions to that.
_NOTED_ON = frozenset(
    {"TrainerState", "TrainerControl", "TrainingArguments", "Seq2SeqTrainingArguments", "SimpleNamespace"}
)


class PythonState:
    """The state of all Python objects reachable from some roots; inside a ``with`` block it may change.

    Args:
        roots: objects whose attributes are kept, whatever they are.
        leave: objects that are not followed, such as data sets.
        follow_modules: keep modules and parameters, too.

    Attributes:
        reached: the objects that were reached or left, by id.
        kept: their states; `preserve` adds those of tensors.
    """

    def __init__(self, *roots: object, leave: Iterable[object] = (), follow_modules: bool = False) -> None:
        self._roots = {id(root) for root in roots}
        self.reached = {id(each): each for each in leave}
        self.kept: list[Kept] = []
        skipped = _PLAIN if follow_modules else (*_PLAIN, nn.Module, nn.Parameter)
        pending: list[Any] = list(roots)
        while pending:
            each = pending.pop()
            if id(each) in self.reached or (isinstance(each, skipped) and id(each) not in self._roots):
                continue
            self.reached[id(each)] = each
            for kind in self.kinds_of(each):
                self.kept.append(_kept(each, kind))
                held = self.kept[-1].before
                if isinstance(held, (dict, list, tuple, frozenset)) and len(held) <= _MOST_ELEMENTS:
                    pending.extend(held.values() if isinstance(held, dict) else held)

    def kinds_of(self, value: Any) -> Iterator[Kind]:
        """The kinds of state that an object has."""
        cls = type(value)
        if isinstance(value, Tensor):
            if cls in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested:
                yield _DATA
            if isinstance(value, nn.Parameter):
                yield GRADIENT
        elif isinstance(value, np.ndarray):
            if cls is np.ndarray and value.flags.writeable and value.size <= MOST_NUMBERS:
                yield ARRAY
        # Containers of libraries may make their values as these are read.
        elif cls in KINDS or not is_machinery(cls):
            yield from [KINDS[base] for base in cls.__mro__ if base in KINDS][:1]
        if self.follows(value) or id(value) in self._roots:
            if isinstance(getattr(value, "__dict__", None), dict):
                yield ATTRIBUTES
            if any("__slots__" in vars(base) for base in cls.__mro__):
                yield SLOTS

    def follows(self, value: Any) -> bool:
        """Whether the attributes of an object are state."""
        return isinstance(value, nn.Module) or not is_machinery(type(value))

    def wrote(self) -> bool:
        """Whether a value has changed that a loss may depend on: no counter, and no log."""
        # A copy, since a mode that adds storages also sees their comparison.
        return any(each.differs() and _matters(each.before, each.now()) for each in [*self.kept])

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything as it was at the start."""
        for each in self.kept:
            if each.differs():
                each.kind.put(each.holder, each.before)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore, also after an error, and put the streams in their places again."""
        self.restore()
        for holder, kind, before in self.kept:
            named_values = before.items() if isinstance(before, dict) else ()
            if rewound := {name: each.rewound() for name, each in named_values if isinstance(each, Stream)}:
                kind.put(holder, before | rewound)


def is_machinery(cls: Any) -> bool:
    """Whether a class is a library's, whose objects hold no state that a loss depends on."""
    module = cls.__module__ or ""
    # A loss may step an optimizer of its own.
    is_noted = cls.__name__ in _NOTED_ON or module.startswith("torch.optim")
    return not is_noted and module.partition(".")[0] in _MACHINERY


# --- the state of one object ------------------------------------------------------------------------------------------


def lose(holder: Any, before: Any) -> None:
    """Leave a state that cannot be restored."""


class Kind(NamedTuple):
    """How one kind of state is copied, shallowly, and restored."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object] = lose


class Kept(NamedTuple):
    """The state that ``holder`` had before."""

    holder: Any
    kind: Kind
    before: Any

    def now(self) -> Any:
        """The state that it has."""
        return self.kind.get(self.holder)

    def differs(self) -> bool:
        """Whether it is another: other objects, or other numbers."""
        return not _same(self.before, self.now())


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return not differing(before, now)
    if isinstance(before, list):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    if isinstance(before, (Tensor, torch.UntypedStorage)):
        # Comparing the numbers would wait for the device.
        return bool(now.data_ptr() == before.data_ptr())
    return bool(now.tobytes() == before.tobytes() if isinstance(before, np.ndarray) else now == before)


def differing(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The names of other values, of new ones and of those that are gone."""
    return [name for name in {**before, **now} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]


def _matters(before: Any, now: Any) -> bool:
    """Whether a loss may depend on a difference."""
    if isinstance(before, list):
        # Words and counts may be a log.
        return not _same(before, now[: len(before)]) or any(map(_holds_numbers, now[len(before) :]))
    if isinstance(before, torch.UntypedStorage):
        one, other = (torch.tensor([], dtype=torch.uint8, device=each.device).set_(each) for each in (before, now))
        return not torch.equal(one, other)
    if not isinstance(before, dict):
        return isinstance(before, np.ndarray)
    pairs = [(before.get(name), now.get(name)) for name in differing(before, now)]
    # A number that was a class attribute becomes the object's with its first change.
    return any(
        _holds_numbers(new) if old is None else isinstance(old, Tensor) or (isinstance(old, float) and old != new)
        for old, new in pairs
    )


def _holds_numbers(value: Any) -> bool:
    """Whether a value holds numbers that a loss may use later: its first value, a moving average, a queue."""
    if isinstance(value, (list, tuple, deque, dict)):
        return any(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (float, Tensor))


class Stream(Iterator[Any]):
    """Stands for an iterator that has a name, such as a loader's, which cannot be rewound itself."""

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


def _kept(holder: Any, kind: Kind) -> Kept:
    """The state of an object, in which `Stream` replaces the iterators."""
    before = kind.get(holder)
    searched = before.items() if kind in (ATTRIBUTES, ITEMS) and len(before) <= _MOST_ELEMENTS else ()
    if streams := {name: Stream(each) for name, each in searched if _is_stream(each)}:
        before |= streams
        kind.put(holder, before)
    return Kept(holder, kind, before)


def _is_stream(value: object) -> bool:
    known = type(value).__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")
    return known and isinstance(value, Iterator)


# --- kinds of state ---------------------------------------------------------------------------------------------------


def _dict_methods(value: dict[Any, Any]) -> Any:
    """Those of the class that bypass the overrides of a subclass."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _put_items(value: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    _dict_methods(value).clear(value)
    _dict_methods(value).update(value, before)


def _put_elements(value: Any, before: Iterable[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(before)


def named(get: Callable[[Any], dict[str, Any]]) -> Kind:
    """Values by name, which setattr restores."""

    def put(value: Any, before: Mapping[str, Any]) -> None:
        methods = type if isinstance(value, type) else object
        for name in differing(before, get(value)):
            if name in before:
                methods.__setattr__(value, name, before[name])
            else:
                methods.__delattr__(value, name)

    return Kind(get, put)


def _slots(value: Any) -> dict[str, Any]:
    """The filled slots of an object."""
    found: dict[str, Any] = {}
    for own in (vars(cls) for cls in type(value).__mro__ if "__slots__" in vars(cls)):
        for name, slot in own.items():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    return found


def _drawing(get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> Kind:
    """The state of a random generator, as bytes, which can be compared."""
    return Kind(lambda value: dumps(get(value)), lambda value, before: put(value, loads(before)))


ATTRIBUTES = Kind(lambda value: dict(vars(value)), lambda value, before: _put_items(vars(value), before))
SLOTS = named(_slots)
GRADIENT = named(lambda value: {"grad": value.grad, "requires_grad": value.requires_grad})
MODE = named(lambda value: {"training": value.training})
#: A tensor, or a storage, whose copy is restored without a comparison.
NUMBERS = Kind(lambda value: value, lambda value, before: value.copy_(before))
STORAGE = Kind(
    lambda value: value, lambda value, before: value.nbytes() == before.nbytes() and value.copy_(before, False)
)
_DATA = Kind(lambda value: value.data, lambda value, before: setattr(value, "data", before))
ARRAY = Kind(np.copy, lambda value, before: np.copyto(value, before))
ITEMS = Kind(lambda value: dict(_dict_methods(value).items(value)), _put_items)
_LIST = Kind(lambda value: value[:], lambda value, before: operator.setitem(value, slice(None), before))
GENERATORS: Mapping[type, Kind] = {
    torch.Generator: _drawing(
        lambda value: value.get_state().numpy(), lambda value, before: value.set_state(torch.from_numpy(before))
    ),
    random.Random: _drawing(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _drawing(
        lambda value: value.bit_generator.state, lambda value, before: setattr(value.bit_generator, "state", before)
    ),
    np.random.RandomState: _drawing(np.random.RandomState.get_state, np.random.RandomState.set_state),
}
KINDS: Mapping[type, Kind] = {
    **dict.fromkeys((dict, defaultdict, OrderedDict, Counter), ITEMS),
    **dict.fromkeys((list, bytearray, array), _LIST),
    deque: Kind(list, _put_elements),
    set: Kind(frozenset, _put_elements),
    tuple: Kind(tuple),
    **GENERATORS,
    Stream: Kind(lambda value: value.at, lambda value, before: setattr(value, "at", before)),
}
