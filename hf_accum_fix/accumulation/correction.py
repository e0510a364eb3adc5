"""End a window: compare what its losses divided by with the prediction, and correct the gradient.

If its losses divided by ``N seen`` items and its rule predicted ``N predicted``, the gradient is too large by
``N seen / N predicted``, and is divided by that before the optimizer step. Reading these numbers would wait for a GPU,
so a window is corrected there without reading, if its loss was observed to need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.weigh import WindowCheck
from hf_accum_fix.accumulation.window import count_dtype

_OTHER = "its terms divide by another number of items than predicted"


class Host(Protocol):
    """What is used of `core.host.Host`."""

    @property
    def device(self) -> torch.device:
        """Of the counts."""

    @property
    def data_ranks(self) -> int:
        """W, data-parallel ranks."""

    @property
    def readable(self) -> bool:
        """Whether a window's numbers are read at its end."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether the engine steps inside the backward."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Sum numbers over ranks: a collective."""

    def report_inexact(self, why: str, windows: int = 1) -> None:
        """Warn that one window, or several since the last log, are not exact."""


@dataclass
class GradientCorrection:
    """Compare each window of a training with its prediction, and correct its gradient.

    Attributes:
        corrects: every window's gradient is multiplied by predicted over seen items.
        several_losses: the open window has several losses over all ranks, so one number cannot correct it.
        differs: a window of this rank had other counts than predicted; the other ranks learn it in the next.
        changed: the last window had other terms or counts than observed.
        unread: windows since the last log with other counts than observed, 0-dim on the device.
    """

    corrects: bool = False
    several_losses: bool = False
    differs: bool = False
    changed: bool = False
    unread: Tensor | None = None
    _flag: Tensor | None = None

    def will_correct(self, host: Host) -> bool:
        """Whether the open window's gradient is corrected at its end."""
        corrects = self.corrects or (host.data_ranks == 1 and host.readable)
        return corrects and not (self.several_losses or host.steps_in_backward)

    def end(self, host: Host, checks: Sequence[WindowCheck], skipped: int = 0) -> Tensor | float | None:
        """The factor for gradient and logged loss of a window; None: 1, or unknown.

        ``checks``: of the window, one for each loss; ``skipped``: micro-batches that this rank did not run.
        """
        self._flag, self.changed = None, any(check.changed for check in checks)
        # Counts first: only one warning is given, and theirs is more specific.
        times = self._times(host, checks, skipped)
        for check in checks:
            self._check(host, check)
        if self._flag is not None:
            self.unread = self._flag.long() if self.unread is None else self.unread + self._flag
        return times

    def _times(self, host: Host, checks: Sequence[WindowCheck], skipped: int) -> Tensor | float | None:
        readable, several, corrects = host.readable, host.data_ranks > 1, self.will_correct(host)
        if skipped and not (several and corrects):
            host.report_inexact(f"{skipped} of its micro-batches were skipped")
        if not corrects:
            for check in checks:
                self._compare(host, check)
            return None
        if not self.corrects and not any(each.counted for each in checks):
            return None
        # Every rank has to join the collective.
        counts = [each.counts(host.device) for each in checks]
        counts = counts or [torch.zeros(2, dtype=count_dtype(host.device), device=host.device)]
        sums = counts[0] if len(counts) == 1 else torch.stack(counts).sum(dim=0)
        if several:
            sums = host.summed(torch.cat([sums, sums.new_full((1,), skipped)]))
            if readable and float(sums[2]):
                host.report_inexact(f"{float(sums[2]):g} micro-batches on its ranks were skipped")
            sums = sums[:2]
        if not readable:
            return torch.where(sums[0] != 0, sums[1] / sums[0], torch.ones_like(sums[0]))
        seen, predicted = sums.tolist()
        times = predicted / seen if seen else 1.0
        return None if abs(times - 1) <= 1e-12 else float(times)

    def read(self, host: Host) -> None:
        """Read what was found on the device since the last log, which has just waited for it."""
        if self.unread is not None and (windows := int(self.unread)):
            host.report_inexact(_OTHER, windows)
            # Several ranks would first have to agree on it.
            self.corrects = self.corrects or host.data_ranks == 1
        self.unread = None

    def _compare(self, host: Host, check: WindowCheck) -> None:
        """Report counts other than predicted, without a correction."""
        if not check.counted:
            return
        sums = check.counts(host.device)
        if not host.readable:
            self._read_later((sums[0] - sums[1]).abs() > 1e-6 * sums[1].abs())
            return
        seen, predicted = sums.tolist()
        if abs(seen - predicted) > 1e-6 * abs(predicted):
            self.differs = True
            kept = "; under DeepSpeed the gradient is not corrected" if host.steps_in_backward else ""
            host.report_inexact(f"its loss divides by {seen:g} items; {predicted:g} were predicted{kept}")

    def _read_later(self, flag: Tensor) -> None:
        self._flag = flag if self._flag is None else self._flag | flag

    def _check(self, host: Host, check: WindowCheck) -> None:
        """Report a window that is not as observed."""
        if check.changed:
            host.report_inexact(check.changed)
        elif (broken := check.broken(host.device)) is not None:
            if not host.readable:
                self._read_later(broken)
            elif bool(broken):
                self.changed = True
                host.report_inexact(_OTHER)


def scale_gradients(model: nn.Module, times: Tensor | float) -> None:
    """Multiply every gradient, of a shard its local part; no device sync."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
            by_device.setdefault(local.device, []).append(local)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, times.to(device) if isinstance(times, Tensor) else times)
