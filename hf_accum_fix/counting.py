"""Open an accumulation window: settle how its loss is reduced, and count it over all ranks.

The Trainer and hand-written loops both call this. Each hands over a `Run`, which reaches the other ranks and warns, and
a function that observes its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.closing import Closing
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SEVERAL_FIT, Coupling, LossContract, Reduction
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.run import Run
from hf_accum_fix.accumulation.second_look import (
    ATTEMPTS,
    Observe,
    as_before,
    is_due,
    look,
    several_fit,
    trained_wrongly,
)
from hf_accum_fix.accumulation.share import Cut
from hf_accum_fix.accumulation.window import Items, count_by_rules, count_dtype
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import RankError
from hf_accum_fix.observations import Windows
from hf_accum_fix.router.router_loss import Form, Forward, RouterLoss, one_form

Said = TypeVar("Said")


class Known:
    """What the windows of one training have shown.

    Attributes:
        contract: how its loss is reduced; None: no window was opened yet.
        attempts: windows in which that was observed, and not all of their samples were without a target.
        windows: opened so far, and how many of them were not exact.
        closing: what ends them.
        empty_windows: how many had no target, of those that are not read as they end, 0-dim.
    """

    contract: LossContract | None = None
    attempts: int = 0
    windows: Windows
    closing: Closing
    empty_windows: Tensor | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the contract is taken as it is."""
        return self.contract is not None and (self.contract.conclusive or self.attempts >= ATTEMPTS)

    @property
    def exact(self) -> bool:
        """Whether its loss, and every window so far, was exact."""
        return self.contract is not None and self.contract.exact and not self.windows.inexact


# --- how the loss is reduced --------------------------------------------------------------------------------------


def settle(
    run: Run,
    known: Known,
    window: Sequence[Any],
    observe: Observe,
    agree_on: Callable[[LossContract | None, Exception | None], LossContract],
    *,
    per_sample: bool,
    matters: bool,
    trouble: Exception | None = None,
) -> LossContract:
    """The contract as it is now; observed where it has not been or is due again, on every rank alike.

    Args:
        run: the training.
        known: what its windows have shown; changed.
        window: the micro-batches of this rank; empty: its data have ended.
        observe: as `look` asks for it.
        agree_on: the ranks' one contract, of what this rank saw and the trouble that it met.
        per_sample: as in `Options`.
        matters: as in `look`.
        trouble: what kept this rank from fetching its window.

    Raises:
        RankError: if another rank is in trouble, has no window, or labels where this one has none.
    """
    before, was_settled = known.contract, known.is_settled
    # A rank whose data have ended counts this window as the others do.
    number = known.windows.opened + (not window)
    if before is not None and was_settled and not is_due(before, number, window, alone=run.data_ranks == 1):
        _say_if_several_fit(run, known, before, window)
        return before
    check_alike(run, window, trouble)
    seen, trouble = look(observe, lambda mine, trouble: any(agreed(run, mine, trouble)), window, matters=matters)
    found = agree_on(seen, trouble)
    if per_sample:
        found = by_sample(found)
    if before is not None and found.reason == NO_TARGET_SEEN:
        # It shows nothing.
        return before
    if before is not None and was_settled:
        known.contract = _held(run, known, before, found, window, matters=matters)
        return known.contract
    known.attempts += found.reason != NO_TARGET_SEEN
    if trained_wrongly(before, found):
        known.windows.note_inexact()
    take(known, found)
    return found


def take(known: Known, contract: LossContract) -> None:
    """Train by a contract from this window on."""
    known.contract = contract
    known.closing.corrects = contract.made_of is not None and not contract.made_of.counted


def _held(
    run: Run, known: Known, before: LossContract, found: LossContract, window: Sequence[Any], *, matters: bool
) -> LossContract:
    """The contract after a later window was observed too: as it was, narrowed down, or with a warning another one."""
    narrowed = as_before(before, found)
    if narrowed is None or narrowed.rules != before.rules:
        # The windows before counted by a rule that this one rules out.
        known.windows.note_inexact()
    if narrowed is not None:
        _say_if_several_fit(run, known, narrowed, window)
        return narrowed
    if before.reduction is Reduction.PLAIN:
        return found
    if matters or before.by_number or found.by_number:
        run.warn_once(
            "changed",
            f"{run.head}: window {known.windows.opened}: the loss {found}; it was observed as: {before}. The windows "
            "since then may not be exact; look at what changes in the data, or give contract=LossContract(...).",
        )
    return replace(found, changed_by_trainer=True)


def _say_if_several_fit(run: Run, known: Known, contract: LossContract, window: Sequence[Any]) -> None:
    if contract.conclusive and several_fit(contract, window):
        known.windows.note_inexact()
        run.warn_once("inexact", f"{run.head}: window {known.windows.opened}: {SEVERAL_FIT}.")


def agreed(run: Run, said: Said, trouble: Exception | None) -> list[Said]:
    """What every rank says, in their order; the trouble of one is raised on all."""
    return ranks.agreed(said, trouble, rank=run.rank, world_size=run.world_size, gather=run.gather)


def check_alike(run: Run, window: Sequence[Any], trouble: Exception | None) -> None:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does."""
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    gathered = agreed(run, (len(window), bool(labels), told), trouble)
    lengths = [length for length, _, _ in gathered]
    if len({length if run.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len({labelled for _, labelled, _ in gathered}) > 1:
        raise RankError(
            f"got {ranks.by_rank([each for _, _, each in gathered])}; expected labels on every rank or on none; look "
            "at the collator, and at what it was given on the rank without"
        )


def remarks(
    head: str,
    found: LossContract,
    attempts: int,
    *,
    outcome: str = "gets the plain mean over micro-batches",
    changed_by: str = "something",
) -> Iterator[tuple[str, str]]:
    """What is to be said of a contract once it is in force, each with a kind; nothing where it is exact.

    Args:
        head: the model's class.
        found: its contract.
        attempts: windows that were observed.
        outcome: what becomes of a loss that no rule counts.
        changed_by: what makes another loss of the model's than was observed.
    """
    if found.reduction is Reduction.SUM:
        yield "sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch."
    if found.reduction is Reduction.PLAIN:
        coupled = found.coupling is Coupling.COUPLED
        advice = " Keep micro-batches large: one sample may teach nothing." if coupled else ""
        yield "inexact", f"{head}: {found.reason}. It {outcome}: {found.coupling.value}.{advice}"
    elif found.changed_by_trainer:
        yield "inexact", f"{head}: {changed_by} changes the base's loss, so that it is not called exact."
    elif found.beside:
        yield "inexact", f"{head}: {found.reason}, so that it is not called exact."
    elif not found.conclusive:
        yield "inexact", f"{head}: the loss {found}, as far as {attempts} windows tell: {found.reason}."


def record(run: Run, known: Known, contract: LossContract, micro_batches: int, **beside: Any) -> None:
    """Keep for report() what was observed of a training; ``beside``: what only its kind of training knows."""
    observations.record(
        {
            "head": run.head,
            **contract.facts(),
            "exact": known.exact,
            "inexact_windows": known.windows.inexact,
            "accumulation_steps": micro_batches,
            "world_size": run.data_ranks,
            **beside,
        }
    )
    known.windows.recorded = True


# --- how many items it has ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """A window, counted.

    Attributes:
        by_rule: items of each micro-batch, 0-dim, by each of the contract's rules.
        total: N over all ranks.
        cut: n_mean, G and W.
        number: the other count that was handed over, over all ranks; None: there was none.
    """

    by_rule: list[dict[Items, Tensor]]
    total: Tensor
    cut: Cut
    number: Tensor | None


def count(
    run: Run,
    known: Known,
    contract: LossContract,
    batches: Sequence[Any],
    *,
    number: Any = None,
    trouble: Exception | None = None,
    router: RouterLoss | None = None,
    routing: Tensor | None = None,
) -> Counted:
    """Count a window over all ranks, by the one collective of an optimizer step.

    Beside the items ride: another count, three numbers that tell of a rank that fails or has less to run, the routing
    of a mixture of experts, and whether windows before were as they had been observed.

    Args:
        run: the training.
        known: what its windows have shown; changed where other ranks tell of theirs.
        contract: how its loss is reduced.
        batches: the micro-batches of this rank.
        number: another count of them; None: there is none.
        trouble: what this rank failed with, raised on all ranks; None: nothing.
        router: whose loss is to be the global batch's; None: none.
        routing: its numbers of this rank.
    """
    device, several, closing = run.device, run.world_size > 1, known.closing
    zero = torch.zeros((), dtype=count_dtype(device), device=device)
    by_rule: list[dict[Items, Tensor]] = []
    totals = [zero] * max(len(contract.rules), 1)
    try:
        if contract.rules:
            by_rule, totals = count_by_rules(contract.rules, list(batches), device, several_ranks=several)
    except Exception as error:
        trouble = trouble or error
    other = zero if number is None else torch.as_tensor(number).to(zero)
    if several:
        runs = len(batches) if run.shards else min(len(batches), 1)
        tells = contract.made_of is not None and not closing.corrects
        told = [zero + closing.differs, zero + known.windows.news] if tells else []
        numbers = torch.stack([totals[0], other, *ranks.marks(runs, trouble, zero), *totals[1:], *told])
        sums = run.summed(numbers if routing is None else torch.cat([numbers, routing]))
        fetched, suspects = len(batches), runs < (run.steps if run.shards else 1)
        ranks.check_marks(
            sums[2:5],
            runs,
            trouble,
            fetched=fetched,
            suspects=suspects,
            rank=run.rank,
            world_size=run.world_size,
            gather=run.gather,
        )
        last = 4 + len(totals)
        if tells and device.type == "cpu":
            # Read only where that waits for no device: there it is never set on another.
            closing.corrects = bool(sums[last])
            if float(sums[last + 1]) > known.windows.news:
                known.windows.note_inexact(known.windows.opened - bool(batches))
        # Tensor-parallel ranks hold the same samples, and have all counted them.
        copies = run.world_size // run.data_ranks
        totals = [each / copies for each in (sums[0], *sums[5:last])]
        other, routing = sums[1], sums[last + len(told) :] / copies
    elif trouble is not None:
        raise trouble
    known.windows.news = False
    cut = Cut.of(contract, totals[0], len(batches), run.data_ranks, totals[1:])
    if router is not None and routing is not None:
        router.settle(routing, cut.micro_batches, cut.world_size)
    return Counted(by_rule, totals[0], cut, None if number is None else other)


def count_routing(
    run: Run,
    contract: LossContract,
    router: RouterLoss,
    forward: Forward,
    batches: Sequence[Any],
    model: nn.Module | None,
    trouble: Exception | None = None,
) -> tuple[Tensor, Exception | None]:
    """This rank's numbers of a window, to be summed over ranks, and its trouble.

    The model's own load-balancing loss is looked at first, on every rank alike.

    Args:
        run: the training.
        contract: how its loss is reduced.
        router: what is known of the router's loss.
        forward: (inputs) -> loss, 0-dim, as training makes it.
        batches: the micro-batches of this rank.
        model: inside DistributedDataParallel; None: this rank has none at hand, and no micro-batch.
        trouble: what this rank failed with before; None: nothing.
    """
    listed = list(batches)
    if router.runs_forwards and run.shards:
        lengths = agreed(run, len(listed), trouble)
        if len(set(lengths)) > 1:
            raise ranks.uneven(dict(enumerate(lengths)))
    if router.form is None or not router.form.settled:
        seen = Form(settled=False)
        try:
            if model is not None:
                seen = router.recognise_among(forward, listed, contract.items, model, run.device)
        except Exception as error:
            trouble = trouble or error
        router.form = one_form(agreed(run, seen, trouble))
        if why := router.why_mean(contract.has_router_loss):
            run.warn_once("router", f"{run.head}: {why}")
    try:
        if model is not None:
            return router.count(forward, listed, model, run.device, run.data_ranks), trouble
    except Exception as error:
        # Raised as soon as the other ranks know.
        trouble = trouble or error
    return router.nothing(run.device), trouble


def note_empty(run: Run, known: Known, total: Tensor) -> None:
    """Take N of a window that this rank has a part in; where windows are not read as they end, it is read later."""
    if not run.readable:
        empty = (total == 0).long()
        known.empty_windows = empty if known.empty_windows is None else known.empty_windows + empty
    elif not bool(total):
        _warn_empty(run)


def say_empty(run: Run, known: Known) -> None:
    """Say whether a window had no target, of those that were not looked at; waits for the device."""
    if known.empty_windows is not None and int(known.empty_windows):
        _warn_empty(run)


def _warn_empty(run: Run) -> None:
    run.warn_once(
        "empty",
        "a whole accumulation window had no target: its gradient and its logged loss are zero; look at truncation, "
        "label masking, or samples without an answer",
    )
