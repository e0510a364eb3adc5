"""Read a loss from its autograd graph: its reductions, and what each is divided by.

    loss = sum over terms of  (product of the term's factors) * (sum over the elements of the term's leaf)

Reading takes no forward, no tensor operation and no wait for the device. Anything else (a root, a product of two terms,
compiled code) becomes an unreadable term with that node as its leaf.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.counting.items import Items
from hf_accum_fix.reading import nodes
from hf_accum_fix.reading.nodes import Edge, Factor, NotSavedError, live_edges, on_host, shape_of
from hf_accum_fix.reading.values import Values

#: Most terms of a loss that is read.
_MOST_TERMS = 4096
#: Most nodes between a sum and the numbers that are stacked below it.
_MOST_ABOVE = 16


@dataclass(frozen=True)
class Term:
    """One reduction inside a loss, with its nodes; or without them and as numbers, with more that a look has seen."""

    top: Any  # the highest node that belongs to this term alone; a hook there weights the whole term
    factors: tuple[Factor, ...]  # from the loss down; the leaf's own divisor is the last
    above: int  # number of factors above ``top``
    added: bool  # something without a gradient is added on the way from the loss
    name: str  # of the leaf
    leaf: Any  # the node that reduces, or that could not be read
    readable: bool = True  # False: the leaf is no reduction, and what is below is unknown
    rows: int = 0  # how many single numbers the leaf reduces, from stack or cat; 0: it reduces a tensor
    divides: bool = False  # the last factor is the leaf's own divisor
    within: int = 0  # number of factors inside the leaf's sum
    learnt: bool = False  # the leaf is a function of single parameters
    value: float | None = None  # in a look, as all below: its part of the loss; None: unknown
    router: str = ""  # the name of the router loss that it is
    ignored: int | None = None  # the label that is no target of a cross entropy; None: it is none
    targets: float = 0.0  # the weight of a cross entropy's targets; 0.0: unknown
    named: tuple[Items, ...] = ()  # the rules whose targets the leaf has saved
    by_classes: bool = False  # it is a mean over the class weights of its targets
    sorts: bool = False  # its elements are sorted
    weighs: bool = False  # its elements have weights
    layered: bool = False  # its elements pass layers

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Its factors; waits for those on a device."""
        return tuple(float(each.value) for each in self.factors)

    def is_own_divisor(self, place: int) -> bool:
        """Whether a factor is the loss function's own divisor."""
        return self.divides and place == len(self.factors) - 1

    def product(self, places: Sequence[int] | range) -> float:
        """The product of these factors; nan: one divides by zero."""
        result = 1.0
        for place in places:
            value = self.numbers[place]
            if not self.factors[place].divides:
                result *= value
            else:
                result = result / value if value else math.nan
        return result

    @property
    def learnt_nodes(self) -> list[Any]:
        """The products or quotients with learnt factors."""
        return [each.node for each in self.factors if each.learnt]

    @property
    def is_nothing(self) -> bool:
        """Whether it is multiplied by zero; False for factors on a device, which are not read."""
        read = (each.value for each in self.factors if not (each.divides or each.learnt) and on_host(each.value))
        return any(float(value) == 0.0 for value in read)

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Equal for the same term of two micro-batches: all but numbers."""
        return (self.name, self.readable, *[(each.divides, each.learnt) for each in self.factors])


def read(loss: Tensor, stops: Collection[Any] = (), values: Values | None = None, *, deep: bool = False) -> list[Term]:
    """The terms of a loss; empty: it has no gradient.

    Args:
        loss: of one element.
        stops: nodes that are terms whatever is below them, such as a router loss.
        values: captured of its forward, with the counts below clamps.
        deep: also look for factors inside a sum, which unpacks tensors that autograd has saved.
    """
    if loss.grad_fn is None:
        return []
    nodes.note_loss(loss)
    # Under a dispatch mode Python numbers that autograd has wrapped cannot be read.
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            terms = read(loss, stops, values, deep=deep)
            return [replace(each, factors=tuple(map(nodes.as_number, each.factors))) for each in terms]
    whole: _Way = (loss.grad_fn, (), 0, False)
    pending, found = [((loss.grad_fn, loss.output_nr), whole)], list[Term]()
    # Without recursion, since a sum may have thousands of terms.
    while pending and len(found) <= _MOST_TERMS:
        (node, output), way = pending.pop()
        does = nodes.does(node)
        if node in stops:
            found.append(_unread(way, node, node))
        elif does in ("loss", "mean", "sum", "dot"):
            terms, numbers = _reduced(node, does, way, deep=deep)
            found += terms
            pending += numbers
        elif (steps := nodes.steps(node, output, does)) is None:
            found.append(_unread(way, node, node))
        else:
            top, factors, above, added = way
            # With one summand alone the other has no gradient; a node with several outputs is shared.
            added = added or (does == "add" and len(steps) == 1)
            splits = does == "add" or nodes.has_several_outputs(node)
            for edge, its in reversed(steps):
                below = factors + its
                pending.append((edge, (edge[0], below, len(below), added) if splits else (top, below, above, added)))
    if len(found) > _MOST_TERMS:
        return [Term(*whole, name="too many terms", leaf=loss.grad_fn, readable=False)]
    if values is None:
        return found
    # What is asked there is no part of the loss; the leaf's own divisor is a count.
    with torch._C.DisableTorchFunction():
        ways = [(t, len(t.factors) - t.divides) for t in found]
        return [replace(t, factors=(*values.below(t.factors[:own]), *t.factors[own:])) for t, own in ways]


def without_nothing(terms: Sequence[Term]) -> list[Term]:
    """Without the terms that are multiplied by zero (a weight that is warmed up), unless all are."""
    return [each for each in terms if not each.is_nothing] or [*terms]


def ignored_index(term: Term) -> int | None:
    """The ignored index of a cross entropy; None: it is none."""
    if not term.name.startswith("NllLoss"):
        return None
    ignored = int(term.leaf._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored


#: The way from a loss down: `Term.top`, `Term.factors`, `Term.above` and `Term.added` so far.
_Way: TypeAlias = tuple[Any, tuple[Factor, ...], int, bool]


def _unread(way: _Way, leaf: Any, hides: Any) -> Term:
    """A term whose leaf is a node that ``hides`` what is below it, or that reduces such a node."""
    return Term(*way, name=type(hides).__name__, leaf=leaf, readable=False, learnt=nodes.is_learnt(leaf))


def _reduced(node: Any, does: str, way: _Way, *, deep: bool) -> tuple[list[Term], list[tuple[Edge, _Way]]]:
    """The term of a node that reduces a tensor; the number below it, or added to each element, is read on."""
    edge, *others = live_edges(node)
    rows, over_elements = 0, does in ("mean", "sum")
    if over_elements and (number := nodes.number_below(edge, does)) is not None:
        return [], [(number, way)]
    # A selection depends on all elements; a dot product multiplies numbers of which each may be a term.
    hides = edge[0] if nodes.does(edge[0]) == "choose" and nodes.chooses_rows(edge[0]) else None
    hides = node if does == "dot" and (others or _holds_stack(edge[0])) else hides
    if hides is not None:
        return [_unread(way, node, hides)], []
    if over_elements and _holds_stack(edge[0]):
        # What was not saved tells.
        with suppress(NotSavedError):
            rows = _rows(edge, math.prod(shape_of(edge[0])))
    (top, factors, above, added), numbers = way, list[tuple[Edge, _Way]]()
    if does == "mean" and nodes.adds_a_number(edge[0]):
        # mean(x + number) = mean(x) + number
        parts = [(each, (each[0], factors + its, len(factors + its), added)) for each, its in nodes.summands(edge[0])]
        [(edge, (top, factors, above, _)), *numbers] = sorted(parts, key=lambda part: shape_of(part[0][0]) == ())
    inner = tuple(_inner(edge)) if deep and does != "loss" else ()
    own = nodes.own_divisor(node, does, edge[0])
    term = Term(top, factors + inner + own, above, added, type(node).__name__, node, True, rows, bool(own), len(inner))
    return [term], numbers


def _holds_stack(node: Any, left: int = _MOST_ABOVE) -> bool:
    """Whether numbers are stacked below a node, without asking for shapes, which take a gradient before torch 2.5."""
    does = nodes.does(node)
    below = live_edges(node) if left and does in ("pass", "factor", "add") else []
    return does == "stack" or any(_holds_stack(each, left - 1) for each, _ in below)


def _rows(edge: Edge, size: int) -> int:
    """How many numbers with a gradient are stacked in a vector of ``size`` elements; 0: it holds something else."""
    (node, output), does = edge, nodes.does(edge[0])
    if math.prod(shape_of(node)) != size:
        return 0
    if does == "stack":
        numbers = [each for each, _ in live_edges(node)]
        fits = len(node.next_functions) == size <= _MOST_TERMS and all(map(nodes.is_number, numbers))
        return len(numbers) if fits else 0
    counted = list[int]()
    for each, its in nodes.steps(node, output, does) or ():
        weights = its[0].value.numel() if its and isinstance(its[0].value, Tensor) else 1
        fits = weights == 1 or (weights == size and not its[0].learnt)
        counted.append(_rows(each, size) if fits else 0)
    return sum(counted) if all(counted) else 0


def _inner(edge: Edge) -> Iterator[Factor]:
    """The numbers that the elements of a sum are multiplied or divided by."""
    while edge[0] is not None and edge[0].next_functions:
        (node, output), does = edge, nodes.does(edge[0])
        if does == "mean":
            # Over some dimensions.
            edge = live_edges(node)[0]
            yield Factor(float(node._saved_self_sym_numel) / math.prod(shape_of(node)), divides=True)
            continue
        steps = None
        # What was not saved is no single number.
        with suppress(NotSavedError):
            steps = nodes.steps(node, output, does) if does in ("pass", "factor") else None
        if steps is None:
            return
        [(edge, its)] = steps
        if any(one.learnt or (isinstance(one.value, Tensor) and one.value.ndim > 0) for one in its):
            return
        yield from its
