"""Count the single numbers that are stacked below a sum: the rows of one mean, as of ``torch.stack(losses)``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.nodes import (
    Edge,
    does,
    factor_of,
    is_number,
    kind_of,
    live_edges,
    passed,
    shape_of,
    summands,
)

#: Most nodes between a sum and the stack below it.
_MOST_ABOVE = 16


def rows_of(edge: Edge, most: int) -> int:
    """How many numbers with a gradient are stacked below a sum over at most ``most``; 0: it is no such vector."""
    size = math.prod(shape_of(edge[0])) if holds_stack(edge[0]) else 0
    return _rows(edge, size) if size <= most else 0


def holds_stack(node: Any, left: int = _MOST_ABOVE) -> bool:
    """Whether numbers are stacked below a node, without asking for shapes, which take a gradient before torch 2.5."""
    job = does(node)
    below = live_edges(node) if left and job in ("pass", "factor", "add") else []
    return job == "stack" or any(holds_stack(each, left - 1) for each, _ in below)


def _rows(edge: Edge, size: int) -> int:
    """`rows_of` a vector of ``size`` elements."""
    node, job = edge[0], does(edge[0])
    if math.prod(shape_of(node)) != size:
        return 0
    if job == "stack":
        numbers = live_edges(node)
        return len(numbers) if len(node.next_functions) == size and all(is_number(each) for each, _ in numbers) else 0
    if job == "pass":
        shape = shape_of(live_edges(node)[0][0])
        keeps = kind_of(node) not in ("Permute", "Expand") or sum(each > 1 for each in shape) <= 1
        return _rows(passed(node, edge[1]), size) if keeps else 0
    if job == "factor" and kind_of(node) != "Where" and (found := factor_of(node)) is not None:
        many = found[1].value.numel() if isinstance(found[1].value, Tensor) else 1
        return _rows(found[0], size) if many == 1 or (many == size and not found[1].learnt) else 0
    if job == "add":
        alike = all(
            not isinstance(each.value, Tensor) or each.value.numel() == 1 for _, its in summands(node) for each in its
        )
        counted = [_rows(each, size) for each, _ in summands(node)] if alike else [0]
        return sum(counted) if all(counted) else 0
    return 0
