"""Read a loss from its autograd graph: the reductions it is made of, and what each is divided by.

    loss = sum over terms of  (product of the term's factors) * (sum over the elements of the term's leaf)

Reading it takes no forward, no operation on a tensor and no wait for the device. What is no such sum (a root, a product
of two terms, compiled code) becomes a term whose leaf is the node that says so. The nodes are rows of `ROWS`; names and
attributes are the same from torch 2.2.2 to 2.15.0, where they were probed.
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

#: What a node does to the number above it: "pass" hands it on, "sum" and "mean" reduce a
#: tensor to it, "choose" takes elements by their values.
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
#: The loss that was read last.
_last: Callable[[], Tensor | None] = lambda: None  # noqa: E731
#: Nodes through which data reach a loss.
_LAYERS = ("Embedding", "Convolution", "Addmm", "Mm", "Bmm")
#: So many nodes below one are looked at.
_MOST_BELOW = 10_000
#: A loss of more terms than this is not read.
_MOST_TERMS = 512
#: Nodes of a factor that has a gradient of its own (exp(-s)) at most.
_MOST_NODES = 32


class Factor(NamedTuple):
    """A number that a term is multiplied by, or divided by; a tensor has one element, and is on the device.

    ``learnt``: it has a gradient of its own: a parameter, or a function of parameters.
    """

    value: Tensor | float
    divides: bool = False
    learnt: bool = False


#: A node, and which of its inputs the gradient goes to.
Edge: TypeAlias = "tuple[Any, int]"


@dataclass(frozen=True)
class Path:
    """The way from a loss down to a term.

    Attributes:
        top: the highest node that belongs to this term alone; a hook there weighs the whole term.
        learnt: the products, or quotients, with factors that have a gradient of their own.
        above: how many of the factors stand above that node.
        added: something without a gradient is added on the way.
        outer: how many of the factors stand above the loss that the model itself returned; None: it was not passed.
    """

    top: Any
    factors: tuple[Factor, ...] = ()
    learnt: tuple[Any, ...] = ()
    above: int = 0
    added: bool = False
    outer: int | None = None

    def times(self, *factors: Factor) -> Path:
        """The same with more factors."""
        return replace(self, factors=(*self.factors, *factors))

    def on_host(self) -> Path:
        """The same with Python numbers for those that wait for no device."""
        known = ((each, each.value) for each in self.factors)
        factors = (
            each._replace(value=float(v)) if isinstance(v, Tensor) and v.ndim == 0 and v.is_cpu else each
            for each, v in known
        )
        return replace(self, factors=tuple(factors))

    def below(self, top: Any) -> Path:
        """The same below a sum: the node belongs to one of its terms."""
        return replace(self, top=top, above=len(self.factors))


@dataclass(frozen=True)
class Term:
    """One reduction inside a loss.

    Attributes:
        leaf: the node that reduces, or the one that could not be read; ``name`` is its.
        path: from the loss to it; the leaf's own count is the last of its factors.
        readable: False: the leaf is no reduction, so that nothing is known below it.
        rows: how many single numbers the leaf has put together by stack or cat; 0: it reduces a tensor.
        divides: the last of the factors is the leaf's own count.
        within: how many of the factors stand inside of the leaf's sum.
        learnt: the leaf is a function of single parameters, and no reduction.
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
    def classes(self) -> int:
        """Of a cross entropy; 0: it is none, or has no gradient."""
        below = self.leaf.next_functions[0][0] if self.name.startswith("NllLoss") else None
        return 0 if below is None else _shape(below)[min(1, len(_shape(below)) - 1)]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What terms of two micro-batches have in common if they are the same: all but numbers."""
        return (self.name, self.readable, *((each.divides, each.learnt) for each in self.factors))


def read(
    loss: Tensor,
    stops: Collection[Any] = (),
    *,
    inside: bool = False,
    deep: bool = False,
    returned: Collection[Any] = (),
) -> list[Term]:
    """The terms of a loss; none: it has no gradient.

    Args:
        loss: of one element.
        stops: nodes that are terms whatever stands below them, such as a router's loss.
        inside: look into means and sums of stacked numbers; else they are leaves, and their numbers rows.
        deep: look for numbers inside of a sum, too; this unpacks tensors that autograd has kept.
        returned: nodes of losses that the model itself returned.
    """
    if loss.grad_fn is None:
        return []
    global _last
    _last = weakref.ref(loss)
    # A dispatch mode hands on no Python number that autograd has wrapped.
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            terms = read(loss, stops, inside=inside, deep=deep, returned=returned)
            return [replace(each, path=each.path.on_host()) for each in terms]
    path = Path(loss.grad_fn)
    walk = _terms((loss.grad_fn, loss.output_nr), path, stops=stops, returned=returned, inside=inside, deep=deep)
    terms = list(islice(walk, _MOST_TERMS + 1))
    return terms if len(terms) <= _MOST_TERMS else [Term("too many terms", loss.grad_fn, path, readable=False)]


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
            if not reduction and _shape(live[0][0]) == ():
                # Of one number: it reduces nothing.
                edge = live[0]
                continue
            stacked = _stacked(live[0][0])
            if inside and stacked:
                path = path.times(Factor(float(len(stacked)), divides=True)) if does == "mean" else path
                for each in stacked:
                    yield from walk(each, path.below(each[0]))
                return
            if _does(live[0][0]) == "choose":
                # Which elements it holds depends on all of them.
                name = type(live[0][0]).__name__
                break
            if does == "mean" and _adds_numbers(live[0][0]):
                # mean(x + number) = mean(x) + number
                below, signs = live[0][0], _signs(live[0][0], type(live[0][0]).__name__)
                for each, sign in zip(below.next_functions, signs, strict=True):
                    part = (path if sign == 1 else path.times(Factor(sign))).below(each[0])
                    if _shape(each[0]) == ():
                        yield from walk(each, part)
                    else:
                        own = _own_factors(node, name, 0, each, does, deep)
                        yield Term(name, node, part.times(*own), divides=True, within=len(own) - 1)
                return
            divides = reduction == 1 or does == "mean"
            own = _own_factors(node, name, reduction, live[0], does, deep)
            yield Term(name, node, path.times(*own), True, len(stacked), divides, len(own) - divides)
            return
        if does == "pass":
            edge = edges[output] if name.startswith("_DDP") else live[0]
            # A node of several outputs belongs to others, too.
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
            # Below what is added, which has no gradient.
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


def _does(node: Any) -> str:
    return ROWS.get(type(node).__name__.rpartition("Backward")[0], "")


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of a node's output. torch before 2.5 shows it by a gradient alone."""
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
    """The one edge on which a product, quotient or selection with a number goes on, and the number."""
    live = [each for each in edges if each[0] is not None]
    first = bool(edges) and edges[0][0] is not None
    if len(live) != 1 or does not in ("mul", "div", "where") or (does == "div" and not first):
        return None
    if does == "where":
        return live[0], Factor(node._saved_condition if first else ~node._saved_condition)
    return live[0], Factor(node._saved_other if first else node._saved_self, divides=does == "div")


def _stacked(node: Any) -> list[Edge]:
    """The single numbers that a node has put together; none: it puts together tensors, or nothing."""
    live = [each for each in node.next_functions if each[0] is not None] if _does(node) == "stack" else []
    numbers = [
        _shape(each) == () or (_does(each) == "pass" and _shape(each.next_functions[0][0]) == ()) for each, _ in live
    ]
    return live if all(numbers) else []


def _adds_numbers(node: Any) -> bool:
    """Whether a node adds a single number to every element of a tensor."""
    live = [each for each, _ in node.next_functions if each is not None]
    return _does(node) == "add" and len(live) == 2 and sorted(_shape(each) == () for each in live) == [False, True]


def _own_factors(node: Any, name: str, reduction: int, below: Edge, does: str, deep: bool) -> list[Factor]:
    """The numbers that stand inside of a mean or sum, and last what the reduction divides by."""
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
    """The numbers that the elements of a sum are multiplied by, or divided by, before they are added."""
    while edge[0] is not None and edge[0].next_functions:
        node, output = edge
        does, edges = _does(node), node.next_functions
        if does == "neg":
            yield Factor(-1.0)
        elif does in ("mul", "div"):
            try:
                found = _factor(node, edges, does)
            except ContractError:
                # A tensor that was forgotten, and so no number.
                return
            if found is None or (isinstance(found[1].value, Tensor) and found[1].value.ndim > 0):
                return
            edges = (found[0],)
            yield found[1]
        elif does != "pass":
            return
        # A node of several inputs and outputs hands on one to one.
        edge = edges[output] if type(node).__name__.startswith("_DDP") else edges[0]


def _learnt_side(edges: Any, does: str) -> int | None:
    """Which of two factors is a function of parameters alone; None: neither, or both."""
    found = [side for side in (0, 1) if _is_learnt(edges[side][0])]
    return found[0] if len(found) == 1 and (does, found[0]) != ("div", 0) else None


def holds_layers(node: Any) -> bool:
    """Whether a layer of a model stands below a node, as far as one looks."""
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
    """Whether a number is a function of single parameters: no tensor stands between it and them."""
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
