"""Facts about a Trainer, readable in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import CellType, CodeType
from typing import Any

from torch import nn
from transformers import Trainer

from hf_accum_fix.accumulation.declared import has_parameter, takes_number
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

    Source: ``Trainer.loss_is_scaled_for_ga`` (5.19.0 on); before it, a ``compute_loss_func`` that is not callable keeps
    the Trainer from dividing.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    func = getattr(trainer, "compute_loss_func", None)
    return (func is not None and not callable(func)) if declared is None else bool(declared)


def declares_scale(trainer: TrainerLike) -> bool:
    """Whether a trainer declares that its loss is, or is not, already divided by the accumulation steps."""
    return getattr(trainer, "loss_is_scaled_for_ga", None) is not None or scales_itself(trainer)


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


def replaced_step(trainer: TrainerLike) -> Callable[..., Any] | None:
    """A custom ``training_step`` that never calls the base's, as its code shows; None: there is none, or it does.

    It is not run to find out, since a step may change what it is run on.
    """
    steps: list[Any] = [vars(trainer).get("training_step")]
    for cls in takewhile(lambda cls: cls.__module__ not in _OURS, type(trainer).__mro__):
        steps += [vars(cls)["training_step"].__get__(trainer)] if "training_step" in vars(cls) else []
    for step in (each for each in steps if each is not None):
        bare = inspect.unwrap(step)
        if getattr(bare, "__module__", "") not in _OURS and not _calls_base(type(trainer), bare, {"training_step"}):
            return step  # type: ignore[no-any-return]
    return None


def _calls_base(cls: type, function: Any, seen: set[str]) -> bool:
    """Whether a method names ``training_step``, or calls a method of its class that does."""
    # A wrapper's closure has what it calls.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    is_known = hasattr(function, "__code__")
    if not is_known or any(callable(each) and not isinstance(each, type) for each in held):
        return True
    return any("training_step" in names for names in _names_below(cls, function, seen))


def _names_below(cls: type, function: Any, seen: set[str]) -> Iterator[set[str]]:
    """What the code of a method names, and that of the methods of its class which it names."""
    pending, names = [getattr(function, "__code__", None)], set[str]()
    for code in filter(None, pending):
        names |= {*code.co_names, *code.co_freevars, *(each for each in code.co_consts if isinstance(each, str))}
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    yield names
    for name in names - seen:
        seen.add(name)
        method = inspect.unwrap(getattr(cls, name, None))  # type: ignore[arg-type]
        if inspect.isfunction(method) and method.__module__ != Trainer.__module__:
            yield from _names_below(cls, method, seen)


def own_numbers(trainer: TrainerLike, steps: set[int], ranks: int) -> frozenset[int]:
    """G and W, those above 1, if the code of the trainer's own loss or step names the accumulation steps or the ranks.

    A trainer that declares its scale has no other: of one that says that the model takes no number, though it does, or
    that its loss is not scaled, the Trainer divides by G.
    """
    if declares_scale(trainer) or (
        takes_number(trainer.model) and not getattr(trainer, "model_accepts_loss_kwargs", True)
    ):
        return frozenset()
    own = [compute_loss_of(trainer), vars(trainer).get("training_step"), getattr(trainer, "compute_loss_func", None)]
    own += [type(trainer).training_step] if is_custom(trainer, "training_step") else []
    seen = set[str]()
    names = {n for each in own if each for its in _names_below(type(trainer), inspect.unwrap(each), seen) for n in its}
    found = {*(steps if any("accum" in name for name in names) else ()), *((ranks,) if names & _RANKS else ())}
    return frozenset(each for each in found if each > 1)


def counts_itself(trainer: TrainerLike) -> bool:
    """Whether a trainer overrides how the items of a window are counted."""
    method = getattr(type(trainer), "_get_num_items_in_batch", None)
    return method is not None and method.__module__ != Trainer.__module__


def gradient_versions(model: nn.Module) -> int:
    """A number that changes with any in-place change of a gradient."""
    return sum(parameter.grad._version for parameter in model.parameters() if parameter.grad is not None)
