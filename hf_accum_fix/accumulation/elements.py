"""What happens to the elements of a reduction, below its leaf: they may be sorted, weighted, or pass layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.loss_graph import MOST_BELOW
from hf_accum_fix.accumulation.nodes import NotSavedError, factor_of, live_edges, shape_of

#: Layers, through which data reach a loss.
_LAYERS = ("Embedding", "Convolution", "Addmm", "Mm", "Bmm")


def holds_layers(node: Any) -> bool:
    """Whether there is a layer of a model among the nodes searched below one."""
    return any(_is_layer(each) for each in _below(node))


def sorts_elements(node: Any) -> bool:
    """Whether all elements of a reduction are sorted, above the first layer, of which some may then be left out."""
    sorts = (each for each in _below(node) if type(each).__name__.startswith(("SortBackward", "TopkBackward")))
    # Before torch 2.5 nodes do not show their shape once the loss is gone.
    return any(len(shape_of(each)) == 1 for each in sorts if hasattr(each, "_input_metadata"))


def weights_elements(node: Any) -> bool:
    """Whether elements of a reduction are multiplied by numbers without gradient, above the first layer.

    These may be statistics of the batch, such as the mean reward.
    """
    return any(map(_has_weights, _below(node)))


def _has_weights(node: Any) -> bool:
    if not type(node).__name__.startswith(("MulBackward", "DivBackward")) or len(live_edges(node)) > 1:
        return False
    try:
        found = factor_of(node)
    except NotSavedError:
        # A tensor that was not saved, and so no single number.
        return True
    return found is not None and isinstance(found[1].value, Tensor) and found[1].value.numel() > 1


def _below(node: Any) -> Iterator[Any]:
    """A node and those below it, down to the first layers."""
    seen, pending = {node}, [node]
    while pending and len(seen) < MOST_BELOW:
        below = pending.pop()
        yield below
        new = set() if _is_layer(below) else {each for each, _ in live_edges(below)} - seen
        seen |= new
        pending.extend(new)


def _is_layer(node: Any) -> bool:
    return type(node).__name__.startswith(_LAYERS)
