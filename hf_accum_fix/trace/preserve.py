"""Run a forward without noise and side effects: what it changes of tensors, attributes and generators is restored.

Objects are followed three levels deep; elements are kept by identity, since each has a state of its own. A storage is
recorded when it is about to be written to, which a dispatch mode sees; what is not written to is never copied.
"""

from __future__ import annotations

import logging
import random
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pickle import dumps, loads
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The place and the name of an operation's dropout rate.
_DROPOUTS = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_), (1, "p")),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}
_RANDOM = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like),
    *(Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_),
}
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
_GENERATORS: Final[Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]]] = {
    torch.Generator: (lambda one: one.get_state().numpy(), lambda one, to: one.set_state(torch.from_numpy(to))),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda one: one.bit_generator.state, lambda one, to: setattr(one.bit_generator, "state", to)),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}  # fmt: skip


class Kept(NamedTuple):
    """What ``holder`` was: its elements, attributes by name, the state of a generator, or a copy of a storage."""

    holder: Any
    before: Any

    def put(self) -> None:
        """Restore it where it differs."""
        holder, before = self
        if isinstance(before, (dict, list)):
            if self.differs():
                holder.clear()
                (holder.update if isinstance(before, dict) else holder.extend)(before)
        elif isinstance(before, tuple):
            for name, value in before:
                now = getattr(holder, name)
                if now is not value and (name != "data" or now.data_ptr() != value.data_ptr()):
                    setattr(holder, name, value)
        elif isinstance(before, bytes):
            next(put for kind, (_, put) in _GENERATORS.items() if isinstance(holder, kind))(holder, loads(before))
        elif holder.nbytes() == before.nbytes():
            holder.copy_(before, False)

    def differs(self) -> bool:
        """Whether it has other elements now, or other bytes."""
        if isinstance(self.before, torch.UntypedStorage):
            return not torch.equal(
                *(torch.tensor([], dtype=torch.uint8, device=each.device).set_(each) for each in self)
            )
        if not isinstance(self.before, (dict, list)):
            return False
        # Others, new, or gone.
        now, before = map(_by_place, self)
        return any(now.get(name, _ABSENT) is not before.get(name, _ABSENT) for name in {**before, **now})


def _by_place(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value))


def _state_of(value: Any) -> Any:
    """What `Kept` restores of one object, its elements by identity; None: nothing, or its attributes."""
    if type(value) in (dict, defaultdict, OrderedDict, Counter):
        return dict(value)
    if type(value) in (list, deque):
        return list(value)
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
        attributes = ("grad", "requires_grad") if isinstance(value, nn.Parameter) else ()
        return tuple((name, getattr(value, name)) for name in (*(("data",) if is_plain else ()), *attributes))
    return next((dumps(get(value)) for kind, (get, _) in _GENERATORS.items() if isinstance(value, kind)), None)


class PythonState(AbstractContextManager[Any]):
    """The state of the objects that are reached from some roots; inside a ``with`` block it may change.

    Args:
        roots: objects whose attributes are kept, whatever they are.
        leave: objects that are not followed, such as data sets.
        follow_modules: keep modules and parameters, too.
    """

    deep = 3.0  # levels of objects below the roots
    machinery = _MACHINERY  # packages whose objects are not followed

    def __init__(self, *roots: object, leave: Iterable[object] = (), follow_modules: bool = False) -> None:
        self.reached = {id(each): each for each in leave}  # or left, by id
        self.kept: list[Kept] = []  # their states; `KeepsStorages` adds those of storages
        skipped = _PLAIN if follow_modules else (*_PLAIN, nn.Module, nn.Parameter)
        pending: list[tuple[Any, int]] = [(root, 0) for root in roots]
        for each, depth in pending:
            if id(each) in self.reached or (isinstance(each, skipped) and depth):
                continue
            self.reached[id(each)] = each
            if isinstance(each, nn.Module) and follow_modules:
                pending += [(module, depth) for module in each.modules()]
            holder, before = each, _state_of(each)
            if before is None and (not depth or self._follows(each)):
                holder = getattr(each, "__dict__", None)
                before = _state_of(holder)
            if before is not None:
                self.kept.append(Kept(holder, before))
            held = [*_by_place(before).values()] if isinstance(before, (dict, list)) else []
            held += self.passed_by(each)
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

    def keep_storages(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Add copies of storages."""
        self.kept += [Kept(each, each.clone()) for each in storages]  # type: ignore[no-untyped-call]

    def wrote(self) -> bool:
        """Whether anything has changed but random generators."""
        # A copy, since a mode that adds storages also sees their comparison.
        return any(each.differs() for each in [*self.kept])

    def drew(self) -> bool:
        """Whether a generator has drawn a number."""
        return any(isinstance(before, bytes) and _state_of(holder) != before for holder, before in self.kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything as it was at the start."""
        for each in self.kept:
            each.put()

    def __exit__(self, *_: object) -> None:
        """Restore, also after an error."""
        self.restore()


def random_states() -> PythonState:
    """The states of the generators that need not be named: of Python, numpy, and torch on the CPU and on devices."""
    devices = [getattr(torch, kind, None) for kind in ("cuda", "xpu", "npu")]
    on_devices = [one for each in devices for one in getattr(each, "default_generators", ())]
    return PythonState(random._inst, np.random.mtrand._rand, torch.default_generator, *on_devices)


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
        written = _storages([args[at] if at < len(args) else kwargs.get(name) for at, name in writes])
        new = {each._cdata: each for each in written if each._cdata not in self._known}
        self._state.keep_storages(new.values())
        self._known |= new.keys()
        out = func(*args, **kwargs)
        results = zip(out if isinstance(out, (tuple, list)) else (out,), makes, strict=False)
        self._known.update(storage._cdata for storage in _storages([each for each, made in results if made]))
        return out


@cache
def _effects(func: Any) -> tuple[list[tuple[int, str]], list[bool]]:
    """The arguments that an operation writes to, by place and name; whether each result is a new tensor."""
    if (schema := getattr(func, "_schema", None)) is None:
        return [], []
    # BatchNorm does not declare its statistics.
    undeclared = ("running_mean", "running_var")
    places = [(place, each.name, each.alias_info) for place, each in enumerate(schema.arguments)]
    writes = [(place, name) for place, name, its in places if name in undeclared or (its is not None and its.is_write)]
    return writes, [each.alias_info is None for each in schema.returns]


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in a value; wrappers such as DTensor have none of their own."""
    found = [each for each in tree_leaves(value) if type(each) in (Tensor, nn.Parameter)]
    return [each.untyped_storage() for each in found if each.layout is torch.strided]


def with_buffers(state: PythonState, model: nn.Module) -> PythonState:
    """Add the buffers and modes of a model to a state, which restores them without waiting for its device."""
    for module in model.modules():
        state.kept += [Kept(module, (("training", module.training),)), Kept(module._buffers, dict(module._buffers))]
        state.keep_storages(_storages([*module._buffers.values()]))
    return state


class overridden(AbstractContextManager[None]):
    """Override an attribute of one object inside a ``with`` block.

    A class, since every micro-batch enters it several times, and a generator would take twice the time.
    """

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
    state = PythonState(*() if sharded else (model,), *others, leave=leave, follow_modules=not sharded)
    with (
        random_states(),
        torch.no_grad(),
        eagerly(),
        warnings.catch_warnings(),
        with_buffers(state, model) if sharded else state,
        nullcontext() if sharded else KeepsStorages(state),
    ):
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
        model.train()
        try:
            yield state
        finally:
            _remove_fsdp_hooks(model)


def _remove_fsdp_hooks(model: nn.Module) -> None:
    """Remove the hooks that FSDP1 sets on its parameters in a forward with gradient, since no backward follows.

    ``torch.distributed.fsdp`` does this at a backward's end; the next forward would keep them, for another dtype.
    """
    for module in model.modules():
        parameter: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        if (hooks := getattr(parameter, "_post_backward_hook_state", None)) is not None:
            hooks[-1].remove()
            del parameter._post_backward_hook_state


def seed_generators(number: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class WithoutNoise(TorchFunctionMode):
    """Make the forward a function of its inputs: no dropout, the same noise for all rows.

    ``alike``: noise depends on its shape alone, so that it is the same in every batch (points in a mask).
    """

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self._alike = alike

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            position, name = _DROPOUTS[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        if func not in _RANDOM:
            return func(*args, **kwargs)
        with random_states() if self._alike else nullcontext():
            if self._alike:
                torch.manual_seed(0)
            out = func(*args, **kwargs)
        if out.ndim > 1:
            with torch.no_grad():
                out.copy_(out[:1].expand_as(out).clone())
        return out
