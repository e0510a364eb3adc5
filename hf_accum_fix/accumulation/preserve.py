"""Run code as if it had not been run: put back the tensors, Python values and random generators that it changes.

Two kinds of state are kept, each in the way that costs least:

- *tensors*, whoever holds them: a dispatch mode sees every in-place operation before it runs and copies the storage it
  is about to write to, unless that storage was made inside. A model that changes nothing is never copied.
- *Python values*: attributes, containers, slots and arrays reachable from the given objects (modules, a trainer, its
  meters) are noted before and put back, shallowly, where they differ; generators among them get their state back.

What stays out of sight: globals and closures of the code that is run, and whatever it sends elsewhere.
"""

from __future__ import annotations

import operator
import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import islice, tee
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
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
#: Packages whose objects are machinery, not state that a loss notes something on.
_MACHINERY = frozenset(
    {"accelerate", "datasets", "deepspeed", "hf_accum_fix", "numpy", "tokenizers", "torch", "transformers", "wrapt"}
) | (sys.stdlib_module_names - {"__main__"})
#: Of those, the objects that a loss does note something on.
_NOTED_ON = frozenset(
    {"TrainerState", "TrainerControl", "TrainingArguments", "Seq2SeqTrainingArguments", "SimpleNamespace"}
)


class Kept(NamedTuple):
    """One piece of Python state: what puts it back, and whether it differs in what a loss may depend on."""

    undo: Callable[[], object]
    differs: Callable[[], bool] = bool


class Preserved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a ``with`` block state may change; `restore`, and the end of the block, put it back.

    Args:
        model: whose modes, buffers, parameters, generators and Python attributes are kept.
        others: further objects whose attributes are kept, such as a trainer.
        leave: objects that are not followed, such as data sets.
        sharded: an engine moves the parameters in every forward, and keeps notes on the modules: only buffers, modes
            and what hangs on ``others`` are kept.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, *others: object, leave: Iterable[object] = (), sharded: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        modules = list(model.modules())
        self._sharded = sharded
        self._made_inside: set[int] = set()
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._kept = _noted(others if sharded else (*modules, *others), leave, follow_modules=not sharded)
        for module in modules:
            held = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
            self._kept += [_buffer_kept(module._buffers, name, buffer) for name, buffer in held]
        for parameter in () if sharded else model.parameters():
            self._kept += [_data_kept(parameter), _attribute_kept(parameter, "grad")]
        self._kept += [_attribute_kept(module, "training") for module in modules]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what ``func`` is about to write to, once a storage; note what it makes."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:
            return func(*args, **kwargs)
        if schema.is_mutable:
            given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(given.get(argument.name))
        out = func(*args, **kwargs)
        returned = out if isinstance(out, (tuple, list)) else (out,)
        for each, declared in zip(returned, schema.returns, strict=False):
            if declared.alias_info is None:
                self._made_inside.update(map(_address, _plain(each)))
        return out

    def wrote(self) -> bool:
        """Whether a tensor that was there before has been written to, or a Python value that a loss may depend on.

        A list that has grown by Python numbers is a log, and an integer counts.
        """
        # A copy: comparing them is seen by this mode, too.
        if any(not torch.equal(*_as_bytes(storage, content)) for storage, content in [*self._written.values()]):
            return True
        return any(each.differs() for each in self._kept)

    def restore(self) -> None:
        """Put everything back as it was when this was made."""
        with torch.no_grad():
            for storage, content in self._written.values():
                if storage.nbytes() == content.nbytes():
                    storage.copy_(content, False)
            for each in self._kept:
                each.undo()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Restore, also after an error."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self.restore()

    def _keep(self, value: Any) -> None:
        if self._sharded:
            return
        for tensor in _plain(value):
            address = _address(tensor)
            if address not in self._made_inside and address not in self._written:
                storage = tensor.untyped_storage()
                self._written[address] = (storage, storage.clone())  # type: ignore[no-untyped-call]


def _as_bytes(*storages: torch.UntypedStorage) -> list[Tensor]:
    return [torch.tensor([], dtype=torch.uint8, device=each.device).set_(each) for each in storages]


def _plain(value: Any) -> list[Tensor]:
    """The tensors in a value that have a storage of their own: no wrappers such as DTensor."""
    return [
        each for each in tree_leaves(value) if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
    ]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def python_state_kept(*roots: object, leave: Iterable[object] = ()) -> ExitStack:
    """A context that puts back attributes and containers of some objects; tensors and modules are not looked at."""
    stack = ExitStack()
    for each in _noted(roots, leave, follow_modules=False):
        stack.callback(each.undo)
    return stack


def _noted(roots: Iterable[object], leave: Iterable[object], *, follow_modules: bool = True) -> list[Kept]:
    """What puts back the state of everything reachable from the roots."""
    seen = {id(each) for each in leave}
    kept: list[Kept] = []
    pending = list(roots)
    rooted = {id(root) for root in pending}
    while pending:
        each: Any = pending.pop()
        if isinstance(each, (str, int, float, bool, bytes, type(None))) or id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if isinstance(each, Tensor):
            if kind is Tensor and each.layout is torch.strided and not each.is_nested:
                kept.append(_data_kept(each))
        elif kind is np.ndarray:
            if each.size <= _MOST_NUMBERS and each.flags.writeable:
                kept.append(_array_kept(each))
        elif kind in _DICTS or (isinstance(each, dict) and not _is_machinery(kind)):
            if kind not in _DICTS:
                pending.append(getattr(each, "__dict__", None))
            kept += _dict_kept(each)
            if len(each) <= _MOST_ELEMENTS:
                pending.extend(each.values())
        elif kind in _SEQUENCES or (isinstance(each, _SEQUENCES) and not _is_machinery(kind)):
            if kind not in _SEQUENCES:
                pending.append(getattr(each, "__dict__", None))
            kept.append(_sequence_kept(each))
            if len(each) <= _MOST_ELEMENTS:
                pending.extend(each)
        elif kind is set:
            kept.append(_set_kept(each))
        elif kind is tuple:
            pending.extend(each[:_MOST_ELEMENTS])
        elif isinstance(each, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            kept.append(_generator_kept(each))
        elif id(each) in rooted or (follow_modules if isinstance(each, nn.Module) else _holds_state(each)):
            kept += _dict_kept(vars(each))
            pending.extend(vars(each).values())
        if not (isinstance(each, type) or _is_machinery(kind)):
            kept += _slots_kept(each, pending)
    return kept


def _is_machinery(kind: type) -> bool:
    return kind.__name__ not in _NOTED_ON and kind.__module__.partition(".")[0] in _MACHINERY


def _holds_state(value: object) -> bool:
    is_code = isinstance(value, type) or callable(getattr(type(value), "__get__", None))
    return hasattr(value, "__dict__") and not is_code and not _is_machinery(type(value))


def _is_stream(value: object) -> bool:
    known = type(value).__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")
    return known and isinstance(value, Iterator)


def _streams_kept(holder: dict[Any, Any]) -> list[Kept]:
    """Generators and iterators, a loader's too, that a dict holds: what is drawn from one is drawn again afterwards.

    One that was drawn from is replaced for good, by an iterator over the same values: it cannot be wound back.
    """
    undo: list[Kept] = []
    for name, stream in [(name, value) for name, value in holder.items() if _is_stream(value)]:
        drawn: list[bool] = []

        def values(stream: Any = stream, drawn: list[bool] = drawn) -> Iterator[Any]:
            for value in stream:
                drawn.append(True)
                yield value

        (kept,) = tee(values(), 1)
        holder[name] = copy(kept)

        def put_back(name: Any = name, stream: Any = stream, drawn: list[bool] = drawn, kept: Any = kept) -> None:
            holder[name] = copy(kept) if drawn else stream

        undo.append(Kept(put_back))
    return undo


def _dict_kept(value: dict[Any, Any]) -> list[Kept]:
    streams = _streams_kept(value)
    before = dict(value)
    telling = [(key, each) for key, each in before.items() if isinstance(each, (float, Tensor))]

    def undo() -> None:
        if len(value) != len(before) or any(value.get(key, _ABSENT) is not kept for key, kept in before.items()):
            # Whatever a class of its own makes of them.
            methods: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            methods.clear(value)
            methods.update(value, before)

    def differs() -> bool:
        # A number that a class gave is an attribute from its first change on.
        begun = any(isinstance(each, float) for key, each in value.items() if key not in before)
        now = ((value.get(key, _ABSENT), each) for key, each in telling)
        return begun or any(new is not old and not (isinstance(new, float) and new == old) for new, old in now)

    return [Kept(undo, differs), *streams]


def _attribute_kept(value: Any, name: str, is_same: Callable[[Any, Any], bool] = operator.is_) -> Kept:
    before = getattr(value, name)

    def undo() -> None:
        if not is_same(getattr(value, name), before):
            setattr(value, name, before)

    return Kept(undo)


def _data_kept(value: Tensor) -> Kept:
    """What ``.data = ...`` puts elsewhere; what is written in place is seen by the dispatch mode."""
    return _attribute_kept(value, "data", lambda now, before: now.data_ptr() == before.data_ptr())


def _buffer_kept(holder: dict[str, Tensor | None], name: str, buffer: Tensor) -> Kept:
    before = buffer.detach().clone()

    def undo() -> None:
        holder[name] = buffer
        # BatchNorm changes its statistics by an operation that does not say so.
        if buffer.layout is not torch.strided or not torch.equal(buffer, before):
            buffer.copy_(before)

    return Kept(undo)


def _array_kept(value: np.ndarray[Any, Any]) -> Kept:
    before = value.copy()
    return Kept(lambda: np.copyto(value, before), lambda: value.tobytes() != before.tobytes())


def _slots_kept(value: object, pending: list[Any]) -> list[Kept]:
    """What puts back the slots of an object; what they hold is followed."""
    undo: list[Kept] = []
    for kind in type(value).__mro__:
        slots = vars(kind).values() if "__slots__" in vars(kind) else ()
        for slot in (each for each in slots if isinstance(each, MemberDescriptorType)):
            try:
                before = slot.__get__(value, kind)
            except AttributeError:
                continue
            pending.append(before)
            undo.append(Kept(partial(slot.__set__, value, before)))
    return undo


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
    if isinstance(value, torch.Generator):
        return Kept(partial(value.set_state, value.get_state()))
    if isinstance(value, random.Random):
        return Kept(partial(value.setstate, value.getstate()))
    if isinstance(value, np.random.RandomState):
        return Kept(partial(value.set_state, value.get_state(legacy=False)))
    return Kept(partial(setattr, value.bit_generator, "state", value.bit_generator.state))


def _without_fsdp_hooks(model: nn.Module) -> None:
    """Take off the hooks that FSDP1 hangs on its parameters in a forward with gradient, for a backward that never came.

    The next forward would keep them, on nodes of another dtype. As ``torch.distributed.fsdp`` does at a backward's end.
    """
    for module in model.modules():
        parameter = getattr(getattr(module, "_handle", None), "flat_param", None)
        hooks = getattr(parameter, "_post_backward_hook_state", None)
        if parameter is not None and hooks is not None:
            hooks[-1].remove()
            del parameter._post_backward_hook_state


class overridden(AbstractContextManager[None]):
    """Inside a ``with`` block an attribute of one object is another; afterwards it is as it was.

    A class, since as a generator it takes twice the time, and every micro-batch enters it several times.
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
def undisturbed(
    model: nn.Module, *others: object, leave: Iterable[object] = (), sharded: bool = False
) -> Iterator[Preserved]:
    """Run forwards as training does, without gradient, and leave everything as it was; arguments as `Preserved`'s."""
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
