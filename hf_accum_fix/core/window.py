"""The accumulation window: counted over all ranks by one collective, weighted as it runs, corrected at its end.

window = open_window(host, batches)                 # settles the contract of each loss, counts, sums over ranks
for each micro-batch:
    part = window.part_of(batch)                    # contract, n_mean and check of its loss
    with host.adding(model, len(batches), begun):   # the dtype of its gradient sum
        ...                                         # forward, window.weigh(loss, ...), backward
window.close(model)                                 # compares divisors with the prediction
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.correction import scale_gradients
from hf_accum_fix.accumulation.scaling import Normalizer
from hf_accum_fix.accumulation.tasks import describe, task_of
from hf_accum_fix.accumulation.values import Captured
from hf_accum_fix.accumulation.weigh import Part, WindowCheck
from hf_accum_fix.accumulation.window import Items, count_by_rules, count_dtype
from hf_accum_fix.core.host import Host
from hf_accum_fix.engines import ranks
from hf_accum_fix.router.router_loss import Form, Forward, one_form


@dataclass(eq=False)
class Window:
    """The micro-batches of one optimizer step on this rank.

    Attributes:
        host: of the training.
        batches: the micro-batches.
        parts: one for each loss, the first task's first.
        counts: items of each micro-batch, 0-dim, by each rule of its loss.
        total: N over all ranks and tasks, 0-dim.
        number: items as upstream counts them, over all ranks, 0-dim; None: upstream does not.
        done: micro-batches that were run.
        value: their sum for the logged loss, 0-dim.
        ended: it was closed.
    """

    host: Host
    batches: list[Any]
    parts: list[Part]
    counts: list[dict[Items, Tensor]]
    total: Tensor
    number: Tensor | None = None
    done: int = 0
    value: Tensor | None = None
    ended: bool = False

    def part_of(self, batch: Any) -> Part:
        """The part of a micro-batch."""
        if len(self.parts) == 1:
            return self.parts[0]
        contract = self.host.state.contract_of(batch)
        return next(part for part in self.parts if part.contract is contract)

    def counts_of(self, batch: Any) -> dict[Items, Tensor] | None:
        """Items of a micro-batch, found by identity; None: it is another object than the loader's."""
        return next((each for one, each in zip(self.batches, self.counts, strict=False) if one is batch), None)

    def add(self, value: Tensor) -> None:
        """Add a micro-batch's part of the logged loss."""
        self.value = value if self.value is None else self.value + value

    @property
    def checks(self) -> list[WindowCheck]:
        """For each loss of its micro-batches that is read."""
        parts = dict.fromkeys(id(self.part_of(batch)) for batch in self.batches)
        checks = (part.check for part in self.parts if id(part) in parts)
        # Every rank has to join the correction of an unobserved loss.
        return [c for c in checks if c.contract.is_read or c.contract.by_divisor or c.counted or c.changed]

    def observed_again(self, check: WindowCheck, captured: Captured) -> bool:
        """Observe its losses again, as one has other terms than before; False: not possible in mid-window.

        Several ranks would have to do it together, and a gradient that was added cannot be weighted again. A loss that
        was not exact may depend on state that a forward writes, which this micro-batch's backward still needs.
        """
        host, state = self.host, self.host.state
        if self.done or host.world_size > 1 or not (state.tasks and check.contract.exact):
            return False
        if not state.take_earlier(check.contract, check.other_terms):
            state.reconsider()
            if not state.reconsiders:
                return False
            host.settle(self.batches, self.number, None)
        again = count_window(host, self.batches, self.number)
        self.parts, self.counts, self.total = again.parts, again.counts, again.total
        if captured.values is None and any(part.contract.groups > 1 or part.contract.added for part in self.parts):
            host.report_inexact(
                "its loss has new terms, which its log averages over micro-batches (its gradient does not)"
            )
        return True

    def close(self, model: nn.Module) -> Tensor | float | None:
        """Correct the gradient if the losses divided by another number of items than predicted; warn if they changed.

        Returns:
            What gradient and ``value`` were multiplied by; None: nothing.
        """
        host, self.ended = self.host, True
        host.gradient.finish()
        checks = self.checks
        if not self.batches or not (checks or host.state.corrects_others):
            return None
        times = host.state.correction.end(host, checks, len(self.batches) - self.done)
        if host.state.correction.changed and host.state.tasks:
            host.state.reconsider()
        if times is not None:
            scale_gradients(model, times)
            self.value = None if self.value is None else self.value * times
        return times


def open_window(host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None) -> Window:
    """Settle how the losses of a window are reduced, and count it over all ranks.

    Args:
        host: the training.
        batches: the micro-batches of this rank; empty: its data have ended.
        number: upstream's count of them, summed as well; None: there is none.
        error: raised while this rank fetched its window; it is raised on all ranks.
    """
    while True:
        host.settle(batches, number, error)
        routing, error = host.route(batches, error)
        window = count_window(host, batches, number, error, routing)
        if not host.state.asks:
            break
    if batches and all(each.items is not None for each in host.state.contracts):
        empty, before = window.total == 0, host.state.empty
        # Reading would wait for the device.
        host.state.empty = empty if before is None else before | empty
        if host.readable:
            host.warn_empty()
    return window


@dataclass
class _Counts:
    """Items of a window: first of this rank, then of all.

    Attributes:
        each: of each micro-batch, by each rule.
        totals: of each loss, by each rule.
        samples: of each loss, which weigh the losses where there are several.
        number: as upstream counts.
    """

    each: list[dict[Items, Tensor]] = field(default_factory=list)
    totals: list[list[Tensor]] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    number: Tensor | None = None


def count_window(
    host: Host,
    batches: Sequence[Any],
    number: Any = None,
    error: Exception | None = None,
    routing: Tensor | None = None,
) -> Window:
    """Count a window over all ranks, by the one collective of an optimizer step."""
    state, several = host.state, host.world_size > 1
    if state.reconsidered and not state.can_be_exact:
        # Its own contract is not exact, though earlier ones were.
        state.note_inexact()
    zero = torch.zeros((), dtype=count_dtype(host.device), device=host.device)
    contracts = state.contracts
    new = state.reconsiders or not all(state.knows(task_of(batch)) for batch in batches)
    try:
        # With a new task the window is observed, and counted again.
        counts = _counted(host, batches, zero, strict=several and not new)
    except Exception as caught:
        error = error or caught
        counts = _Counts([], [[zero] * max(len(each.rules), 1) for each in contracts])
        counts.samples = [zero] * len(contracts) if len(contracts) > 1 else []
    counts.number = None if number is None else torch.as_tensor(number).to(zero)
    summed_routing = routing
    if several:
        new, summed_routing = _sum_over_ranks(host, counts, batches, error, new=new, routing=routing)
    elif error is not None:
        raise error
    state.unreported = False
    if (
        host.device.type == "cpu"
        and not host.shards
        and not state.asks
        and state.tasks
        and _compare_rules(host, counts)
    ):
        return count_window(host, batches, number, error, routing)
    if not state.tasks:
        _check_given(host, batches)
    if new and not state.asks:
        host.report_inexact("it has micro-batches of a task that was not observed")
    if any(not state.contract_of(batch).exact for batch in batches if len(contracts) > 1):
        # The first task's contract may be exact.
        state.note_inexact()
    window = Window(host, list(batches), _parts(host, counts, len(batches)), counts.each, zero, counts.number)
    if summed_routing is not None:
        normalizer = window.parts[0].normalizer
        host.router.settle(summed_routing, normalizer.micro_batches, normalizer.world_size)
    totals = [each[0] for each in counts.totals]
    window.total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    return window


def _counted(host: Host, batches: Sequence[Any], zero: Tensor, *, strict: bool) -> _Counts:
    """Items of this rank; ``strict``: a micro-batch without the counted input is an error."""
    state, counts = host.state, _Counts()
    contracts, by_batch = state.contracts, dict[int, dict[Items, Tensor]]()
    alone = len(contracts) == 1
    for contract in contracts:
        held = [batch for batch in batches if alone or state.contract_of(batch) is contract]
        each, totals = count_by_rules(contract.rules, held, host.device, several_ranks=strict)
        counts.totals.append(totals or [zero])
        by_batch |= {id(batch): found for batch, found in zip(held, each, strict=True)}
        if not alone:
            counts.samples += count_by_rules([Items()], held, host.device)[1]
    if any(by_batch.values()):
        counts.each = [by_batch[id(batch)] for batch in batches]
    return counts


def _sum_over_ranks(
    host: Host,
    counts: _Counts,
    batches: Sequence[Any],
    error: Exception | None,
    *,
    new: bool,
    routing: Tensor | None,
) -> tuple[bool, Tensor | None]:
    """Sum the counts over all ranks, and with them each rank's errors, new tasks and inexact windows.

    Returns:
        Whether any rank has a new task, and the routing of all.
    """
    state, like = host.state, counts.totals[0][0]
    runs = len(batches) if host.shards else min(len(batches), 1)
    # One number cannot correct several losses.
    corrected = state.correction.corrects and len(counts.totals) == 1
    reports = any(each.is_read for each in state.contracts) and not corrected
    sent = {
        "totals": list(chain(*counts.totals)),
        "number": [torch.zeros_like(like) if counts.number is None else counts.number],
        "marks": ranks.pack_status(runs, error, like),
        "samples": counts.samples,
        "new": [torch.full_like(like, new)] if state.tasks else [],
        "inexact": [torch.full_like(like, each) for each in (state.correction.differs, state.unreported)] * reports,
    }
    numbers = torch.stack([*chain(*sent.values())])
    sums = host.summed(numbers if routing is None else torch.cat([numbers, routing]))
    summed = dict(zip(sent, torch.split(sums[: len(numbers)], [*map(len, sent.values())]), strict=True))
    fetched, suspects = len(batches), runs < (host.steps if host.shards else 1)
    place = {"rank": host.rank, "world_size": host.world_size}
    ranks.check_status(summed["marks"], runs, error, fetched=fetched, suspects=suspects, gather=host.gather, **place)
    # Tensor-parallel ranks have all counted the same samples.
    copies = host.world_size // host.data_ranks
    totals = iter((summed["totals"] / copies).unbind())
    counts.totals = [[next(totals) for _ in each] for each in counts.totals]
    counts.samples = list((summed["samples"] / copies).unbind())
    counts.number = None if counts.number is None else summed["number"][0]
    # Reading waits for any other device: there these are never set.
    if host.device.type == "cpu" and state.tasks:
        state.asks = new = bool(summed["new"])
    if host.device.type == "cpu" and reports:
        differs, unreported = summed["inexact"].tolist()
        state.correction.corrects = state.correction.corrects or bool(differs)
        if unreported > state.unreported:
            state.note_inexact(state.opened - bool(batches))
    return new, None if routing is None else sums[len(numbers) :] / copies


def _parts(host: Host, counts: _Counts, micro_batches: int) -> list[Part]:
    """The part of each loss in the window."""
    samples: Sequence[Tensor | None] = [
        each.clamp(min=1) / torch.stack(counts.samples).sum().clamp(min=1) for each in counts.samples
    ] or [None]
    # Off the CPU samples are not read, so a window may have all losses.
    held = [each for each in counts.samples if host.device.type != "cpu" or each]
    host.state.correction.several_losses = len(held) > 1
    corrected, divisor = host.state.correction.will_correct(host), host.engine_divisor
    parts = []
    for contract, totals, fraction in zip(host.state.contracts, counts.totals, samples, strict=True):
        normalizer = Normalizer.of(
            contract,
            totals,
            micro_batches,
            host.data_ranks,
            fraction,
            is_corrected=corrected,
            engine_divisor=divisor,
        )
        parts.append(Part(contract, normalizer, WindowCheck(contract, normalizer.is_corrected)))
    return parts


def _compare_rules(host: Host, counts: _Counts) -> bool:
    """Observe the losses again on this window if rules that fitted so far count it differently.

    Returns:
        Whether the window has to be counted again, since one rule was chosen.
    """
    state = host.state
    for loss, totals in zip([each for each in state.losses if each.contract is not None], counts.totals, strict=True):
        contract = loss.contract
        if contract is None or not contract.has_rules_to_compare:
            continue
        by_rule = dict(zip(contract.rules, map(float, totals), strict=True))
        if contract.is_ambiguous(by_rule):
            as_upstream = None if counts.number is None else contract.counting(by_rule, float(counts.number))
            if as_upstream is not None:
                # A loss divides by the number that it gets: as stock's.
                doubt = "several rules fit its items and count a window differently; upstream's is used"
                state.take(replace(as_upstream, doubt=as_upstream.doubt or doubt), loss)
                host.report_inexact(doubt)
                return True
            if state.compared != state.opened:
                state.compared = state.opened
                state.reconsider()
                state.asks = state.asks or state.reconsiders
            if not state.reconsiders:
                host.report_inexact("several rules fit the items of its terms, and count this window differently")
    return False


def _check_given(host: Host, batches: Sequence[Any]) -> None:
    """Warn of a task that a given contract, which covers one, does not cover."""
    state = host.state
    counted = {key for contract in state.contracts for rule in contract.rules for key in rule.keys}
    for batch in batches if counted else ():
        held = frozenset((key, axes) for key, axes in task_of(batch) if key in counted)
        state.given_for = held if state.given_for is None else state.given_for
        if held != state.given_for:
            covered = describe(state.given_for)
            host.report_inexact(
                f"got a micro-batch with {describe(task_of(batch))}; expected {covered}, as the given contract does"
            )
            return


def count_routing(
    host: Host, forward: Forward, batches: Sequence[Any], model: nn.Module | None, error: Exception | None
) -> tuple[Tensor, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error.

    The model's load-balancing loss is recognised first, on every rank. ``forward``: (inputs) -> loss, as in training;
    ``model``: inside DistributedDataParallel; None: this rank has no micro-batch.
    """
    router, contract, listed = host.router, host.contract, list(batches)
    assert contract is not None
    if router.runs_forwards and host.shards:
        lengths = host.all_of(len(listed), error)
        if len(set(lengths)) > 1:
            raise ranks.uneven(dict(enumerate(lengths)))
    if router.form is None or not router.form.settled:
        seen = Form(settled=False)
        try:
            if model is not None:
                seen = router.recognise_among(forward, listed, contract.items, model, host.device)
        except Exception as caught:
            error = error or caught
        router.form = one_form(host.all_of(seen, error))
        if why := router.why_mean(contract.has_router_loss):
            host.warn_once("router", f"{host.head}: {why}")
    try:
        if model is not None:
            return router.count(forward, listed, model, host.device, host.data_ranks), error
    except Exception as caught:
        # Raised once the other ranks have it.
        error = error or caught
    return router.nothing(host.device), error
