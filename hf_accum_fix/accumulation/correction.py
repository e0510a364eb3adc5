"""End a window: compare what its losses divided by with what was predicted, and correct the gradient.

Where the losses of a window divided by ``N seen`` items and its rule predicted ``N predicted``, its gradient is
``N seen / N predicted`` times the right one, and is divided by that before the optimizer looks at it. Numbers are read
where that waits for no device; on another one a window is corrected unread, where its loss was observed to need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.weigh import WindowCheck
from hf_accum_fix.accumulation.window import count_dtype

_OTHER = "its terms divide by other items than were predicted"


class Host(Protocol):
    """What ending a window asks of a training (see `core.host`)."""

    @property
    def device(self) -> torch.device:
        """Where counts are."""

    @property
    def data_ranks(self) -> int:
        """W: the ranks that hold samples of their own."""

    @property
    def readable(self) -> bool:
        """Whether a window's numbers are read as it ends."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether the engine has taken the step within the backward."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Numbers summed over ranks: a collective."""

    def report_inexact(self, why: str, windows: int = 1) -> None:
        """Warn that a window is not exact, or so many since the last log."""


@dataclass
class GradientCorrection:
    """What ends the windows of one training.

    Attributes:
        corrects: the gradient is divided by what the loss calls counted more than the rule, in every window.
        several_losses: micro-batches of this window, of all ranks, have losses of their own, so that no one number
            corrects them.
        differs: a window of this rank counted otherwise than the rule; the others learn of it with the next.
        was_other: the window that ended last had other terms, or other counts, than its loss was observed to have.
        unread: on a device, how many windows since the last log were made in another way than observed, 0-dim.
    """

    corrects: bool = False
    several_losses: bool = False
    differs: bool = False
    was_other: bool = False
    unread: Tensor | None = None
    _flag: Tensor | None = None

    def will_correct(self, host: Host) -> bool:
        """Whether a window's gradient is divided, as it ends, by what its loss calls counted more than its rule."""
        corrects = self.corrects or (host.data_ranks == 1 and host.readable)
        return corrects and not (self.several_losses or host.steps_in_backward)

    def end(self, host: Host, checks: Sequence[WindowCheck], skipped: int = 0) -> Tensor | float | None:
        """What gradient and logged loss of a window are to be multiplied by; None: they are right, or cannot be.

        ``checks``: of the window, one for each loss; ``left_out``: micro-batches of it that this rank did not run.
        """
        self._flag, self.was_other = None, any(check.changed for check in checks)
        # Counts first: a window warns once, and they give the more telling words.
        times = self._times(host, checks, skipped)
        for check in checks:
            self._check(host, check)
        if self._flag is not None:
            self.unread = self._flag.long() if self.unread is None else self.unread + self._flag
        return times

    def _times(self, host: Host, checks: Sequence[WindowCheck], skipped: int) -> Tensor | float | None:
        readable, several, corrects = host.readable, host.data_ranks > 1, self.will_correct(host)
        if skipped and not (several and corrects):
            host.report_inexact(f"{skipped} of its micro-batches were left out")
        if not corrects:
            for check in checks:
                self._compare(host, check)
            return None
        if not self.corrects and not any(each.counted for each in checks):
            return None
        # Every rank joins the collective once, whatever its micro-batches have shown.
        counts = [each.counts(host.device) for each in checks]
        counts = counts or [torch.zeros(2, dtype=count_dtype(host.device), device=host.device)]
        sums = counts[0] if len(counts) == 1 else torch.stack(counts).sum(dim=0)
        if several:
            sums = host.summed(torch.cat([sums, sums.new_full((1,), skipped)]))
            if readable and float(sums[2]):
                host.report_inexact(f"{float(sums[2]):g} micro-batches of its ranks were left out")
            sums = sums[:2]
        if not readable:
            return torch.where(sums[0] > 0, sums[1] / sums[0], torch.ones_like(sums[0]))
        seen, predicted = sums.tolist()
        times = predicted / seen if seen else 1.0
        return None if abs(times - 1) <= 1e-12 else float(times)

    def read(self, host: Host) -> None:
        """Read what was found on the device since the last log, when the log has just waited for it."""
        if self.unread is not None and (windows := int(self.unread)):
            host.report_inexact(_OTHER, windows)
            # From here on what is counted otherwise is corrected, unread; ranks would have to agree on it.
            self.corrects = self.corrects or host.data_ranks == 1
        self.unread = None

    def _compare(self, host: Host, check: WindowCheck) -> None:
        """Say where the loss calls of one loss counted otherwise than its rule, and leave it."""
        if not check.counted:
            return
        sums = check.counts(host.device)
        if not host.readable:
            self._read_later((sums[0] - sums[1]).abs() > 1e-6 * sums[1])
            return
        seen, predicted = sums.tolist()
        if abs(seen - predicted) > 1e-6 * predicted:
            self.differs = True
            kept = "; DeepSpeed keeps the gradients, so that none is divided by that" if host.steps_in_backward else ""
            host.report_inexact(f"its loss divides by {seen:g} items, where {predicted:g} were predicted{kept}")

    def _read_later(self, flag: Tensor) -> None:
        self._flag = flag if self._flag is None else self._flag | flag

    def _check(self, host: Host, check: WindowCheck) -> None:
        """Hold a window against what was observed."""
        if check.changed:
            host.report_inexact(check.changed)
        elif (broken := check.broken(host.device)) is not None:
            if not host.readable:
                self._read_later(broken)
            elif bool(broken):
                self.was_other = True
                host.report_inexact(_OTHER)


def scale_gradients(model: nn.Module, times: Tensor | float) -> None:
    """Multiply every gradient there is, a shard by its local part; no device sync."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
            by_device.setdefault(local.device, []).append(local)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, times.to(device) if isinstance(times, Tensor) else times)
