"""What the engine under ``accelerator.backward`` does to a loss, read from the live objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DistributedType


def engine_divisor(accelerator: Any, backward_kwargs: Mapping[str, Any]) -> int:
    """What the engine is about to divide a loss by.

    Args:
        accelerator: the live ``accelerate.Accelerator``.
        backward_kwargs: what ``backward`` is called with beside the loss.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return int(accelerator.gradient_accumulation_steps)
    if backward_kwargs.get("scale_wrt_gas") is False:
        return 1
    return int(accelerator.deepspeed_engine_wrapped.engine.gradient_accumulation_steps())
