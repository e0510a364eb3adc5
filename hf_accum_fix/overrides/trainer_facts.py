"""Facts about a Trainer, readable in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from types import CellType, CodeType
from typing import Any

from transformers import Trainer

from hf_accum_fix.accumulation.declared import has_parameter
from hf_accum_fix.upstream.protocols import TrainerLike

#: The modules of the base Trainer, with and without the patch.
_OURS = ("hf_accum_fix.trainer", Trainer.__module__)
_MICRO_BATCH = "hf_accum_fix.overrides.micro_batch"
#: Names of the number of ranks.
_RANKS = {"num_processes", "world_size", "get_world_size", "n_gpu"}


def data_ranks(trainer: TrainerLike) -> int:
    """W, data-parallel ranks, which engines average over."""
    return int(trainer.args.world_size) // parallel_size(trainer, "tp")


def parallel_size(trainer: TrainerLike, axis: str) -> int:
    """Size of a parallel dimension, "tp", "cp" or "sp"."""
    size = getattr(trainer, f"get_{axis}_size", None)
    if size is not None:
        return int(size())
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return int(getattr(config, f"{axis}_size", 1) or 1)


def release_counts_windows() -> bool:
    """Whether the release's Trainer counts the items of a window: 4.46 and later."""
    return hasattr(Trainer, "get_batch_samples")


def averages_tokens(trainer: TrainerLike) -> bool:
    """Whether the release's Trainer counts the items of all ranks."""
    return bool(getattr(trainer.args, "average_tokens_across_devices", False))


def hands_number(compute_loss: Callable[..., Any]) -> bool:
    """Whether the release's Trainer passes num_items_in_batch to a custom ``compute_loss``."""
    return release_counts_windows() and has_parameter(compute_loss, "num_items_in_batch")


def scales_itself(trainer: TrainerLike) -> bool:
    """Whether a trainer declares that its loss is already divided by the accumulation steps.

    Source: ``Trainer.loss_is_scaled_for_ga`` (5.19.0 on); before it, a ``compute_loss_func`` that is not callable.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    func = getattr(trainer, "compute_loss_func", None)
    return (func is not None and not callable(func)) if declared is None else bool(declared)


def is_custom(trainer: TrainerLike, *methods: str) -> bool:
    """Whether one of these methods is not the base's; that of a running micro-batch does not count."""
    held = [vars(trainer)[name] for name in methods if name in vars(trainer)]
    defining = (next((cls for cls in type(trainer).__mro__ if name in vars(cls)), Trainer) for name in methods)
    return any(getattr(each, "__module__", "") != _MICRO_BATCH for each in held) or any(
        cls.__module__ not in _OURS for cls in defining
    )


def compute_loss_of(trainer: TrainerLike) -> Callable[..., Any] | None:
    """A trainer's custom ``compute_loss``; None: it is the base's."""
    return trainer.compute_loss if is_custom(trainer, "compute_loss") else None


def replaces_step(trainer: TrainerLike) -> bool:
    """Whether a custom ``training_step`` never calls the base's, as its code shows.

    It is not run to find out, since a step may change what it is run on.
    """
    steps: list[Any] = [vars(trainer).get("training_step")]
    for cls in takewhile(lambda cls: cls.__module__ not in _OURS, type(trainer).__mro__):
        steps += [vars(cls)["training_step"].__get__(trainer)] if "training_step" in vars(cls) else []
    bare = (inspect.unwrap(step) for step in steps if step is not None)
    return any(getattr(each, "__module__", "") not in _OURS and not _calls_base(type(trainer), each) for each in bare)


def _calls_base(cls: type, function: Any) -> bool:
    """Whether a method names ``training_step``, or what its code leads to does; True if that is unknown."""
    # A wrapper's closure has what it calls.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    if not hasattr(function, "__code__") or any(callable(each) and not isinstance(each, type) for each in held):
        return True
    return "training_step" in names_below(cls, function)


def names_below(cls: type, *functions: Any) -> set[str]:
    """What the code of methods names, and that of the functions it leads to: of its class, closures and own modules."""
    pending, seen, found = [*functions], set[Any](), set[str]()
    while pending:
        function = inspect.unwrap(pending.pop())
        if not hasattr(function, "__code__") or function.__code__ in seen or function.__module__ == Trainer.__module__:
            continue
        codes, names = [function.__code__], set[str]()
        for code in codes:
            words = (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
            names |= {*code.co_names, *code.co_freevars, *words}
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        seen.add(function.__code__)
        found |= names
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
        held += [
            space[name] for name in names for space in (*map(vars, cls.__mro__), function.__globals__) if name in space
        ]
        root = function.__module__.partition(".")[0]
        # Other packages name the steps for reasons of their own.
        pending += [each for each in held if inspect.isfunction(each) and each.__module__.partition(".")[0] == root]
    return found


def own_numbers(trainer: TrainerLike, steps: set[int], ranks: int) -> frozenset[int]:
    """G and W, those above 1, if the code of the trainer's own loss or step names the accumulation steps or the ranks.

    A trainer that declares its scale has no other.
    """
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None or scales_itself(trainer):
        return frozenset()
    # A constructor may keep them.
    own = (each for each in ("compute_loss", "training_step", "__init__") if is_custom(trainer, each))
    methods = [getattr(trainer, each) for each in own]
    names = names_below(type(trainer), *methods, getattr(trainer, "compute_loss_func", None))
    found = {*(steps if any("accum" in name for name in names) else ()), *((ranks,) if names & _RANKS else ())}
    return frozenset(each for each in found if each > 1)


def counts_itself(trainer: TrainerLike) -> bool:
    """Whether a trainer overrides how the items of a window are counted."""
    method = getattr(type(trainer), "_get_num_items_in_batch", None)
    return method is not None and method.__module__ != Trainer.__module__
