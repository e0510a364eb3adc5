"""Settle how the loss of each task is reduced: observed in its first window, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SHIFT_UNKNOWN, LossContract, Reduction
from hf_accum_fix.accumulation.observe import out_of_memory
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.tasks import Task, describe, task_of
from hf_accum_fix.core.host import Host
from hf_accum_fix.core.state import ALL, LossState, TrainingState
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import AccumFixError, RankError


def settle(host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None) -> None:
    """Settle how the losses of a window are reduced: as given, or as observed on every rank.

    Arguments as of `core.window.open_window`.

    Raises:
        RankError: if another rank failed, has no window, or has labels where this one has none.
    """
    host.look(batches)
    first, before = host.state.first, host.state.first.contract
    was_settled = first.is_settled
    if host.options.contract is None:
        _observe_new(host, batches, number, error)
    elif not was_settled:
        host.state.take(host.options.contract, first)
    contract = host.state.first.contract
    assert contract is not None
    if not was_settled or contract is not before:
        host.settled(contract, len(batches))


def _observe_new(host: Host, batches: Sequence[Any], number: Any, error: Exception | None) -> None:
    """Observe the loss of every new task of a window."""
    state, alone = host.state, host.data_ranks == 1
    if state.first.contract is None:
        state.tasks, state.without_target = {}, {}
    # Ranks that meet in every forward cannot observe tasks one by one.
    held = [ALL if host.shards else task_of(batch) for batch in batches]
    mine = [ALL] if host.shards else list(dict.fromkeys(held))

    def batches_of(loss: LossState) -> list[Any]:
        its = [task not in state.without_target and state.loss_of(task) is loss for task in held]
        return [batch for batch, is_its in zip(batches, its, strict=True) if is_its]

    def is_due(loss: LossState) -> bool:
        return not loss.is_settled and (loss is state.first or bool(batches_of(loss)) or not alone)

    new = alone and not all(map(state.knows, mine))
    again = state.reconsiders and (alone or state.asks)
    if not (new or again or state.asks or any(map(is_due, state.losses))):
        return
    state.asks = False
    tasks, again = check_alike(host, batches, error, mine)
    state.reconsiders = False
    state.reconsidered += again
    tasks = [task for task in tasks if task or not (any(tasks) or state.tasks)]
    # A rank whose data have ended counts this window, too.
    window, pooled = state.opened + (not batches), state.without_target
    new_tasks = [task for task in tasks if task not in state.tasks or task in pooled]
    state.without_target = {task: at for task, at in pooled.items() if task not in tasks}
    for task in new_tasks:
        state.tasks[task] = LossState() if state.tasks else state.first
    for loss in state.losses:
        if is_due(loss) or (again and (batches_of(loss) or not alone)):
            _observe(host, loss, batches_of(loss), number)
    _begin_with_a_target(state, window)
    for task in new_tasks:
        if state.tasks[task] is not state.first:
            _add_task(host, task, window, was_pooled=task in pooled)


def _observe(host: Host, loss: LossState, batches: Sequence[Any], number: Any) -> None:
    """Observe one loss in a window, and update its contract."""
    state, is_first = host.state, loss is host.state.first
    seen: LossContract | None = None
    error: Exception | None = None
    try:
        seen = host.observe(batches, number)
    except Exception as caught:
        error = caught
    goes_on = host.world_size == 1 or (not is_first and loss.contract is None)
    if error is not None and goes_on and not isinstance(error, AccumFixError) and not out_of_memory(error):
        # If training runs this forward, it raises the error itself.
        reason = f"its loss could not be observed: {error}"
        seen, error = LossContract(Reduction.PLAIN, conclusive=not is_first, reason=reason), None
    found = agree([each for each in host.all_of(seen, error) if each is not None])
    if host.options.per_sample:
        found = by_sample(found)
    if loss.contract is not None and found.reason == NO_TARGET_SEEN:
        return
    if host.world_size == 1 or not host.readable:
        # Several ranks correct a window only after one has found a difference.
        found = found.with_one_rule()
    if loss.contract is not None and loss.contract.conclusive and not loss.contract.exact:
        # Earlier windows were trained by the old contract.
        before = state.opened - 1
        state.note_inexact(before, windows=before - state.inexact)
    loss.attempts += found.reason != NO_TARGET_SEEN
    if not found.conclusive and found.reason != NO_TARGET_SEEN:
        # This window is trained by an inconclusive contract.
        state.note_inexact()
    state.take(found, loss)


def _begin_with_a_target(state: TrainingState, window: int) -> None:
    """Make the first task one that has had a target, if any has."""
    seen = (each for each in state.losses if each.contract is not None and each.contract.reason != NO_TARGET_SEEN)
    first, before = next(seen, state.first), state.first
    if first is before:
        return
    without = [task for task, loss in state.tasks.items() if loss is before]
    state.without_target.update(dict.fromkeys(without, window))
    state.tasks.update(dict.fromkeys(without, first))
    state.first = first
    assert first.contract is not None
    state.take(first.contract, first)


def _add_task(host: Host, task: Task, window: int, *, was_pooled: bool) -> None:
    """Give a new task its own loss, unless it shares one with an earlier task."""
    state, loss = host.state, host.state.tasks[task]
    found = loss.contract
    assert found is not None
    if found.reason == NO_TARGET_SEEN:
        state.tasks[task] = state.first
        state.without_target[task] = window
        return
    for other, each in state.tasks.items():
        if each is not loss and other not in state.without_target and _is_one_loss(state, task, other):
            state.tasks[task] = each
            return
    reason = ""
    if found.custom and found.by_number:
        reason = "one num_items_in_batch is passed for several tasks"
    elif any(other and (other < task or task < other) for other in state.tasks):
        reason = "other tasks share some of these labels, and a term that both have is no single mean"
    if reason:
        loss.contract = found = replace(found, doubt=reason, reason=reason)
    words = describe(task)
    if was_pooled and host.is_split:
        host.warn_inexact(
            f"pooled {words}",
            f"{host.head}: micro-batches with {words} had no target before window {window}; until then their samples "
            "counted for the first task, which got too much weight",
        )
    # Label smoothing has to know the shift even if nothing is split.
    shows = host.is_split or SHIFT_UNKNOWN in (found.reason, found.doubt)
    for name, message in remarks(f"{host.head}, of {words}", found, loss.attempts) if shows else ():
        host.warn_once(f"{name} of {words}", message)
    state.amend(exact=state.exact, **state.facts())


def _is_one_loss(state: TrainingState, task: Task, other: Task) -> bool:
    """Whether two tasks are reduced and counted alike, so that one mean is over the items of both."""
    one, another = state.tasks[task].contract, state.tasks[other].contract
    if one is None or another is None or (one.reduction, one.rules) != (another.reduction, another.rules):
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
    gathered = host.all_of((len(batches), bool(labels), held, list(tasks), host.state.reconsiders), error)
    lengths = [length for length, *_ in gathered]
    if len({length if host.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len({labelled for _, labelled, *_ in gathered}) > 1:
        found = ranks.by_rank([held for _, _, held, *_ in gathered])
        raise RankError(
            f"got {found}; expected labels on every rank or on none; look at the collator and its inputs on the rank "
            "without"
        )
    return list(dict.fromkeys(task for *_, tasks, _ in gathered for task in tasks)), any(each for *_, each in gathered)


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
            why = (
                "the samples of a micro-batch are coupled, so the loss depends on the split. Use micro-batches of more "
                "than one sample."
            )
        yield "inexact", f"{head}: {found.reason}. It {outcome}: {why}"
    elif found.doubt:
        yield "inexact", f"{head}: {found.doubt}. It is reported as not exact."
    elif not found.conclusive:
        yield "inexact", f"{head}: after {attempts} windows the loss {found}: {found.reason}."
