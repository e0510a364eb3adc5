"""See the loss functions of torch that a forward calls: their value, and the items that they reduced over.

While a `LossCalls` listens, the loss functions of ``torch.nn.functional``, and Liger's fused ones where they are
imported, are thin wrappers that tell it of each call.
Nothing is read from the device, and no other operation is looked at. Heads, ``nn.CrossEntropyLoss`` and the
library's ``fixed_cross_entropy`` look these functions up in that module whenever they call them. What a forward calls
under torch.compile, inside of ``torch.func`` or by a name of its own is not seen.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.accumulation.window import count_dtype
from hf_accum_fix.errors import ContractError

#: The functions that are seen; what a mean divides by is `_divisor`.
_KNOWN = (
    "cross_entropy", "linear_cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "ctc_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss",
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss", "triplet_margin_loss",
)  # fmt: skip
_LIGER = ("liger_cross_entropy", "liger_fused_linear_cross_entropy")
#: Losses of other libraries, by the module in which callers look them up.
_ELSEWHERE = {"liger_kernel.transformers.functional": _LIGER}
#: Classes stand beside the samples, so that a mean divides by weights of the targets.
_BY_CLASS = ("cross_entropy", "nll_loss", "linear_cross_entropy", *_LIGER)
#: Weights of classes by another name: "weight" is the linear layer's.
_CLASS_WEIGHTS = {"liger_fused_linear_cross_entropy": "ce_weight"}
#: Older releases of torch do not know them all.
_LOSSES = tuple(name for name in _KNOWN if hasattr(F, name))
#: A mean divides by the weights of the elements, where there are any; the other losses' does not.
_BY_WEIGHT = ("mse_loss", "l1_loss")
#: One value for each sample whatever the shape of its target.
_BY_SAMPLE = (
    "ctc_loss", "cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "triplet_margin_loss",
)  # fmt: skip


#: Where a function was looked up, its name there, and itself.
_Replaced = tuple[dict[str, Any], str, Callable[..., Any]]


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function of torch.

    Attributes:
        reduction: "mean" or "sum"; "none" where it returned a loss for each item, whose sum is ``value``.
        value: 0-dim, what it returned.
        items: what a mean divides by: valid targets, samples or elements; the sum of the targets' weights where
            classes are weighted. A tensor is 0-dim, and not read.
        targets: how many there are, whatever they weigh.
        weighted: whether classes are weighted.
        ignore_index: None for losses that have none.
    """

    reduction: str
    value: Tensor
    items: Tensor | int
    targets: Tensor | int
    weighted: bool
    ignore_index: int | None

    @property
    def mean(self) -> Tensor:
        """The mean over its items, where it took it itself or returned a loss for each of them."""
        return self.value / self.items if self.reduction == "none" else self.value


class LossCalls(AbstractContextManager["LossCalls"]):
    """Note the loss calls that this thread makes inside a ``with`` block.

    Args:
        graded: leave out calls without a gradient: a matcher's, and what is only logged.

    Attributes:
        seen: the calls, in order.
    """

    def __init__(self, *, graded: bool = False) -> None:
        self.graded = graded
        self.seen: list[LossCall] = []

    def __enter__(self) -> LossCalls:
        """Listen, instead of whoever listens outside."""
        self._outer = getattr(_THREAD, "listener", None)
        _THREAD.listener = self
        self._replaced = _put_wrappers()
        return self

    def __exit__(self, *_: object) -> None:
        """Let whoever listens outside go on."""
        _put_back(self._replaced)
        _THREAD.listener = self._outer

    @staticmethod
    def listening() -> LossCalls | None:
        """Whoever listens in this thread."""
        return getattr(_THREAD, "listener", None)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Listen again, inside of a block in which another one does."""
        outer, _THREAD.listener = _THREAD.listener, self
        try:
            yield
        finally:
            _THREAD.listener = outer

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, weights: Tensor | None
    ) -> None:
        given = _given(name, args, kwargs)
        reduction = given["reduction"]
        if (out.ndim > 0 and reduction != "none") or (self.graded and not out.requires_grad):
            return
        items: Tensor | int
        targets: Tensor | int | None = None
        target = given.get("target")
        ignore_index: int | None = None
        weighted = False
        if weights is not None:
            ignore_index, items = given["ignore_index"], weights.sum()
        elif reduction == "batchmean":
            reduction, items = "mean", len(given["input"])
        elif name in _BY_CLASS and isinstance(target, Tensor) and not target.is_floating_point():
            ignore_index = -100 if given["ignore_index"] is None else given["ignore_index"]
            valid = target != ignore_index
            items = targets = valid.sum(dtype=count_dtype(valid.device))
            if (of_classes := given.get(_CLASS_WEIGHTS.get(name, "weight"))) is not None:
                weighted = True
                items = (of_classes.detach()[target.masked_fill(~valid, 0)] * valid).sum()
        elif name in _BY_CLASS:
            items = given["input"].numel() // given["input"].shape[1 if given["input"].ndim > 1 else 0]
        elif name == "ctc_loss":
            items = torch.as_tensor(given["target_lengths"]).numel()
        elif name in _BY_SAMPLE:
            items = len(first) if isinstance(first := next(iter(given.values())), Tensor) and first.ndim else 1
        elif name in _BY_WEIGHT and given.get("weight") is not None:
            weighted = True
            items = given["weight"].detach().expand_as(out if reduction == "none" else given["input"]).sum()
        else:
            items = (out if reduction == "none" else next(iter(given.values()))).numel()
        # A copy: heads add a router's loss to it in place.
        value = out.sum() if out.ndim else out.clone()
        self.seen.append(
            LossCall(reduction, value, items, items if targets is None else targets, weighted, ignore_index)
        )


@contextmanager
def weighing(weights: Mapping[int, Tensor]) -> Iterator[None]:
    """Let cross entropies multiply each target's loss by a weight of its own; a mean divides by the weights.

    Args:
        weights: flat, by the number of targets that a call is handed.
    """
    outer, _THREAD.weights = getattr(_THREAD, "weights", None), weights
    replaced = _put_wrappers()
    try:
        yield
    finally:
        _put_back(replaced)
        _THREAD.weights = outer


def _weighed(
    function: Callable[..., Any], name: str, given: dict[str, Any], weights: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """A loss call with a weight for each target, and the weights of those that are no ignored ones."""
    target, reduction = given["target"], given["reduction"]
    found = weights.get(target.numel()) if name in _LOSSES else None
    if found is None or target.is_floating_point() or reduction == "none":
        raise ContractError(
            f"got {name} over {target.numel()} targets, reduced by {reduction!r}; expected torch's mean or sum over "
            f"the {' or '.join(map(str, weights))} labels of its micro-batch: leave per_sample out"
        )
    used = found.to(target.device) * (target != given["ignore_index"]).flatten()
    losses = function(**{**given, "reduction": "none"})
    total = (losses.flatten().to(used.dtype) * used).sum()
    return (total / used.sum() if reduction == "mean" else total).to(losses.dtype), used


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss call by name, its reduction as torch spells it today."""
    given = {**_DEFAULTS[name], **dict(zip(_NAMES[name], args, strict=False)), **kwargs}
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    given.setdefault("reduction", "mean")
    if size_average is not None or reduce is not None:
        # The spelling of torch before 1.0, which the function itself translates.
        given["reduction"] = "none" if reduce is False else ("mean" if size_average in (None, True) else "sum")
    return given


def _put_wrappers() -> list[_Replaced]:
    """Put the wrappers in the place of the functions."""
    replaced = []
    for names, namespace in _namespaces():
        for name in names:
            function = namespace[name]
            if function not in _OURS:
                namespace[name] = _WRAPPERS.get(function) or _noted(name, function)
                replaced.append((namespace, name, function))
    return replaced


def _namespaces() -> Iterator[tuple[Sequence[str], dict[str, Any]]]:
    """The names of losses, and where they are looked up."""
    yield _LOSSES, vars(F)
    for module, names in _ELSEWHERE.items():
        if module in sys.modules:
            namespace = vars(sys.modules[module])
            yield [name for name in names if name in namespace], namespace


def _put_back(replaced: Sequence[_Replaced]) -> None:
    """Put the functions back, unless others have put theirs around."""
    for namespace, name, function in replaced:
        if namespace[name] in _OURS:
            namespace[name] = function


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of a function: always the same one, so that a compiled caller's guard on it holds."""
    parameters = inspect.signature(function).parameters
    _NAMES[name] = tuple(parameters)
    _DEFAULTS[name] = {
        key: each.default if each.default is not each.empty else None for key, each in parameters.items()
    }

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        # A compiled caller must not be broken in two: what it calls is not seen.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        listener, weights = getattr(_THREAD, "listener", None), getattr(_THREAD, "weights", None)
        if listener is None and weights is None:
            return function(*args, **kwargs)
        # Under a function mode the call comes back to us once more, by its name.
        _THREAD.listener, _THREAD.weights = None, None
        try:
            if weights is not None and name in _BY_CLASS:
                out, used = _weighed(function, name, _given(name, args, kwargs), weights)
            else:
                out, used = function(*args, **kwargs), None
        finally:
            _THREAD.listener, _THREAD.weights = listener, weights
        # Liger's may return its loss beside the accuracy.
        loss = getattr(out, "loss", out)
        # Inside of torch.func there is a value for each row, which has no number outside.
        heard = isinstance(loss, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(loss)
        if listener is not None and heard:
            listener._note(name, args, kwargs, loss, used)
        return out

    _WRAPPERS[function] = noted
    _OURS.add(noted)
    return noted


_THREAD = local()
_WRAPPERS: dict[Callable[..., Any], Callable[..., Any]] = {}
_OURS: set[Callable[..., Any]] = set()
#: The parameters of each loss, and their defaults.
_NAMES: dict[str, tuple[str, ...]] = {}
_DEFAULTS: dict[str, dict[str, Any]] = {}
