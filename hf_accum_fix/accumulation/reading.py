"""Run one batch without saving tensors for a backward, and read its loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.accumulation.items import Items
from hf_accum_fix.accumulation.loss_graph import Term, ignored_index, read, without_nothing
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.noise import WithoutNoise
from hf_accum_fix.accumulation.rules import ways_of_counting
from hf_accum_fix.accumulation.values import Captured, capture
from hf_accum_fix.errors import ContractError

#: One forward: (inputs, number or None) -> loss.
Forward = Callable[[Mapping[str, Any], Tensor | None], Tensor]


#: The attribute of an error that the forward of a loss has raised.
_OF_FORWARD = "_hf_accum_fix_of_forward"


@dataclass(frozen=True)
class TermReading:
    """One term in one forward, as numbers.

    Attributes:
        term: in the graph.
        factors: as numbers.
        value: its part of the loss; None: unknown.
        router: the name of the router loss that it is.
        named: the rules whose targets the leaf has saved.
        shift: the loss drops position 0 of the labels; None: unknown.
        classes: number of classes of a cross entropy (see `Term.classes`).
    """

    term: Term
    factors: tuple[float, ...]
    value: float | None
    router: str
    named: tuple[Items, ...]
    shift: bool | None
    classes: int

    @property
    def name(self) -> str:
        """Of the leaf."""
        return self.term.name

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for the same term of another forward."""
        return self.term.shape

    @property
    def outer(self) -> int:
        """Number of factors above the loss that the model returned; all of them, where that is not on the path."""
        outer = self.term.path.outer
        return len(self.factors) if outer is None else outer

    @property
    def divisors(self) -> list[float]:
        """The numbers that divide it."""
        return [value for value, each in zip(self.factors, self.term.factors, strict=True) if each.divides]

    @property
    def total(self) -> float:
        """The weight of a cross entropy's targets; 0.0: unknown."""
        return float(getattr(self.term.leaf, "_saved_total_weight", 0.0))

    @property
    def is_weighted(self) -> bool:
        """Whether it is a mean over the class weights of its targets."""
        is_by_classes = self.term.divides and ignored_index(self.term) is not None
        return is_by_classes and self.term.leaf._saved_weight is not None

    @property
    def shares_learnt(self) -> bool:
        """Whether other terms have the same learnt factor."""
        return self.term.path.product is None and any(each.learnt for each in self.term.factors[: self.term.path.above])

    def is_own_count(self, place: int) -> bool:
        """Whether a factor is the loss function's own divisor."""
        return self.term.divides and place == len(self.factors) - 1

    def product(self, places: Iterable[int]) -> float:
        """The product of these factors; nan: one divides by zero."""
        result = 1.0
        for place in places:
            value = self.factors[place]
            if not self.term.factors[place].divides:
                result *= value
            else:
                result = result / value if value else math.nan
        return result


@dataclass(frozen=True)
class Reading:
    """One forward.

    Attributes:
        number: passed to it; None: none.
        terms: with stacked numbers as rows.
        inside: with stacked numbers as terms.
        drew: it drew random numbers, apart from dropout.
        warms: a term was multiplied by zero, and is left out.
        keeps: its graph has all tensors that a backward needs.
    """

    batch: Mapping[str, Any]
    number: float | None
    loss: float
    dtype: torch.dtype
    terms: list[TermReading]
    inside: list[TermReading]
    drew: bool
    warms: bool = False
    keeps: bool = False

    @property
    def shows_terms(self) -> bool:
        """Whether it has terms, and a finite value."""
        return bool(self.terms) and math.isfinite(self.loss)

    @property
    def numbers(self) -> list[Any]:
        """All values of the loss, to compare."""
        return [self.loss, *((each.shape, each.factors, each.value) for each in self.terms)]


@dataclass(frozen=True)
class LossRun:
    """A loss that can be run on any batch.

    Attributes:
        forward: one forward of the trained loss.
        model: its modes, buffers and parameters are restored.
        device: of the number.
        head: the model whose outputs have a router loss; None: there is none.
        others: more objects whose attributes are restored, such as the trainer.
        leave: objects that are not restored, such as data sets.
        more_steps: (factor) -> context in which the arguments have more accumulation steps, and factor times the ranks.
        kept_back: how often a custom loss passed a number to the base's in the last forward, which did not get it.
        hand_on: from now on the base's gets that number.
    """

    forward: Forward
    model: nn.Module
    device: torch.device
    head: nn.Module | None = None
    others: Sequence[object] = ()
    leave: Sequence[object] = ()
    more_steps: Callable[[int], AbstractContextManager[Any]] = nullcontext
    kept_back: Callable[[], int] = int
    hand_on: Callable[[], object] = bool


def read_batch(
    loss: LossRun,
    batch: Mapping[str, Any],
    number: float | None,
    within: Any,
    *,
    listed: bool,
    keep: bool,
    seed: int = 0,
) -> Reading:
    """Run a batch with gradient, and read the loss; unless ``keep``, no tensors are saved for a backward."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    before = _random_state()
    with WithoutNoise(alike=listed), within():
        found, captured = run_with_graph(loss, batch, number, keep=keep)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ContractError(f"got {type(found).__name__} as the loss of a micro-batch; expected a tensor of one number")
    total = float(found.detach())
    shown = partial(read, found, captured.routers, deep=True, returned=captured.returned)
    shapes = shown(inside=False), shown(inside=True)
    kept = [without_nothing(terms) for terms in shapes]
    rows, inside = (_filled([_term_reading(term, captured, batch) for term in terms], total) for terms in kept)
    warms = len(kept[0]) < len(shapes[0])
    return Reading(batch, number, total, found.dtype, rows, inside, _random_state() != before, warms, keep)


def run_with_graph(
    loss: LossRun, batch: Mapping[str, Any], number: float | None, *, keep: bool
) -> tuple[Tensor, Captured]:
    """A loss with its graph, and what was captured of its forward; unless ``keep``, no backward is possible."""
    passed = None if number is None else torch.tensor(number, device=loss.device)
    with (
        capture(None, loss.head) as captured,
        torch.enable_grad(),
        nullcontext() if keep else saved_tensors_hooks(kept_small, unpacked),
        errors_of_forward(),
    ):
        return loss.forward(dict(batch), passed), captured


@contextmanager
def errors_of_forward() -> Iterator[None]:
    """Mark what a forward of the loss raises, for `is_of_forward`."""
    try:
        yield
    except Exception as error:
        vars(error)[_OF_FORWARD] = True
        raise


def is_of_forward(error: Exception) -> bool:
    """Whether an error was raised by the forward of a loss, which training would raise as well."""
    return _OF_FORWARD in vars(error)


def kept_small(tensor: Tensor) -> Tensor | None:
    """Save counts, labels and class weights, and no activations.

    Detached: an operation that saves its own result would hold itself in a cycle that no collection finds.
    """
    is_vector = tensor.numel() <= max(tensor.shape, default=1)
    return tensor.detach() if is_vector or not tensor.is_floating_point() else None


def unpacked(tensor: Tensor | None) -> Tensor:
    """A tensor that was saved."""
    if tensor is None:
        raise NotSavedError
    return tensor


def _term_reading(term: Term, captured: Captured, batch: Mapping[str, Any]) -> TermReading:
    with _disable_current_modes():
        values = [each.value.detach() if isinstance(each.value, Tensor) else each.value for each in term.factors]
        kept = None if captured.values is None else captured.values.of(term.path.top)
        if any(bool(each.binds()) for each in term.path.bounds):
            term = replace(term, name=f"a floor or ceiling of {term.name}", readable=False)
        router, named = captured.routers.get(term.leaf, ""), _named(term, batch)
        seen = TermReading(term, tuple(map(float, values)), None, router, named, is_shifted(term, batch), term.classes)
        return seen if kept is None else replace(seen, value=float(kept) * seen.product(range(term.path.above)))


def _filled(terms: list[TermReading], loss: float) -> list[TermReading]:
    """Assign the rest of a loss to its only term, or to the only one without a value."""
    blank = terms if len(terms) == 1 else [each for each in terms if each.value is None]
    if len(blank) != 1 or any(each.term.path.added for each in terms):
        return terms
    rest = loss - math.fsum(each.value or 0.0 for each in terms if each is not blank[0])
    return [replace(each, value=rest) if each is blank[0] else each for each in terms]


def _named(term: Term, batch: Mapping[str, Any]) -> tuple[Items, ...]:
    """The rules whose targets a cross entropy has saved."""
    if (ignored := ignored_index(term)) is None:
        return ()
    target = term.leaf._saved_target
    kept = target[target != ignored].cpu()
    named = []
    for rule in ways_of_counting(batch, (ignored,)):
        value = batch.get(rule.keys[0]) if rule.keys and rule.entry is None else None
        labels = isinstance(value, Tensor) and not value.is_floating_point() and "label" in rule.keys[0]
        if labels and torch.equal(value[rule.targets(batch)].cpu(), kept):  # type: ignore[index]
            named.append(rule)
    return tuple(named)


def is_shifted(term: Term, batch: Mapping[str, Any]) -> bool | None:
    """Whether a cross entropy drops position 0 of the labels; None: unknown."""
    labels = batch.get("labels")
    if not term.name.startswith("NllLoss") or not isinstance(labels, Tensor) or labels.ndim < 2:
        return None
    target = term.leaf._saved_target.flatten().to(labels)
    moved = torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), -100)], dim=-1)
    shifted, unshifted = [labels[..., 1:].flatten(), moved.flatten()], [labels.flatten()]
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        # Some heads select what is attended to (LLaVA up to 4.49).
        attended = mask.to(labels.device) != 0
        shifted.append(labels[..., 1:][attended[..., 1:]])
        unshifted.append(labels[attended])
    is_one, is_other = (any(torch.equal(target, each) for each in ways) for ways in (shifted, unshifted))
    return is_one if is_one != is_other else None


def _random_state() -> tuple[Any, ...]:
    words = np.random.get_state(legacy=True)
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    return random.getstate(), words[1].tobytes(), words[2], *(each.numpy().tobytes() for each in of_torch)  # type: ignore[index]
