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

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, How
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import Counts, Items, count_by_rules, labels_in_words
from hf_accum_fix.accumulation.look import LossRun, errors_of_forward, is_of_forward, run_with_graph
from hf_accum_fix.accumulation.nodes import NotSavedError
from hf_accum_fix.accumulation.observe import NUMBERS
from hf_accum_fix.accumulation.part import Part
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.weigh import weigh
from hf_accum_fix.core.host import Host
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
        part: its denominators.
        total: N over all ranks, 0-dim.
        each: of each micro-batch of this rank, by each rule, and by place (see `Counts`).
        number: as upstream counts over all ranks, 0-dim; None: upstream does not.
    """

    part: Part
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    each: list[Counts] = field(default_factory=list)
    number: Tensor | None = None


def count_window(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None
) -> WindowCounts | None:
    """Count a window over all ranks; arguments as of `core.window.open_window`.

    Returns:
        None: a rank has a changed loss, so all ranks have to settle and count again.

    Raises:
        StandAsideError: looking failed on a rank, so that all train as stock.
    """
    state, loss, several = host.state, host.state.loss, host.world_size > 1
    assert loss.contract is not None
    others = host.contained("comparing the labels of a window", partial(_other_labels, host, batches), None)
    zero, rules = host.zero, loss.contract.rules
    routing, error = count_routing(host, batches, error)
    each, totals = nothing = list[Counts](), [zero] * len(rules)
    try:
        strict = several and not (loss.reconsiders or others)
        each, totals = host.contained("counting a window", partial(_count, host, batches, strict=strict), nothing)
    except BY_DESIGN as caught:
        error = error or caught
    items = [*totals, zero if number is None else torch.as_tensor(number).to(zero)]
    # This rank has a changed loss; had other counts than predicted; had an inexact window; failed; has other labels.
    flags = [several and loss.reconsiders, state.differs, state.unreported, state.troubled, others is not None]
    if several:
        items, flags, routing = _over_ranks(host, len(batches), error, items, flags, routing)
    elif error is not None:
        raise error
    asks, differs, inexact, troubled, mixed = flags
    if troubled and (host.knows_other_ranks or not each):
        # Where flags are not read, a rank falls back micro-batch by micro-batch.
        raise StandAsideError
    if asks and host.knows_other_ranks:
        return None
    if differs:
        loss.correct_from_now()
    if inexact and not state.unreported:
        state.note_inexact(state.opened - bool(batches))
    state.unreported = False
    if mixed:
        host.report_inexact(others or "another rank has a micro-batch with other labels: the window is averaged")
    by_rule = dict(zip(rules, items, strict=False))
    # What a custom loss divides by the number of the global batch stays as it is.
    averages = mixed and not (loss.contract.custom and loss.contract.by_number)
    part = _part(host, by_rule, len(batches), averages=averages)
    counts = WindowCounts(part, items[0] if rules else zero, each, None if number is None else items[-1])
    planning = partial(_plan, host, counts, by_rule, batches, routing, averages=averages)
    # On several ranks the others wait for this one until they hear of it, in the next window.
    if not host.contained("planning a window", planning, several):
        raise StandAsideError
    return counts


def _plan(
    host: Host, counts: WindowCounts, totals: Totals, batches: Sequence[Any], routing: Tensor, *, averages: bool
) -> bool:
    """Plan how the micro-batches of a window are weighted; True: that is done."""
    if not averages:
        _set_part(host, counts, totals, batches)
    _note_inexact(host, counts, batches)
    host.router.settle(routing, max(len(batches), 1), host.data_ranks)
    return True


def _other_labels(host: Host, batches: Sequence[Any]) -> str | None:
    """Which labels a micro-batch has, and which the loss was observed on, in words; None: those."""
    expected, found = host.state.loss.labels, [*map(host.labels_of, batches)]
    other = next((its for its in found if its != expected), None)
    # Without labels a model may have no loss, and other ranks wait for ever.
    if other is None or expected is None or (host.world_size > 1 and expected and not all(found)):
        return None
    words = f"got a micro-batch with {labels_in_words(other)}; expected {labels_in_words(expected)}"
    return f"{words}, as in the first window: the window is averaged"


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


def _count(host: Host, batches: Sequence[Any], *, strict: bool) -> tuple[list[Counts], list[Tensor]]:
    """Items of each micro-batch of this rank, and their sums, by each rule.

    ``strict``: a micro-batch without the counted input is an error.
    """
    _check_given(host, batches)
    assert host.contract is not None
    return count_by_rules(host.contract.rules, batches, host.device, several_ranks=strict)


def _check_given(host: Host, batches: Sequence[Any]) -> None:
    """Refuse a given contract that reads what no micro-batch of this rank's first window has."""
    given = host.options.contract
    if given is None or host.state.opened > 1:
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


def _part(host: Host, totals: Totals, micro_batches: int, *, averages: bool) -> Part:
    """The denominators of a window; ``averages``: it is not weighted."""
    contract, loss = host.contract, host.state.loss
    assert contract is not None
    n: dict[Items | int, Tensor] = {rule: totals[rule] for rule in contract.rules} or {Items(): host.zero}
    contract = contract.averaged("its labels differ") if averages else contract
    corrects = loss.windows_to_correct > 0 or (host.data_ranks == 1 and host.corrects_alone)
    loss.windows_to_correct = max(loss.windows_to_correct - 1, 0)
    corrects = corrects and not is_deepspeed(host.accelerator)
    return Part(contract, n, micro_batches, host.data_ranks, corrects, engine_divisor(host.accelerator))


def _set_part(host: Host, counts: WindowCounts, totals: Totals, batches: Sequence[Any]) -> None:
    """Count by forwards what the rules of a window do not, or not alike."""
    by_forwards = _needs_forwards(host, totals, counts.number)
    contract, part = host.contract, counts.part
    if contract is not None and contract is not part.contract:
        # Upstream's rule of a number was chosen just now.
        its: Counts = {rule: totals[rule] for rule in contract.rules}
        counts.total, counts.part = totals[contract.rules[0]], replace(part, contract=contract, totals=its)
        part = counts.part
    if by_forwards and not part.is_whole:
        together: Counts = {**part.totals}
        together.update(_count_by_forwards(host, batches, counts).items())
        counts.part = replace(part, totals=together)


def _count_by_forwards(host: Host, batches: Sequence[Any], counts: WindowCounts) -> dict[int, Tensor]:
    """Count a window by its own forwards, where its inputs do not tell what a term of its loss divides by.

    Every micro-batch's loss is run once more, with its graph and without a backward, and read. State is restored,
    random generators too, so that the training's forwards draw the same masks and noise. It costs one forward a
    micro-batch and one collective, in such windows only.

    Returns:
        N of each mean over items of its own, by its place; 0-dim. Those of a micro-batch are added to its ``counts``.
    """
    zero, part = host.zero, counts.part
    totals = {at: zero for at, each in enumerate(part.contract.terms) if each.how is How.MEAN}
    if batches:
        with (
            host.run(batches) as run,
            preserved_state(run.model, *run.others, leave=run.leave, sharded=holds_shards(run.model)),
        ):
            for batch, its in zip(batches, counts.each, strict=True):
                takes_number = part.contract.hands_number or (part.contract.custom and counts.number is not None)
                divided: Callable[[], Mapping[int, Any]] = partial(
                    _divisors, run, batch, part, its, takes_number=takes_number
                )
                # A rank that fails joins the others' collective below, and tells them in the next window.
                nothing: Mapping[int, Any] = {}
                for place, divisor in host.contained("counting by forwards", divided, nothing).items():
                    if place in totals:
                        its[place] = torch.as_tensor(divisor, dtype=zero.dtype, device=host.device)
                        totals[place] = totals[place] + its[place]
    if host.world_size > 1 and totals:
        summed = host.summed(torch.stack([*totals.values()])) * host.data_ranks / host.world_size
        totals = dict(zip(totals, summed.unbind(), strict=True))
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


def _needs_forwards(host: Host, by_rule: Totals, number: Tensor | None) -> bool:
    """Whether forwards have to count this window: no rule fits a term, one has failed, or two that fit differ.

    Two that fit num_items_in_batch are reported, and upstream's is used.
    """
    loss, contract = host.state.loss, host.state.loss.contract
    # Reading would wait for another device.
    if contract is None or len(by_rule) < 2 or not host.reads_are_free:
        return loss.needs_forwards
    totals = dict(zip(by_rule, torch.stack([*by_rule.values()]).tolist(), strict=True))
    differ = contract.ambiguous(totals)
    if How.NUMBER in differ:
        fitting = (rule for each in contract.terms if each.how is How.NUMBER for rule in each.rules)
        upstreams = tuple(rule for rule in fitting if number is not None and totals[rule] == float(number))
        if upstreams:
            loss.contract = contract.with_rules_of_number(upstreams)
        host.report_inexact("several rules fit its num_items_in_batch, and count the window differently")
    return How.MEAN in differ or loss.needs_forwards


def _note_inexact(host: Host, counts: WindowCounts, batches: Sequence[Any]) -> None:
    """Note a window whose loss is not exact, or that has no target."""
    state, contract, empty = host.state, counts.part.contract, None
    if batches and contract.items is not None:
        empty = counts.total == 0
        state.empty = state.empty | empty
    # Without a target the gradient is zero, whatever the loss.
    if not (contract.exact or contract.reason == NO_TARGET_SEEN) and not (host.reads_are_free and bool(empty)):
        state.note_inexact()


def count_routing(host: Host, batches: Sequence[Any], error: Exception | None) -> tuple[Tensor, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error.

    The model's load-balancing loss is recognised first, on every rank.

    Raises:
        StandAsideError: recognising it failed on a rank, so that all train as stock.
    """
    router, contract, device = host.router, host.contract, host.device
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
    host: Host, batches: Sequence[Any], error: Exception | None, look: Callable[..., Value], instead: Value
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
