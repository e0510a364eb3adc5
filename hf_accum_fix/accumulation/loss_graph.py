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
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.errors import ContractError

#: What a node does: "pass" keeps a number, "sum" and "mean" reduce a tensor to it, "choose" selects elements by value.
ROWS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand"), "pass"
        ),
        **dict.fromkeys(("Permute", "NanToNum", "_DDPSink", "_ToTorchTensor", "_FromTorchTensor"), "pass"),
        # DeepSpeed's hook on what a module returns.
        **dict.fromkeys(("PreBackwardFunctionForModule", "PreBackwardFunction"), "pass"),
        **dict.fromkeys(("Add", "Sub", "Rsub"), "add"),
        **{name: name.lower() for name in ("Neg", "Mul", "Div", "Where", "Mean")},
        **dict.fromkeys(("Sum", "Nansum", "Dot"), "sum"),
        **dict.fromkeys(("Stack", "Cat"), "stack"),
        **dict.fromkeys(("Topk", "Kthvalue"), "choose"),
    }
)
#: Losses that divide by rows, not by elements.
_BY_ROW = ("MultiMarginLossBackward0", "MultilabelMarginLossBackward0")
_SEVERAL_OUTPUTS = ("Unbind", "Split", "VarMean", "StdMean")
#: The last loss that was read.
_last: Callable[[], Tensor | None] = lambda: None  # noqa: E731
#: Layers, through which data reach a loss.
_LAYERS = ("Embedding", "Convolution", "Addmm", "Mm", "Bmm")
#: Most nodes that are searched below one.
_MOST_BELOW = 10_000
#: Most terms of a loss that is read.
_MOST_TERMS = 512
#: Most nodes of a learnt factor (exp(-s)).
_MOST_NODES = 32


class Factor(NamedTuple):
    """A number that a term is multiplied or divided by; a tensor has one element, and stays on the device.

    ``learnt``: it has a gradient: a parameter, or a function of parameters.
    """

    value: Tensor | float
    divides: bool = False
    learnt: bool = False


#: A node, and the index of its input.
Edge: TypeAlias = "tuple[Any, int]"


@dataclass(frozen=True)
class Path:
    """The path from a loss down to a term.

    Attributes:
        top: the highest node that belongs to this term alone; a hook there weights the whole term.
        learnt: the products or quotients with learnt factors.
        above: number of factors above ``top``.
        added: something without a gradient is added on the path.
        outer: number of factors above the loss that the model returned; None: that is not on the path.
    """

    top: Any
    factors: tuple[Factor, ...] = ()
    learnt: tuple[Any, ...] = ()
    above: int = 0
    added: bool = False
    outer: int | None = None

    def times(self, *factors: Factor) -> Path:
        """With more factors."""
        return replace(self, factors=(*self.factors, *factors))

    def on_host(self) -> Path:
        """With Python numbers for the tensors on the CPU."""
        known = ((each, each.value) for each in self.factors)
        factors = (
            each._replace(value=float(v)) if isinstance(v, Tensor) and v.ndim == 0 and v.is_cpu else each
            for each, v in known
        )
        return replace(self, factors=tuple(factors))

    def below(self, top: Any) -> Path:
        """Below a sum, where ``top`` belongs to one of its terms."""
        return replace(self, top=top, above=len(self.factors))


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
        return 0 if below is None else _shape(below)[min(1, len(_shape(below)) - 1)]

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
            return [replace(each, path=each.path.on_host()) for each in terms]
    path = Path(loss.grad_fn)
    walk = _terms((loss.grad_fn, loss.output_nr), path, stops=stops, returned=returned, inside=inside, deep=deep)
    terms = list(islice(walk, _MOST_TERMS + 1))
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


def _terms(
    edge: Edge, path: Path, *, stops: Collection[Any], returned: Collection[Any], inside: bool, deep: bool
) -> Iterator[Term]:
    walk = partial(_terms, stops=stops, returned=returned, inside=inside, deep=deep)
    while True:
        node, output = edge
        if node in returned:
            path = replace(path, outer=len(path.factors))
        name, edges = type(node).__name__, node.next_functions
        does = _does(node)
        live = [each for each in edges if each[0] is not None]
        reduction = getattr(node, "_saved_reduction", 0)
        if node in stops:
            break
        if reduction or does in ("mean", "sum"):
            if not reduction and _is_number(live[0][0]):
                # It reduces a single number.
                edge = live[0]
                continue
            if does == "mean" and type(live[0][0]).__name__ == "ExpandBackward0":
                expanded = live[0][0].next_functions[0]
                if _shape(expanded[0]) == ():
                    # The mean of a number for every sample.
                    edge, path = expanded, path.below(expanded[0])
                    continue
            yield from _reduced(node, live[0], path, walk, inside=inside, deep=deep)
            return
        if does == "pass":
            edge = edges[output] if name.startswith("_DDP") else live[0]
            # A node with several outputs is shared.
            path = path.below(edge[0]) if has_several_outputs(node) else path
        elif does == "neg":
            edge, path = live[0], path.times(Factor(-1.0))
        elif does == "add":
            signed = [
                (each, sign) for each, sign in zip(edges, _signs(node, name), strict=False) if each[0] is not None
            ]
            paths = [path if sign == 1 else path.times(Factor(sign)) for _, sign in signed]
            if len(live) > 1:
                for each, below in zip(live, paths, strict=True):
                    yield from walk(each, below.below(each[0]))
                return
            # The other summand has no gradient.
            edge, path = live[0], replace(paths[0].below(live[0][0]), added=True)
        elif (found := _factor(node, edges, does)) is not None:
            edge, path = found[0], path.times(found[1])
        elif does in ("mul", "div") and (side := _learnt_side(edges, does)) is not None:
            value = (node._saved_other if side else node._saved_self).detach()
            path = path.times(Factor(value, divides=does == "div", learnt=True))
            edge, path = edges[1 - side], replace(path, learnt=(*path.learnt, node))
        else:
            break
    yield Term(name, node, path, readable=False, learnt=_is_learnt(node))


def _reduced(
    node: Any, below: Edge, path: Path, walk: Callable[[Edge, Path], Iterator[Term]], *, inside: bool, deep: bool
) -> Iterator[Term]:
    """The terms of a mean or sum; several where it reduces stacked numbers, or a number added to a tensor."""
    name, does, reduction = type(node).__name__, _does(node), getattr(node, "_saved_reduction", 0)
    stacked = _stacked(below[0])
    if inside and stacked:
        path = path.times(Factor(float(len(stacked)), divides=True)) if does == "mean" else path
        for each in stacked:
            yield from walk(each, path.below(each[0]))
    elif _does(below[0]) == "choose":
        # The selection depends on all elements.
        yield Term(type(below[0]).__name__, node, path, readable=False, learnt=_is_learnt(node))
    elif does == "mean" and _adds_numbers(below[0]):
        # mean(x + number) = mean(x) + number
        signs = _signs(below[0], type(below[0]).__name__)
        for each, sign in zip(below[0].next_functions, signs, strict=True):
            part = (path if sign == 1 else path.times(Factor(sign))).below(each[0])
            if _shape(each[0]) == ():
                yield from walk(each, part)
            else:
                own = _own_factors(node, name, 0, each, does, deep)
                yield Term(name, node, part.times(*own), divides=True, within=len(own) - 1)
    else:
        divides = reduction == 1 or does == "mean"
        own = _own_factors(node, name, reduction, below, does, deep)
        yield Term(name, node, path.times(*own), True, len(stacked), divides, len(own) - divides)


def _does(node: Any) -> str:
    return ROWS.get(type(node).__name__.rpartition("Backward")[0], "")


def _shape(node: Any) -> tuple[int, ...]:
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


def _signs(node: Any, name: str) -> tuple[float, float]:
    alpha = float(node._saved_alpha)
    return (1.0, alpha) if name[0] == "A" else (1.0, -alpha) if name[0] == "S" else (-alpha, 1.0)


def _factor(node: Any, edges: Sequence[Edge], does: str) -> tuple[Edge, Factor] | None:
    """The edge below a product, quotient or selection with a number, and the number."""
    live = [each for each in edges if each[0] is not None]
    first = bool(edges) and edges[0][0] is not None
    if len(live) != 1 or does not in ("mul", "div", "where") or (does == "div" and not first):
        return None
    if does == "where":
        return live[0], Factor(node._saved_condition if first else ~node._saved_condition)
    return live[0], Factor(node._saved_other if first else node._saved_self, divides=does == "div")


def _stacked(node: Any) -> list[Edge]:
    """The single numbers that a node has stacked; empty: it stacks tensors, or nothing."""
    live = [each for each in node.next_functions if each[0] is not None] if _does(node) == "stack" else []
    return live if all(_is_number(each) for each, _ in live) else []


def _is_number(node: Any) -> bool:
    """Whether a node returns a single number, or makes a vector of one."""
    if _shape(node) == ():
        return True
    # An expanded number is no vector of one.
    return _does(node) == "pass" and math.prod(_shape(node)) == 1 and _shape(node.next_functions[0][0]) == ()


def _adds_numbers(node: Any) -> bool:
    """Whether a node adds a single number to every element of a tensor."""
    live = [each for each, _ in node.next_functions if each is not None]
    return _does(node) == "add" and len(live) == 2 and sorted(_shape(each) == () for each in live) == [False, True]


def _own_factors(node: Any, name: str, reduction: int, below: Edge, does: str, deep: bool) -> list[Factor]:
    """The factors inside a mean or sum, and last its own divisor."""
    if reduction == 2:
        return []
    if reduction:
        total = getattr(node, "_saved_total_weight", None)
        if total is None:
            shape = _shape(below[0])
            total = float(math.prod(shape[:1] if name in _BY_ROW else shape))
        return [Factor(total, True)]
    inner = list(_inner(below)) if deep else []
    return [*inner, Factor(float(node._saved_self_sym_numel), True)] if does == "mean" else inner


def _inner(edge: Edge) -> Iterator[Factor]:
    """The numbers that the elements of a sum are multiplied or divided by."""
    while edge[0] is not None and edge[0].next_functions:
        node, output = edge
        does, edges = _does(node), node.next_functions
        if does == "neg":
            yield Factor(-1.0)
        elif does in ("mul", "div"):
            try:
                found = _factor(node, edges, does)
            except ContractError:
                # A tensor that was not saved, and so no single number.
                return
            if found is None or (isinstance(found[1].value, Tensor) and found[1].value.ndim > 0):
                return
            edges = (found[0],)
            yield found[1]
        elif does != "pass":
            return
        # DDP's node maps each input to one output.
        edge = edges[output] if type(node).__name__.startswith("_DDP") else edges[0]


def _learnt_side(edges: Any, does: str) -> int | None:
    """Which of two factors is learnt; None: neither, or both."""
    found = [side for side in (0, 1) if _is_learnt(edges[side][0])]
    return found[0] if len(found) == 1 and (does, found[0]) != ("div", 0) else None


def holds_layers(node: Any) -> bool:
    """Whether there is a layer of a model among the nodes searched below one."""
    seen, pending = {node}, [node]
    while pending and len(seen) < _MOST_BELOW:
        below = pending.pop()
        if type(below).__name__.startswith(_LAYERS):
            return True
        new = {each for each, _ in below.next_functions if each is not None} - seen
        seen |= new
        pending.extend(new)
    return False


def _is_learnt(node: Any, left: int = _MOST_NODES) -> bool:
    """Whether a number is a function of single parameters, without a tensor in between."""
    if node is None or left == 0:
        return left > 0
    if type(node).__name__ == "AccumulateGrad":
        return True
    if getattr(node, "_saved_reduction", 0) or math.prod(_shape(node)) != 1:
        return False
    below = [each for each, _ in node.next_functions]
    leaves = [each for each in below if type(each).__name__ == "AccumulateGrad"]
    picks = type(node).__name__.startswith(("Select", "Index", "Unbind"))
    if not picks and any(math.prod(_shape(each)) != 1 for each in leaves):
        return False
    return all(_is_learnt(each, left - 1) for each in below)
