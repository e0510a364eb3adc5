"""The accumulation window: counted over all ranks by one collective, weighted as it runs, corrected at its end.

If the losses of a window divided by ``N seen`` items and its rules predicted ``N predicted``, the gradient is too large
by ``N seen / N predicted``, and is divided by that before the optimizer step, on a GPU without reading these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.counting.items import Counts, count_by_rules, scale_mean
from hf_accum_fix.engines.engine import is_deepspeed
from hf_accum_fix.engines.ranks import is_told
from hf_accum_fix.errors import AccumFixError, StandAsideError
from hf_accum_fix.learning.contract import How, Reduction
from hf_accum_fix.learning.look import is_of_forward
from hf_accum_fix.reading.values import Captured
from hf_accum_fix.router.router_loss import weighted_router_loss
from hf_accum_fix.weighing.part import Part, kept
from hf_accum_fix.weighing.weigh import Weighed, weigh
from hf_accum_fix.window.count import count_window
from hf_accum_fix.window.host import Host
from hf_accum_fix.window.settle import settle


@dataclass(eq=False)
class Window:
    """The micro-batches of one optimizer step on this rank."""

    host: Host  # of the training
    batches: list[Any]  # the micro-batches
    part: Part  # its denominators, and what its micro-batches have divided by
    each: list[Counts] = field(default_factory=list)  # items of each micro-batch (see `window.count.Counted`)
    number: Tensor | None = None  # as upstream counts over all ranks, 0-dim; None: upstream does not
    done: int = 0  # micro-batches that were run
    value: Tensor | None = None  # the logged loss, summed over them, 0-dim
    ended: bool = False  # it was closed
    stock_number: Any = None  # num_items_in_batch as the stock Trainer has it

    def items_of(self, batch: Any) -> Counts:
        """Items of a micro-batch by each rule, 0-dim; a copy or a part of one is counted again."""
        for one, items in zip(self.batches, self.each, strict=False):
            if one is batch:
                return items
        return count_by_rules(self.part.contract.rules, [batch], self.part.device)[0][0]

    def weigh(self, loss: Tensor, batch: Any, captured: Captured, inputs: Mapping[str, Any]) -> Weighed:
        """Weight the loss of a micro-batch before its backward; ``inputs``: of its forward (see `weigh.weigh`)."""
        return weigh(loss, self.part, inputs, self.items_of(batch), captured)

    def run_by_rule(
        self,
        inputs: Mapping[str, Any],
        items: Counts | None,
        run: Callable[[Mapping[str, Any], Tensor | None], tuple[Tensor, Any]],
        *,
        own_loss: bool = False,
    ) -> tuple[Tensor, Any]:
        """Run a micro-batch, and scale its loss, which it returns with the outputs; arguments as of `Part.scale_of`.

        ``run`` is its forward, (inputs, number or None) -> (loss, outputs).
        """
        inputs, number, ratio = self.part.scale_of(inputs, items, own_loss=own_loss)
        loss, outputs = run(inputs, number)
        if ratio is None:
            return loss, outputs
        router = weighted_router_loss(self.part.contract, outputs)
        return scale_mean(loss, ratio, None if router is None else router.to(loss.device)), outputs

    def average(self, loss: Tensor) -> Weighed:
        """A loss that was scaled by its rule, over G."""
        steps, by_engine = len(self.batches), self.part.engine_divisor
        # New tensors: DeepSpeed (stage 0) hangs hooks that divide once more on the model's output itself.
        value = loss.detach() * 1.0 if steps == 1 else loss.detach() / steps
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
        host, loss = self.host, self.host.state.loss
        self.ended = True
        if not host.delivery.gradient.idle:
            host.contained("ending the sum of a window's gradients", host.delivery.gradient.finish, None)
        # What is not read, such as compiled code, shows no more in another window.
        may_change = host.state.opened == 1 and loss.contract is not None and loss.contract.terms
        if may_change and host.knows_other_ranks and host.is_split:
            loss.reconsider()
        if not self.batches:
            return None
        compared = host.contained("comparing a window's counts with those predicted", self._compare, None)
        times = self._correction(compared)
        if times is not None:
            if self.part.contract.rules and isinstance(times, float) and host.knows_other_ranks:
                loss.reconsider()
            scale_gradients(model, times)
            self.value = None if self.value is None else self.value * times
        host.delivery.check(host, times)
        return times

    def _compare(self) -> Tensor | None:
        """Report a loss that changed, or counts other than predicted; items seen and predicted, [2]; None: no count."""
        host, part, state = self.host, self.part, self.host.state
        if skipped := len(self.batches) - self.done:
            host.report_inexact(f"{skipped} of its micro-batches were skipped")
        counts = part.summed() if part.is_corrected and part.counted else None
        state.loss.mixed = state.loss.mixed + 1 if part.mixed else 0
        if part.changed:
            host.report_inexact(part.changed)
            if host.knows_other_ranks:
                state.loss.reconsider()
            return counts
        differs = part.broken()
        if differs is not None and not host.reads_are_free:
            state.unread = state.unread + differs.long()
        elif differs is not None and bool(differs):
            each = [(place, *pair) for place in part.counts for pair in part.divisors(place).T.tolist()]
            place, seen, predicted = max(each, key=lambda its: abs(its[1] - its[2]))
            name = f"its term {part.contract.terms[place].shape[0]}" if len(part.counts) > 1 else "its loss"
            kept = "; under DeepSpeed the gradient is not corrected" if is_deepspeed(host.accelerator) else ""
            state.told.differs, why = True, f"{name} divides by {seen:g} items; {predicted:g} were predicted{kept}"
            host.report_inexact(why)
        return counts

    def _correction(self, counts: Tensor | None) -> Tensor | float | None:
        """Predicted over seen items, the factor for gradient and logged loss; None: 1."""
        host, several = self.host, self.host.world.data_ranks > 1
        if counts is None and not (several and self.part.is_corrected):
            return None
        # The other ranks wait for a rank without counts.
        sums = torch.stack([host.zero, host.zero]) if counts is None else counts
        sums = host.summed(sums) if several else sums
        floor = next((each.floor for each in self.part.contract.terms if each.how is How.MEAN), None)
        seen, predicted = (kept(each, floor) for each in (sums.tolist() if host.reads_are_free else sums))
        times: Tensor | float = predicted / seen
        return None if not isinstance(times, Tensor) and abs(times - 1) <= 1e-12 else times


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
    counted, asked = None, False
    while counted is None:
        host.contained("looking at what computes the loss", partial(host.refresh, batches), None)
        # Once more where a rank has a changed loss.
        if asked or host.is_due:
            settle(host, batches, number, error)
        if host.contract is not None and host.contract.reduction is Reduction.STOCK:
            raise StandAsideError
        counted, asked = count_window(host, batches, number, error), True
    if host.reads_are_free:
        host.contained("reading what windows have shown", host.read, None)
    return Window(host, list(batches), *counted)


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
        if (grad := parameter.grad) is not None:
            local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
            by_device.setdefault(local.device, []).append(local)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, times.to(device) if isinstance(times, Tensor) else times)
