"""Facts about a Trainer, readable in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from types import CellType, CodeType
from typing import Any

from transformers import Trainer

from hf_accum_fix.engines.model import has_parameter
from hf_accum_fix.engines.sample_shards import axis_size

#: The modules of the base Trainer, with and without the patch.
_OURS = ("hf_accum_fix.trainer", Trainer.__module__)
_STEP = "hf_accum_fix.overrides.step"
#: Stands for calls that cannot be read, among the names in code.
_UNREADABLE = "?"
#: Names of the number of ranks.
_RANKS = {"num_processes", "world_size", "get_world_size", "n_gpu"}


def data_ranks(trainer: Any) -> int:
    """W, data-parallel ranks, which engines average over."""
    return int(trainer.args.world_size) // parallel_size(trainer, "tp")


def parallel_size(trainer: Any, axis: str) -> int:
    """Size of a parallel dimension, "tp", "cp" or "sp"."""
    own = getattr(trainer, f"get_{axis}_size", None)
    return axis_size(trainer.accelerator, axis) if own is None else int(own())


def release_counts_windows() -> bool:
    """Whether the release's Trainer counts the items of a window: 4.46 and later."""
    return hasattr(Trainer, "get_batch_samples")


def hands_number(compute_loss: Callable[..., Any]) -> bool:
    """Whether the release's Trainer passes num_items_in_batch to a custom ``compute_loss``."""
    return release_counts_windows() and has_parameter(compute_loss, "num_items_in_batch")


def scales_itself(trainer: Any) -> bool:
    """Whether a trainer declares that its loss is already divided by the accumulation steps.

    Source: ``Trainer.loss_is_scaled_for_ga`` (5.19.0 on); before it, a ``compute_loss_func`` that is not callable.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    func = getattr(trainer, "compute_loss_func", None)
    return (func is not None and not callable(func)) if declared is None else bool(declared)


def is_custom(trainer: Any, method: str) -> bool:
    """Whether a method is not the base's; that of a running micro-batch does not count."""
    held = getattr(vars(trainer).get(method), "__module__", _STEP)
    defined = next((cls.__module__ for cls in type(trainer).__mro__ if method in vars(cls)), Trainer.__module__)
    return held != _STEP or defined not in _OURS


def compute_loss_of(trainer: Any) -> Callable[..., Any] | None:
    """A trainer's custom ``compute_loss``; None: it is the base's."""
    return trainer.compute_loss if is_custom(trainer, "compute_loss") else None


def replaces_step(trainer: Any) -> bool:
    """Whether a custom ``training_step`` never calls the base's, as its code shows; False if that cannot be read.

    It is not run to find out, since a step may change what it is run on.
    """
    own = takewhile(lambda cls: cls.__module__ not in _OURS, type(trainer).__mro__)
    steps = [inspect.unwrap(step) for each in (trainer, *own) if (step := vars(each).get("training_step")) is not None]
    custom = [each for each in steps if getattr(each, "__module__", "") not in _OURS]
    return any(not {"training_step", _UNREADABLE} & _named_in(type(trainer), each) for each in custom)


def own_numbers(trainer: Any, steps: set[int], ranks: int) -> tuple[frozenset[int], frozenset[int]]:
    """The numbers above 1 among G (``steps``) and W that the code of the trainer's own loss or step names: of G, of W.

    A trainer that declares its scale has none.
    """
    declares = getattr(trainer, "loss_is_scaled_for_ga", None) is not None or scales_itself(trainer)
    # A constructor may keep them.
    own = [getattr(trainer, each) for each in ("compute_loss", "training_step", "__init__") if is_custom(trainer, each)]
    func = getattr(trainer, "compute_loss_func", None)
    names = set[str]() if declares else _named_in(type(trainer), *own, *([] if func is None else [func]))
    of_steps = {each for each in steps if each > 1 and any("accum" in name for name in names)}
    return frozenset(of_steps), frozenset({ranks} if ranks > 1 and names & _RANKS else ())


def _named_in(cls: type, *functions: Any) -> set[str]:
    """What the code of functions names, and of those it leads to: of its class, closures and own modules.

    `_UNREADABLE` is among them if the first is no function, or wraps what it calls.
    """
    pending, seen, found = [*functions], set[CodeType](), set[str]()
    while pending:
        function = inspect.unwrap(pending.pop())
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells if cell != CellType()]
        if not found and (code is None or any(callable(each) and not isinstance(each, type) for each in held)):
            # A wrapper's closure has what it calls.
            found.add(_UNREADABLE)
        if code is None or code in seen or function.__module__ == Trainer.__module__:
            continue
        seen.add(code)
        codes, names = [code], set[str]()
        for each in codes:
            words = {word for word in each.co_consts if isinstance(word, str) and word.isidentifier()}
            names |= {*each.co_names, *each.co_freevars, *words}
            codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        found |= names
        spaces = (*map(vars, cls.__mro__), function.__globals__)
        held += [space[name] for name in names for space in spaces if name in space]
        root = function.__module__.partition(".")[0]
        # Other packages name the steps for reasons of their own.
        pending += [each for each in held if inspect.isfunction(each) and each.__module__.partition(".")[0] == root]
    return found


def counts_itself(trainer: Any) -> bool:
    """Whether a trainer overrides how the items of a window are counted."""
    method = getattr(type(trainer), "_get_num_items_in_batch", None)
    return method is not None and method.__module__ != Trainer.__module__
