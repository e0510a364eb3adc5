"""Is the loss that a Trainer logs the mean over the items? Checked against the logits of one micro-batch a log.

A head either returns the mean over its micro-batch's items or divides their sum by the number that it gets. To see
which, and by which factor the Trainer's number is off, compute the loss once more from logits and labels: cross entropy
(shifted or not), mean squared error, binary cross entropy. Another loss cannot be checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hf_accum_fix.monitor.gathered import Gathered

#: Elements of float32 logits to process at a time: 64 MiB.
_CHUNK = 2**24
#: Relative difference of two losses that count as the same; of 16-bit ones.
_SAME, _SAME_16_BIT = 1e-3, 2e-2


@dataclass(frozen=True)
class Verdict:
    """How a head's loss is reduced, the same on every rank.

    Attributes:
        is_mean: the head returns the mean over its micro-batch's items.
        is_share: it divides their sum by the number that it gets.
        factor: weight that the Trainer gives a micro-batch, over the right one.
        guess: loss of a guess with all classes equally likely, ln(classes); nan without classes.
        handed: sum of the item counts that the steps of all ranks got since the last reading.
    """

    is_mean: bool = False
    is_share: bool = False
    factor: float = 1.0
    guess: float = math.nan
    handed: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the loss was recognised at all."""
        return self.is_mean or self.is_share


class LossCheck(Gathered[Verdict]):
    """Collect one micro-batch's numbers on the device, and judge them on demand."""

    def __init__(self) -> None:
        self._number: Any = None
        self._handed: Any = 0.0
        self._items: Any = 0.0
        self._loss: Tensor | None = None
        self._guesses: list[Tensor] = []
        self._numbers: Tensor | None = None
        self._classes, self._same = 0, _SAME
        self._known = Verdict()

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
        self._same = _SAME if self._loss.dtype.itemsize > 2 else _SAME_16_BIT

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

    def reading(self, table: Tensor) -> Verdict:
        handed, items, voters, *votes = table.sum(0).tolist()
        if voters:
            size = len(table)
            means, shares, equal, exact, classes, steps = (vote / voters for vote in votes)
            is_mean = means == 1
            # A number that counts the items of all ranks goes with a loss that is multiplied by the ranks.
            exact /= _ranks_counted(handed / items if items else 1.0, exact, size)
            right = _near(exact, 1.0) or (is_mean and _near(equal, 1.0))
            factor = 1.0 if right else equal if is_mean else exact
            wrong = {steps, size, steps * size}
            named = right or any(_near(factor, times) or _near(factor, 1 / times) for times in wrong)
            # A mean is right, whatever scale the Trainer gives it; for a share only the Trainer's number is known.
            if is_mean or (shares == 1 and named):
                guess = math.log(classes) if classes > 1 else math.nan
                self._known = Verdict(is_mean, not is_mean, factor if named else 1.0, guess)
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
    return abs(factor - expected) <= 0.03 * expected


def _ranks_counted(handed_over_items: float, exact: float, size: int) -> int:
    """Ranks whose items the numbers count: 1, or all of them."""
    for counted in (1, size):
        if abs(handed_over_items - counted) < 0.2 * counted:
            return counted
    return size if _near(exact, size) else 1  # Items were counted in another unit.


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
