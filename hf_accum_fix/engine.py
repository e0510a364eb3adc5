"""What the engine under an ``accelerate.Accelerator`` does to losses and inputs, read from the live objects."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.utils import DistributedType
from torch import nn


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


def reducing(accelerator: Any, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around a forward and backward: the ranks reduce gradients in the last micro-batch of a window alone.

    Args:
        accelerator: the live ``accelerate.Accelerator``.
        model: as it was prepared.
        last: whether this is the last micro-batch.
    """
    # accelerate's optimizer and scheduler step, and DeepSpeed's engine, where this is set.
    accelerator.sync_gradients = last
    tell_last(accelerator, last)
    # DeepSpeed goes by what it was told; its own no_sync refuses ZeRO-2 and -3.
    alone = last or accelerator.distributed_type == DistributedType.DEEPSPEED
    return nullcontext() if alone else accelerator.no_sync(model)


def tell_last(accelerator: Any, last: bool) -> None:
    """Tell DeepSpeed, which else counts windows of one length, whether this micro-batch ends one.

    accelerate tells it from 1.8 on; before, the short window at the end of an epoch is not stepped.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_engine_wrapped.engine.set_gradient_accumulation_boundary(last)


def is_sharded(accelerator: Any) -> bool:
    """Whether the ranks meet in every forward, to put the parameters together."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def waits_every_micro_batch(accelerator: Any) -> bool:
    """Whether the ranks wait for one another in every micro-batch (FSDP, ZeRO-2 and -3), not once a window (DDP)."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.state.deepspeed_plugin.zero_stage >= 2)
    return is_sharded(accelerator)


def inputs_are_rounded(accelerator: Any) -> bool:
    """Whether the engine rounds the floating-point inputs of a forward, the number among them, to 16 bits.

    Source: ``cast_forward_inputs`` of FSDP's mixed precision, ``DeepSpeedEngine._cast_inputs_half``; in float16 a
    number above 65504 would be infinite.
    """
    return is_sharded(accelerator) and accelerator.mixed_precision != "no"
