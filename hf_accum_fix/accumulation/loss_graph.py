"""Read a loss from its autograd graph: its reductions, and what each is divided by.

    loss = sum over terms of  (product of the term's factors) * (sum over the elements of the term's leaf)

Reading takes no forward, no tensor operation and no wait for the device. Anything else (a root, a product of two terms,
compiled code) becomes an unreadable term with that node as its leaf. `ROWS` lists the nodes; their names and attributes
are the same from torch 2.2.2 to 2.15.0.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.errors import ContractError

#: Nodes by what they do: "pass" keeps a number, "factor" multiplies or divides it, "sum" and "mean" reduce a tensor to
#: it, "choose" selects elements by value.
_NODES = {
    "pass": "ToCopy Clone Alias View UnsafeView ReshapeAlias Squeeze Unsqueeze Expand Permute NanToNum "
    # Of distributed tensors and DistributedDataParallel; DeepSpeed's hooks on what a module returns.
    "_ToTorchTensor _FromTorchTensor _DDPSink PreBackwardFunctionForModule PreBackwardFunction",
    "add": "Add Sub Rsub",
    "factor": "Neg Mul Div Where",
    "mean": "Mean",
    "sum": "Sum Nansum Dot Mm Bmm",
    "stack": "Stack Cat",
    "choose": "Topk Kthvalue",
}
#: What each node does.
ROWS: Mapping[str, str] = MappingProxyType({name: does for does, names in _NODES.items() for name in names.split()})
#: Losses that divide by rows, not by elements.
_BY_ROW = ("MultiMarginLossBackward0", "MultilabelMarginLossBackward0")
#: Sums of products.
PRODUCTS = ("Dot", "Mm", "Bmm")
_SEVERAL_OUTPUTS = ("Unbind", "Split", "VarMean", "StdMean")
#: Most terms of a loss that is read, nodes of a learnt factor (exp(-s)), and nodes that are searched for a layer.
_MOST_TERMS, _MOST_NODES, MOST_BELOW = 512, 32, 10_000
#: The last loss that was read.
_last: Callable[[], Tensor | None] = lambda: None  # noqa: E731


class Factor(NamedTuple):
    """A number that a term is multiplied or divided by; a tensor has one element, and stays on the device.

    ``node``: the product or quotient with a learnt number: a parameter, or a function of parameters; None: the number
    has no gradient. ``memory``: the address of a tensor on the CPU.
    """

    value: Tensor | float
    divides: bool = False
    node: Any = None
    memory: int = 0

    @property
    def learnt(self) -> bool:
        """Whether it has a gradient."""
        return self.node is not None

    def on_host(self) -> Factor:
        """With a Python number for one on the CPU."""
        if not isinstance(self.value, Tensor) or self.value.ndim > 0 or not self.value.is_cpu:
            return self
        return self._replace(value=float(self.value), memory=self.value.data_ptr())


#: A node, and the index of its input.
Edge: TypeAlias = "tuple[Any, int]"


@dataclass(frozen=True)
class Path:
    """The path from a loss down to a term.

    Attributes:
        top: the highest node that belongs to this term alone; a hook there weights the whole term.
        factors: from the loss down.
        above: number of factors above ``top``.
        added: something without a gradient is added on the path.
        outer: number of factors above the loss that the model returned; None: that is not on the path.
    """

    top: Any
    factors: tuple[Factor, ...] = ()
    above: int = 0
    added: bool = False
    outer: int | None = None

    @property
    def learnt(self) -> tuple[Any, ...]:
        """The products or quotients with learnt factors."""
        return tuple(each.node for each in self.factors if each.learnt)

    def times(self, *factors: Factor) -> Path:
        """With more factors."""
        return replace(self, factors=(*self.factors, *factors)) if factors else self

    def below(self, top: Any, sign: float = 1.0) -> Path:
        """Below a sum, where ``top`` belongs to one of its terms, multiplied by ``sign``."""
        path = self if sign == 1 else self.times(Factor(sign))
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
    def classes(self) -> int:
        """Number of classes of a cross entropy; 0: it is none, or has no gradient."""
        below = self.leaf.next_functions[0][0] if self.name.startswith("NllLoss") else None
        return 0 if below is None else shape_of(below)[min(1, len(shape_of(below)) - 1)]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for the same term of two micro-batches: all but numbers."""
        return (self.name, self.readable, *((each.divides, each.learnt) for each in self.factors))


def read(
    loss: Tensor,
    stops: Collection[Any] = (),
    *,
    inside: bool = False,
    deep: bool = False,
    returned: Collection[Any] = (),
) -> list[Term]:
    """The terms of a loss; empty: it has no gradient.

    Args:
        loss: of one element.
        stops: nodes that are terms whatever is below them, such as a router loss.
        inside: look into means and sums of stacked numbers; else they are leaves, and their numbers rows.
        deep: also look for factors inside a sum, which unpacks tensors that autograd has saved.
        returned: nodes of losses that the model returned.
    """
    if loss.grad_fn is None:
        return []
    global _last
    _last = weakref.ref(loss)
    # Under a dispatch mode Python numbers that autograd has wrapped cannot be read.
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            terms = read(loss, stops, inside=inside, deep=deep, returned=returned)
            known = [tuple(factor.on_host() for factor in each.factors) for each in terms]
            return [replace(e, path=replace(e.path, factors=f)) for e, f in zip(terms, known, strict=True)]
    path = Path(loss.grad_fn)
    found = _Reader(stops, returned, inside=inside, deep=deep).terms((loss.grad_fn, loss.output_nr), path)
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


def on_host(number: Tensor | float) -> bool:
    """Whether reading a number does not wait for a device."""
    return not isinstance(number, Tensor) or number.device.type == "cpu"


@dataclass(frozen=True)
class _Reader:
    """How a loss is read; the attributes are the arguments of `read`."""

    stops: Collection[Any]
    returned: Collection[Any]
    inside: bool
    deep: bool

    def terms(self, edge: Edge, path: Path) -> Iterator[Term]:
        """The terms from a node downwards."""
        while True:
            node, output = edge
            if node in self.returned:
                path = replace(path, outer=len(path.factors))
            does = _does(node)
            if node in self.stops:
                break
            if does in ("loss", "mean", "sum"):
                if (number := _number_below(node, does)) is None:
                    yield from self._reduced(node, does, path)
                    return
                edge = number
            elif does == "pass":
                edge = _passed(node, output)
                # A node with several outputs is shared.
                path = path.below(edge[0]) if has_several_outputs(node) else path
            elif does == "add":
                summands = _summands(node)
                if len(summands) > 1:
                    for each, sign in summands:
                        yield from self.terms(each, path.below(each[0], sign))
                    return
                # The other summand has no gradient.
                [(edge, sign)] = summands
                path = replace(path.below(edge[0], sign), added=True)
            elif does == "factor" and (found := factor_of(node)) is not None:
                edge, path = found[0], path.times(found[1])
            else:
                break
        yield Term(type(node).__name__, node, path, readable=False, learnt=_is_learnt(node))

    def _reduced(self, node: Any, does: str, path: Path) -> Iterator[Term]:
        """The terms of a mean or sum; several where it reduces stacked numbers, or a number added to a tensor."""
        below = live_edges(node)[0]
        stacked, parts = _stacked(below[0]), [(below, path)]
        # A selection depends on all elements; a dot product multiplies numbers of which each may be a term.
        multiplies = type(node).__name__.startswith(PRODUCTS) and (bool(stacked) or len(live_edges(node)) > 1)
        hides = node if multiplies else below[0] if _does(below[0]) == "choose" else None
        if hides is not None:
            yield Term(type(hides).__name__, node, path, readable=False, learnt=_is_learnt(node))
            return
        if self.inside and stacked:
            path = path.times(Factor(float(len(stacked)), divides=True)) if does == "mean" else path
            for each in stacked:
                yield from self.terms(each, path.below(each[0]))
            return
        if does == "mean" and _adds_a_number(below[0]):
            # mean(x + number) = mean(x) + number
            parts = [(each, path.below(each[0], sign)) for each, sign in _summands(below[0])]
        for each, part in parts:
            if len(parts) > 1 and shape_of(each[0]) == ():
                yield from self.terms(each, part)
                continue
            inner = list(_inner(each)) if self.deep and does != "loss" else []
            own = _own_divisor(node, does, each[0])
            whole = part.times(*inner, *own)
            yield Term(type(node).__name__, node, whole, rows=len(stacked), divides=bool(own), within=len(inner))


def _does(node: Any) -> str:
    """As in `ROWS`, or "loss": a mean or sum by one of torch's loss functions."""
    reduces = getattr(node, "_saved_reduction", 0)
    return "loss" if reduces else ROWS.get(type(node).__name__.rpartition("Backward")[0], "")


def live_edges(node: Any) -> list[Edge]:
    """The edges to what has a gradient."""
    return [each for each in node.next_functions if each[0] is not None]


def _passed(node: Any, output: int) -> Edge:
    """The edge below a node that keeps a number; DDP's maps each input to one output."""
    return node.next_functions[output] if type(node).__name__.startswith("_DDP") else live_edges(node)[0]


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's output; before torch 2.5, the shape of its gradient."""
    if hasattr(node, "_input_metadata"):
        return tuple(node._input_metadata[0].shape) if node._input_metadata else ()
    if hasattr(node, "variable"):
        return tuple(node.variable.shape)
    loss = _last()
    assert loss is not None, "a node outlives its loss"
    return tuple(torch.autograd.grad(loss, GradientEdge(node, 0), retain_graph=True)[0].shape)


def has_several_outputs(node: Any) -> bool:
    """Whether a node has several outputs; before torch 2.5 any custom function may."""
    if hasattr(node, "_input_metadata"):
        return len(node._input_metadata) > 1
    return isinstance(node, BackwardCFunction) or type(node).__name__.startswith(_SEVERAL_OUTPUTS)


def _summands(node: Any) -> list[tuple[Edge, float]]:
    """The edges below a sum or difference, and what each is multiplied by."""
    alpha, kind = float(node._saved_alpha), type(node).__name__[0]
    signs = {"A": (1.0, alpha), "S": (1.0, -alpha), "R": (-alpha, 1.0)}[kind]
    return [(each, sign) for each, sign in zip(node.next_functions, signs, strict=False) if each[0] is not None]


def factor_of(node: Any) -> tuple[Edge, Factor] | None:
    """The edge below a product, quotient or selection with a number, and the number; None: there is no such number."""
    kind = type(node).__name__.rpartition("Backward")[0]
    if kind == "Neg":
        return node.next_functions[0], Factor(-1.0)
    # A number of Python may have no edge.
    edges = (*node.next_functions, (None, 0))[:2]
    sides = [side for side in (0, 1) if edges[side][0] is None]
    if not sides and kind != "Where":
        sides = [side for side in (0, 1) if _is_learnt(edges[side][0])]
    if len(sides) != 1 or (kind == "Div" and sides == [0]):
        return None
    [side] = sides
    below = edges[1 - side]
    if kind == "Where":
        return below, Factor(node._saved_condition if side else ~node._saved_condition)
    value, learnt = node._saved_other if side else node._saved_self, edges[side][0] is not None
    return below, Factor(value.detach() if learnt else value, kind == "Div", node if learnt else None)


def _number_below(node: Any, does: str) -> Edge | None:
    """The single number that a mean or sum reduces, or that a mean has for every element; None: it reduces more."""
    below = live_edges(node)[0]
    if does == "mean" and type(below[0]).__name__ == "ExpandBackward0":
        expanded = live_edges(below[0])[0]
        return expanded if shape_of(expanded[0]) == () else None
    return below if does != "loss" and _is_number(below[0]) else None


def _stacked(node: Any) -> list[Edge]:
    """The single numbers that a node has stacked; empty: it stacks tensors, or nothing."""
    live = live_edges(node) if _does(node) == "stack" else []
    return live if all(_is_number(each) for each, _ in live) else []


def _is_number(node: Any) -> bool:
    """Whether a node returns a single number, or makes a vector of one."""
    if shape_of(node) == ():
        return True
    # An expanded number is no vector of one.
    return _does(node) == "pass" and math.prod(shape_of(node)) == 1 and shape_of(node.next_functions[0][0]) == ()


def _adds_a_number(node: Any) -> bool:
    """Whether a node adds a single number to every element of a tensor."""
    return _does(node) == "add" and sorted(shape_of(each) == () for each, _ in live_edges(node)) == [False, True]


def _own_divisor(node: Any, does: str, below: Any) -> list[Factor]:
    """What a mean divides by itself; empty: it is a sum."""
    if does == "sum" or getattr(node, "_saved_reduction", 0) == 2:
        return []
    if does == "mean":
        return [Factor(float(node._saved_self_sym_numel), divides=True)]
    total = getattr(node, "_saved_total_weight", None)
    if total is None:
        # Before torch 2.5 a shape takes a gradient.
        shape = shape_of(below)
        total = float(math.prod(shape[:1] if type(node).__name__ in _BY_ROW else shape))
    return [Factor(total, divides=True)]


def _inner(edge: Edge) -> Iterator[Factor]:
    """The numbers that the elements of a sum are multiplied or divided by."""
    while edge[0] is not None and edge[0].next_functions:
        node, output = edge
        does = _does(node)
        if does == "factor":
            try:
                found = factor_of(node)
            except ContractError:
                # A tensor that was not saved, and so no single number.
                return
            if found is None or found[1].learnt or (isinstance(found[1].value, Tensor) and found[1].value.ndim > 0):
                return
            edge = found[0]
            yield found[1]
        elif does == "pass":
            edge = _passed(node, output)
        elif does == "mean":
            # Over some dimensions.
            edge = live_edges(node)[0]
            yield Factor(float(node._saved_self_sym_numel) / math.prod(shape_of(node)), divides=True)
        else:
            return


def _is_learnt(node: Any, left: int = _MOST_NODES) -> bool:
    """Whether a number is a function of single parameters, without a tensor in between."""
    if node is None or left == 0:
        return left > 0
    if type(node).__name__ == "AccumulateGrad":
        return True
    if getattr(node, "_saved_reduction", 0) or math.prod(shape_of(node)) != 1:
        return False
    below = [each for each, _ in node.next_functions]
    leaves = [each for each in below if type(each).__name__ == "AccumulateGrad"]
    picks = type(node).__name__.startswith(("Select", "Index", "Unbind"))
    if not picks and any(math.prod(shape_of(each)) != 1 for each in leaves):
        return False
    return all(_is_learnt(each, left - 1) for each in below)
