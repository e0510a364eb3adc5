"""The accumulation window: counted over all ranks by one collective, weighted as it runs, corrected at its end.

window = open_window(host, batches)                 # settles the contract of each loss, counts, sums over ranks
for each micro-batch:
    with host.adding(model, len(batches), begun):   # the dtype of its gradient sum
        ...                                         # forward, window.weigh(loss, batch, captured), backward
window.close(model)                                 # compares divisors with the prediction

If the losses of a window divided by ``N seen`` items and its rules predicted ``N predicted``, the gradient is too large
by ``N seen / N predicted``, and is divided by that before the optimizer step, on a GPU without reading these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.items import Counts, count_by_rules
from hf_accum_fix.accumulation.look import is_of_forward
from hf_accum_fix.accumulation.part import Part
from hf_accum_fix.accumulation.values import Captured
from hf_accum_fix.accumulation.weigh import Weighed, weigh
from hf_accum_fix.core.contracts import settle
from hf_accum_fix.core.count import WindowCounts, count_window
from hf_accum_fix.core.host import OTHER_COUNTS, Host
from hf_accum_fix.core.state import ATTEMPTS
from hf_accum_fix.engines.engine import is_deepspeed
from hf_accum_fix.engines.ranks import is_told
from hf_accum_fix.errors import AccumFixError, StandAsideError

_READING = "comparing a window's counts with those predicted"


@dataclass(eq=False)
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        host: of the training.
        batches: the micro-batches.
        counts: of all ranks.
        done: micro-batches that were run.
        value: the logged loss, summed over them, 0-dim.
        ended: it was closed.
        copied: losses of copies or parts of its micro-batches were weighted.
        stock_number: num_items_in_batch as the stock Trainer has it.
    """

    host: Host
    batches: list[Any]
    counts: WindowCounts
    done: int = 0
    value: Tensor | None = None
    ended: bool = False
    copied: bool = False
    stock_number: Any = None

    @property
    def part(self) -> Part:
        """Its denominators, and what its micro-batches have divided by."""
        return self.counts.part

    def items_of(self, batch: Any) -> Counts:
        """Items of a micro-batch by each rule, 0-dim; a copy or a part of one is counted again."""
        for one, items in zip(self.batches, self.counts.each, strict=False):
            if one is batch:
                return items
        self.copied = True
        return count_by_rules(self.part.contract.rules, [batch], self.part.device)[0][0]

    def weigh(self, loss: Tensor, batch: Any, captured: Captured, inputs: Mapping[str, Any]) -> Weighed:
        """Weight the loss of a micro-batch before its backward; ``inputs``: of its forward (see `weigh.weigh`)."""
        return weigh(loss, self.part, inputs, self.items_of(batch), captured)

    def average(self, loss: Tensor, divided: int = 1) -> Weighed:
        """A loss that was scaled by its rule, over G; ``divided``: the part of G by which it was divided already."""
        steps, by_engine = len(self.batches), divided * self.part.engine_divisor
        # New tensors: DeepSpeed (stage 0) hangs hooks that divide once more on the model's output itself.
        value = loss.detach() * 1.0 if divided == steps else loss.detach() * divided / steps
        if self.host.coupled is not None:
            self.host.coupled.note(value)
        return Weighed(loss * 1.0 if by_engine == steps else loss * by_engine / steps, value)

    def add(self, value: Tensor) -> None:
        """Add a micro-batch's part of the logged loss."""
        self.value = value if self.value is None else self.value + value

    def close(self, model: nn.Module) -> Tensor | float | None:
        """Correct the gradient if the losses divided by another number of items than predicted; warn if they changed.

        Returns:
            What gradient and ``value`` were multiplied by; None: nothing.
        """
        host, state, part, loss = self.host, self.host.state, self.part, self.host.state.loss
        self.ended = True
        host.contained("ending the sum of a window's gradients", host.gradient.finish, None)
        # What is not read, such as compiled code, shows no more in another window.
        may_change = state.opened < ATTEMPTS and loss.contract is not None and loss.contract.is_read
        if may_change and host.knows_other_ranks and host.is_split:
            loss.reconsider()
        if not self.batches:
            return None
        if skipped := len(self.batches) - self.done:
            host.report_inexact(f"{skipped} of its micro-batches were skipped")
        if self.copied:
            part.plan(self.counts.each)
        times = self._correction()
        unread = host.contained(_READING, self._differs, None)
        if unread is not None:
            state.unread = state.unread + unread.long()
        loss.mixed = part.mixed
        if host.knows_other_ranks and (part.changed or (isinstance(times, float) and part.contract.rules)):
            loss.reconsider()
        if times is not None:
            scale_gradients(model, times)
            self.value = None if self.value is None else self.value * times
        host.check_reached(times)
        return times

    def _correction(self) -> Tensor | float | None:
        """Predicted over seen items, the factor for gradient and logged loss; None: 1."""
        host, part, several = self.host, self.part, self.host.data_ranks > 1
        if not part.is_corrected or not (several or part.counted):
            return None
        read = host.contained(_READING, part.counts, None)
        # The other ranks wait for a rank whose counts cannot be read.
        sums = torch.stack([host.zero, host.zero]) if read is None else read
        sums = host.summed(sums) if several else sums
        # Where a rule counted nothing, the window was weighted by N = 1 (`mean_item_count`).
        if not host.readable:
            seen, predicted = sums
            return torch.where(seen == 0, 1.0, torch.where(predicted == 0, 1.0, predicted) / seen)
        seen, predicted = sums.tolist()
        times = (predicted or 1.0) / seen if seen else 1.0
        return None if abs(times - 1) <= 1e-12 else times

    def _differs(self) -> Tensor | None:
        """Report a loss that changed, or counts other than predicted; returns what to read later."""
        host, part, differs = self.host, self.part, self.part.broken()
        if differs is not None and not (host.readable or part.changed):
            return differs
        if part.changed:
            host.report_inexact(part.changed)
        elif differs is not None and bool(differs):
            host.state.differs = True
            why = OTHER_COUNTS
            if part.counted:
                seen, predicted = part.counts().tolist()
                kept = "; under DeepSpeed the gradient is not corrected" if is_deepspeed(host.accelerator) else ""
                why = f"its loss divides by {seen:g} items; {predicted:g} were predicted{kept}"
            host.report_inexact(why)
        return None


def open_window(host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None) -> Window:
    """Settle how the losses of a window are reduced, and count it over all ranks.

    Args:
        host: the training.
        batches: the micro-batches of this rank; empty: its data have ended.
        number: upstream's count of them, summed as well; None: there is none.
        error: raised while this rank fetched its window; it is raised on all ranks.

    Raises:
        StandAsideError: looking failed on a rank, or the loss cannot be read, so that all train as stock.
    """
    counts, asked = None, False
    while counts is None:
        # Once more where a rank has a changed loss.
        settle(host, batches, number, error, asked=asked)
        if host.contract is not None and host.contract.as_stock:
            raise StandAsideError
        counts, asked = count_window(host, batches, number, error), True
    if host.readable:
        host.contained("reading what windows have shown", host.read, None)
    return Window(host, list(batches), counts)


def open_unless_aside(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None
) -> Window | None:
    """`open_window`; None: looking failed on a rank, so that the training goes on as without us."""
    if not host.state.aside:
        try:
            window = open_window(host, batches, number, error)
            if host.coupled is not None:
                host.coupled.open(host, batches)
            return window
        except StandAsideError:
            host.stand_aside()
        except Exception as caught:
            if caught is error or isinstance(caught, AccumFixError) or is_of_forward(caught) or is_told(caught):
                raise
            # A fault in our code that no collective has told of is the same on every rank.
            host.note_trouble("looking at a window", caught)
            host.stand_aside()
    host.state.note_inexact()
    if error is not None:
        raise error
    return None


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
