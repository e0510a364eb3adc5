"""Correct on the live engine what its release loses of a window's gradient; the rows are in upstream/engine_defects.py.

DeepSpeed's ZeRO-2 with an offloaded optimizer keeps the sum of a window on the CPU, parameter by parameter
(``async_accumulate_grad_in_cpu_via_gpu`` in ``deepspeed/runtime/zero/stage_1_and_2.py``). Up to 0.18.9 it saves there
what the first micro-batch (``micro_step_id`` 0) brings, and adds that to every later one without saving the sum; with
``gradient_accumulation_steps`` of 1 it saves nothing. Since 0.19.0 it always saves.
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from typing import Any, Final

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.trace.preserve import overridden
from hf_accum_fix.upstream.engine_defects import EngineDefect, engine_defects_of

_MENDED: Final = "_hf_accum_fix_mended"
_SAVES: Final = "async_accumulate_grad_in_cpu_via_gpu"


def mend(optimizer: Any) -> None:
    """Correct an optimizer of DeepSpeed, once; call it before the first micro-batch of a window that has several.

    Raises:
        UnsupportedSetupError: if the release is known to lose micro-batches, and has not the methods that were read.
    """
    defects = defects_of(optimizer)
    if not defects or getattr(optimizer, _MENDED, False):
        return
    saves = getattr(type(optimizer), _SAVES, None)
    fits = saves is not None and [*inspect.signature(saves).parameters] == ["self", "param"]
    values = (getattr(optimizer, name, None) for name in ("micro_step_id", "gradient_accumulation_steps"))
    boundary = getattr(optimizer, "is_gradient_accumulation_boundary", None)
    if not fits or not all(isinstance(each, int) for each in values) or not isinstance(boundary, bool):
        raise _refusal(defects[0], type(optimizer).__name__)
    setattr(optimizer, _SAVES, _saving_every_sum(optimizer))
    # DeepSpeed asks it for nothing but whether there is a sum to save.
    optimizer.gradient_accumulation_steps = max(2, optimizer.gradient_accumulation_steps)
    setattr(optimizer, _MENDED, True)


def defects_of(optimizer: Any) -> tuple[EngineDefect, ...]:
    """The defects of the imported DeepSpeed that change a window of this optimizer."""
    affected = getattr(optimizer, "cpu_offload", False) and getattr(optimizer, "partition_gradients", False)
    return engine_defects_of("deepspeed", _release()) if affected else ()


def _saving_every_sum(optimizer: Any) -> Any:
    original = getattr(optimizer, _SAVES)

    @wraps(original)
    def accumulate(param: Any) -> None:
        original(param)
        if optimizer.micro_step_id > 0 and not optimizer.is_gradient_accumulation_boundary:
            # As in the first micro-batch, it saves what the parameter holds: now the sum.
            with overridden(optimizer, "micro_step_id", 0):
                original(param)

    return accumulate


def _release() -> str:
    return str(getattr(sys.modules.get("deepspeed"), "__version__", ""))


def _refusal(defect: EngineDefect, optimizer: str) -> UnsupportedSetupError:
    return UnsupportedSetupError(
        f"got DeepSpeed {_release()}, whose ZeRO-2 with an offloaded optimizer drops micro-batches ({defect.name}), "
        f"and a {optimizer} whose methods cannot be corrected; expected DeepSpeed {defect.until} or newer; "
        f"{defect.remedy}, or remove offload_optimizer from its configuration"
    )
