"""Read a loss from its autograd graph: its reductions, and what each is divided by.

    loss = sum over terms of  (product of the term's factors) * (sum over the elements of the term's leaf)

Reading takes no forward, no tensor operation and no wait for the device. Anything else (a root, a product of two terms,
compiled code) becomes an unreadable term with that node as its leaf.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.accumulation import nodes, stacks
from hf_accum_fix.accumulation.nodes import Edge, Factor, NotSavedError, live_edges, on_host, shape_of

#: Most terms of a loss that is read.
_MOST_TERMS = 4096


@dataclass(frozen=True)
class Path:
    """The path from a loss down to a term.

    Attributes:
        top: the highest node that belongs to this term alone; a hook there weights the whole term.
        factors: from the loss down.
        above: number of factors above ``top``.
        added: something without a gradient is added on the path.
    """

    top: Any
    factors: tuple[Factor, ...] = ()
    above: int = 0
    added: bool = False

    @property
    def learnt(self) -> tuple[Any, ...]:
        """The products or quotients with learnt factors."""
        return tuple(each.node for each in self.factors if each.learnt)

    def times(self, *factors: Factor) -> Path:
        """With more factors."""
        return replace(self, factors=(*self.factors, *factors)) if factors else self

    def below(self, top: Any, *factors: Factor) -> Path:
        """Below a sum, where ``top`` belongs to one of its terms, multiplied by ``factors``."""
        path = self.times(*factors)
        return replace(path, top=top, above=len(path.factors))


@dataclass(frozen=True)
class Term:
    """One reduction inside a loss.

    Attributes:
        name: of the leaf.
        leaf: the node that reduces, or that could not be read.
        path: from the loss to it; the leaf's own divisor is the last factor.
        readable: False: the leaf is no reduction, and what is below is unknown.
        rows: how many single numbers the leaf reduces, from stack or cat; 0: it reduces a tensor.
        divides: the last factor is the leaf's own divisor.
        within: number of factors inside the leaf's sum.
        learnt: the leaf is a function of single parameters.
    """

    name: str
    leaf: Any
    path: Path
    readable: bool = True
    rows: int = 0
    divides: bool = False
    within: int = 0
    learnt: bool = False

    @property
    def factors(self) -> tuple[Factor, ...]:
        """From the loss down."""
        return self.path.factors

    @property
    def is_nothing(self) -> bool:
        """Whether it is multiplied by zero; False for factors on a device, which are not read."""
        factors = (each for each in self.factors if not (each.divides or each.learnt))
        return any(on_host(each.value) and float(each.value) == 0.0 for each in factors)

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
            known = [tuple(factor.on_host() for factor in each.factors) for each in terms]
            return [replace(e, path=replace(e.path, factors=f)) for e, f in zip(terms, known, strict=True)]
    path = Path(loss.grad_fn)
    found = _Reader(stops, inside=inside, deep=deep).terms((loss.grad_fn, loss.output_nr), path)
    terms = list(islice(found, _MOST_TERMS + 1))
    return terms if len(terms) <= _MOST_TERMS else [Term("too many terms", loss.grad_fn, path, readable=False)]


def without_nothing(terms: Sequence[Term]) -> list[Term]:
    """Without the terms that are multiplied by zero (a weight that is warmed up), unless all are."""
    return [each for each in terms if not each.is_nothing] or [*terms]


def ignored_index(term: Term) -> int | None:
    """The ignored index of a cross entropy; None: it is none."""
    if not term.name.startswith("NllLoss"):
        return None
    ignored = int(term.leaf._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored


@dataclass(frozen=True)
class _Reader:
    """How a loss is read; the attributes are the arguments of `read`."""

    stops: Collection[Any]
    inside: bool
    deep: bool

    def terms(self, edge: Edge, path: Path) -> Iterator[Term]:
        """The terms from a node downwards; without recursion, since a sum may have thousands of them."""
        pending = [(edge, path)]
        while pending:
            edge, path = pending.pop()
            node, output = edge
            does = nodes.does(node)
            if node in self.stops:
                yield _unread(node, path)
            elif does in ("loss", "mean", "sum"):
                if (number := nodes.number_below(node, does)) is None:
                    yield from self._reduced(node, does, path)
                    continue
                pending.append((number, path))
            elif does == "pass":
                edge = nodes.passed(node, output)
                # A node with several outputs is shared.
                pending.append((edge, path.below(edge[0]) if nodes.has_several_outputs(node) else path))
            elif does == "add":
                summands = nodes.summands(node)
                # Else the other summand has no gradient.
                added = path.added or len(summands) == 1
                below = [(each, replace(path.below(each[0], *its), added=added)) for each, its in summands]
                pending += reversed(below)
            elif does == "factor" and (found := nodes.factor_of(node)) is not None:
                pending.append((found[0], path.times(found[1])))
            else:
                yield _unread(node, path)

    def _reduced(self, node: Any, does: str, path: Path) -> Iterator[Term]:
        """The terms of a mean or sum; several where it reduces stacked numbers, or a number added to a tensor."""
        multiplies = type(node).__name__.startswith(nodes.PRODUCTS)
        stacked, below = self._stacked(node, does), live_edges(node)[0]
        # A selection depends on all elements; a dot product multiplies numbers of which each may be a term.
        hidden = multiplies and not stacked and (len(live_edges(node)) > 1 or stacks.holds_stack(below[0]))
        hides = node if hidden else below[0] if nodes.does(below[0]) == "choose" else None
        if hides is not None:
            yield Term(type(hides).__name__, node, path, readable=False, learnt=nodes.is_learnt(node))
            return
        if self.inside and stacked:
            path = path.times(Factor(float(math.prod(shape_of(below[0]))), divides=True)) if does == "mean" else path
            for one in stacked:
                part = path.below(one.edge[0], *one.factors)
                yield from self.terms(one.edge, replace(part, added=True) if one.added else part)
            return
        parts = [(below, path)]
        if does == "mean" and nodes.adds_a_number(below[0]):
            # mean(x + number) = mean(x) + number
            parts = [(each, path.below(each[0], *factors)) for each, factors in nodes.summands(below[0])]
        for each, part in parts:
            if len(parts) > 1 and shape_of(each[0]) == ():
                yield from self.terms(each, part)
                continue
            inner = list(_inner(each)) if self.deep and does != "loss" else []
            own = nodes.own_divisor(node, does, each[0])
            whole = part.times(*inner, *own)
            yield Term(type(node).__name__, node, whole, rows=len(stacked), divides=bool(own), within=len(inner))

    def _stacked(self, node: Any, does: str) -> list[stacks.Part]:
        """The numbers that a node reduces; empty: it reduces a tensor, or what was not saved tells."""
        try:
            is_product = type(node).__name__.startswith(nodes.PRODUCTS)
            return [] if does == "loss" or is_product else stacks.parts_of(live_edges(node)[0], _MOST_TERMS) or []
        except NotSavedError:
            return []


def _unread(node: Any, path: Path) -> Term:
    return Term(type(node).__name__, node, path, readable=False, learnt=nodes.is_learnt(node))


def _inner(edge: Edge) -> Iterator[Factor]:
    """The numbers that the elements of a sum are multiplied or divided by."""
    while edge[0] is not None and edge[0].next_functions:
        node, output = edge
        does = nodes.does(node)
        if does == "factor":
            try:
                found = nodes.factor_of(node)
            except NotSavedError:
                # No single number.
                return
            if found is None or found[1].learnt or (isinstance(found[1].value, Tensor) and found[1].value.ndim > 0):
                return
            edge = found[0]
            yield found[1]
        elif does == "pass":
            edge = nodes.passed(node, output)
        elif does == "mean":
            # Over some dimensions.
            edge = live_edges(node)[0]
            yield Factor(float(node._saved_self_sym_numel) / math.prod(shape_of(node)), divides=True)
        else:
            return
