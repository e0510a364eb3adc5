"""Keep attributes, lists, dicts, tensors and random generators of some objects, and restore those that differ.

Objects are followed three levels deep. Elements are kept by identity, since each has a state of its own.
"""

from __future__ import annotations

import logging
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pickle import dumps, loads
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

#: Containers with more elements than this hold data: their elements are not followed.
_MOST_ELEMENTS = 1000

_ABSENT = object()
_PLAIN = (str, int, float, bool, bytes, type(None), type, types.ModuleType, logging.Logger)
#: Packages whose objects hold no state that a loss depends on, but for these.
_MACHINERY = frozenset(
    {"accelerate", "datasets", "deepspeed", "hf_accum_fix", "numpy", "tokenizers", "torch", "transformers", "wrapt"}
) | (sys.stdlib_module_names - {"__main__"})
_NOTED_ON = {"TrainerState", "TrainerControl", "TrainingArguments", "Seq2SeqTrainingArguments", "SimpleNamespace"}
#: How the state of a random generator is read and put back.
GENERATORS: Final[Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]]] = {
    torch.Generator: (lambda one: one.get_state().numpy(), lambda one, to: one.set_state(torch.from_numpy(to))),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda one: one.bit_generator.state, lambda one, to: setattr(one.bit_generator, "state", to)
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}  # fmt: skip


class PythonState(AbstractContextManager[Any]):
    """The state of the objects that are reached from some roots; inside a ``with`` block it may change.

    Args:
        roots: objects whose attributes are kept, whatever they are.
        leave: objects that are not followed, such as data sets.
        follow_modules: keep modules and parameters, too.

    Attributes:
        deep: levels of objects below the roots.
        machinery: packages whose objects are not followed.
        reached: the objects that were reached or left, by id.
        kept: their states; `preserve` adds those of storages.
    """

    deep = 3.0
    machinery = _MACHINERY

    def __init__(self, *roots: object, leave: Iterable[object] = (), follow_modules: bool = False) -> None:
        self.reached = {id(each): each for each in leave}
        self.kept: list[Kept] = []
        skipped = _PLAIN if follow_modules else (*_PLAIN, nn.Module, nn.Parameter)
        pending: list[tuple[Any, int]] = [(root, 0) for root in roots]
        for each, depth in pending:
            if id(each) in self.reached or (isinstance(each, skipped) and depth):
                continue
            self.reached[id(each)] = each
            if isinstance(each, nn.Module) and follow_modules:
                pending += [(module, depth) for module in each.modules()]
            holder, before = each, state_of(each)
            if before is None and (not depth or self._follows(each)):
                holder = getattr(each, "__dict__", None)
                before = state_of(holder)
            if before is not None:
                self.kept.append(Kept(holder, before))
            held = [*before.values()] if isinstance(before, dict) else before if isinstance(before, list) else []
            held = [*held, *self.passed_by(each)]
            if depth < self.deep and len(held) <= _MOST_ELEMENTS:
                pending += [(one, depth + 1) for one in held]

    def _follows(self, value: Any) -> bool:
        """Whether the attributes of an object are state."""
        name, package = type(value).__name__, type(value).__module__
        # A loss may step an optimizer of its own.
        is_noted = isinstance(value, nn.Module) or name in _NOTED_ON or package.startswith("torch.optim")
        return is_noted or package.partition(".")[0] not in self.machinery

    def passed_by(self, value: Any) -> list[Any]:
        """What an object holds besides its state."""
        return [*value] if isinstance(value, tuple) else []

    def wrote(self) -> bool:
        """Whether anything has changed but random generators."""
        # A copy, since a mode that adds storages also sees their comparison.
        return any(each.differs() for each in [*self.kept])

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything as it was at the start."""
        for each in self.kept:
            each.put()

    def __exit__(self, *_: object) -> None:
        """Restore, also after an error."""
        self.restore()


class Kept(NamedTuple):
    """The state that ``holder`` had before: what `state_of` found, a module's mode, or a copy of a storage."""

    holder: Any
    before: Any

    def differs(self) -> bool:
        """Whether a dict or a list has other elements now, or a storage other bytes."""
        holder, before = self
        if isinstance(before, dict):
            pairs = ((holder.get(name, _ABSENT), value) for name, value in before.items())
            return len(holder) != len(before) or any(one is not other for one, other in pairs)
        if isinstance(before, list):
            return len(holder) != len(before) or any(
                one is not other for one, other in zip(holder, before, strict=True)
            )
        if not isinstance(before, torch.UntypedStorage):
            return False
        one, other = (torch.tensor([], dtype=torch.uint8, device=each.device).set_(each) for each in (before, holder))
        return not torch.equal(one, other)

    def put(self) -> None:
        """Restore it where it differs."""
        holder, before = self.holder, self.before
        if isinstance(before, (dict, list)):
            if self.differs():
                holder.clear()
                (holder.update if isinstance(before, dict) else holder.extend)(before)
        elif isinstance(before, tuple):
            data, *of_parameter = before
            if data is not None and holder.data_ptr() != data.data_ptr():
                holder.data = data
            for name, value in zip(("grad", "requires_grad"), of_parameter, strict=False):
                if getattr(holder, name) is not value:
                    setattr(holder, name, value)
        elif isinstance(before, bool):
            holder.training = before
        elif isinstance(before, bytes):
            if state_of(holder) != before:
                next(put for kind, (_, put) in GENERATORS.items() if isinstance(holder, kind))(holder, loads(before))
        elif holder.nbytes() == before.nbytes():
            holder.copy_(before, False)


def state_of(value: Any) -> Any:
    """A copy of the state of one object, its elements by identity; None: it has none, or that of its attributes."""
    if type(value) in (dict, defaultdict, OrderedDict, Counter):
        return dict(value)
    if type(value) in (list, deque):
        return list(value)
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
        data = value.data if is_plain else None
        return (data, value.grad, value.requires_grad) if isinstance(value, nn.Parameter) else (data,)
    return next((dumps(get(value)) for kind, (get, _) in GENERATORS.items() if isinstance(value, kind)), None)
