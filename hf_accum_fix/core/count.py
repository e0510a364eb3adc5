"""Count a window over all ranks, by the one collective of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, How
from hf_accum_fix.accumulation.items import Counts, Items, count_by_rules, count_dtype
from hf_accum_fix.accumulation.scaling import Normalizer
from hf_accum_fix.accumulation.tasks import describe, task_of
from hf_accum_fix.accumulation.weigh import Part, WindowCheck
from hf_accum_fix.core.counting_pass import count_by_forwards
from hf_accum_fix.core.host import Host
from hf_accum_fix.core.state import LossState
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import engine_divisor, is_deepspeed
from hf_accum_fix.router.router_loss import Convention, Form, one_form

#: Items of a window by each rule, 0-dim, over all ranks.
Totals = Mapping[Items, Tensor]


@dataclass
class WindowCounts:
    """Items of a window.

    Attributes:
        total: N over all ranks and tasks, 0-dim.
        each: of each micro-batch of this rank, by each rule of its loss, and by place (see `Counts`).
        number: as upstream counts over all ranks, 0-dim; None: upstream does not.
        parts: one for each loss, the first task's first.
        corrects: the gradient is corrected at the end of the window.
    """

    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    each: list[Counts] = field(default_factory=list)
    number: Tensor | None = None
    parts: list[Part] = field(default_factory=list)
    corrects: bool = False


@dataclass(frozen=True)
class Sums:
    """What the ranks sum.

    Attributes:
        totals: items of each loss by each of its rules, 0-dim.
        number: as upstream counts, 0-dim.
        flags: this rank has a new task or a changed loss; had other counts than predicted; had an inexact window.
        routing: see `RouterLoss.count`.
    """

    totals: Sequence[Tensor]
    number: Tensor
    flags: tuple[bool, bool, bool]
    routing: Tensor

    def over_ranks(self, host: Host, fetched: int, error: Exception | None) -> Sums:
        """The sums, by one collective; the error of one rank, which has ``fetched`` micro-batches, is raised on all."""
        runs = fetched if host.shards else min(fetched, 1)
        status = ranks.pack_status(runs, error, self.number)
        flags = [torch.full_like(self.number, flag) for flag in self.flags]
        slots = [*map(torch.stack, ([*self.totals, self.number], status, flags)), self.routing]
        items, summed, found, routing = torch.split(host.summed(torch.cat(slots)), [*map(len, slots)])
        suspects, place = runs < (host.steps if host.shards else 1), {"rank": host.rank, "world_size": host.world_size}
        ranks.check_status(summed, runs, error, fetched=fetched, suspects=suspects, gather=host.gather, **place)
        # Tensor-parallel ranks have all counted the same samples.
        copies = host.world_size // host.data_ranks
        totals = (items[:-1] / copies).unbind()
        asks, differs, inexact = map(bool, found.tolist()) if host.hears else self.flags
        return Sums(totals, items[-1], (asks, differs, inexact), routing / copies)


def count_window(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None
) -> WindowCounts | None:
    """Count a window over all ranks; arguments as of `core.window.open_window`.

    Returns:
        None: a rank has a new task or a changed loss, so all ranks have to settle and count again.
    """
    state, several = host.state, host.world_size > 1
    # One rank alone has observed its new tasks.
    asks = several and (state.reconsiders or not all(state.knows(task_of(batch)) for batch in batches))
    rules, zero = _rules(host), torch.zeros((), dtype=count_dtype(host.device), device=host.device)
    routing, error = count_routing(host, batches, error)
    each, totals = list[Counts](), [zero] * sum(map(len, rules))
    try:
        each, totals = _count(host, rules, batches, strict=several and not asks)
    except Exception as caught:
        error = error or caught
    upstream = zero if number is None else torch.as_tensor(number).to(zero)
    sums = Sums(totals, upstream, (asks, state.differs, state.unreported), routing)
    if several:
        sums = sums.over_ranks(host, len(batches), error)
    elif error is not None:
        raise error
    asks, differs, inexact = sums.flags
    if asks and host.hears:
        return None
    if asks:
        host.report_inexact("it has micro-batches of a task that was not observed")
    if differs:
        state.correct_from_now()
    if inexact and not state.unreported:
        state.note_inexact(state.opened - bool(batches))
    state.unreported = False
    counts, by_rule = WindowCounts(zero, each, None if number is None else sums.number), iter(sums.totals)
    _set_parts(host, counts, [{rule: next(by_rule) for rule in its} for its in rules], batches)
    _note_inexact(host, counts, batches)
    host.router.settle(sums.routing, max(len(batches), 1), host.data_ranks)
    return counts


def _rules(host: Host) -> list[list[Items]]:
    """The rules that count each loss; several losses are weighted by their samples."""
    contracts = host.state.contracts
    samples = [Items()] * (len(contracts) > 1)
    return [list(dict.fromkeys((*contract.rules, *samples))) for contract in contracts]


def _count(
    host: Host, rules: Sequence[Sequence[Items]], batches: Sequence[Any], *, strict: bool
) -> tuple[list[Counts], list[Tensor]]:
    """Items of each micro-batch of this rank, and their sums for each loss by each rule.

    ``strict``: a micro-batch without the counted input is an error.
    """
    state, by_batch, totals = host.state, dict[int, Counts](), list[Tensor]()
    for contract, its in zip(state.contracts, rules, strict=True):
        held = [batch for batch in batches if len(rules) == 1 or state.contract_of(batch) is contract]
        each, sums = count_by_rules(its, held, host.device, several_ranks=strict)
        totals += sums
        by_batch |= {id(batch): found for batch, found in zip(held, each, strict=True)}
    return [by_batch[id(batch)] for batch in batches], totals


def _set_parts(host: Host, counts: WindowCounts, totals: Sequence[Totals], batches: Sequence[Any]) -> None:
    """Set the part of each loss in the window, and whether its gradient is corrected."""
    state = host.state
    losses = [each for each in state.losses if each.contract is not None]
    # Reading would wait for another device. First, since the contracts may change.
    differs = [
        host.on_cpu and _rules_differ(host, loss, by_rule, counts.number)
        for loss, by_rule in zip(losses, totals, strict=True)
    ]
    samples = torch.stack([by_rule[Items()] for by_rule in totals]) if len(totals) > 1 else None
    # One number cannot correct several losses; where samples are not read, a window may have all of them.
    several_losses = samples is not None and (not host.on_cpu or int((samples > 0).sum()) > 1)
    corrects = state.corrects or state.unproven > 0 or (host.data_ranks == 1 and host.corrects_alone)
    state.unproven = max(state.unproven - 1, 0)
    counts.corrects = corrects and not (several_losses or is_deepspeed(host.accelerator))
    # Of the samples that have each loss (see `tasks`).
    shares = [1.0] if samples is None else [*(samples.clamp(min=1) / samples.sum().clamp(min=1))]
    for contract, by_rule, share in zip(state.contracts, totals, shares, strict=True):
        n = [by_rule[rule] for rule in contract.rules] or [torch.zeros_like(counts.total)]
        counts.total = counts.total + n[0]
        normalizer = Normalizer.of(
            contract,
            [each / share for each in n],
            len(batches),
            host.data_ranks,
            is_corrected=counts.corrects,
            engine_divisor=engine_divisor(host.accelerator),
        )
        counts.parts.append(Part(contract, normalizer, WindowCheck(contract, counts.corrects)))
    if counts.parts[0].normalizer.is_whole:
        return
    if any(differs) or any(loss.needs_forwards for loss in losses):
        counted = count_by_forwards(host, batches, counts.parts, counts.each, handed=counts.number is not None)
        for at, (loss, by_rule, by_place) in enumerate(zip(losses, totals, counted, strict=True)):
            contract = counts.parts[at].contract
            if host.readable and len(contract.rules) > 1:
                places = {place: float(n) for place, n in by_place.items()}
                contract = loss.contract = contract.fitting(_values(by_rule), places)
            n_of_terms = {place: n / shares[at] for place, n in by_place.items()}
            normalizer = counts.parts[at].normalizer.counted(contract, n_of_terms)
            counts.parts[at] = Part(contract, normalizer, WindowCheck(contract, counts.corrects))


def _rules_differ(host: Host, loss: LossState, by_rule: Totals, number: Tensor | None) -> bool:
    """Whether rules that fit a mean count the window differently; of num_items_in_batch, upstream's is used."""
    contract = loss.contract
    if contract is None or len(by_rule) < 2:
        return False
    totals = _values(by_rule)
    differ = contract.ambiguous(totals)
    if How.NUMBER in differ:
        fitting = (rule for each in contract.terms if each.how is How.NUMBER for rule in each.rules)
        upstreams = tuple(rule for rule in fitting if number is not None and totals[rule] == float(number))
        if upstreams:
            loss.contract = contract.with_rules_of_number(upstreams)
        host.report_inexact("several rules fit its num_items_in_batch, and count the window differently")
    return How.MEAN in differ


def _values(by_rule: Totals) -> dict[Items, float]:
    """Read at once."""
    return dict(zip(by_rule, torch.stack([*by_rule.values()]).tolist(), strict=True))


def _note_inexact(host: Host, counts: WindowCounts, batches: Sequence[Any]) -> None:
    """Note a window whose loss is not exact, that has no target, or a task that a given contract does not cover."""
    state, empty = host.state, None
    if batches and all(part.contract.items is not None for part in counts.parts):
        empty = counts.total == 0
        state.empty = empty if state.empty is None else state.empty | empty
    # Without a target the gradient is zero, whatever the loss.
    inexact = not all(
        each.exact or each.by_divisor or each.reason == NO_TARGET_SEEN for each in map(state.contract_of, batches)
    )
    if inexact and (empty is None or not host.on_cpu or not bool(empty)):
        state.note_inexact()
    counted = {key for rule in state.contracts[0].rules for key in rule.keys}
    for batch in batches if host.options.contract is not None and counted else ():
        held = frozenset((key, axes) for key, axes in task_of(batch) if key in counted)
        state.given_for = held if state.given_for is None else state.given_for
        if held != state.given_for:
            covered = describe(state.given_for)
            host.report_inexact(
                f"got a micro-batch with {describe(task_of(batch))}; expected {covered}, as the given contract does"
            )
            return


def count_routing(host: Host, batches: Sequence[Any], error: Exception | None) -> tuple[Tensor, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error.

    The model's load-balancing loss is recognised first, on every rank.
    """
    router, contract, device = host.router, host.state.first.contract, host.device
    if router.convention is Convention.MEAN:
        return router.nothing(device), error
    assert contract is not None
    number = contract.as_number(torch.ones((), dtype=count_dtype(device), device=device))
    with host.routing(batches) if batches else nullcontext() as run:
        if router.runs_forwards and host.shards:
            lengths = host.all_of(len(batches), error)
            if len(set(lengths)) > 1:
                raise ranks.uneven(dict(enumerate(lengths)))

        def forward(inputs: Any) -> Tensor:
            assert run is not None
            return run.forward(inputs, number)

        if router.form is None or not router.form.settled:
            seen = Form(settled=False)
            try:
                if run is not None:
                    seen = router.recognise_among(forward, batches, contract.items, run.model, device)
            except Exception as caught:
                error = error or caught
            router.form = one_form(host.all_of(seen, error))
            if why := router.why_mean(contract.has_router_loss):
                host.warn_once("router", f"{host.head}: {why}")
        try:
            if run is not None:
                return router.count(forward, batches, run.model, device, host.data_ranks), error
        except Exception as caught:
            # Raised once the other ranks have it.
            error = error or caught
        return router.nothing(device), error
