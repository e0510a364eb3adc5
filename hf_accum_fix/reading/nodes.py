"""What one node of an autograd graph does to a number: it passes it on, adds, multiplies, reduces or stacks it.

`ROWS` lists the nodes, which are the same from torch 2.2.2 to 2.15.0. Asking does not wait for a device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

#: Nodes by what they do: "pass" keeps a number, "factor" multiplies or divides it, "sum" and "mean" reduce a tensor to
#: it, "dot" sums products, "choose" selects elements by value.
_NODES = {
    "pass": "ToCopy Clone Alias View UnsafeView ReshapeAlias Squeeze Unsqueeze Expand Permute NanToNum "
    # Of distributed tensors and DistributedDataParallel; DeepSpeed's hooks on what a module returns.
    "_ToTorchTensor _FromTorchTensor _DDPSink PreBackwardFunctionForModule PreBackwardFunction",
    "add": "Add Sub Rsub",
    "factor": "Neg Mul Div",
    "mean": "Mean",
    "sum": "Sum Nansum",
    "dot": "Dot Mm Bmm",
    "stack": "Stack Cat",
    "choose": "Topk Kthvalue",
}
#: What each node does.
ROWS: Mapping[str, str] = {name: does for does, names in _NODES.items() for name in names.split()}
_SEVERAL_OUTPUTS = ("Unbind", "Split", "VarMean", "StdMean")
#: Most nodes of a learnt factor (exp(-s)), and between a number and a tensor of one element.
_MOST_NODES = 32
#: The last loss that was read.
_last: Callable[[], Tensor | None] = lambda: None  # noqa: E731

#: A node, and the index of its input.
Edge: TypeAlias = "tuple[Any, int]"


class NotSavedError(Exception):
    """A tensor is asked for that was not saved: in a forward without a backward only small ones are."""


class Floor(NamedTuple):
    """What keeps a count from zero: a loss divides by max(count + more, least)."""

    more: Any = 0.0
    least: Any = 0.0
    read: bool = False  # by Python, which has read the count, or another number by chance

    def over(self, count: Any) -> float:
        """What a loss divides by; waits for numbers on a device."""
        return max(float(count) + float(self.more), float(self.least))


#: Of a sum that nothing keeps from zero.
NO_FLOOR = Floor()


class Factor(NamedTuple):
    """A number that a term is multiplied or divided by; a tensor has one element, and stays on the device.

    ``node``: the product or quotient with a learnt number, a function of parameters; None: it has no gradient.
    ``floor``, ``below``: what made it of a count, and the count; None: unknown.
    """

    value: Tensor | float
    divides: bool = False
    node: Any = None
    floor: Floor | None = None
    below: Any = None

    @property
    def learnt(self) -> bool:
        """Whether it has a gradient."""
        return self.node is not None

    def alone(self) -> Factor:
        """As a Python number, without its node; the count below its floor, if there is one."""
        if self.floor is not None:
            floor = self.floor._replace(more=float(self.floor.more), least=float(self.floor.least))
            return Factor(float(self.below), self.divides, None, floor)
        value = self.value.detach() if isinstance(self.value, Tensor) else self.value
        return Factor(float(value), self.divides, self.learnt or None)


#: An edge below a node, and what it is multiplied by there.
Step: TypeAlias = "tuple[Edge, tuple[Factor, ...]]"


def on_host(number: Tensor | float) -> bool:
    """Whether reading a number does not wait for a device."""
    return not isinstance(number, Tensor) or number.device.type == "cpu"


def as_number(factor: Factor) -> Factor:
    """A factor with a Python number for one on the host."""
    is_number = on_host(factor.value) and not (isinstance(factor.value, Tensor) and factor.value.ndim)
    return factor._replace(value=float(factor.value)) if is_number else factor


def note_loss(loss: Tensor) -> None:
    """Remember the loss that is read, which before torch 2.5 is needed for the shapes of its nodes."""
    global _last
    _last = weakref.ref(loss)


def kind_of(node: Any) -> str:
    """The operation of a node: "Mul" of a MulBackward0."""
    return type(node).__name__.rpartition("Backward")[0]


def does(node: Any) -> str:
    """As in `ROWS`, or "loss": a mean or sum by one of torch's loss functions; empty: anything else."""
    if getattr(node, "_saved_reduction", 0):
        return "loss"
    return ROWS.get(kind_of(node), "")


def chooses_rows(node: Any) -> bool:
    """Whether a selection is among the rows of a tensor, or all elements; else it is within each row."""
    axes, dim = len(node._saved_self_sym_sizes), int(node._saved_dim)
    return axes < 2 or (dim - 2**64 if dim >= 2**63 else dim) % axes == 0


def is_parameter(node: Any) -> bool:
    """Whether a node adds to the gradient of a leaf tensor."""
    return type(node).__name__ == "AccumulateGrad"


def live_edges(node: Any) -> list[Edge]:
    """The edges to what has a gradient."""
    return [each for each in node.next_functions if each[0] is not None]


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


def steps(node: Any, output: int, does: str) -> list[Step] | None:
    """The live edges below a node that passes a number on, adds or multiplies; None: it does something else."""
    if does == "pass":
        # DDP's maps each input to one output.
        is_ddp = type(node).__name__.startswith("_DDP")
        return [(node.next_functions[output] if is_ddp else live_edges(node)[0], ())]
    if does == "add":
        return summands(node)
    found = factor_of(node) if does == "factor" else None
    return None if found is None else [(found[0], (found[1],))]


def summands(node: Any) -> list[Step]:
    """The edges below a sum that have a gradient, and what each is multiplied by."""
    alpha = float(node._saved_alpha)
    signs = {"A": (1.0, alpha), "S": (1.0, -alpha), "R": (-alpha, 1.0)}[type(node).__name__[0]]
    edges = zip((*node.next_functions, (None, 0))[:2], signs, strict=True)
    return [(each, () if sign == 1 else (Factor(sign),)) for each, sign in edges if each[0] is not None]


def factor_of(node: Any) -> tuple[Edge, Factor] | None:
    """The edge below a product or quotient with a number, and the number; None: there is no such number."""
    kind = kind_of(node)
    if kind == "Neg":
        return node.next_functions[0], Factor(-1.0)
    # A number of Python may have no edge.
    edges = (*node.next_functions, (None, 0))[:2]
    sides = [side for side in (0, 1) if edges[side][0] is None]
    sides = sides or [side for side in (0, 1) if is_learnt(edges[side][0])]
    if len(sides) != 1 or (kind == "Div" and sides == [0]):
        return None
    [side] = sides
    value, learnt = node._saved_other if side else node._saved_self, edges[side][0] is not None
    return edges[1 - side], Factor(value.detach() if learnt else value, kind == "Div", node if learnt else None)


def number_below(edge: Edge, does: str) -> Edge | None:
    """The single number that a mean or sum over an edge reduces, or that a mean has for every element."""
    if does == "mean" and type(edge[0]).__name__ == "ExpandBackward0":
        [edge] = live_edges(edge[0])
        return edge if shape_of(edge[0]) == () else None
    return edge if is_number(edge[0]) else None


def is_number(node: Any, left: int = 2 * _MOST_NODES) -> bool:
    """Whether a node returns a single number, or makes a tensor of one element from one."""
    shape = shape_of(node)
    if shape == () or not left or math.prod(shape) != 1:
        return shape == ()
    # A tensor of one element is no number where it is a batch of one sample.
    below = live_edges(node) if does(node) in ("pass", "add", "factor") else []
    return is_parameter(node) or (bool(below) and all(is_number(each, left - 1) for each, _ in below))


def adds_a_number(node: Any) -> bool:
    """Whether a node adds a single number to every element of a tensor."""
    return does(node) == "add" and sorted(shape_of(each) == () for each, _ in live_edges(node)) == [False, True]


def own_divisor(node: Any, does: str, below: Any) -> tuple[Factor, ...]:
    """What a mean divides by itself; empty: it is a sum."""
    if does in ("sum", "dot") or (does == "loss" and node._saved_reduction == 2):
        return ()
    total = float(node._saved_self_sym_numel) if does == "mean" else getattr(node, "_saved_total_weight", None)
    # Before torch 2.5 a shape takes a gradient.
    return (Factor(float(math.prod(shape_of(below))) if total is None else total, divides=True),)


def is_learnt(node: Any, left: int = _MOST_NODES) -> bool:
    """Whether a number is a function of single parameters alone."""
    if node is None or left == 0:
        return left > 0
    if is_parameter(node):
        return True
    if getattr(node, "_saved_reduction", 0) or math.prod(shape_of(node)) != 1:
        return False
    below = [each for each, _ in node.next_functions]
    picks = type(node).__name__.startswith(("Select", "Index", "Unbind"))
    if picks and below[0] is not None and kind_of(below[0]) == "Softmax":
        # Only directly over a parameter: a layer below may have inputs without gradient.
        below = [each for each, _ in below[0].next_functions if is_parameter(each)] or below
    single = picks or all(math.prod(shape_of(each)) == 1 for each in below if is_parameter(each))
    return single and all(is_learnt(each, left - 1) for each in below)
