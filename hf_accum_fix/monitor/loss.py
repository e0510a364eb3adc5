"""A loss curve of every micro-batch, where most logs show one batch in ten, or one rank.

Symptom: the curve of a run on several GPUs oscillates where that of one GPU is smooth, because it shows the last batch
before each log, or a mean in which a micro-batch of 3 tokens counts as much as one of 3,000.

    meter = LossMeter()
    for step, batch in enumerate(loader):
        loss = model(batch)
        meter.update(loss, items=(batch["labels"] != -100).sum())
        ...
        if step % 10 == 0:
            reading = meter.read()                   # the only device sync and the only collective
            print(reading.mean, reading.standard_error, [rank.mean for rank in reading.ranks])
"""

from __future__ import annotations

import math
import operator
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks

#: Weight of a log in the moving average, over that of the next one.
_SMOOTHING = 0.9


@dataclass(frozen=True)
class Moments:
    """Sums over micro-batches with a summed loss S and n items each.

    Attributes:
        micro_batches: number of them with at least one item.
        items: sum of n.
        loss: sum of S.
        loss_squared: sum of S^2.
        loss_items: sum of S n.
        items_squared: sum of n^2.
    """

    micro_batches: float = 0.0
    items: float = 0.0
    loss: float = 0.0
    loss_squared: float = 0.0
    loss_items: float = 0.0
    items_squared: float = 0.0

    @property
    def mean(self) -> float:
        """Loss per item, ``sum(S) / sum(n)``; nan without an item."""
        return self.loss / self.items if self.items else math.nan

    @property
    def deviations_squared(self) -> float:
        """``sum((S - mean n)^2)``."""
        mean = self.mean
        return max(self.loss_squared - 2 * mean * self.loss_items + mean**2 * self.items_squared, 0.0)

    @property
    def effective_micro_batches(self) -> float:
        """Equal micro-batches with as much information, ``sum(n)^2 / sum(n^2)`` (Kish 1965); 0 without an item."""
        return self.items**2 / self.items_squared if self.items_squared else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of the mean [loss per item]; nan for fewer than two micro-batches.

        The micro-batches are the sample, because the items of one are correlated: the error of a ratio of two sums,

            sqrt(m / (m - 1) * sum((S - mean n)^2)) / sum(n),        m micro-batches.

        A falling loss adds to the deviations, so that the error is too large rather than too small.

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
        return replace(
            self,
            loss=self.loss * factor,
            loss_squared=self.loss_squared * factor**2,
            loss_items=self.loss_items * factor,
        )


@dataclass(frozen=True)
class LossReading:
    """The loss since the meter was last read.

    Attributes:
        ranks: the moments of each rank. A rank without a loss (an early pipeline stage, a batch without targets) has
            all zeros: it takes part in no mean.
    """

    ranks: tuple[Moments, ...]

    @property
    def total(self) -> Moments:
        """The moments of all ranks together."""
        return sum(self.ranks, Moments())

    @property
    def mean(self) -> float:
        """Loss per item over all micro-batches of all ranks; nan without an item."""
        return self.total.mean

    @property
    def standard_error(self) -> float:
        """Standard error of the mean: `Moments.standard_error`."""
        return self.total.standard_error

    @property
    def spread(self) -> float:
        """Largest minus smallest mean of a rank that has a loss; nan without one, and where one is nan."""
        means = [moments.mean for moments in self.ranks if moments.items]
        return max(means) - min(means) if means and not any(map(math.isnan, means)) else math.nan

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
        self._smoothed = (0.0, 0.0)

    def update(self, loss: Tensor | float | None, items: Tensor | float = 1) -> None:
        """Take one micro-batch's mean loss into account; no device sync.

        Args:
            loss: one number, the mean over the items. None: this rank has no loss.
            items: number of items; 0 adds nothing, even where the loss is 0 / 0 = nan.

        Raises:
            UnsupportedSetupError: if the loss is more than one number.
        """
        if loss is None:
            return
        loss, items = self._on_device(loss, items)
        self._add(torch.where(items == 0, 0.0, loss * items), items)

    def update_sum(self, loss: Tensor | float | None, items: Tensor | float) -> None:
        """The same for a summed loss."""
        if loss is None:
            return
        loss, items = self._on_device(loss, items)
        self._add(torch.where(items == 0, 0.0, loss), items)

    def row(self) -> Tensor:
        mine = torch.zeros(9, dtype=torch.float64)
        if self._moments is not None:
            mine.copy_(self._moments.flatten())
            self._moments.zero_()
        return mine

    def reading(self, table: Tensor) -> LossReading:
        return LossReading(
            tuple(
                Moments(
                    micro_batches=of_rank[2][2],
                    items=of_rank[1][2],
                    loss=of_rank[0][2],
                    loss_squared=of_rank[0][0],
                    loss_items=of_rank[0][1],
                    items_squared=of_rank[1][1],
                )
                for of_rank in table.view(-1, 3, 3).tolist()
            )
        )

    def logged(self, reading: LossReading) -> dict[str, float]:
        """Mean with its error, and an exponential moving average; of several ranks each rank's mean, and their spread.

        A log counts in the moving average by its items, and 0.9 times as much with each log since.
        """
        found = {"loss_standard_error": reading.standard_error}
        total = reading.total
        if math.isfinite(total.loss):
            loss, items = self._smoothed
            self._smoothed = (_SMOOTHING * loss + total.loss, _SMOOTHING * items + total.items)
        if self._smoothed[1]:
            found["loss_smoothed"] = self._smoothed[0] / self._smoothed[1]
        if reading.total.items:
            found["loss"] = reading.mean
        if len(reading.ranks) > 1:
            found["rank_loss_spread"] = reading.spread
            found.update((f"rank_loss_{rank}", its.mean) for rank, its in enumerate(reading.ranks) if its.items)
        return found

    def _on_device(self, loss: Tensor | float, items: Tensor | float) -> tuple[Tensor, Tensor]:
        """Both in the precision of the sums, on the device of the first loss."""
        if self._moments is None:
            device = loss.device if isinstance(loss, Tensor) else torch.device("cpu")
            dtype = torch.float32 if device.type == "mps" else torch.float64  # mps knows no float64
            self._moments = torch.zeros(3, 3, dtype=dtype, device=device)
        return _like(self._moments, loss), _like(self._moments, items)

    def _add(self, loss: Tensor, items: Tensor) -> None:
        assert self._moments is not None
        row = torch.stack([loss, items, (items > 0).to(loss.dtype)])
        self._moments.addr_(row, row)


def _like(tensor: Tensor, value: Tensor | float) -> Tensor:
    """The value as a 0-dim tensor on that device, without a sync: a number is filled in, not copied."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UnsupportedSetupError(
                f"got a loss of shape {list(value.shape)}; expected one number, its mean over the items; reduce it"
            )
        return value.detach().reshape(()).to(tensor.device, tensor.dtype, non_blocking=True)
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)
