"""Is this much accumulation worth it? The gradient noise scale, from the micro-batches that a step takes anyway.

The noise scale B is the batch, in items, at which the noise of the gradient is as large as the gradient: far below it
a larger batch saves steps in proportion, far above it none. The sample is the M micro-batches of one window on all
ranks: with g_m the gradient of the mean over the n items of one, w = n / N, and g the mean weighted by w,

    S = (sum(w |g_m|^2) - |g|^2) N / (M - 1),        |G|^2 = |g|^2 - S / N,        B = S / |G|^2

are unbiased for the trace S of the covariance of one item's gradient and for the square of the true gradient, for any
sizes of the micro-batches. |G|^2 is a small difference of large numbers where N is far below B: look at the error.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162, appendix A.1, for two
sizes of batch); here for one sample of unequal sizes, as a one-way analysis of variance.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, is_sharded


@dataclass(frozen=True)
class NoiseScaleReading:
    """Means over the last measured windows."""

    windows: int  # how many
    items: float  # mean number of items of a window
    noise: float  # S, trace of the covariance of one item's gradient, in the unit of the squared gradient
    signal: float  # |G|^2, square of the true gradient; below zero where it is lost in the noise
    error: float  # standard error of `scale`, relative; nan for fewer than two windows or no signal

    @property
    def scale(self) -> float:
        """B [items]; inf where no signal is left; nan without a window."""
        return self.noise / self.signal if self.signal > 0 else math.inf if self.windows else math.nan

    @property
    def gain(self) -> float:
        """What a step achieves, as a share of what one without noise would: ``1 / (1 + B / N)``."""
        return 1 / (1 + self.scale / self.items) if self.windows else math.nan

    def __str__(self) -> str:
        """In words."""
        if not math.isfinite(self.scale):
            return f"no gradient above its noise in {self.windows} windows"
        return (
            f"noise scale {self.scale:,.0f} items (+- {self.error:.0%}, {self.windows} windows); a step of "
            f"{self.items:,.0f} achieves {self.gain:.0%} of one without noise"
        )


class NoiseScale(Gathered[NoiseScaleReading]):
    """Gradient noise scale of ragged micro-batches over all ranks, one backward each.

    Length-balanced windows have no noise scale: their micro-batches are no sample of the same data.

    In every ``every``-th window, hooks on the parameters see the gradient of each micro-batch before it is added to
    ``.grad``: one more reading of it, no second gradient, no device sync. There are no hooks in other windows.

    Args:
        model: the one in training: plain on one process, or wrapped in DistributedDataParallel.
        every: windows from one measured to the next.
        ranks: the data-parallel ranks; None: torch.distributed.
        windows: measured windows that the means are over, and the most from one reading to the next.

    Raises:
        UnsupportedSetupError: if parameters are sharded, or several ranks train without DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, every: int = 10, ranks: Ranks | None = None, windows: int = 100) -> None:
        self._ranks = ranks or TorchRanks()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self._ranks.size > 1 and not isinstance(model, DistributedDataParallel):
            raise UnsupportedSetupError(
                f"got {type(model).__name__} on {self._ranks.size} ranks; expected DistributedDataParallel: other "
                "engines show no gradient of a whole micro-batch"
            )
        if any(map(is_sharded, self._parameters)):
            raise UnsupportedSetupError("got sharded parameters; expected whole ones on every rank")
        self._every, self._window, self._windows = every, 0, windows
        self._nodes, self._hooks = list[Node](), list[RemovableHandle]()
        self._squares: list[Tensor] = []
        self._sums: Tensor | None = None
        self._unread: deque[tuple[Tensor, Tensor]] = deque(maxlen=windows)
        self._estimates: deque[tuple[float, float, float]] = deque(maxlen=windows)
        self._listen()

    def micro_batch(self, items: Tensor | float) -> None:
        """A micro-batch's backward has ended; no device sync.

        Args:
            items: number of its items, on any device; one without items adds nothing.
        """
        if not self._hooks:
            return
        squares, self._squares = self._squares, []
        if not squares:
            return
        square = torch.stack(squares).sum()
        # A number is filled in, not copied: a copy would wait for the device.
        n = items.to(square, non_blocking=True).reshape(()) if isinstance(items, Tensor) else square.new_full((), items)
        counted = n > 0
        row = torch.stack([torch.where(counted, square / n, 0.0), n, counted.to(square)])
        self._sums = row if self._sums is None else self._sums + row

    def step(self, norm: Tensor | float | None = None) -> None:
        """The window has ended: between the last backward and clipping, unscaling and the optimizer's step; no sync.

        Args:
            norm: of the gradient before clipping, where it has been clipped, and times the scale of a `GradScaler` that
                has been taken off; None takes it here.
        """
        if self._hooks:
            sums = torch.zeros(3) if self._sums is None else self._sums
            if norm is None:
                squares = [_square(its.grad) for its in self._parameters if its.grad is not None]
                norm = torch.stack(squares).sum().sqrt() if squares else 0.0
            self._unread.append((sums, torch.as_tensor(norm).detach().to(sums)))
        self._sums = None
        self._squares.clear()
        self._window += 1
        self._listen()

    def row(self) -> Tensor:
        rows = torch.zeros(self._windows, 4, dtype=torch.float64)
        if self._unread:
            found = torch.stack([torch.cat([sums, norm.reshape(1)]) for sums, norm in self._unread])
            rows[: len(found)] = found.cpu().to(torch.float64)
            self._unread.clear()
        rows[:, 3] /= self._ranks.size
        return rows.flatten()

    def reading(self, table: Tensor) -> NoiseScaleReading:
        for shares, items, count, norm in table.sum(0).view(-1, 4).tolist():
            if count < 2:
                continue
            # A rank's gradients are averaged over the ranks: each is the part of the step times the number of ranks.
            weighted = shares * items / self._ranks.size**2
            noise = (weighted - norm**2) * items / (count - 1)
            if math.isfinite(noise):
                self._estimates.append((noise, norm**2 - noise / items, items))
        count = len(self._estimates)
        if not count:
            return NoiseScaleReading(0, math.nan, math.nan, math.nan, math.nan)
        noise, signal, items = (fmean(column) for column in zip(*self._estimates, strict=True))
        error = math.nan
        if count > 1 and signal > 0 and noise > 0:
            # Of a ratio of two means: Cochran 1977, section 6.4.
            squares = sum((its / noise - its_signal / signal) ** 2 for its, its_signal, _ in self._estimates)
            error = math.sqrt(squares / count / (count - 1))
        return NoiseScaleReading(count, items, noise, signal, error)

    def logged(self, reading: NoiseScaleReading) -> dict[str, float]:
        """The noise scale, its relative error, and what a step achieves."""
        if not math.isfinite(reading.scale):
            return {}
        return {"noise_scale_items": reading.scale, "noise_scale_error": reading.error, "step_gain": reading.gain}

    def close(self) -> None:
        """Let go of the parameters: nothing is measured any more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes, self._hooks = [], []

    def _listen(self) -> None:
        """Hook the parameters where this window is to be measured, else let go of them."""
        measured = self._window % self._every == 0
        if measured and not self._hooks:
            # Not hooks of the parameters: who finds these takes the gradient for changed.
            self._nodes = [_accumulator(its) for its in self._parameters]
            self._hooks = [node.register_prehook(self._after) for node in self._nodes]
        elif not measured:
            self.close()

    def _after(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._squares += [_square(its.detach()) for its in gradients if its is not None]


def _accumulator(parameter: nn.Parameter) -> Node:
    """What adds the gradients of all uses of a parameter to its ``.grad``; its hooks live as long as it is held."""
    view: Any = parameter.view_as(parameter).grad_fn
    found: Node = view.next_functions[0][0]
    return found


def _square(gradient: Tensor) -> Tensor:
    """Sum of squares, 0-dim, in 32 bits at least."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    precise = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=precise)
    return norm.square()
