"""Take a small vector of numbers apart: ``(w * torch.stack([a, b])).sum()`` is ``w_0 a + w_1 b``, of constant w."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hf_accum_fix.accumulation.nodes import (
    Edge,
    Factor,
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


class Part(NamedTuple):
    """One summand of the sum over a vector.

    Attributes:
        edge: to a number.
        factors: from the sum down.
        added: something without a gradient is added to it.
    """

    edge: Edge
    factors: tuple[Factor, ...]
    added: bool = False


def parts_of(edge: Edge, most: int) -> list[Part] | None:
    """The summands of the sum over a vector of at most ``most`` numbers; None: it is no such vector."""
    if not holds_stack(edge[0]):
        return None
    size = math.prod(shape_of(edge[0]))
    return _parts(edge, [()] * size) if 0 < size <= most else None


def holds_stack(node: Any, left: int = _MOST_ABOVE) -> bool:
    """Whether numbers are stacked below a node, without asking for shapes, which take a gradient before torch 2.5."""
    job = does(node)
    below = live_edges(node) if left and job in ("pass", "factor", "add") else []
    return job == "stack" or any(holds_stack(each, left - 1) for each, _ in below)


def _parts(edge: Edge, above: Sequence[tuple[Factor, ...]]) -> list[Part] | None:
    """`parts_of` below the factors that stand ``above`` each element."""
    node, size, job = edge[0], len(above), does(edge[0])
    if math.prod(shape_of(node)) != size:
        return None
    if job == "stack":
        if len(node.next_functions) != size or not all(is_number(each) for each, _ in live_edges(node)):
            return None
        inputs = zip(node.next_functions, above, strict=True)
        return [Part(each, factors) for each, factors in inputs if each[0] is not None]
    if job == "pass" and _keeps_order(node):
        return _parts(passed(node, edge[1]), above)
    if job == "factor" and kind_of(node) != "Where" and (found := factor_of(node)) is not None:
        factors = _each(found[1], size)
        return _parts(found[0], [(*over, each) for over, each in zip(above, factors, strict=True)]) if factors else None
    if job == "add":
        parts: list[Part] = []
        for each, times in summands(node):
            if any(isinstance(factor.value, Tensor) and factor.value.numel() > 1 for factor in times):
                return None
            below = _parts(each, [(*over, *times) for over in above])
            if below is None:
                return None
            parts += [part._replace(added=True) for part in below] if len(live_edges(node)) == 1 else below
        return parts or None
    return None


def _each(factor: Factor, size: int) -> list[Factor]:
    """A factor for each element of a vector; empty: it is learnt, or of another size."""
    value = factor.value
    if not isinstance(value, Tensor) or value.numel() == 1:
        return [factor] * size
    if factor.learnt or value.numel() != size:
        return []
    return [factor._replace(value=each) for each in value.detach().flatten().unbind()]


def _keeps_order(node: Any) -> bool:
    """Whether a node that passes a vector on keeps the order of its elements."""
    shape = shape_of(live_edges(node)[0][0])
    return kind_of(node) not in ("Permute", "Expand") or sum(each > 1 for each in shape) <= 1
