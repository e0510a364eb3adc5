"""Count a window over all ranks, by the one collective of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, How, LossContract
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import Counts, Items, count_by_rules
from hf_accum_fix.accumulation.look import LossRun, errors_of_forward, is_of_forward, run_with_graph
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.observe import NUMBERS
from hf_accum_fix.accumulation.part import Part
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.tasks import describe, task_of
from hf_accum_fix.accumulation.weigh import weigh
from hf_accum_fix.core.host import Host
from hf_accum_fix.core.state import LossState
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import engine_divisor, is_deepspeed
from hf_accum_fix.errors import BY_DESIGN, ContractError, StandAsideError
from hf_accum_fix.router.router_loss import Convention, Form, one_form

Value = TypeVar("Value")
#: Items of a window by each rule of one loss, 0-dim, over all ranks.
Totals = Mapping[Items, Tensor]


@dataclass
class WindowCounts:
    """Items of a window.

    Attributes:
        total: N over all ranks and tasks, 0-dim.
        each: of each micro-batch of this rank, by each rule of its loss, and by place (see `Counts`).
        number: as upstream counts over all ranks, 0-dim; None: upstream does not.
        parts: one for each loss, the first task's first.
    """

    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    each: list[Counts] = field(default_factory=list)
    number: Tensor | None = None
    parts: list[Part] = field(default_factory=list)


def count_window(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None
) -> WindowCounts | None:
    """Count a window over all ranks; arguments as of `core.window.open_window`.

    Returns:
        None: a rank has a new task or a changed loss, so all ranks have to settle and count again.

    Raises:
        StandAsideError: looking failed on a rank, so that all train as stock.
    """
    state, losses, several = host.state, host.state.losses, host.world_size > 1
    # One rank alone has observed its new tasks.
    known = (losses.knows(task_of(batch), state.opened) for batch in batches)
    asks = several and (losses.reconsiders or not all(known))
    zero, rules = host.zero, _rules_of(losses.contracts)
    routing, error = count_routing(host, batches, error)
    each, totals = nothing = list[Counts](), [zero] * sum(map(len, rules))
    try:
        counting = partial(_count, host, rules, batches, strict=several and not asks)
        each, totals = host.contained("counting a window", counting, nothing)
    except BY_DESIGN as caught:
        error = error or caught
    items = [*totals, zero if number is None else torch.as_tensor(number).to(zero)]
    # This rank has a new task or a changed loss; had other counts than predicted; had an inexact window; failed.
    flags = [asks, state.differs, state.unreported, state.troubled]
    if several:
        items, flags, routing = _over_ranks(host, len(batches), error, items, flags, routing)
    elif error is not None:
        raise error
    asks, differs, inexact, troubled = flags
    if troubled and (host.knows_other_ranks or not each):
        # Where flags are not read, a rank falls back micro-batch by micro-batch.
        raise StandAsideError
    if asks and host.knows_other_ranks:
        return None
    if asks:
        host.report_inexact("it has micro-batches of a task that was not observed")
    if differs:
        losses.correct_from_now()
    if inexact and not state.unreported:
        state.note_inexact(state.opened - bool(batches))
    state.unreported = False
    counts, summed = WindowCounts(zero, each, None if number is None else items[-1]), iter(items)
    of_losses = [{rule: next(summed) for rule in its} for its in rules]
    if not host.contained("planning a window", partial(_plan, host, counts, of_losses, batches, routing), False):
        if not several:
            raise StandAsideError
        # The other ranks wait for this one until they hear of it, in the next window.
        corrects = losses.windows_to_correct > 0 and not is_deepspeed(host.accelerator)
        counts.parts = _parts(host, of_losses, len(batches), corrects=corrects)
    return counts


def _plan(host: Host, counts: WindowCounts, totals: Sequence[Totals], batches: Sequence[Any], routing: Tensor) -> bool:
    """Plan how the micro-batches of a window are weighted; True: that is done."""
    _set_parts(host, counts, totals, batches)
    _note_inexact(host, counts, batches)
    host.router.settle(routing, max(len(batches), 1), host.data_ranks)
    return True


def _rules_of(contracts: Sequence[LossContract]) -> list[list[Items]]:
    """The rules that count each loss; several are weighted by their samples."""
    samples = [Items()] * (len(contracts) > 1)
    return [list(dict.fromkeys((*contract.rules, *samples))) for contract in contracts]


def _over_ranks(
    host: Host, fetched: int, error: Exception | None, items: list[Tensor], flags: list[bool], routing: Tensor
) -> tuple[list[Tensor], list[bool], Tensor]:
    """What the ranks sum, by one collective; the error of one that has ``fetched`` micro-batches is raised on all.

    ``items``: of each loss by each of its rules, and at last as upstream counts, 0-dim; ``routing``: of
    `RouterLoss.count`.
    """
    runs, like = fetched if host.shards else min(fetched, 1), items[-1]
    status = ranks.pack_status(runs, error, like)
    slots = [*map(torch.stack, (items, status, [torch.full_like(like, flag) for flag in flags])), routing]
    counts, summed, found, routing = torch.split(host.summed(torch.cat(slots)), [*map(len, slots)])
    suspects, place = runs < (host.steps if host.shards else 1), {"rank": host.rank, "world_size": host.world_size}
    ranks.check_status(summed, runs, error, fetched=fetched, suspects=suspects, gather=host.gather, **place)
    # Tensor-parallel ranks have all counted the same samples.
    copies = host.world_size // host.data_ranks
    heard = [*map(bool, found.tolist())] if host.knows_other_ranks else flags
    return [*(counts[:-1] / copies), counts[-1]], heard, routing / copies


def _count(
    host: Host, rules: Sequence[Sequence[Items]], batches: Sequence[Any], *, strict: bool
) -> tuple[list[Counts], list[Tensor]]:
    """Items of each micro-batch of this rank, and their sums for each loss by each rule.

    ``strict``: a micro-batch without the counted input is an error.
    """
    _check_given(host, batches)
    losses, by_batch, totals = host.state.losses, dict[int, Counts](), list[Tensor]()
    for contract, its in zip(losses.contracts, rules, strict=True):
        held = [batch for batch in batches if len(rules) == 1 or losses.contract_of(batch) is contract]
        each, sums = count_by_rules(its, held, host.device, several_ranks=strict)
        totals += sums
        by_batch |= {id(batch): found for batch, found in zip(held, each, strict=True)}
    return [by_batch[id(batch)] for batch in batches], totals


def _check_given(host: Host, batches: Sequence[Any]) -> None:
    """Refuse a given contract that reads what no micro-batch of this rank's first window has."""
    given = host.options.contract
    if given is None or host.state.losses.given_for is not None:
        return
    mappings = (batch for batch in batches if isinstance(batch, Mapping))
    held = {str(key) for batch in mappings for key, value in batch.items() if value is not None}
    for name in (name for rule in given.rules for name in rule.names if held and name not in held):
        close = get_close_matches(name, held)
        known = ", ".join(map(repr, (*close, *sorted(held - {*close}))))
        raise ContractError(
            f"got a contract that counts by {name!r}, which no micro-batch of the first window has; expected one of "
            f"{known}; change the contract, or add it in the collator"
        )


def _parts(
    host: Host, totals: Sequence[Totals], micro_batches: int, *, corrects: bool, shares: Sequence[Any] = ()
) -> list[Part]:
    """The part of each loss in the window; ``shares``: of the samples that have it (see `tasks`), if not all have."""
    parts, lengths = list[Part](), (micro_batches, host.data_ranks, corrects, engine_divisor(host.accelerator))
    for at, (contract, by_rule) in enumerate(zip(host.state.losses.contracts, totals, strict=True)):
        n: dict[Items | int, Tensor] = {rule: by_rule[rule] for rule in contract.rules} or {Items(): host.zero}
        parts.append(Part(contract, {rule: n[rule] / shares[at] for rule in n} if shares else n, *lengths))
    return parts


def _set_parts(host: Host, counts: WindowCounts, totals: Sequence[Totals], batches: Sequence[Any]) -> None:
    """Set the part of each loss in the window."""
    losses, state = [each for each in host.state.losses.each if each.contract is not None], host.state.losses
    # First, since the contracts may change.
    by_forwards = [_needs_forwards(host, loss, n, counts.number) for loss, n in zip(losses, totals, strict=True)]
    samples = torch.stack([by_rule[Items()] for by_rule in totals]) if len(totals) > 1 else None
    # One number cannot correct several losses; where samples are not read, a window may have all of them.
    one_loss = samples is None or (host.reads_are_free and int((samples > 0).sum()) <= 1)
    shares = [] if samples is None else [*(samples.clamp(min=1) / samples.sum().clamp(min=1))]
    corrects = state.windows_to_correct > 0 or (host.data_ranks == 1 and host.corrects_alone)
    corrects = corrects and one_loss and not is_deepspeed(host.accelerator)
    state.windows_to_correct = max(state.windows_to_correct - 1, 0)
    counts.parts = _parts(host, totals, len(batches), corrects=corrects, shares=shares)
    for contract, by_rule in zip(state.contracts, totals, strict=True):
        counts.total = counts.total + next((by_rule[rule] for rule in contract.rules), 0)
    if counts.parts[0].is_whole or not any(by_forwards):
        return
    counted = _count_by_forwards(host, batches, counts)
    for at, (loss, part, by_place) in enumerate(zip(losses, counts.parts, counted, strict=True)):
        contract = part.contract
        if host.readable and len(contract.rules) > 1:
            places = {place: float(n) for place, n in by_place.items()}
            contract = loss.contract = contract.fitting(_values(totals[at]), places)
        shared: Counts = {place: n / shares[at] if shares else n for place, n in by_place.items()}
        counts.parts[at] = replace(part, contract=contract, totals={**part.totals, **shared})


def _count_by_forwards(host: Host, batches: Sequence[Any], counts: WindowCounts) -> list[dict[int, Tensor]]:
    """Count a window by its own forwards, where its inputs do not tell what a term of its loss divides by.

    Every micro-batch's loss is run once more, with its graph and without a backward, and read. State is restored,
    random generators too, so that the training's forwards draw the same masks and noise. It costs one forward a
    micro-batch and one collective, in such windows only.

    Returns:
        N of each mean over items of its own, by its place, for each loss; 0-dim. Those of a micro-batch are added to
        its ``counts``.
    """
    zero = host.zero
    means = [[at for at, each in enumerate(part.contract.terms) if each.how is How.MEAN] for part in counts.parts]
    totals = [dict.fromkeys(places, zero) for places in means]
    if batches:
        with (
            host.run(batches) as run,
            preserved_state(run.model, *run.others, leave=run.leave, sharded=holds_shards(run.model)),
        ):
            for batch, its in zip(batches, counts.each, strict=True):
                contract = host.state.losses.contract_of(batch)
                at = next(at for at, part in enumerate(counts.parts) if part.contract is contract)
                takes_number = contract.hands_number or (contract.custom and counts.number is not None)
                divided: Callable[[], Mapping[int, Any]] = partial(
                    _divisors, run, batch, counts.parts[at], its, takes_number=takes_number
                )
                # A rank that fails joins the others' collective below, and tells them in the next window.
                nothing: Mapping[int, Any] = {}
                for place, divisor in host.contained("counting by forwards", divided, nothing).items():
                    if place in totals[at]:
                        its[place] = torch.as_tensor(divisor, dtype=zero.dtype, device=host.device)
                        totals[at][place] = totals[at][place] + its[place]
    if host.world_size > 1 and any(totals):
        flat = torch.stack([each for of_loss in totals for each in of_loss.values()])
        summed = iter((host.summed(flat) * host.data_ranks / host.world_size).unbind())
        totals = [{place: next(summed) for place in of_loss} for of_loss in totals]
    return totals


def _divisors(run: LossRun, batch: Any, part: Part, items: Counts, *, takes_number: bool) -> Mapping[int, Any]:
    """What the terms of one micro-batch divide by, as `weigh` reads it."""
    as_read = replace(part, is_corrected=True)
    # Once more if it takes a gradient inside the forward, or its loss is checkpointed.
    for keep in (False, True):
        with suppress(*() if keep else (NotSavedError,)):
            loss, captured = run_with_graph(run, batch, NUMBERS[0] if takes_number else None, keep=keep)
            weigh(loss, as_read, batch, items, captured)
            break
    return as_read.latest


def _needs_forwards(host: Host, loss: LossState, by_rule: Totals, number: Tensor | None) -> bool:
    """Whether forwards have to count this window: no rule fits a term, one has failed, or two that fit differ.

    Two that fit num_items_in_batch are reported, and upstream's is used.
    """
    contract = loss.contract
    # Reading would wait for another device.
    if contract is None or len(by_rule) < 2 or not host.reads_are_free:
        return loss.needs_forwards
    totals = _values(by_rule)
    differ = contract.ambiguous(totals)
    if How.NUMBER in differ:
        fitting = (rule for each in contract.terms if each.how is How.NUMBER for rule in each.rules)
        upstreams = tuple(rule for rule in fitting if number is not None and totals[rule] == float(number))
        if upstreams:
            loss.contract = contract.with_rules_of_number(upstreams)
        host.report_inexact("several rules fit its num_items_in_batch, and count the window differently")
    return How.MEAN in differ or loss.needs_forwards


def _values(by_rule: Totals) -> dict[Items, float]:
    """Read at once."""
    return dict(zip(by_rule, torch.stack([*by_rule.values()]).tolist(), strict=True))


def _note_inexact(host: Host, counts: WindowCounts, batches: Sequence[Any]) -> None:
    """Note a window whose loss is not exact, that has no target, or a task that a given contract does not cover."""
    state, losses, given, empty = host.state, host.state.losses, host.options.contract, None
    if batches and all(part.contract.items is not None for part in counts.parts):
        empty = counts.total == 0
        state.empty = state.empty | empty
    contracts = map(losses.contract_of, batches)
    exact = all(each.exact or each.by_divisor or each.reason == NO_TARGET_SEEN for each in contracts)
    # Without a target the gradient is zero, whatever the loss.
    if not exact and not (host.reads_are_free and bool(empty)):
        state.note_inexact()
    counted = {key for rule in given.rules for key in rule.keys} if given is not None else set()
    for task in map(task_of, batches) if counted else ():
        held = frozenset((key, axes) for key, axes in task if key in counted)
        losses.given_for = held if losses.given_for is None else losses.given_for
        if held != losses.given_for:
            expected = f"expected {describe(losses.given_for)}, as the given contract does"
            host.report_inexact(f"got a micro-batch with {describe(task)}; {expected}")
            return


def count_routing(host: Host, batches: Sequence[Any], error: Exception | None) -> tuple[Tensor, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error.

    The model's load-balancing loss is recognised first, on every rank.

    Raises:
        StandAsideError: recognising it failed on a rank, so that all train as stock.
    """
    router, contract, device = host.router, host.state.losses.first.contract, host.device
    if router.convention is Convention.MEAN:
        return router.nothing(device), error
    assert contract is not None
    if router.runs_forwards and host.shards:
        lengths = host.all_of(len(batches), error)
        if len(set(lengths)) > 1:
            raise ranks.uneven(dict(enumerate(lengths)))
    if router.form is None or not router.form.settled:
        recognise = partial(router.recognise_among, window=batches, items=contract.items, device=device)
        seen, error = _by_forwards(host, batches, error, recognise, Form(settled=False))
        forms, troubled = zip(*host.all_of((seen, host.state.troubled), error), strict=True)
        if any(troubled):
            raise StandAsideError
        router.form = one_form(forms)
        if why := router.why_mean(contract.has_router_loss):
            host.warn_once("router", f"{host.head}: {why}")

    count = partial(router.count, window=batches, device=device, world_size=host.data_ranks)
    return _by_forwards(host, batches, error, count, router.nothing(device))


def _by_forwards(
    host: Host,
    batches: Sequence[Any],
    error: Exception | None,
    look: Callable[..., Value],
    instead: Value,
) -> tuple[Value, Exception | None]:
    """What ``look(forward, model)`` finds in a window, and this rank's error, raised once the other ranks have it.

    That is the first of ``error`` and of what a forward of the loss or a check of ours raises. A fault in our code is
    contained; the other ranks hear of it by the flag in the window's collective.
    """
    if not batches:
        return instead, error
    try:
        with host.run_counting(batches) as run:
            passed = None if host.contract is None else host.contract.as_number(host.zero + 1)

            def forward(inputs: Any) -> Tensor:
                with errors_of_forward():
                    return run.forward(inputs, passed)

            return look(forward=forward, model=run.model), error
    except Exception as caught:
        host.router.forget()
        if isinstance(caught, BY_DESIGN) or is_of_forward(caught):
            return instead, error or caught
        host.note_trouble("counting the routing of a window", caught)
        return instead, error
