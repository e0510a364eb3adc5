"""Look at a loss: run one batch without a backward, and read its terms as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_accum_fix.counting.items import Items, sample_count
from hf_accum_fix.counting.rules import is_near, ways_of_counting
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.join import Split
from hf_accum_fix.reading.loss_graph import Term, ignored_index, read, without_nothing
from hf_accum_fix.reading.nodes import NotSavedError, factor_of, live_edges, shape_of
from hf_accum_fix.reading.values import Captured, capture
from hf_accum_fix.trace.preserve import WithoutNoise, random_states, seed_generators

#: One forward: (inputs, number or None) -> loss.
Forward = Callable[[Mapping[str, Any], Tensor | None], Tensor]

#: Layers, through which data reach a loss, and most nodes that are searched for one.
_LAYERS, _MOST_BELOW = ("Embedding", "Convolution", "Addmm", "Mm", "Bmm"), 10_000
#: Relative tolerance of two values computed alike, by bytes of their dtype.
_TOLERANCE = {8: 1e-6, 4: 1e-5}
#: The attribute of an error that the forward of a loss has raised.
_OF_FORWARD = "_hf_accum_fix_of_forward"


@dataclass(frozen=True)
class LossRun:
    """A loss that can be run on any batch."""

    forward: Forward  # one forward of the trained loss
    model: nn.Module  # its modes, buffers and parameters are restored
    device: torch.device  # of the number
    sharded: bool = False  # an engine shards the parameters
    head: nn.Module | None = None  # the model whose outputs have a router loss; None: there is none
    others: Sequence[object] = ()  # more objects whose attributes are restored, such as the trainer
    leave: Sequence[object] = ()  # objects that are not restored, such as data sets
    #: how often a custom loss passed a number to the base's in one forward, at most; it did not get it.
    kept_back: Callable[[], int] = int
    hand_on: Callable[[], object] = bool  # from now on the base's gets that number


@dataclass(frozen=True)
class Setting:
    """Facts about a training that are known before its loss is observed; "the number" is num_items_in_batch."""

    #: which forwards get the number: "all", "none", or one more ("once"), to see whether it divides the loss.
    handed: str = "none"
    hands_number: bool = False  # the model or the compute_loss_func cannot do without it, and gets it in training
    custom: bool = False  # a custom ``compute_loss`` makes the loss
    func: bool = False  # a compute_loss_func makes it
    #: G and W, as far as the code that computes a custom loss names them, those above 1.
    own: frozenset[int] = frozenset()
    own_steps: frozenset[int] = frozenset()  # G alone
    world_size: int = 1
    #: the items of this rank's window as the release counts them; None: it does not.
    upstream_number: float | None = None
    rounded: bool = False  # matrix products are less precise than float32
    has_z_loss: bool = False  # the model's loss has a mean over all positions, a router's loss by convention
    decoder_pad: int | None = None  # as for `rules.targets_padding`
    has_stock: bool = False  # a Trainer hands its number on, so that what cannot be read may stay as it is there
    is_cut: bool = False  # the ranks that hold a sample's parts run each forward together, as it was fetched
    halves: bool = False  # where a split runs out of memory, the samples are halved
    doubt: str = ""  # why it is not exact, whatever is observed; empty: there is no reason


@dataclass(frozen=True)
class Look:
    """One forward of a loss."""

    batch: Mapping[str, Any]
    number: float | None  # passed to it; None: none
    loss: float
    dtype: torch.dtype  # of the loss
    terms: list[Term]
    drew: bool  # it drew random numbers, apart from dropout

    @property
    def samples(self) -> int:
        """Of the batch."""
        return sample_count(self.batch)

    @property
    def numbers_among_inputs(self) -> dict[str, float]:
        """The inputs that are one number."""
        single = {key: v for key, v in self.batch.items() if isinstance(v, (int, float, Tensor))}
        return {key: float(v) for key, v in single.items() if not isinstance(v, Tensor) or v.numel() == 1}

    @property
    def shows_terms(self) -> bool:
        """Whether it has terms, and a finite value."""
        return bool(self.terms) and math.isfinite(self.loss)

    @property
    def numbers(self) -> list[Any]:
        """All values of the loss, to compare."""
        return [self.loss, *((each.shape, each.numbers, each.value) for each in self.terms)]


@dataclass(frozen=True)
class Comparison:
    """Looks at the three batches of a split, the whole first."""

    looks: Sequence[Look]
    split: Split
    window: Sequence[Mapping[str, Any]]  # the micro-batches of this rank
    setting: Setting
    by_number: bool = False  # the model would divide by the number, if it got it

    @property
    def whole(self) -> Look:
        """The look at the batch."""
        return self.looks[0]

    @property
    def batches(self) -> list[Mapping[str, Any]]:
        """The batch and its parts."""
        return [each.batch for each in self.looks]

    @cached_property
    def ignored(self) -> list[int]:
        """The labels that are no targets."""
        found = (each.ignored for each in self.whole.terms)
        return list(dict.fromkeys([*(each for each in found if each is not None), -100]))

    @property
    def rounding(self) -> float:
        """Relative, of the loss's values."""
        return 2e-2 if self.setting.rounded else _TOLERANCE.get(self.whole.dtype.itemsize, 2e-2)

    @property
    def tolerance(self) -> float:
        """Relative tolerance of the loss's values; random numbers differ between a batch and its parts."""
        return math.inf if self.whole.drew or not self.split.apart else self.rounding

    @property
    def is_ragged(self) -> bool:
        """Whether the same input is wider in one micro-batch than in another."""
        widths = [{key: x.shape[1:] for key, x in batch.items() if isinstance(x, Tensor)} for batch in self.window]
        return any(widths[0].get(key, shape) != shape for each in widths[1:] for key, shape in each.items())

    @property
    def grows(self) -> bool:
        """Whether the loss of the batch is nearer to the sum of its parts' than to their mean."""
        whole, one, other = (each.loss for each in self.looks)
        return self.split.shows_coupling and abs(whole - one - other) < abs(whole - (one + other) / 2)

    def are_numbers(self, values: Sequence[float]) -> bool:
        """Whether values are the numbers passed, up to a constant factor (the classes of a smoothed loss)."""
        numbers = [each.number for each in self.looks]
        if None in numbers:
            return False
        # A model in 16 bits rounds it.
        tolerance = 1e-2 if self.setting.rounded or self.whole.dtype.itemsize < 4 else 1e-6
        times = [value / (number or 1) for value, number in zip(values, numbers, strict=True)]
        return bool(times[0]) and all(is_near(each, times[0], tolerance) for each in times)


def look(
    loss: LossRun, batch: Mapping[str, Any], number: float | None, *, listed: bool, keep: bool, seed: int = 0
) -> Look:
    """Run a batch with gradient, and read the loss; unless ``keep``, no tensors are saved for a backward."""
    seed_generators(seed)
    before = random_states()
    with WithoutNoise(alike=listed):
        found, captured = run_with_graph(loss, batch, number, keep=keep)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ContractError(f"got {type(found).__name__} as the loss of a micro-batch; expected a tensor of one number")
    total = float(found.detach())
    terms = without_nothing(read(found, captured.routers, captured.values, deep=True))
    terms = _filled([_as_numbers(each, captured, batch) for each in terms], total)
    return Look(batch, number, total, found.dtype, terms, before.drew())


def run_with_graph(
    loss: LossRun, batch: Mapping[str, Any], number: float | None, *, keep: bool
) -> tuple[Tensor, Captured]:
    """A loss with its graph, and what was captured of its forward; unless ``keep``, no backward is possible."""
    passed = None if number is None else torch.tensor(number, device=loss.device)
    with (
        capture(loss.head) as captured,
        torch.enable_grad(),
        nullcontext() if keep else saved_tensors_hooks(_kept_small, _unpacked),
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


def out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory."""
    words = ("out of memory", "defaultcpuallocator", "bad_alloc", "status_alloc_failed")
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or any(map(str(error).lower().count, words))


def _kept_small(tensor: Tensor) -> Tensor | None:
    """Save counts, labels and class weights, and no activations.

    Detached: an operation that saves its own result would hold itself in a cycle that no collection finds.
    """
    is_vector = tensor.numel() <= max(tensor.shape, default=1)
    return tensor.detach() if is_vector or not tensor.is_floating_point() else None


def _unpacked(tensor: Tensor | None) -> Tensor:
    """A tensor that was saved."""
    if tensor is None:
        raise NotSavedError
    return tensor


def _as_numbers(term: Term, captured: Captured, batch: Mapping[str, Any]) -> Term:
    """A term without its nodes; after this nothing holds the graph."""
    leaf, kept = term.leaf, None if captured.values is None else captured.values.of(term.top)
    with _disable_current_modes():
        ignored = ignored_index(term)
        found = replace(
            term,
            top=None,
            leaf=None,
            factors=tuple(each.alone() for each in term.factors),
            router=captured.routers.get(leaf, ""),
            ignored=ignored,
            targets=float(getattr(leaf, "_saved_total_weight", 0.0)),
            named=() if ignored is None else tuple(_named(leaf._saved_target, ignored, batch)),
            by_classes=term.divides and ignored is not None and leaf._saved_weight is not None,
            sorts=_sorts_elements(leaf),
            weighs=any(map(_has_weights, _below(leaf))),
            layered=not term.readable and any(map(_is_layer, _below(leaf))),
        )
        return found if kept is None else replace(found, value=float(kept) * term.product(range(found.above)))


def _filled(terms: list[Term], loss: float) -> list[Term]:
    """Assign the rest of a loss to its only term, or to the only one without a value."""
    blank = terms if len(terms) == 1 else [each for each in terms if each.value is None]
    if len(blank) != 1 or any(each.added for each in terms):
        return terms
    rest = loss - math.fsum(each.value or 0.0 for each in terms if each is not blank[0])
    return [replace(each, value=rest) if each is blank[0] else each for each in terms]


def _named(target: Tensor, ignored: int, batch: Mapping[str, Any]) -> Iterator[Items]:
    """The rules whose targets a cross entropy has saved."""
    kept = target[target != ignored].cpu()
    for rule in ways_of_counting(batch, (ignored,)):
        value = batch.get(rule.keys[0]) if rule.keys and rule.entry is None else None
        labels = isinstance(value, Tensor) and not value.is_floating_point() and "label" in rule.keys[0]
        if labels and torch.equal(value[rule.targets(batch)].cpu(), kept):  # type: ignore[index]
            yield rule


def _sorts_elements(node: Any) -> bool:
    """Whether all elements of a reduction are sorted, above the first layer, of which some may then be left out."""
    sorts = (each for each in _below(node) if type(each).__name__.startswith(("SortBackward", "TopkBackward")))
    # Before torch 2.5 nodes do not show their shape once the loss is gone.
    return any(len(shape_of(each)) == 1 for each in sorts if hasattr(each, "_input_metadata"))


def _has_weights(node: Any) -> bool:
    """Whether a node multiplies elements by numbers without gradient, which may be statistics of the batch."""
    if not type(node).__name__.startswith(("MulBackward", "DivBackward")) or len(live_edges(node)) > 1:
        return False
    try:
        found = factor_of(node)
    except NotSavedError:
        # A tensor that was not saved, and so no single number.
        return True
    return found is not None and isinstance(found[1].value, Tensor) and found[1].value.numel() > 1


def _below(node: Any) -> Iterator[Any]:
    """A node and those below it, down to the first layers."""
    seen, pending = {node}, [node]
    while pending and len(seen) < _MOST_BELOW:
        below = pending.pop()
        yield below
        new = set() if _is_layer(below) else {each for each, _ in live_edges(below)} - seen
        seen |= new
        pending.extend(new)


def _is_layer(node: Any) -> bool:
    return type(node).__name__.startswith(_LAYERS)
