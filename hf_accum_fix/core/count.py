"""Count a window over all ranks, by the one collective of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.scaling import Normalizer
from hf_accum_fix.accumulation.tasks import describe, task_of
from hf_accum_fix.accumulation.weigh import Part, WindowCheck
from hf_accum_fix.accumulation.window import Counts, Items, ZeroWeightBatch, count_by_rules, count_dtype
from hf_accum_fix.core.counting_pass import count_by_forwards
from hf_accum_fix.core.host import Host
from hf_accum_fix.core.state import TrainingState
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import engine_divisor, is_deepspeed
from hf_accum_fix.router.router_loss import Convention, Form, one_form


@dataclass
class WindowCounts:
    """Items of a window: first of this rank, then of all.

    Attributes:
        each: of each micro-batch of this rank, 0-dim, by each rule of its loss, and by place (see `Counts`); or empty.
        totals: of each loss, by each rule.
        samples: of each loss, which weigh the losses where there are several.
        number: as upstream counts, 0-dim; None: upstream does not.
        total: N over all ranks and tasks, 0-dim.
        parts: one for each loss, the first task's first.
        corrects: the gradient is corrected at the end of the window.
    """

    each: list[Counts] = field(default_factory=list)
    totals: list[list[Tensor]] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    number: Tensor | None = None
    total: Tensor = field(init=False)
    parts: list[Part] = field(default_factory=list)
    corrects: bool = False


def count_window(
    host: Host,
    batches: Sequence[Any],
    number: Any = None,
    error: Exception | None = None,
    routing: Tensor | None = None,
) -> WindowCounts:
    """Count a window over all ranks; arguments as of `core.window.open_window`, ``routing`` of `count_routing`."""
    state, several, contracts = host.state, host.world_size > 1, host.state.contracts
    if state.reconsidered and not state.can_be_exact:
        # Its own contract is not exact, though earlier ones were.
        state.note_inexact()
    # One rank has observed its new tasks; with one of several ranks the window is observed, and counted again.
    new = several and (state.reconsiders or not all(state.knows(task_of(batch)) for batch in batches))
    zero = torch.zeros((), dtype=count_dtype(host.device), device=host.device)
    try:
        counts = _counted(host, contracts, batches, zero, strict=several and not new)
    except Exception as caught:
        error = error or caught
        counts = WindowCounts(totals=[[zero] * max(len(each.rules), 1) for each in contracts])
        counts.samples = [zero] * len(contracts) if len(contracts) > 1 else []
    counts.number = None if number is None else torch.as_tensor(number).to(zero)
    rule = contracts[0].items
    for batch in batches:
        if isinstance(batch, ZeroWeightBatch) and counts.number is not None and rule is not None:
            # Upstream has counted it.
            counts.number = counts.number - rule.count(dict(batch), host.device)
    summed_routing = routing
    if several:
        new, summed_routing = _sum_over_ranks(host, counts, batches, error, new=new, routing=routing)
    elif error is not None:
        raise error
    elif state.differs:
        _note_differs(state)
    state.unreported = False
    settled = bool(state.tasks) and not state.asks
    if not state.tasks:
        _check_given(host, batches)
    if new and not state.asks:
        host.report_inexact("it has micro-batches of a task that was not observed")
    if any(not state.contract_of(batch).exact for batch in batches if len(contracts) > 1):
        # The first task's contract may be exact.
        state.note_inexact()
    _set_parts(host, contracts, counts, len(batches))
    if settled and not counts.parts[0].normalizer.is_whole:
        # Reading would wait for another device.
        differ = host.device.type == "cpu" and _differ(state, counts)
        _count_by_forwards(host, counts, batches, differ=differ)
    if summed_routing is not None:
        host.router.settle(summed_routing, max(len(batches), 1), host.data_ranks)
    return counts


def _counted(
    host: Host, contracts: Sequence[LossContract], batches: Sequence[Any], zero: Tensor, *, strict: bool
) -> WindowCounts:
    """Items of this rank; ``strict``: a micro-batch without the counted input is an error."""
    state, counts, by_batch = host.state, WindowCounts(), dict[int, Counts]()
    alone = len(contracts) == 1
    for contract in contracts:
        held = [batch for batch in batches if alone or state.contract_of(batch) is contract]
        each, totals = count_by_rules(contract.rules, held, host.device, several_ranks=strict)
        counts.totals.append(totals or [zero])
        by_batch |= {id(batch): found for batch, found in zip(held, each, strict=True)}
        if not alone:
            counts.samples += count_by_rules([Items()], held, host.device)[1]
    if any(by_batch.values()) or any(each.needs_forwards for each in contracts):
        counts.each = [by_batch[id(batch)] for batch in batches]
    return counts


def _sum_over_ranks(
    host: Host,
    counts: WindowCounts,
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
    corrected = state.corrects and len(counts.totals) == 1
    reports = any(each.is_read for each in state.contracts) and not corrected
    sent = {
        "totals": list(chain(*counts.totals)),
        "number": [torch.zeros_like(like) if counts.number is None else counts.number],
        "marks": ranks.pack_status(runs, error, like),
        "samples": counts.samples,
        "new": [torch.full_like(like, new)] if state.tasks else [],
        "inexact": [torch.full_like(like, each) for each in (state.differs, state.unreported)] * reports,
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
        if differs:
            _note_differs(state)
        if unreported > state.unreported:
            state.note_inexact(state.opened - bool(batches))
    return new, None if routing is None else sums[len(numbers) :] / copies


def _set_parts(host: Host, contracts: Sequence[LossContract], counts: WindowCounts, micro_batches: int) -> None:
    """Set the part of each loss in the window, and whether its gradient is corrected."""
    totals = [each[0] for each in counts.totals]
    counts.total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    samples: Sequence[Tensor | None] = [
        each.clamp(min=1) / torch.stack(counts.samples).sum().clamp(min=1) for each in counts.samples
    ] or [None]
    # Off the CPU samples are not read, so a window may have all losses, which one number cannot correct.
    several_losses = sum(host.device.type != "cpu" or bool(each) for each in counts.samples) > 1
    corrects = host.state.corrects or (host.data_ranks == 1 and host.corrects_alone)
    counts.corrects = corrects and not (several_losses or is_deepspeed(host.accelerator))
    divisor = engine_divisor(host.accelerator)
    for contract, by_rule, fraction in zip(contracts, counts.totals, samples, strict=True):
        normalizer = Normalizer.of(
            contract,
            by_rule,
            micro_batches,
            host.data_ranks,
            fraction,
            is_corrected=counts.corrects,
            engine_divisor=divisor,
        )
        counts.parts.append(Part(contract, normalizer, WindowCheck(contract, counts.corrects)))


def _note_differs(state: TrainingState) -> None:
    """After a window with other items than predicted: correct windows of one count, count the others by forwards."""
    for loss in state.losses:
        one = loss.contract is None or loss.contract.groups <= 1
        state.corrects = state.corrects or one
        loss.counts_by_forwards = loss.counts_by_forwards or not one


def _differ(state: TrainingState, counts: WindowCounts) -> bool:
    """Whether several rules fit a term of some loss, and count this window differently; reads the counts."""
    for contract, totals in zip(state.contracts, counts.totals, strict=True):
        if len(contract.rules) > 1 and contract.is_ambiguous(_by_rule(contract, totals)):
            return True
    return False


def _by_rule(contract: LossContract, totals: Sequence[Tensor]) -> dict[Items, float]:
    """N by each rule; reads the counts."""
    return dict(zip(contract.rules, torch.stack([*totals]).tolist(), strict=True))


def _count_by_forwards(host: Host, counts: WindowCounts, batches: Sequence[Any], *, differ: bool) -> None:
    """Count a window by its own forwards, where no rule predicts its items, or two rules ``differ``."""
    losses = [(each, each.contract) for each in host.state.losses if each.contract is not None]
    unpredicted = (
        contract.needs_forwards or (loss.counts_by_forwards and contract.groups > 1) for loss, contract in losses
    )
    if not (differ or any(unpredicted)):
        return
    parts, counts.parts = counts.parts, []
    counted = count_by_forwards(host, batches, parts, counts.each or [{} for _ in batches])
    for (loss, contract), part, totals, by_place in zip(losses, parts, counts.totals, counted, strict=True):
        if host.readable and len(contract.rules) > 1:
            counted_by = {at: float(each) for at, each in by_place.items()}
            contract = loss.contract = contract.fitting(_by_rule(contract, totals), counted_by)
        normalizer = part.normalizer.counted(contract, by_place)
        counts.parts.append(Part(contract, normalizer, WindowCheck(contract, counts.corrects)))


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
    host: Host, batches: Sequence[Any], error: Exception | None
) -> tuple[Tensor | None, Exception | None]:
    """This rank's routing counts of a window, to be summed over ranks, and its error; None: nothing to count.

    The model's load-balancing loss is recognised first, on every rank.
    """
    router, contract = host.router, host.state.first.contract
    if router.convention is Convention.MEAN:
        return None, error
    assert contract is not None
    with host.routing(batches) as (forward, model):
        if router.runs_forwards and host.shards:
            lengths = host.all_of(len(batches), error)
            if len(set(lengths)) > 1:
                raise ranks.uneven(dict(enumerate(lengths)))
        if router.form is None or not router.form.settled:
            seen = Form(settled=False)
            try:
                if model is not None:
                    seen = router.recognise_among(forward, batches, contract.items, model, host.device)
            except Exception as caught:
                error = error or caught
            router.form = one_form(host.all_of(seen, error))
            if why := router.why_mean(contract.has_router_loss):
                host.warn_once("router", f"{host.head}: {why}")
        try:
            if model is not None:
                return router.count(forward, batches, model, host.device, host.data_ranks), error
        except Exception as caught:
            # Raised once the other ranks have it.
            error = error or caught
        return router.nothing(host.device), error
