"""Around a verification: how the trainer trains, stock or patched, and restoring everything that changed."""

from __future__ import annotations

import logging
import math
import os
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from hf_accum_fix import observations
from hf_accum_fix.applying import active_handle, apply
from hf_accum_fix.confirmation import unconfirmed
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.trace.preserve import KeepsStorages, PythonState, eagerly, overridden, random_states
from hf_accum_fix.trainer import GlobalBatchMixin
from hf_accum_fix.verification.report import PATCHED, STOCK

#: Loggers that report every training run; silenced during a dry run.
_LOGGERS = ("transformers.trainer", "accelerate", "hf_accum_fix")


class WholeState(PythonState):
    """`PythonState` at any depth, with what functions close over and objects of libraries, but live ones."""

    deep = math.inf
    machinery = frozenset({"asyncio", "concurrent", "logging", "psutil", "subprocess", "threading", "weakref"})

    def passed_by(self, value: Any) -> list[Any]:
        """What an object holds besides its state."""
        if isinstance(value, types.FunctionType):
            return [each.cell_contents for each in value.__closure__ or () if each != types.CellType()]
        return [value.__self__] if isinstance(value, types.MethodType) else super().passed_by(value)


@contextmanager
def unseen(trainer: Any) -> Iterator[None]:
    """Run trainings that leave no trace: not logged, in no `report()`; gradients are cleared first.

    Restored are, also after an error, all state reachable from the trainer, and the random states.
    """
    with (
        overridden(observations, "_RUNS", []),
        ExitStack() as stack,
        unconfirmed(),
        random_states(),
        eagerly(),
        WholeState(trainer.model, trainer, follow_modules=True) as state,
        KeepsStorages(state),
    ):
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
        for parameter in trainer.model.parameters():
            parameter.grad = None
        yield


def without_dropout(model: nn.Module) -> bool:
    """Set every dropout rate of a module and its configuration to zero, layerdrop included; `unseen` undoes it.

    Returns:
        Whether a rate was above zero.
    """
    found = False
    holders = [each for module in model.modules() for each in (module, vars(module).get("config"))]
    for holder in (each for each in holders if hasattr(each, "__dict__")):
        for name, value in list(vars(holder).items()):
            is_rate = "drop" in name.lower() or (name == "p" and isinstance(holder, nn.modules.dropout._DropoutNd))
            if is_rate and isinstance(value, float) and value > 0:
                setattr(holder, name, 0.0)
                found = True
    return found


def active_mode(trainer: Any) -> str:
    """The mode in which this process trains."""
    handle = active_handle()
    patched = isinstance(trainer, GlobalBatchMixin) or (handle is not None and handle.active)
    return PATCHED if patched and enabled() else STOCK


def options_of(trainer: Any) -> Options:
    """The options of the trainer's class, or of the active patch; else the defaults."""
    handle = active_handle()
    if isinstance(trainer, GlobalBatchMixin):
        return trainer.global_batch_options
    return Options() if handle is None else handle.options


@contextmanager
def in_mode(mode: str, trainer: Any, options: Options) -> Iterator[None]:
    """Train stock, with patch and subclass switched off, or patched."""
    if mode == PATCHED:
        already = active_mode(trainer) == PATCHED
        with nullcontext() if already else apply(**vars(options), quiet=True):
            yield
        return
    before = {SWITCH: os.environ[SWITCH]} if SWITCH in os.environ else {}
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        os.environ.update(before)
