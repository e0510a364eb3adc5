"""A loss curve of every micro-batch, where most logs show one batch in ten, or one rank; is the Trainer's own right?

Symptom: the curve of a run on several GPUs oscillates where that of one GPU is smooth, because it shows the last batch
before each log, or a mean in which a micro-batch of 3 tokens counts as much as one of 3,000.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.thresholds import SAME_FACTOR, SAME_LOSS, SAME_LOSS_16_BIT

#: Elements of float32 logits to process at a time: 64 MiB.
_CHUNK = 2**24


@dataclass(frozen=True)
class Moments:
    """Sums over micro-batches with a summed loss S and n items each."""

    micro_batches: float = 0.0  # number of them with at least one item
    items: float = 0.0  # sum of n
    loss: float = 0.0  # sum of S
    loss_squared: float = 0.0  # sum of S^2
    loss_items: float = 0.0  # sum of S n
    items_squared: float = 0.0  # sum of n^2

    @property
    def mean(self) -> float:
        """Loss per item, ``sum(S) / sum(n)``; nan without an item."""
        return self.loss / self.items if self.items else math.nan

    @property
    def deviations_squared(self) -> float:
        """``sum((S - mean n)^2)``."""
        return max(self.loss_squared + self.mean * (self.mean * self.items_squared - 2 * self.loss_items), 0.0)

    @property
    def effective_micro_batches(self) -> float:
        """Equal micro-batches with as much information, ``sum(n)^2 / sum(n^2)`` (Kish 1965); 0 without an item."""
        return self.items**2 / self.items_squared if self.items_squared else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of the mean [loss per item]; nan for fewer than two micro-batches.

        The m micro-batches are the sample, because the items of one are correlated: the error of a ratio of two sums is
        ``sqrt(m / (m - 1) * sum((S - mean n)^2)) / sum(n)``. A falling loss makes it too large rather than too small.

        Source: Cochran 1977, "Sampling Techniques", section 6.4 and 9A (the ratio estimator, clusters of unequal size).
        """
        if self.micro_batches < 2:
            return math.nan
        bessel = self.micro_batches / (self.micro_batches - 1)
        return math.sqrt(bessel * self.deviations_squared) / self.items

    def __add__(self, other: Moments) -> Moments:
        return Moments(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(*map(operator.sub, astuple(self), astuple(other)))

    def times(self, factor: float) -> Moments:
        """The same with every loss multiplied."""
        loss, squared, with_items = self.loss * factor, self.loss_squared * factor**2, self.loss_items * factor
        return replace(self, loss=loss, loss_squared=squared, loss_items=with_items)


@dataclass(frozen=True)
class LossReading:
    """The loss since the meter was last read."""

    #: Of each rank. A rank without a loss (an early pipeline stage, a batch without targets) has all zeros, and takes
    #: part in no mean.
    ranks: tuple[Moments, ...]

    @property
    def total(self) -> Moments:
        """The moments of all ranks together."""
        return sum(self.ranks, Moments())

    @property
    def mean(self) -> float:
        """Loss per item over all micro-batches of all ranks; nan without an item."""
        return self.total.mean

    def times(self, factor: float) -> LossReading:
        """The same with every loss multiplied."""
        return LossReading(tuple(moments.times(factor) for moments in self.ranks))


class LossMeter(Gathered[LossReading]):
    """Item-weighted mean of the loss of every micro-batch on every rank, kept on the device until it is read.

    Args:
        ranks: the ranks to read over; None: torch.distributed. Every rank reads, also one without a loss, and gets the
            same reading: where only the last pipeline stage has a loss, rank 0 has it now too.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or TorchRanks()
        self._moments: Tensor | None = None

    def update(self, loss: Tensor | float | None, items: Tensor | float = 1, *, summed: bool = False) -> None:
        """Take one micro-batch's loss into account; no device sync.

        Args:
            loss: one number, the mean over the items. None: this rank has no loss.
            items: number of items; 0 adds nothing, even where the loss is 0 / 0 = nan.
            summed: the loss is the sum over the items.

        Raises:
            UnsupportedSetupError: if the loss is more than one number.
        """
        if loss is None:
            return
        if self._moments is None:
            device = loss.device if isinstance(loss, Tensor) else torch.device("cpu")
            dtype = torch.float32 if device.type == "mps" else torch.float64  # mps knows no float64
            self._moments = torch.zeros(3, 3, dtype=dtype, device=device)
        loss, items = _like(self._moments, loss), _like(self._moments, items)
        row = torch.stack([torch.where(items == 0, 0.0, loss if summed else loss * items), items, (items > 0).to(loss)])
        self._moments.addr_(row, row)

    def row(self) -> Tensor:
        mine = torch.zeros(9, dtype=torch.float64)
        if self._moments is not None:
            mine.copy_(self._moments.flatten())
            self._moments.zero_()
        return mine

    def reading(self, table: Tensor) -> LossReading:
        found = (its.flatten().tolist() for its in table.view(-1, 3, 3))
        # Rows and columns: loss, items, one; the upper triangle.
        return LossReading(tuple(Moments(its[8], its[5], its[2], its[0], its[1], its[4]) for its in found))

    def logged(self, reading: LossReading) -> dict[str, float]:
        """Mean with its error; of several ranks each rank's mean."""
        found = {"loss_standard_error": reading.total.standard_error}
        if reading.total.items:
            found["loss"] = reading.mean
        if len(reading.ranks) > 1:
            found.update((f"rank_loss_{rank}", its.mean) for rank, its in enumerate(reading.ranks) if its.items)
        return found


def _like(tensor: Tensor, value: Tensor | float) -> Tensor:
    """The value as a 0-dim tensor on that device, without a sync: a number is filled in, not copied."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UnsupportedSetupError(
                f"got a loss of shape {list(value.shape)}; expected one number, its mean over the items; reduce it"
            )
        return value.detach().reshape(()).to(tensor.device, tensor.dtype, non_blocking=True)
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True)
class HeadReading:
    """How a head's loss is reduced, the same on every rank."""

    is_known: bool = False  # the loss was recognised
    is_mean: bool = False  # the head returns the mean over a micro-batch's items; else it divides by the number it gets
    factor: float = 1.0  # weight that the Trainer gives a micro-batch, over the right one
    guess: float = math.nan  # loss of a guess with all classes equally likely, ln(classes); nan without classes
    handed: float = 0.0  # sum of the item counts that the steps of all ranks got since the last reading


class LossCheck(Gathered[HeadReading]):
    """Is the loss that a Trainer logs the mean over the items? Checked against the logits of one micro-batch a log.

    A head either returns the mean over its micro-batch's items or divides their sum by the number that it gets. To see
    which, and by which factor the Trainer's number is off, the loss is computed once more from logits and labels: cross
    entropy (shifted or not), mean squared error, binary cross entropy. Another loss cannot be checked.
    """

    def __init__(self) -> None:
        self._number: Any = None
        self._handed: Any = 0.0
        self._items: Any = 0.0
        self._loss: Tensor | None = None
        self._guesses: list[Tensor] = []
        self._numbers: Tensor | None = None
        self._classes, self._same = 0, SAME_LOSS
        self._known = HeadReading()

    def forward(self, output: Any, labels: Any) -> None:
        """Take the model's outputs; in the first micro-batch after a verdict, compute its loss once more."""
        loss = output.get("loss") if hasattr(output, "get") else None
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        logits = output.get("logits") if hasattr(output, "get") else None
        # Of several forwards in a micro-batch the last counts.
        if self._numbers is None:
            self._guesses = []
        if self._guesses or self._loss is None or not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            return
        with torch.no_grad():
            self._guesses = list(_losses(logits.detach(), labels))
        self._classes = 0 if labels.is_floating_point() else logits.shape[-1]
        self._same = SAME_LOSS if self._loss.dtype.itemsize > 2 else SAME_LOSS_16_BIT

    def trained(self, result: Tensor, items: Tensor | int, number: Any, steps: int) -> Tensor | None:
        """Take the Trainer's number for the same micro-batch.

        Args:
            result: its share of the logged loss, 0-dim.
            items: of the micro-batch.
            number: the item count that the step got; None: none.
            steps: micro-batches of the window.

        Returns:
            The model's own loss of this micro-batch, 0-dim; None where it returned none.
        """
        self._items, self._number = self._items + items, number
        loss, self._loss = self._loss, None
        if self._numbers is None and self._guesses and loss is not None:
            its = (loss, result, math.nan if number is None else number, float(steps))
            on_device = [torch.as_tensor(each, device=result.device).double().reshape(()) for each in its]
            self._numbers = torch.stack(on_device)
        return loss

    def step(self) -> None:
        """A step has ended: add up the item counts that steps got."""
        if self._number is not None:
            self._handed = self._handed + self._number

    def row(self) -> Tensor:
        vote = self._vote()
        row = [float(self._handed), float(self._items), *([1.0, *vote] if vote else [0.0] * 7)]
        self._guesses, self._numbers, self._handed, self._items = [], None, 0.0, 0.0
        return torch.tensor(row, dtype=torch.float64)

    def reading(self, table: Tensor) -> HeadReading:
        handed, items, voters, *votes = table.sum(0).tolist()
        if voters:
            size = len(table)
            means, shares, equal, exact, classes, steps = (vote / voters for vote in votes)
            is_mean = means == 1
            # A number that counts the items of all ranks goes with a loss that is multiplied by the ranks.
            counted = handed / items if items else 1.0
            of_all = abs(counted - size) < 0.2 * size or (abs(counted - 1) >= 0.2 and _near(exact, size))
            exact /= size if of_all else 1
            right = _near(exact, 1.0) or (is_mean and _near(equal, 1.0))
            factor = 1.0 if right else equal if is_mean else exact
            wrong = {steps, size, steps * size}
            named = right or any(_near(factor, times) or _near(factor, 1 / times) for times in wrong)
            # A mean is right, whatever scale the Trainer gives it; for a share only the Trainer's number is known.
            if is_mean or (shares == 1 and named):
                guess = math.log(classes) if classes > 1 else math.nan
                self._known = HeadReading(True, is_mean, factor if named else 1.0, guess)
        return replace(self._known, handed=handed)

    def _vote(self) -> list[float]:
        """Whether the loss is a mean, and whether a share; the Trainer's weights for it; classes; micro-batches.

        The weights are ``r G / loss``, 1 where micro-batches weigh alike, and ``r N / sum``, 1 where items do.
        """
        if self._numbers is None:
            return []
        loss, result, number, steps = self._numbers.tolist()
        for total, count in torch.stack(self._guesses).tolist():
            is_mean, is_share = self._alike(loss * count, total), self._alike(loss * number, total)
            if (is_mean or is_share) and loss:
                exact = math.nan if math.isnan(number) else result * number / total
                return [float(is_mean), float(is_share), result * steps / loss, exact, float(self._classes), steps]
        return [0.0, 0.0, 1.0, 1.0, 0.0, steps]

    def _alike(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._same * abs(other)


def _near(factor: float, expected: float) -> bool:
    return abs(factor - expected) <= SAME_FACTOR * expected


def _losses(logits: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """The summed loss and the count of items, of every loss that fits the shapes; no device sync."""
    if labels.is_floating_point():
        if logits.numel() == labels.numel():
            predicted, wanted = logits.float().flatten(), labels.float().flatten()
            for loss in (mse_loss, binary_cross_entropy_with_logits):
                yield torch.stack([loss(predicted, wanted, reduction="sum"), wanted.new_tensor(float(len(wanted)))])
    elif logits.ndim == labels.ndim + 1 and logits.shape[:-1] == labels.shape:
        yield _cross_entropy(logits.flatten(0, -2), labels.flatten())
        if labels.ndim == 2:
            yield _cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    rows = max(_CHUNK // logits.shape[-1], 1)
    total = logits.new_zeros((), dtype=torch.float32)
    for part, wanted in zip(torch.split(logits, rows), torch.split(labels, rows), strict=True):
        total += cross_entropy(part.float(), wanted, reduction="sum", ignore_index=-100)
    return torch.stack([total, (labels != -100).sum().float()])
