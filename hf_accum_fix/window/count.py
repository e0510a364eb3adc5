"""Count a window over all ranks: by rules on its inputs, by the one collective of an optimizer step, by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_accum_fix.counting.items import Counts, Items, count_by_rules, labels_in_words
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import engine_divisor, is_deepspeed
from hf_accum_fix.errors import BY_DESIGN, ContractError, StandAsideError
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, How
from hf_accum_fix.learning.look import LossRun, run_with_graph
from hf_accum_fix.learning.observe import NUMBERS
from hf_accum_fix.reading.nodes import NotSavedError
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.router.routing import count_routing
from hf_accum_fix.trace.preserve import preserved_state
from hf_accum_fix.weighing.part import Part
from hf_accum_fix.weighing.weigh import weigh
from hf_accum_fix.window.host import Host
from hf_accum_fix.window.state import Told


class Counted(NamedTuple):
    """A window as counted."""

    part: Part  # its denominators
    each: list[Counts]  # items of each micro-batch of this rank, by each rule, and by place (see `Counts`)
    number: Tensor | None = None  # as upstream counts over all ranks, 0-dim; None: upstream does not


def count_window(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None
) -> Counted | None:
    """Count a window over all ranks; arguments as of `window.window.open_window`.

    Returns:
        None: a rank has a changed loss, so all ranks have to settle and count again.

    Raises:
        StandAsideError: looking failed on a rank, so that all train as stock.
    """
    state, contract, several = host.state, host.state.loss.contract, host.world.size > 1
    assert contract is not None
    rules = contract.rules
    routing = host.zero.new_zeros(0)
    if host.router.convention is not Convention.MEAN:
        routing, error = count_routing(host, host.router, batches, error)
    nothing = (list[Counts](), [host.zero] * len(rules), "")
    try:
        each, totals, others = host.contained("counting a window", partial(_count, host, batches), nothing)
    except BY_DESIGN as caught:
        (each, totals, others), error = nothing, error or caught
    items = [*totals, host.zero if number is None else torch.as_tensor(number).to(host.zero)]
    told = replace(state.told, asks=several and state.loss.reconsiders, mixed=bool(others))
    if several:
        items, told, routing = _exchange(host, len(batches), error, items, told, routing)
    elif error is not None:
        raise error
    if told.troubled and (host.knows_other_ranks or not each):
        # Where flags are not read, a rank falls back micro-batch by micro-batch.
        raise StandAsideError
    if told.asks and host.knows_other_ranks:
        return None
    if told.differs:
        state.loss.correct_from_now()
    if told.inexact and not state.told.inexact:
        state.note_inexact(state.opened - bool(batches))
    state.told.inexact = False
    if told.mixed:
        host.report_inexact(others or "another rank has a micro-batch with other labels: the window is averaged")
        # What a custom loss divides by the number of the global batch stays as it is.
        contract = contract if contract.custom and contract.by_number else contract.averaged("its labels differ")
    n: dict[Items | int, Tensor] = {**dict(zip(rules, items, strict=False))} or {Items(): host.zero}
    corrects = state.loss.takes_correction() or (host.world.data_ranks == 1 and host.corrects_alone)
    corrects, steps = corrects and not is_deepspeed(host.accelerator), max(len(batches), 1)
    own: dict[Items | int, Tensor] = {**dict(zip(rules, totals, strict=True))}
    part = Part(contract, n, steps, host.world.data_ranks, corrects, engine_divisor(host.accelerator), own)
    counted = Counted(part, each, None if number is None else items[-1])
    # On several ranks the others wait for this one until they hear of it, in the next window.
    plan, instead = partial(_by_term, host, counted, batches, routing), counted if several else None
    planned = host.contained("planning a window", plan, instead)
    if planned is None:
        raise StandAsideError
    return planned


def _count(host: Host, batches: Sequence[Any]) -> tuple[list[Counts], list[Tensor], str]:
    """Items of each micro-batch of this rank, their sums, by each rule; and which other labels one has, in words.

    On several ranks a micro-batch without the counted input is an error, unless the loss is looked at again.
    """
    contract, loss = host.contract, host.state.loss
    assert contract is not None
    _check_given(host, batches)
    others = _other_labels(host, batches)
    strict = host.world.size > 1 and not (loss.reconsiders or others)
    return *count_by_rules(contract.rules, batches, host.world.device, several_ranks=strict), others


def _check_given(host: Host, batches: Sequence[Any]) -> None:
    """Refuse a given contract that reads what no micro-batch of this rank's first window has."""
    given = host.options.contract
    if given is None or host.state.opened > 1:
        return
    mappings = (batch for batch in batches if isinstance(batch, Mapping))
    held = {str(key) for batch in mappings for key, value in batch.items() if value is not None}
    for name in (name for rule in given.rules for name in rule.names if held and name not in held):
        known = ", ".join(map(repr, sorted(held)))
        raise ContractError(
            f"got a contract that counts by {name!r}, which no micro-batch of the first window has; expected one of "
            f"{known}; change the contract, or add it in the collator"
        )


def _other_labels(host: Host, batches: Sequence[Any]) -> str:
    """Which labels a micro-batch has, and which the loss was observed on, in words; empty: those."""
    expected, found = host.state.loss.labels, [*map(host.labels_of, batches)]
    other = next((its for its in found if its != expected), None)
    # Without labels a model may have no loss, and other ranks wait for ever.
    if other is None or expected is None or (host.world.size > 1 and expected and not all(found)):
        return ""
    words = f"got a micro-batch with {labels_in_words(other)}; expected {labels_in_words(expected)}"
    return f"{words}, as in the first window: the window is averaged"


def _exchange(
    host: Host, fetched: int, error: Exception | None, items: list[Tensor], told: Told, routing: Tensor
) -> tuple[list[Tensor], Told, Tensor]:
    """What the ranks sum, by one collective; the error of one that has ``fetched`` micro-batches is raised on all.

    ``items``: by each rule, and at last as upstream counts, 0-dim; ``routing``: of `RouterLoss.count`.
    """
    world = host.world
    runs, like = fetched if world.shards else min(fetched, 1), items[-1]
    status = ranks.pack_status(runs, error, like)
    slots = [*map(torch.stack, (items, status, [torch.full_like(like, flag) for flag in astuple(told)])), routing]
    counts, summed, found, routing = torch.split(host.summed(torch.cat(slots)), [*map(len, slots)])
    suspects, place = runs < (host.steps if world.shards else 1), {"rank": world.rank, "world_size": world.size}
    ranks.check_status(summed, runs, error, fetched=fetched, suspects=suspects, gather=host.gather, **place)
    # Tensor-parallel ranks have all counted the same samples.
    copies = world.size // world.data_ranks
    told = Told(*map(bool, found.tolist())) if host.knows_other_ranks else told
    return [*(counts[:-1] / copies), counts[-1]], told, routing / copies


def _by_term(host: Host, counted: Counted, batches: Sequence[Any], routing: Tensor) -> Counted:
    """With N of what the rules of a window do not count, or not alike; its routing is settled, and doubts are noted."""
    part, state = counted.part, host.state
    contract = part.contract
    if contract.needs_forwards or (state.loss.counts_by_forwards and contract.groups > 1):
        counted = counted if part.is_whole else counted._replace(part=_count_by_forwards(host, batches, counted))
    # Reading would wait for another device.
    of_number = contract.rules_of_number if host.reads_are_free else ()
    if len({float(part.totals[rule]) for rule in of_number}) > 1:
        host.report_inexact("several rules fit its num_items_in_batch, and count the window differently")
        if (upstreams := next((each for each in of_number if part.totals[each] == counted.number), None)) is not None:
            totals: dict[Items | int, Tensor] = {upstreams: part.totals[upstreams], **part.totals}
            counted = counted._replace(part=replace(part, totals=totals))
    if host.router.convention is not Convention.MEAN:
        host.router.settle(routing, max(len(batches), 1), host.world.data_ranks)
    empty = None
    if batches and contract.items is not None:
        empty = part.total == 0
        state.empty = state.empty | empty
    # Without a target the gradient is zero, whatever the loss.
    if not (contract.exact or contract.reason == NO_TARGET_SEEN) and not (host.reads_are_free and bool(empty)):
        state.note_inexact()
    return counted


def _count_by_forwards(host: Host, batches: Sequence[Any], counted: Counted) -> Part:
    """Count a window by its own forwards, where its inputs do not tell what a term of its loss divides by.

    Every micro-batch's loss is run once more, with its graph and without a backward, and read. State is restored,
    random generators too, so that the training's forwards draw the same masks and noise. It costs one forward a
    micro-batch and one collective, in such windows only.

    Returns:
        The part with N of each mean over items of its own, by its place; those of micro-batches are in their counts.
    """
    zero, part = host.zero, counted.part
    own: dict[Items | int, Tensor]
    own = {at: zero for at, each in enumerate(part.contract.terms) if each.how is How.MEAN}
    if batches:
        with host.run(batches) as run, preserved_state(run.model, *run.others, leave=run.leave, sharded=run.sharded):
            for batch, its in zip(batches, counted.each, strict=True):
                takes_number = part.contract.hands_number or (part.contract.custom and counted.number is not None)
                divided = partial(_divisors, run, batch, part, its, takes_number=takes_number)
                # A rank that fails joins the others' collective below, and tells them in the next window.
                for place, divisor in host.contained("counting by forwards", divided, dict[int, Any]()).items():
                    if place in own:
                        its[place] = torch.as_tensor(divisor, dtype=zero.dtype, device=host.world.device)
                        own[place] = own[place] + its[place]
    by_place = own
    if host.world.size > 1 and own:
        summed = host.summed(torch.stack([*own.values()])) * host.world.data_ranks / host.world.size
        by_place = dict(zip(own, summed.unbind(), strict=True))
    return replace(part, totals={**part.totals, **by_place}, own={**part.own, **own})


def _divisors(run: LossRun, batch: Any, part: Part, items: Counts, *, takes_number: bool) -> dict[int, Any]:
    """What the terms of one micro-batch divide by, as `weigh` reads it."""
    as_read = replace(part, is_corrected=True)
    # Once more if it takes a gradient inside the forward, or its loss is checkpointed.
    for keep in (False, True):
        with suppress(*() if keep else (NotSavedError,)):
            loss, captured = run_with_graph(run, batch, NUMBERS[0] if takes_number else None, keep=keep)
            weigh(loss, as_read, batch, items, captured)
            break
    return as_read.latest
