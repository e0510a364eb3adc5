"""Whether a loss function has one gradient for every split of a batch: pure tensors, no Trainer and no model.

The check is a comparison of gradients in float64 and learns nothing; the autograd graph is only read to say which term
of the loss is off, at which line.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_accum_fix.errors import OptionsError
from hf_accum_fix.verification.blamed_terms import Lines, blame, by_lines

Combine = Literal["sum", "mean"]

#: Most splits of a batch that are run; of more, all even ones and as many others drawn at random.
_MOST: Final = 256
#: Tolerance in machine epsilons of the coarsest dtype of loss, leaves and parameters.
_ROUNDINGS: Final = 1000


@dataclass(frozen=True)
class WholeBatch:
    """The optimizer step that a micro-batch belongs to: what a trainer knows before its first forward.

    Attributes:
        batch: all samples of all ranks, without gradient.
        of_rank: the samples of this rank, without gradient.
        micro_batches: of this rank, G.
        ranks: W.
    """

    batch: Mapping[str, Any]
    of_rank: Mapping[str, Any]
    micro_batches: int
    ranks: int


class Layout(NamedTuple):
    """One split: the samples of each micro-batch, in order, dealt to ``ranks`` equally long runs of micro-batches."""

    sizes: tuple[int, ...]
    ranks: int = 1

    def __str__(self) -> str:
        each = len(self.sizes) // self.ranks
        runs = ["+".join(map(str, self.sizes[at : at + each])) for at in range(0, len(self.sizes), each)]
        return " | ".join(runs) + (f" on {self.ranks} ranks" if self.ranks > 1 else "")


@dataclass(frozen=True)
class SplitReport:
    """What `split_invariance` found; true if every split has the full batch's gradient."""

    splits: int  # number of splits that were run
    off: tuple[tuple[Layout, float], ...]  # those whose gradient differs, with the relative error, worst first
    tolerance: float  # largest relative error that counts as equal
    words: tuple[str, ...] = ()  # which terms of the loss are off at a split of few micro-batches, and which are right

    def __bool__(self) -> bool:
        return not self.off

    def __str__(self) -> str:
        if not self.off:
            return f"the same gradient at {self.splits} splits, to {self.tolerance:.1e}"
        layout, error = self.off[0]
        words = (
            f"got a gradient that depends on the split: {len(self.off)} of {self.splits} splits are off, the worst by "
            f"a relative error of {error:.2g} at micro-batches of {layout} samples; expected the full batch's gradient;"
            " divide each term by a count of the whole window"
        )
        return "\n  ".join([words, *self.words])


def split_invariance(
    loss_fn: Callable[..., Tensor],
    batch: Mapping[str, Any],
    *,
    parameters: Sequence[Tensor] = (),
    ranks: Sequence[int] = (1,),
    uneven: bool = True,
    over_micro_batches: Combine = "sum",
    tolerance: float | None = None,
) -> SplitReport:
    """Compare the gradient of a loss over every split of a batch with that of the batch in one piece.

    Args:
        loss_fn: ``loss_fn(micro_batch, window)``, or ``loss_fn(micro_batch)``: the loss of one micro-batch as it is
            handed to ``backward()``, of one element. ``window`` is a `WholeBatch`.
        batch: tensors [B, ...] and lists of B, split along their first dimension; others are handed on whole. Gradients
            are compared for the tensors that require one (log-probabilities, values); floats become float64.
        parameters: further tensors to compare, which ``loss_fn`` uses itself.
        ranks: numbers of ranks over which to split.
        uneven: also splits whose micro-batches hold different numbers of samples.
        over_micro_batches: what the trainer makes of gradients of one rank: "sum", as ``backward()`` does, or "mean",
            as accelerate and the Trainer do where they divide by gradient_accumulation_steps. Ranks are averaged, as
            by DistributedDataParallel, FSDP and DeepSpeed.
        tolerance: largest relative error that counts as equal; None: 1000 machine epsilons of the coarsest dtype.

    Raises:
        OptionsError: if the batch cannot be split or has no gradient, the loss is not one finite number, or an argument
            is invalid.
    """
    if not (isinstance(ranks, Sequence) and ranks and all(type(each) is int and each > 0 for each in ranks)):
        raise OptionsError(f"got ranks={ranks!r}; expected numbers of ranks; pass ranks=(1, 2)")
    if over_micro_batches not in get_args(Combine):
        raise OptionsError(f"got over_micro_batches={over_micro_batches!r}; expected one of {get_args(Combine)}")
    runs = _Runs(loss_fn, batch, parameters, over_micro_batches)
    whole = runs.gradient(Layout((runs.samples,)))
    norm = float(whole.norm())
    if not math.isfinite(norm) or norm == 0.0:
        raise OptionsError(
            f"got a gradient of norm {norm:g} for the whole batch; expected a finite one above zero; check that the "
            "batch's tensors to train require a gradient"
        )
    layouts = [each for number in ranks for each in _layouts(runs.samples, number, uneven=uneven)]
    if not layouts:
        raise OptionsError(f"got ranks={ranks!r} for {runs.samples} samples; expected fewer ranks, or more samples")
    errors = [(each, float((runs.gradient(each) - whole).norm()) / norm) for each in layouts]
    limit = _ROUNDINGS * runs.eps if tolerance is None else tolerance
    off = sorted((each for each in errors if not each[1] <= limit), key=lambda each: -each[1])
    if not off:
        return SplitReport(len(layouts), (), limit)
    # The fewest micro-batches show it best.
    shown = min(off, key=lambda each: (len(each[0].sizes), -each[1]))[0]
    terms = blame(runs.by_lines(Layout((runs.samples,))), runs.by_lines(shown), limit)
    return SplitReport(len(layouts), tuple(off), limit, (f"at {shown} samples:", *terms))


class _Runs:
    """A loss function with its batch, whose arguments are those of `split_invariance`."""

    def __init__(
        self, loss_fn: Callable[..., Tensor], batch: Mapping[str, Any], parameters: Sequence[Tensor], over: Combine
    ) -> None:
        if not (callable(loss_fn) and isinstance(batch, Mapping)):
            got = f"{type(loss_fn).__name__} and {type(batch).__name__}"
            raise OptionsError(f"got {got}; expected a function and a mapping; pass loss_fn and batch in this order")
        self._loss_fn, self._parameters, self._averages = loss_fn, tuple(parameters), over == "mean"
        tensors = {key: x for key, x in batch.items() if isinstance(x, Tensor)}
        wide = {key: x.detach().double() for key, x in tensors.items() if x.is_floating_point()}
        self._batch = {**batch, **wide}
        self._trained = [key for key, x in tensors.items() if x.requires_grad]
        lengths = {key: len(x) for key, x in batch.items() if _has_rows(x)}
        if len(set(lengths.values())) != 1 or min(lengths.values()) < 2:
            raise OptionsError(f"got a batch of {lengths} rows; expected equally many, and at least 2; pass [B, ...]")
        self.samples = next(iter(lengths.values()))
        self.eps = max([torch.finfo(x.dtype).eps for x in self._parameters], default=torch.finfo(torch.float64).eps)
        known = inspect.signature(loss_fn).parameters
        needed = [each for each in known.values() if each.default is each.empty]
        several = len(needed) > 1 or any(each.kind is each.VAR_POSITIONAL for each in needed)
        self._takes_window = several or "window" in known

    def gradient(self, layout: Layout) -> Tensor:
        """The gradient that the optimizer gets, in one vector, float64."""
        return sum((self._vector(*each) for each in self._losses(layout)), torch.zeros((), dtype=torch.float64))

    def by_lines(self, layout: Layout) -> dict[Lines, Tensor]:
        """The part of each term in the gradient."""
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return by_lines((each[0], partial(self._vector, *each)) for each in self._losses(layout))

    def _losses(self, layout: Layout) -> Iterator[tuple[Tensor, float, dict[str, Tensor], int]]:
        """The loss of each micro-batch, its weight in the sum of all, its leaves and its first row."""
        each = len(layout.sizes) // layout.ranks
        weight = 1.0 / (each if self._averages else 1) / layout.ranks
        ends = [0, *accumulate(layout.sizes)]
        for place, (start, stop) in enumerate(pairwise(ends)):
            first = place // each * each
            of_rank = self._rows(ends[first], ends[first + each])
            leaves = {key: self._batch[key][start:stop].clone().requires_grad_() for key in self._trained}
            # Copies, which a loss may write into.
            rows = {key: x.clone() if isinstance(x, Tensor) else x for key, x in self._rows(start, stop).items()}
            given = {**rows, **{key: leaf.clone() for key, leaf in leaves.items()}}
            window = WholeBatch(dict(self._batch), of_rank, each, layout.ranks)
            try:
                loss = self._loss_fn(given, window) if self._takes_window else self._loss_fn(given)
            except ZeroDivisionError as error:
                raise OptionsError(
                    f"got a division by zero from loss_fn at micro-batches of {layout} samples; expected a divisor "
                    "above zero; clamp it, or take it from the window"
                ) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise OptionsError(f"got {shown} from loss_fn; expected a tensor of one number; return the loss alone")
            self.eps = max(self.eps, torch.finfo(loss.dtype).eps)
            yield loss.reshape(()), weight, leaves, start

    def _vector(self, loss: Tensor, weight: float, leaves: Mapping[str, Tensor], start: int) -> Tensor:
        """The gradient of one micro-batch, at its place in the whole batch's."""
        found = [torch.zeros_like(self._batch[key]) for key in leaves] + [
            torch.zeros_like(each, dtype=torch.float64) for each in self._parameters
        ]
        if loss.requires_grad:
            wanted = [*leaves.values(), *self._parameters]
            taken = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            for place, each in enumerate(taken):
                if each is not None:
                    rows = slice(start, start + len(each)) if place < len(leaves) else slice(None)
                    found[place][rows] += weight * each.double()
        return torch.cat([each.flatten() for each in found]) if found else torch.zeros(1, dtype=torch.float64)

    def _rows(self, start: int, stop: int) -> dict[str, Any]:
        return {key: x[start:stop] if _has_rows(x) else x for key, x in self._batch.items()}


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _layouts(samples: int, ranks: int, *, uneven: bool) -> list[Layout]:
    """The splits into 2 or more micro-batches over all ranks; every contiguous one, up to `_MOST`."""
    found, draws, every = list[tuple[int, ...]](), random.Random(samples), 2 ** (samples - 1)
    if not uneven or every > _MOST:
        found = [(size,) * (samples // size) for size in range(1, samples) if samples % size == 0]
    if uneven:
        # A bit for each place between two samples: whether a micro-batch ends there.
        for ends in range(1, every) if every <= _MOST else (draws.randrange(1, every) for _ in range(_MOST)):
            cuts = [0, *(at + 1 for at in range(samples - 1) if ends >> at & 1), samples]
            found.append(tuple(b - a for a, b in pairwise(cuts)))
    return [Layout(sizes, ranks) for sizes in dict.fromkeys(found) if len(sizes) % ranks == 0]
