"""Read a loss from its autograd graph: its reductions, and what each is divided by.

    loss = sum over terms of  (product of the term's factors) * (sum over the elements of the term's leaf)

Reading takes no forward, no tensor operation and no wait for the device. Anything else (a root, a product of two terms,
compiled code) becomes an unreadable term with that node as its leaf.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.accumulation import nodes
from hf_accum_fix.accumulation.nodes import Edge, Factor, NotSavedError, live_edges, on_host, shape_of

#: Most terms of a loss that is read.
_MOST_TERMS = 4096
#: Most nodes between a sum and the numbers that are stacked below it.
_MOST_ABOVE = 16


class Term(NamedTuple):
    """One reduction inside a loss; on the way down to it, without a leaf.

    Attributes:
        top: the highest node that belongs to this term alone; a hook there weights the whole term.
        factors: from the loss down; the leaf's own divisor is the last.
        above: number of factors above ``top``.
        added: something without a gradient is added on the way.
        name: of the leaf.
        leaf: the node that reduces, or that could not be read.
        readable: False: the leaf is no reduction, and what is below is unknown.
        rows: how many single numbers the leaf reduces, from stack or cat; 0: it reduces a tensor.
        divides: the last factor is the leaf's own divisor.
        within: number of factors inside the leaf's sum.
        learnt: the leaf is a function of single parameters.
    """

    top: Any
    factors: tuple[Factor, ...] = ()
    above: int = 0
    added: bool = False
    name: str = ""
    leaf: Any = None
    readable: bool = True
    rows: int = 0
    divides: bool = False
    within: int = 0
    learnt: bool = False

    def times(self, factors: tuple[Factor, ...]) -> Term:
        """With more factors."""
        return self._replace(factors=self.factors + factors) if factors else self

    def below(self, top: Any, factors: tuple[Factor, ...] = (), *, added: bool = False) -> Term:
        """Below a sum, where ``top`` belongs to one of its terms, multiplied by ``factors``."""
        factors = self.factors + factors
        return self._replace(top=top, factors=factors, above=len(factors), added=self.added or added)

    def unread(self, leaf: Any, hides: Any) -> Term:
        """With a leaf in which the node ``hides`` cannot be read."""
        return self._replace(name=type(hides).__name__, leaf=leaf, readable=False, learnt=nodes.is_learnt(leaf))

    @property
    def learnt_products(self) -> tuple[Any, ...]:
        """The nodes of products or quotients with learnt factors."""
        return tuple(each.node for each in self.factors if each.learnt)

    @property
    def is_nothing(self) -> bool:
        """Whether it is multiplied by zero; False for factors on a device, which are not read."""
        factors = (each for each in self.factors if not (each.divides or each.learnt))
        return any(on_host(each.value) and float(each.value) == 0.0 for each in factors)

    @property
    def classes(self) -> int:
        """Number of classes of a cross entropy; 0: it is none, or has no gradient."""
        below = self.leaf.next_functions[0][0] if self.name.startswith("NllLoss") else None
        return 0 if below is None else shape_of(below)[min(1, len(shape_of(below)) - 1)]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for the same term of two micro-batches: all but numbers."""
        return (self.name, self.readable, *((each.divides, each.learnt) for each in self.factors))


def read(loss: Tensor, stops: Collection[Any] = (), *, inside: bool = False, deep: bool = False) -> list[Term]:
    """The terms of a loss; empty: it has no gradient.

    Args:
        loss: of one element.
        stops: nodes that are terms whatever is below them, such as a router loss.
        inside: look into means and sums of stacked numbers; else they are leaves, and their numbers rows.
        deep: also look for factors inside a sum, which unpacks tensors that autograd has saved.
    """
    if loss.grad_fn is None:
        return []
    nodes.note_loss(loss)
    # Under a dispatch mode Python numbers that autograd has wrapped cannot be read.
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            terms = read(loss, stops, inside=inside, deep=deep)
            return [each._replace(factors=tuple(map(nodes.as_number, each.factors))) for each in terms]
    whole, found = Term(loss.grad_fn), list[Term]()
    pending = [((loss.grad_fn, loss.output_nr), whole)]
    while pending and len(found) <= _MOST_TERMS:
        (node, output), path = pending.pop()
        does = nodes.does(node)
        if node in stops:
            found.append(path.unread(node, node))
        elif does in ("loss", "mean", "sum", "dot"):
            terms, below = _reduced(node, does, path, inside=inside, deep=deep)
            found += terms
            pending += below
        elif (steps := nodes.steps(node, output, does)) is None:
            found.append(path.unread(node, node))
        else:
            # A node with several outputs is shared.
            splits = does == "add" or nodes.has_several_outputs(node)
            # The other summand has no gradient.
            added = does == "add" and len(steps) == 1
            for edge, its in reversed(steps):
                pending.append((edge, path.below(edge[0], its, added=added) if splits else path.times(its)))
    return (
        [whole._replace(name="too many terms", leaf=whole.top, readable=False)] if len(found) > _MOST_TERMS else found
    )


def without_nothing(terms: Sequence[Term]) -> list[Term]:
    """Without the terms that are multiplied by zero (a weight that is warmed up), unless all are."""
    return [each for each in terms if not each.is_nothing] or [*terms]


def ignored_index(term: Term) -> int | None:
    """The ignored index of a cross entropy; None: it is none."""
    if not term.name.startswith("NllLoss"):
        return None
    ignored = int(term.leaf._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored


#: An edge, and the way down to it.
_Path = tuple[Edge, Term]


def _reduced(node: Any, does: str, path: Term, *, inside: bool, deep: bool) -> tuple[list[Term], list[_Path]]:
    """The term of a node that reduces, and what is to be read below it instead, the last first."""
    edge, *others = live_edges(node)
    if does in ("mean", "sum") and (number := nodes.number_below(edge, does)) is not None:
        return [], [(number, path)]
    # A selection depends on all elements; a dot product multiplies numbers of which each may be a term.
    hides = edge[0] if nodes.does(edge[0]) == "choose" else None
    if does == "dot" and (others or _holds_stack(edge[0])):
        hides = node
    if hides is not None:
        return [path.unread(node, hides)], []
    stacked = _stacked(edge, does, path) if does in ("mean", "sum") else []
    if inside and stacked:
        return [], stacked[::-1]
    parts = [(edge, path)]
    if does == "mean" and nodes.adds_a_number(edge[0]):
        # mean(x + number) = mean(x) + number
        parts = [(each, path.below(each[0], its)) for each, its in nodes.summands(edge[0])]
    numbers = [part for part in parts if len(parts) > 1 and shape_of(part[0][0]) == ()]
    terms = []
    for each, part in (part for part in parts if part not in numbers):
        inner = tuple(_inner(each)) if deep and does != "loss" else ()
        own = nodes.own_divisor(node, does, each[0])
        part = part.times(inner + own)._replace(name=type(node).__name__, leaf=node, rows=len(stacked))
        terms.append(part._replace(divides=bool(own), within=len(inner)))
    return terms, numbers


def _holds_stack(node: Any, left: int = _MOST_ABOVE) -> bool:
    """Whether numbers are stacked below a node, without asking for shapes, which take a gradient before torch 2.5."""
    does = nodes.does(node)
    below = live_edges(node) if left and does in ("pass", "factor", "add") else []
    return does == "stack" or any(_holds_stack(each, left - 1) for each, _ in below)


def _stacked(edge: Edge, does: str, path: Term) -> list[_Path]:
    """The numbers that a mean or sum reduces; empty: it reduces a tensor, or what was not saved tells."""
    size = math.prod(shape_of(edge[0])) if _holds_stack(edge[0]) else 0
    if not 0 < size <= _MOST_TERMS:
        return []
    try:
        return _numbers(edge, [path.times((Factor(float(size), divides=True),) if does == "mean" else ())] * size) or []
    except NotSavedError:
        return []


def _numbers(edge: Edge, paths: Sequence[Term]) -> list[_Path] | None:
    """The numbers in a vector, as in ``w * torch.stack([a, b])`` of constant w; None: it holds something else."""
    (node, output), does, size = edge, nodes.does(edge[0]), len(paths)
    if math.prod(shape_of(node)) != size:
        return None
    if does == "stack":
        if len(node.next_functions) != size or not all(nodes.is_number(each) for each, _ in live_edges(node)):
            return None
        inputs = zip(node.next_functions, paths, strict=True)
        return [(each, path.below(each[0])) for each, path in inputs if each[0] is not None]
    kind, found = nodes.kind_of(node), list[_Path]()
    # A selection, or elements in another order.
    if kind == "Where" or (kind in ("Permute", "Expand") and max(shape_of(live_edges(node)[0][0]), default=1) < size):
        return None
    for each, its in (steps := nodes.steps(node, output, does) or []):
        by_place, added = [its] * size, does == "add" and len(steps) == 1
        if its and isinstance(vector := its[0].value, Tensor) and vector.numel() > 1:
            if its[0].learnt or vector.numel() != size:
                return None
            by_place = [(its[0]._replace(value=one),) for one in vector.detach().flatten().unbind()]
        multiplied = [
            path.times(its)._replace(added=path.added or added) for path, its in zip(paths, by_place, strict=True)
        ]
        if (below := _numbers(each, multiplied)) is None:
            return None
        found += below
    return found or None


def _inner(edge: Edge) -> Iterator[Factor]:
    """The numbers that the elements of a sum are multiplied or divided by."""
    while edge[0] is not None and edge[0].next_functions:
        (node, output), does = edge, nodes.does(edge[0])
        if does == "mean":
            # Over some dimensions.
            edge = live_edges(node)[0]
            yield Factor(float(node._saved_self_sym_numel) / math.prod(shape_of(node)), divides=True)
            continue
        try:
            steps = nodes.steps(node, output, does) if does in ("pass", "factor") else None
        except NotSavedError:
            # No single number.
            return
        if steps is None:
            return
        [(edge, its)] = steps
        if any(one.learnt or (isinstance(one.value, Tensor) and one.value.ndim > 0) for one in its):
            return
        yield from its
