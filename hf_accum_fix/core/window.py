"""The accumulation window: counted over all ranks by one collective, weighted as it runs, corrected at its end.

window = open_window(host, batches)                 # settles the contract of each loss, counts, sums over ranks
for each micro-batch:
    with host.adding(model, len(batches), begun):   # the dtype of its gradient sum
        ...                                         # forward, window.weigh(loss, batch, captured), backward
window.close(model)                                 # compares divisors with the prediction

If the losses of a window divided by ``N seen`` items and its rules predicted ``N predicted``, the gradient is too large
by ``N seen / N predicted``, and is divided by that before the optimizer step. Reading these numbers would wait for a
GPU, so a window is corrected there without reading, if its loss was observed to need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.scaling import of_window
from hf_accum_fix.accumulation.values import Captured
from hf_accum_fix.accumulation.weigh import Counted, Part, Weighed, WindowCheck, weigh
from hf_accum_fix.accumulation.window import Counts, count_by_rules, count_dtype
from hf_accum_fix.core.contracts import settle
from hf_accum_fix.core.count import WindowCounts, count_routing, count_window
from hf_accum_fix.core.host import OTHER_COUNTS, Host
from hf_accum_fix.engines.engine import is_deepspeed


@dataclass(eq=False)
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        host: of the training.
        batches: the micro-batches.
        counts: of all ranks.
        done: micro-batches that were run.
        value: the logged loss, summed over them, 0-dim.
        gradients: a number that changes with them, after the last micro-batch; None: not checked.
        ended: it was closed.
    """

    host: Host
    batches: list[Any]
    counts: WindowCounts
    done: int = 0
    value: Tensor | None = None
    gradients: int | None = None
    ended: bool = False

    def part_of(self, batch: Any) -> Part:
        """The part of a micro-batch."""
        parts = self.counts.parts
        if len(parts) == 1:
            return parts[0]
        contract = self.host.state.contract_of(batch)
        return next(part for part in parts if part.contract is contract)

    def items_of(self, batch: Any) -> Counts:
        """Items of a micro-batch by each rule, 0-dim; a copy of one, perhaps on another device, is counted again."""
        for one, items in zip(self.batches, self.counts.each, strict=False):
            if one is batch:
                return items
        part = self.part_of(batch)
        return count_by_rules(part.contract.rules, [batch], part.normalizer.mean.device)[0][0]

    def count_of(self, batch: Any) -> Tensor | None:
        """Items of a micro-batch by the rule in use, 0-dim; None: its loss counts none."""
        items = self.part_of(batch).contract.items
        return None if items is None else self.items_of(batch)[items]

    def weigh(
        self,
        loss: Tensor,
        batch: Any,
        captured: Captured,
        inputs: Mapping[str, Any] | None = None,
        *,
        zero_weight: bool = False,
    ) -> Weighed:
        """Weight the loss of a micro-batch before its backward; one that is unlike the prediction is counted again.

        ``inputs``: of its forward; None: the micro-batch; ``zero_weight``: it counts nothing.
        """
        inputs, part = batch if inputs is None else inputs, self.part_of(batch)
        weighed = weigh(loss, part, Counted(inputs, self.items_of(batch), zero_weight), captured)
        if part.check.is_unlike and self._counted_again(part.check, captured):
            weighed.unhook()
            weighed = weigh(loss, self.part_of(batch), Counted(inputs, self.items_of(batch), zero_weight), captured)
        return weighed

    def average(self, loss: Tensor, divided: int = 1) -> Weighed:
        """A loss that was scaled by its rule; ``divided``: the part of G by which it was divided already."""
        steps, divisor = len(self.batches), self.counts.parts[0].normalizer.engine_divisor
        return Weighed(of_window(loss, steps, divisor * divided), of_window(loss.detach(), steps, divided))

    def add(self, value: Tensor) -> None:
        """Add a micro-batch's part of the logged loss."""
        self.value = value if self.value is None else self.value + value

    def _counted_again(self, check: WindowCheck, captured: Captured) -> bool:
        """Count it again, since its first micro-batch is unlike the prediction; False: not possible in mid-window.

        Its losses are observed again if one has other terms, and counted by forwards if one divides by other items.

        Several ranks would have to do it together, and a gradient that was added cannot be weighted again. A loss that
        was not exact may depend on state that a forward writes, which this micro-batch's backward still needs.
        """
        host, state = self.host, self.host.state
        if self.done or host.world_size > 1 or not (state.tasks and check.contract.exact):
            return False
        with host.outside_micro_batch():
            if not check.other_terms:
                for loss in state.losses:
                    loss.counts_by_forwards = loss.counts_by_forwards or loss.contract is check.contract
            elif not state.take_earlier(check.contract, check.other_terms):
                state.reconsider()
                if not state.reconsiders:
                    return False
                settle(host, self.batches, self.counts.number)
            self.counts = count_window(host, self.batches, self.counts.number)
        contracts = [part.contract for part in self.counts.parts]
        if captured.values is None and any(each.groups > 1 or each.added for each in contracts):
            host.report_inexact(
                "its loss has new terms, which its log averages over micro-batches (its gradient does not)"
            )
        return True

    def close(self, model: nn.Module) -> Tensor | float | None:
        """Correct the gradient if the losses divided by another number of items than predicted; warn if they changed.

        Returns:
            What gradient and ``value`` were multiplied by; None: nothing.
        """
        host, state, self.ended = self.host, self.host.state, True
        host.gradient.finish()
        # Other ranks learn of it by the next window's collective, which is read on the CPU only.
        is_heard = host.device.type == "cpu" or host.world_size == 1
        if is_heard and any(each.may_change for each in state.contracts):
            state.reconsider()
        checks = self._checks()
        # Another rank may have a loss that is corrected, which every rank has to join.
        if not self.batches or not (checks or (state.corrects and len(state.losses) > 1)):
            return None
        # Counts first: only one warning is given, and theirs is more specific.
        times, flags = self._times(checks)
        changed = False
        for check in checks:
            broken = None if check.changed else check.broken(host.device)
            if check.changed:
                changed = True
                host.report_inexact(check.changed)
            elif broken is not None and not host.readable:
                flags.append(broken)
            elif broken is not None and bool(broken):
                state.differs = True
                host.report_inexact(OTHER_COUNTS)
        if flags:
            unread = torch.stack(flags).any().long()
            state.unread = unread if state.unread is None else state.unread + unread
        if changed and is_heard and state.tasks:
            state.reconsider()
        if times is not None:
            scale_gradients(model, times)
            self.value = None if self.value is None else self.value * times
        return times

    def _checks(self) -> list[WindowCheck]:
        """For each loss of its micro-batches that is read."""
        parts = dict.fromkeys(id(self.part_of(batch)) for batch in self.batches)
        checks = (part.check for part in self.counts.parts if id(part) in parts)
        # Every rank has to join the correction of an unobserved loss.
        return [c for c in checks if c.contract.is_read or c.contract.by_divisor or c.counted or c.changed]

    def _times(self, checks: Sequence[WindowCheck]) -> tuple[Tensor | float | None, list[Tensor]]:
        """The factor for gradient and logged loss, None: 1, or unknown; and what to read later."""
        host, skipped = self.host, len(self.batches) - self.done
        corrects, several = self.counts.corrects, host.data_ranks > 1
        if skipped and not (several and corrects):
            host.report_inexact(f"{skipped} of its micro-batches were skipped")
        if not corrects:
            flags = [self._differs(check) for check in checks if check.counted]
            return None, [each for each in flags if each is not None]
        if not host.state.corrects and not any(each.counted for each in checks):
            return None, []
        # Every rank has to join the collective.
        zero = torch.zeros(2, dtype=count_dtype(host.device), device=host.device)
        sums = torch.stack([zero, *(each.counts(host.device) for each in checks)]).sum(dim=0)
        if several:
            sums = host.summed(torch.cat([sums, sums.new_full((1,), skipped)]))
            if host.readable and float(sums[2]):
                host.report_inexact(f"{float(sums[2]):g} micro-batches on its ranks were skipped")
            sums = sums[:2]
        # Where a rule counted nothing, the window was weighted by N = 1 (`mean_item_count`).
        if not host.readable:
            one = torch.ones_like(sums[0])
            return torch.where(sums[0] != 0, torch.where(sums[1] != 0, sums[1], one) / sums[0], one), []
        seen, predicted = sums.tolist()
        times = (predicted or 1.0) / seen if seen else 1.0
        return None if abs(times - 1) <= 1e-12 else times, []

    def _differs(self, check: WindowCheck) -> Tensor | None:
        """Report counts other than predicted, without a correction; returns what to read later."""
        host, sums = self.host, check.counts(self.host.device)
        if not host.readable:
            return (sums[0] - sums[1]).abs() > 1e-6 * sums[1].abs()
        seen, predicted = sums.tolist()
        if abs(seen - predicted) > 1e-6 * abs(predicted):
            host.state.differs = True
            kept = "; under DeepSpeed the gradient is not corrected" if is_deepspeed(host.accelerator) else ""
            host.report_inexact(f"its loss divides by {seen:g} items; {predicted:g} were predicted{kept}")
        return None


def open_window(host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None) -> Window:
    """Settle how the losses of a window are reduced, and count it over all ranks.

    Args:
        host: the training.
        batches: the micro-batches of this rank; empty: its data have ended.
        number: upstream's count of them, summed as well; None: there is none.
        error: raised while this rank fetched its window; it is raised on all ranks.
    """
    state = host.state
    while True:
        settle(host, batches, number, error)
        routing, error = count_routing(host, batches, error)
        counts = count_window(host, batches, number, error, routing)
        if not state.asks:
            break
    if batches and all(part.contract.items is not None for part in counts.parts):
        empty = counts.total == 0
        # Reading would wait for the device.
        state.empty = empty if state.empty is None else state.empty | empty
        if host.readable:
            host.warn_empty()
    return Window(host, list(batches), counts)


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
