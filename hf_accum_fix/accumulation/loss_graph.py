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
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.accumulation import nodes, stacks
from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.nodes import Edge, Factor, NotSavedError, live_edges, on_host, shape_of

#: Most terms of a loss that is read.
_MOST_TERMS = 4096


@dataclass(frozen=True)
class Term:
    """One reduction inside a loss.

    A look keeps numbers alone, without nodes:
        value: its part of the loss; None: unknown.
        router: the name of the router loss that it is.
        ignored: the label that is no target of a cross entropy; None: it is none.
        targets: the weight of a cross entropy's targets; 0.0: unknown.
        named: the rules whose targets the leaf has saved.
        by_classes: it is a mean over the class weights of its targets.
        sorts, weighs, layered: its elements are sorted; they have weights; they pass layers.
    """

    top: Any  # the highest node that belongs to this term alone; a hook there weights the whole term
    leaf: Any = None  # the node that reduces, or that could not be read
    factors: tuple[Factor, ...] = ()  # from the loss down; the leaf's own divisor is the last
    above: int = 0  # number of factors above ``top``
    added: bool = False  # something without a gradient is added on the path from the loss
    name: str = ""  # of the leaf
    readable: bool = True  # False: the leaf is no reduction, and what is below is unknown
    rows: int = 0  # how many single numbers the leaf reduces, from stack or cat; 0: it reduces a tensor
    divides: bool = False  # the last factor is the leaf's own divisor
    within: int = 0  # number of factors inside the leaf's sum
    learnt: bool = False  # the leaf is a function of single parameters
    value: float | None = None
    router: str = ""
    ignored: int | None = None
    targets: float = 0.0
    named: tuple[Items, ...] = ()
    by_classes: bool = False
    sorts: bool = False
    weighs: bool = False
    layered: bool = False

    def times(self, *factors: Factor) -> Term:
        """With more factors."""
        return replace(self, factors=(*self.factors, *factors)) if factors else self

    def below(self, top: Any, *factors: Factor) -> Term:
        """Below a sum, where ``top`` belongs to one of its terms, multiplied by ``factors``."""
        return replace(self, top=top, factors=(*self.factors, *factors), above=len(self.factors) + len(factors))

    def unread(self, node: Any, leaf: Any = None) -> Term:
        """With a node that cannot be read; ``leaf``: that above it, if it reduces."""
        name, leaf = type(node).__name__, leaf or node
        return replace(self, leaf=leaf, name=name, readable=False, learnt=nodes.is_learnt(leaf))

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
        return [each.node for each in self.factors if each.node is not None]

    @property
    def is_nothing(self) -> bool:
        """Whether it is multiplied by zero; False for factors on a device, which are not read."""
        for each in self.factors:
            if not (each.divides or each.node is not None) and on_host(each.value) and float(each.value) == 0.0:
                return True
        return False

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Equal for the same term of two micro-batches: all but numbers."""
        return (self.name, self.readable, *[(each.divides, each.node is not None) for each in self.factors])


def read(loss: Tensor, stops: Collection[Any] = (), *, deep: bool = False) -> list[Term]:
    """The terms of a loss; empty: it has no gradient.

    Args:
        loss: of one element.
        stops: nodes that are terms whatever is below them, such as a router loss.
        deep: also look for factors inside a sum, which unpacks tensors that autograd has saved.
    """
    if loss.grad_fn is None:
        return []
    nodes.note_loss(loss)
    # Under a dispatch mode Python numbers that autograd has wrapped cannot be read.
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            terms = read(loss, stops, deep=deep)
            return [replace(each, factors=tuple(factor.on_host() for factor in each.factors)) for each in terms]
    whole = Term(loss.grad_fn)
    terms = list(islice(_Reader(stops, deep).terms((loss.grad_fn, loss.output_nr), whole), _MOST_TERMS + 1))
    return terms if len(terms) <= _MOST_TERMS else [replace(whole.unread(loss.grad_fn), name="too many terms")]


def without_nothing(terms: Sequence[Term]) -> list[Term]:
    """Without the terms that are multiplied by zero (a weight that is warmed up), unless all are."""
    return [each for each in terms if not each.is_nothing] or [*terms]


def ignored_index(term: Term) -> int | None:
    """The ignored index of a cross entropy; None: it is none."""
    if not term.name.startswith("NllLoss"):
        return None
    ignored = int(term.leaf._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored


class _Reader(NamedTuple):
    """How a loss is read; the attributes are the arguments of `read`."""

    stops: Collection[Any]
    deep: bool

    def terms(self, edge: Edge, path: Term) -> Iterator[Term]:
        """The terms from a node downwards; without recursion, since a sum may have thousands of them."""
        pending = [(edge, path)]
        while pending:
            edge, path = pending.pop()
            node, output = edge
            does = nodes.does(node)
            if node in self.stops:
                yield path.unread(node)
            elif does in ("loss", "mean", "sum"):
                if (number := nodes.number_below(node, does)) is None:
                    yield from self._reduced(node, does, path)
                else:
                    pending.append((number, path))
            elif does == "pass":
                edge = nodes.passed(node, output)
                # A node with several outputs is shared.
                pending.append((edge, path.below(edge[0]) if nodes.has_several_outputs(node) else path))
            elif does == "add":
                summands = nodes.summands(node)
                # Else the other summand has no gradient.
                path = replace(path, added=path.added or len(summands) == 1)
                pending += reversed([(each, path.below(each[0], *its)) for each, its in summands])
            elif does == "factor" and (found := nodes.factor_of(node)) is not None:
                pending.append((found[0], path.times(found[1])))
            else:
                yield path.unread(node)

    def _reduced(self, node: Any, does: str, path: Term) -> Iterator[Term]:
        """The terms of a mean or sum; several where a number is added to each element of a tensor."""
        multiplies, below, rows = type(node).__name__.startswith(nodes.PRODUCTS), live_edges(node)[0], 0
        if does != "loss" and not multiplies:
            # What was not saved tells.
            with suppress(NotSavedError):
                rows = stacks.rows_of(below, _MOST_TERMS)
        # A selection depends on all elements; a dot product multiplies numbers of which each may be a term.
        hidden = multiplies and (len(live_edges(node)) > 1 or stacks.holds_stack(below[0]))
        hides = node if hidden else below[0] if nodes.does(below[0]) == "choose" else None
        if hides is not None:
            yield path.unread(hides, node)
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
            own, name = nodes.own_divisor(node, does, each[0]), type(node).__name__
            whole = part.times(*inner, *own)
            yield replace(whole, leaf=node, name=name, rows=rows, divides=bool(own), within=len(inner))


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
