"""Let a head divide by the targets of its own micro-batch, not by their mean over ranks.

Object-detection heads (targets are a list per image: boxes or masks) sum the number of targets over the ranks inside
the forward, and divide by W. A micro-batch's loss then depends on the other ranks' counts, and a rank with more
micro-batches than the others waits for ever. With `own_counts` every rank counts its own, and none waits.

Source: ``num_boxes = reduce(num_boxes)`` with ``PartialState().num_processes`` (5.23.0, ``loss_for_object_detection``
and MaskFormer; ``reduce`` has taken the mean already, so that stock divides by W once too often), and
``dist.all_reduce(num_boxes)`` with ``dist.get_world_size()`` (``loss_lw_detr``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor

from hf_accum_fix.counting.rules import listed_targets
from hf_accum_fix.trace.preserve import overridden


@contextmanager
def own_counts(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Around the forward of one micro-batch; changes nothing unless its targets are lists."""
    ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not ranks or next(listed_targets(inputs), None) is None:
        yield
        return
    with overridden(dist, "all_reduce", partial(_all_reduce, dist.all_reduce)):
        if not PartialState._shared_state:
            yield
            return
        state = PartialState()
        with overridden(state, "num_processes", 1), overridden(state, "distributed_type", DistributedType.NO):
            yield


def _all_reduce(
    original: Callable[..., Any], tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Return W times a rank's own count instead of the sum of all counts; reduce anything else as before."""
    op = dist.ReduceOp.SUM if op is None else op
    is_count = tensor.numel() == 1 and not tensor.requires_grad and group is None and not async_op
    if is_count and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return tensor.mul_(dist.get_world_size()) if op == dist.ReduceOp.SUM else tensor
    return original(tensor, op=op, group=group, async_op=async_op)
