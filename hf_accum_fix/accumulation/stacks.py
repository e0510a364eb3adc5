"""Take a small vector of numbers apart: what each is multiplied by on its way into a sum.

``(w * torch.stack([a, b])).sum()`` is ``w_0 a + w_1 b``; so is ``stack @ w``, and an einsum. A learnt vector multiplies
each of its numbers: ``(exp(-s) * stack + s).sum()``.
"""

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
    is_learnt,
    is_number,
    kind_of,
    live_edges,
    passed,
    shape_of,
    summands,
)

#: The saved other side of a dot product.
_OTHER = {"Dot": "_saved_tensor", "Mm": "_saved_mat2", "Bmm": "_saved_mat2"}
#: Most nodes between a sum and the stack below it.
_MOST_ABOVE = 16


class Part(NamedTuple):
    """One summand of the sum over a vector.

    Attributes:
        edge: to a number; or to a learnt vector, all of which is one summand.
        factors: from the sum down.
        product: the product with a learnt vector that multiplies it, and its place there; None: there is none.
        added: something without a gradient is added to it.
    """

    edge: Edge
    factors: tuple[Factor, ...]
    product: tuple[Any, int] | None = None
    added: bool = False


#: For each element of a vector, the factors above it, and the product with a learnt vector.
_Above = Sequence[tuple[tuple[Factor, ...], "tuple[Any, int] | None"]]


def parts_of(edge: Edge, most: int) -> list[Part] | None:
    """The summands of the sum over a vector of at most ``most`` numbers; None: it is no such vector."""
    if not holds_stack(edge[0]):
        return None
    size = math.prod(shape_of(edge[0]))
    return _parts(edge, [((), None)] * size) if 0 < size <= most else None


def parts_of_product(node: Any, most: int) -> list[Part] | None:
    """The same of the products that a dot product sums; None: it has two sides of numbers, or none."""
    [(edge, side)] = sides = [(each, side) for side, each in enumerate(node.next_functions) if each[0] is not None][:1]
    if len(live_edges(node)) > len(sides) or not holds_stack(edge[0]) or math.prod(shape_of(node)) != 1:
        return None
    size = math.prod(shape_of(edge[0]))
    if not 0 < size <= most:
        return None
    weights = node._saved_self if side else getattr(node, _OTHER[kind_of(node)])
    return _parts(edge, [((each,), None) for each in _each(weights, size)])


def picked(node: Any) -> tuple[Edge, tuple[Factor, ...]] | None:
    """The number of a vector that a node selects, and its factors; None: it selects something else."""
    if kind_of(node) != "Select":
        return None
    below = live_edges(node)[0]
    if not holds_stack(below[0]):
        return (below, ()) if math.prod(shape_of(below[0])) == 1 and is_number(below[0]) else None
    size = math.prod(shape_of(below[0]))
    if shape_of(node) != () or len(shape_of(below[0])) != 1:
        return None
    place = node._saved_index - 2**64 if node._saved_index >= 2**63 else node._saved_index
    place = place + size if place < 0 else place
    above: list[Any] = [None] * size
    above[place] = ((), None)
    found = _parts(below, above)
    if found is None or len(found) != 1 or found[0].product is not None:
        return None
    return found[0].edge, found[0].factors


def holds_stack(node: Any, left: int = _MOST_ABOVE) -> bool:
    """Whether numbers are stacked below a node, without asking for shapes, which take a gradient before torch 2.5."""
    job = does(node)
    below = live_edges(node) if left and job in ("pass", "factor", "add") else []
    return job == "stack" or any(holds_stack(each, left - 1) for each, _ in below)


def _each(value: Tensor | float, size: int, **how: Any) -> list[Factor]:
    """A factor for each element of a vector, of a tensor that may be expanded to it."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return [Factor(value, **how)] * size
    return [Factor(each, **how) for each in value.detach().flatten().unbind()]


def _parts(edge: Edge, above: _Above) -> list[Part] | None:
    """`parts_of` below what stands ``above`` each element; an element without anything above is not in the sum."""
    node, size = edge[0], len(above)
    if math.prod(shape_of(node)) != size:
        return None
    if is_learnt(node, elements=size) and size > 1:
        kept = [each for each in above if each]
        alike = len(kept) == size and all(factors == kept[0][0] and not product for factors, product in kept)
        return [Part(edge, kept[0][0])] if alike else None
    job = does(node)
    if job == "stack":
        if len(node.next_functions) != size or not all(is_number(each) for each, _ in live_edges(node)):
            return None
        inputs = zip(node.next_functions, above, strict=True)
        return [Part(each, *over) for each, over in inputs if each[0] is not None and over]
    if job == "pass" and _keeps_order(node):
        return _parts(passed(node, edge[1]), above)
    if job == "factor":
        return _factored(node, above)
    if job == "add":
        found: list[Part] = []
        for each, factors in summands(node) or ():
            if any(isinstance(factor.value, Tensor) and factor.value.numel() > 1 for factor in factors):
                return None
            over = [None if one is None else ((*one[0], *factors), one[1]) for one in above]
            below = _parts(each, over)
            if below is None:
                return None
            found += [each._replace(added=True) for each in below] if len(live_edges(node)) == 1 else below
        return found or None
    return None


def _factored(node: Any, above: _Above) -> list[Part] | None:
    """The parts below a product or quotient of a vector."""
    size = len(above)
    found = factor_of(node, lambda side: is_learnt(side, elements=size))
    if found is None or math.prod(shape_of(found[0][0])) != size or kind_of(node) == "Where":
        return None
    edge, factor = found
    if isinstance(factor.value, Tensor) and factor.value.numel() not in (1, size):
        return None
    over: list[Any] = []
    for place, (one, each) in enumerate(
        zip(above, _each(factor.value, size, divides=factor.divides, node=factor.node), strict=True)
    ):
        if one is None:
            over.append(None)
            continue
        if each.learnt and one[1] is not None:
            return None
        over.append(((*one[0], each), (node, place) if each.learnt else one[1]))
    return _parts(edge, over)


def _keeps_order(node: Any) -> bool:
    """Whether a node that passes a vector on keeps the order of its elements."""
    shape = shape_of(live_edges(node)[0][0])
    return kind_of(node) not in ("Permute", "Expand") or sum(each > 1 for each in shape) <= 1
