"""Settle how the loss of each task is reduced: observed in its first windows, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hf_accum_fix.accumulation.agreement import SyncedRanks, agree
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract, Reduction
from hf_accum_fix.accumulation.declared import is_compiled
from hf_accum_fix.accumulation.look import is_of_forward, out_of_memory
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.tasks import Task, describe, task_of
from hf_accum_fix.core.host import MADE_LATER, Host
from hf_accum_fix.core.state import LossState
from hf_accum_fix.data.balancing import unfit
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import BY_DESIGN, ContractError, RankError, StandAsideError, UnsupportedSetupError

logger = logging.getLogger("hf_accum_fix")


def settle(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None, *, asked: bool = False
) -> None:
    """Settle how the losses of a window are reduced: as given, or as observed on every rank.

    ``asked``: all ranks know that one of them has a new task or a changed loss; the rest as of
    `core.window.open_window`.

    Raises:
        RankError: if another rank failed, has no window, or has labels where this one has none.
    """
    host.contained("looking at what computes the loss", partial(host.refresh_loss_source, batches), None)
    first, before = host.state.losses.first, host.state.losses.first.contract
    was_settled = first.is_settled
    if host.options.contract is None:
        _observe_due(host, batches, number, error, asked=asked)
    elif not was_settled:
        host.state.losses.use_contract(host.options.contract, first)
    if not was_settled or host.state.losses.first.contract is not before:
        host.contained("saying how the loss is reduced", partial(_check_first, host), None)


def _observe_due(host: Host, batches: Sequence[Any], number: Any, error: Exception | None, *, asked: bool) -> None:
    """Observe the losses of new tasks, those that no window has shown yet, and those that changed."""
    losses, alone, opened = host.state.losses, host.data_ranks == 1, host.state.opened
    held = list(dict.fromkeys(map(task_of, batches)))
    # Ranks that meet in every forward cannot observe tasks one by one.
    mine = [] if host.shards else held
    unsettled = [each for each in losses.each if not each.is_settled]
    is_open = any(each is losses.first or not alone or each in map(losses.of, held) for each in unsettled)
    is_new = alone and (losses.reconsiders or not all(losses.knows(task, opened) for task in mine))
    if not (asked or is_open or is_new):
        return
    tasks, again = check_alike(host, batches, error, mine)
    losses.reconsiders = False
    losses.reconsidered += again
    tasks = [task for task in tasks if task or not (any(tasks) or losses.tasks)]
    new = {task: losses.tasks.get(task, LossState()) for task in tasks if task and losses.of(task) is None}
    if tasks and not losses.tasks:
        new = {tasks[0]: losses.first, **{task: LossState() for task in tasks[1:]}}
    of_tasks = {**losses.tasks, **new}
    for loss in dict.fromkeys((losses.first, *of_tasks.values())):
        its = [batch for batch in batches if of_tasks.get(task_of(batch), losses.first) is loss]
        if (again or not loss.is_settled) and (its or not alone or loss is losses.first):
            _observe_on_all_ranks(host, loss, its, number)
    if not losses.first.has_target:
        losses.first = next((loss for loss in new.values() if loss.has_target), losses.first)
    for task, loss in new.items():
        # A rank whose data have ended counts this window, too.
        _add_task(host, task, loss, opened + (not batches))


def _observe_on_all_ranks(host: Host, loss: LossState, batches: Sequence[Any], number: Any) -> None:
    """Observe one loss in a window, and update its contract."""
    is_first, error = loss is host.state.losses.first, None
    try:
        # A model or a custom loss may run collectives.
        with SyncedRanks(host.gather if host.world_size > 1 else None) as synced:
            seen = _observed(host, batches, number, synced)
    except Exception as caught:
        seen, error = None, caught
    # Running out of memory would happen in training, too.
    by_design = isinstance(error, BY_DESIGN) or (error is not None and out_of_memory(error))
    told = (error is not None, error is not None and is_of_forward(error), by_design, str(error or ""))
    failed, of_forward, as_designed, why = zip(*host.all_of(told, None), strict=True)
    # Where the forward of one rank fails alone, the others would wait for it in training.
    alone = any(of_forward) and not all(failed)
    plain, found = LossContract(Reduction.PLAIN, keeps_scale=host.has_stock), None
    if any(failed) and not any(as_designed) and (not alone or (not is_first and loss.contract is None)):
        # If training runs this forward, it raises the error itself.
        reason = f"its loss could not be observed: {next(filter(None, why), '')}"
        found = replace(plain, conclusive=not is_first, reason=reason)
    else:
        every = [each for each in host.all_of(seen, error) if each is not None]
        try:
            found = agree(every)
        except ContractError as caught:
            found = replace(plain, reason=str(caught))
        except Exception as caught:
            host.note_trouble("comparing the ranks' losses", caught)
        if None in host.all_of(found, None):
            found = replace(plain, reason="looking at its loss failed on a rank")
    assert found is not None
    if loss.contract is not None and not loss.contract.yields_to(found):
        return
    if host.options.per_sample:
        found = by_sample(found)
    if host.world_size == 1 or not host.readable:
        # Several ranks correct a window only after one has found a difference.
        found = found.with_one_rule()
    loss.attempts += found.reason != NO_TARGET_SEEN
    host.state.losses.use_contract(found, loss)


def _observed(host: Host, batches: Sequence[Any], number: Any, synced: SyncedRanks) -> LossContract | None:
    """One loss on its micro-batches on this rank; None: there is nothing to observe."""
    if not batches or host.trained is None:
        return None
    try:
        facts = host.facts(batches, number)
        if facts.unobserved is not None:
            return facts.unobserved
        with host.run(batches) as loss:
            found = observe(loss, batches, facts.setting, synced)
    except Exception:
        logger.error(
            "%s: the forward that observes the loss failed. If training itself runs, pass the contract: "
            "contract=LossContract(...)",
            host.head,
        )
        raise
    if facts.setting.custom and host.scales_itself and found.reduction in (Reduction.MEAN, Reduction.SUM):
        reason = "the trainer declares that it scales the loss itself"
        return replace(found, reduction=Reduction.PLAIN, items=None, terms=(), doubt=reason, reason=reason)
    if facts.doubt:
        found = replace(found, doubt=facts.doubt, reason=facts.doubt)
    return found.by_rule() if is_compiled(host.model) else found


def _add_task(host: Host, task: Task, loss: LossState, window: int) -> None:
    """Add a new task: it shares the loss of an earlier task that is reduced alike, or has its own."""
    state, losses, found = host.state, host.state.losses, loss.contract
    assert found is not None
    had_no_target, loss.without_target_in = task in losses.tasks, -1 if loss.has_target else window
    others = {other: each for other, each in losses.tasks.items() if each.has_target and other != task}
    shared = (each for other, each in others.items() if _is_one_loss(task, found, other, each.contract))
    losses.tasks[task] = next(shared, loss) if loss.has_target else loss
    if loss is losses.first or losses.tasks[task] is not loss or not loss.has_target:
        return
    reason = ""
    if found.custom and found.by_number:
        reason = "one num_items_in_batch is passed for several tasks"
    elif any(other < task or task < other for other in others if other):
        reason = "other tasks share some of these labels, and a term that both have is no single mean"
    if reason:
        loss.contract = replace(found, doubt=reason, reason=reason)
    words = describe(task)
    if had_no_target and host.is_split:
        host.warn_inexact(
            f"pooled {words}",
            f"{host.head}: micro-batches with {words} had no target before window {window}; until then their samples "
            "counted for the first task, which got too much weight",
        )
    _warn_of(host, loss, words)
    state.amend(exact=state.exact, **state.facts())


def _is_one_loss(task: Task, one: LossContract, other: Task, another: LossContract | None) -> bool:
    """Whether two tasks are reduced and counted alike, so that one mean is over the items of both."""
    if another is None or (one.reduction, one.rules) != (another.reduction, another.rules):
        return False
    # Text classification and token classification both have "labels".
    counted = {key for rule in one.rules for key in rule.keys}
    axes = [{(key, axes) for key, axes in each if key in counted} for each in (task, other)]
    terms = [[(each.shape, each.group) for each in contract.terms] for contract in (one, another)]
    return axes[0] == axes[1] and terms[0] == terms[1]


def check_alike(
    host: Host, batches: Sequence[Any], error: Exception | None, tasks: Sequence[Task] = ()
) -> tuple[list[Task], bool]:
    """Check, before the ranks run forwards together, that all fetched a window, with labels or without.

    Returns:
        All ranks' tasks, in one order, and whether any rank reconsiders its losses.
    """
    labels = {key for batch in batches if isinstance(batch, Mapping) for key in batch if "label" in key}
    held = f"{len(batches)} micro-batches with {sorted(labels) or 'no labels'}" if batches else None
    again = host.state.losses.reconsiders
    gathered = host.all_of((len(batches), bool(labels), held, list(tasks), again, host.state.troubled), error)
    lengths, labelled, found, tasks_of_ranks, changed, troubled = zip(*gathered, strict=True)
    if any(troubled):
        raise StandAsideError
    if len({length if host.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len(set(labelled)) > 1:
        raise RankError(
            f"got {ranks.by_rank(found)}; expected labels on every rank or on none; look at the collator and its "
            "inputs on the rank without"
        )
    return list(dict.fromkeys(task for its in tasks_of_ranks for task in its)), any(changed)


def _check_first(host: Host) -> None:
    """Refuse to balance what a new contract of the first loss couples, and warn unless it is exact."""
    first, contract = host.state.losses.first, host.state.losses.first.contract
    assert contract is not None
    if first.is_settled and host.options.balance_windows and (reason := unfit(contract)) is not None:
        raise UnsupportedSetupError(
            f"balance_windows: got {host.head}: {reason}; length-balancing would change its loss; expected a mean "
            "over items or a sum; omit balance_windows"
        )
    # A trainer that handles windows itself is checked in each.
    is_handled = contract.reason == MADE_LATER and contract.by_divisor
    if not is_handled and (first.has_target or first.is_settled):
        _warn_of(host, first)


def _warn_of(host: Host, loss: LossState, task: str = "") -> None:
    """Warn of a loss that is not exact, the first or that of a later ``task``, once."""
    contract = loss.contract
    assert contract is not None
    # Even a global batch of one micro-batch may have a wrong number.
    own_number = contract.by_number and (contract.keeps_scale or not contract.conclusive)
    matters = host.is_split or own_number
    stays = contract.keeps_scale or (contract.custom and host.scales_itself)
    outcome = "stays as the trainer scales it" if stays else "gets the plain mean over micro-batches"
    head, of = (f"{host.head}, of {task}", f" of {task}") if task else (host.head, "")
    for name, message in remarks(head, contract, loss.attempts, outcome=outcome):
        if name == "sum" or matters:
            host.warn_once(name + of, message)


def remarks(
    head: str, found: LossContract, attempts: int, *, outcome: str = "gets the plain mean over micro-batches"
) -> Iterator[tuple[str, str]]:
    """The warnings for a contract in force, each with a name; none where it is exact.

    ``attempts``: windows that were observed; ``outcome``: what happens to a loss that no rule counts.
    """
    if found.reduction is Reduction.SUM:
        yield "sum", f"{head}: the loss is a sum, so it grows with the global batch."
    if found.reduction is Reduction.PLAIN:
        why = "it is unknown whether the split changes it."
        if found.coupled:
            why = "its samples are coupled, so it depends on the split. coupled_loss='exact' trains the whole window's."
        yield "inexact", f"{head}: {found.reason}. It {outcome}: {why}"
    elif found.doubt:
        yield "inexact", f"{head}: {found.doubt}. It is reported as not exact."
    elif not found.conclusive:
        words = f"after {attempts} windows it is not sure that the loss {found}: {found.reason}"
        yield "inexact", f"{head}: {words}. It is reported as not exact."
