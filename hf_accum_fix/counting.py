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
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Coupling, LossContract, Reduction
from hf_accum_fix.accumulation.kinds import Kind, kind_of, words_of
from hf_accum_fix.accumulation.observe import out_of_memory
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.run import Run
from hf_accum_fix.accumulation.share import Cut
from hf_accum_fix.accumulation.window import Items, count_by_rules, count_dtype
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import AccumFixError, RankError
from hf_accum_fix.known import ALL, Known, Settled
from hf_accum_fix.router.router_loss import Form, Forward, RouterLoss, one_form

Said = TypeVar("Said")
#: What this rank sees of a loss, None if it has no window; and the trouble that it met.
Seen = tuple[LossContract | None, Exception | None]


# --- how the loss is reduced --------------------------------------------------------------------------------------


def settle(
    run: Run,
    known: Known,
    window: Sequence[Any],
    observe: Callable[[Sequence[Any]], Seen],
    *,
    per_sample: bool,
    matters: bool,
    trouble: Exception | None = None,
) -> LossContract:
    """How the first kind of micro-batch has its loss reduced, as it is now.

    Every kind in a window is observed where that has not been done, on every rank alike.

    Args:
        run: the training.
        known: what its windows have shown; changed.
        window: the micro-batches of this rank; empty: its data have ended.
        observe: observes one loss on its micro-batches.
        per_sample: as in `Options`.
        matters: the way of counting changes what is trained.
        trouble: what kept this rank from fetching its window.

    Raises:
        RankError: if another rank is in trouble, has no window, or labels where this one has none.
    """
    if known.contract is None:
        known.kinds, known.without_target = {}, {}
    # Where ranks meet in every forward, all would have to hold the same kinds.
    kinds_of = [ALL if run.shards else kind_of(batch) for batch in window]
    mine = [ALL] if run.shards else list(dict.fromkeys(kinds_of))
    # A rank whose data have ended counts this window as the others do.
    number, alone = known.windows.opened + (not window), run.data_ranks == 1

    def of(settled: Settled) -> list[Any]:
        shown = [kind not in known.without_target and known.settled_of(kind) is settled for kind in kinds_of]
        return [batch for batch, its in zip(window, shown, strict=True) if its]

    def due(settled: Settled) -> bool:
        return not settled.is_settled and (settled is known or bool(of(settled)) or not alone)

    new = alone and not all(map(known.knows, mine))
    again = known.reconsiders and (alone or known.asks)
    if not (new or again or known.asks or any(map(due, known.losses))):
        assert known.contract is not None
        return known.contract
    known.asks = False
    (kinds, again), before = check_alike(run, window, trouble, mine, reconsiders=known.reconsiders), known.kinds
    known.reconsiders = False
    known.reconsidered += again
    kinds = [kind for kind in kinds if kind or not (any(kinds) or before)]
    pooled = known.without_target
    new_kinds = [kind for kind in kinds if kind not in before or kind in pooled]
    known.without_target = {kind: at for kind, at in pooled.items() if kind not in kinds}
    for kind in new_kinds:
        known.kinds = {**known.kinds, kind: Settled() if known.kinds else known}
    for settled in known.losses:
        if due(settled) or (again and (of(settled) or not alone)):
            _settle_one(run, known, settled, of(settled), observe, per_sample=per_sample)
    _begin_with_a_target(known, number)
    for kind in new_kinds:
        if known.kinds[kind] is not known:
            _tell_apart(run, known, kind, number, matters=matters, was_pooled=kind in pooled)
    assert known.contract is not None
    return known.contract


def _settle_one(
    run: Run,
    known: Known,
    settled: Settled,
    window: Sequence[Any],
    observe: Callable[[Sequence[Any]], Seen],
    *,
    per_sample: bool,
) -> None:
    """Observe one loss in a window, and change what is known of it."""
    if settled.contract is not None and known.compared == known.windows.opened:
        window = settled.contract.telling(window)
    seen, trouble = observe(window)
    goes_on = run.world_size == 1 or (settled is not known and settled.contract is None)
    if trouble is not None and goes_on and not isinstance(trouble, AccumFixError) and not out_of_memory(trouble):
        # Training itself may never ask for a loss of these, and shows the trouble where it does.
        reason = f"it could not be observed: {trouble}"
        seen, trouble = LossContract(Reduction.PLAIN, conclusive=settled is not known, reason=reason), None
    found = agree([each for each in agreed(run, seen, trouble) if each is not None])
    if per_sample:
        found = by_sample(found)
    if settled.contract is not None and found.reason == NO_TARGET_SEEN:
        # It shows nothing.
        return
    # Ranks correct a window only once one of them has learnt that it has to be.
    found = replace(found.narrowed(settled.contract), is_corrected=run.world_size == 1 or not run.readable)
    if settled.contract is not None and settled.contract.conclusive and not settled.contract.exact:
        # The windows before stay as they were.
        before = known.windows.opened - 1
        known.windows.note_inexact(before, windows=before - known.windows.inexact)
    settled.attempts += found.reason != NO_TARGET_SEEN
    if not found.conclusive and found.reason != NO_TARGET_SEEN:
        # It is trained as it is for now.
        known.windows.note_inexact()
    known.take(found, settled)


def _begin_with_a_target(known: Known, number: int) -> None:
    """Let the first kind be one that has shown a target, if any has."""
    shown = [each for each in known.losses if each.contract is not None and each.contract.reason != NO_TARGET_SEEN]
    if not shown or shown[0] is known:
        return
    kinds, first = known.kinds, shown[0]
    known.without_target = {**known.without_target, **{kind: number for kind in kinds if kinds[kind] is known}}
    known.begin_with(first)
    known.kinds = {kind: known if each is first else each for kind, each in kinds.items()}


def _tell_apart(run: Run, known: Known, kind: Kind, number: int, *, matters: bool, was_pooled: bool) -> None:
    """Train a new kind of micro-batch by a loss of its own, where it is another than those of kinds before."""
    settled, first = known.kinds[kind], known.contract
    found = settled.contract
    assert found is not None and first is not None
    if found.reason == NO_TARGET_SEEN:
        known.kinds = {**known.kinds, kind: known}
        known.without_target = {**known.without_target, kind: number}
        return
    for other, each in known.kinds.items():
        if each is not settled and other not in known.without_target and _is_one_loss(known, kind, other):
            known.kinds = {**known.kinds, kind: each}
            return
    reason = ""
    if found.custom and found.by_number:
        reason = "one number is handed over for micro-batches of several kinds"
    elif any(other and (other < kind or kind < other) for other in known.kinds):
        reason = "others hold some of these labels, and a term that both have is no one mean over them all"
    if reason:
        settled.contract = found = replace(found, doubt=reason, reason=reason)
    if was_pooled and matters:
        known.windows.note_inexact()
        run.warn_once(
            f"pooled {words_of(kind)}",
            f"{run.head}: micro-batches with {words_of(kind)} had no target before window {number}, and their samples "
            "were counted with the first kind's: those windows weigh the first kind too much",
        )
    if matters:
        for what, words in remarks(f"{run.head}, of {words_of(kind)}", found, settled.attempts):
            run.warn_once(f"{what} of {words_of(kind)}", words)
    if known.windows.recorded:
        observations.amend({"exact": known.exact, **known.kinds_told()})


def _is_one_loss(known: Known, kind: Kind, other: Kind) -> bool:
    """Whether two kinds of micro-batch are reduced and counted alike, so that all of their items are of one mean."""
    one, another = known.kinds[kind].contract, known.kinds[other].contract
    if one is None or another is None or (one.reduction, one.rules) != (another.reduction, another.rules):
        return False
    # Classes of texts and of tokens may both be "labels".
    counted = {key for rule in one.rules for key in rule.keys}
    axes = [{(key, axes) for key, axes in each if key in counted} for each in (kind, other)]
    terms = [[(each.shape, each.group) for each in contract.terms] for contract in (one, another)]
    return axes[0] == axes[1] and terms[0] == terms[1]


def agreed(run: Run, said: Said, trouble: Exception | None) -> list[Said]:
    """What every rank says, in their order; the trouble of one is raised on all."""
    return ranks.agreed(said, trouble, rank=run.rank, world_size=run.world_size, gather=run.gather)


def check_alike(
    run: Run, window: Sequence[Any], trouble: Exception | None, kinds: Sequence[Kind] = (), *, reconsiders: bool = False
) -> tuple[list[Kind], bool]:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does.

    Returns:
        All ranks' kinds of micro-batches, in one order, and whether any rank reconsiders its losses.
    """
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    gathered = agreed(run, (len(window), bool(labels), told, list(kinds), reconsiders), trouble)
    lengths = [length for length, *_ in gathered]
    if len({length if run.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len({labelled for _, labelled, *_ in gathered}) > 1:
        held_by = ranks.by_rank([told for _, _, told, *_ in gathered])
        raise RankError(
            f"got {held_by}; expected labels on every rank or on none; look "
            "at the collator, and at what it was given on the rank without"
        )
    held = dict.fromkeys(kind for *_, kinds, _ in gathered for kind in kinds)
    return list(held), any(each for *_, each in gathered)


def remarks(
    head: str,
    found: LossContract,
    attempts: int,
    *,
    outcome: str = "gets the plain mean over micro-batches",
) -> Iterator[tuple[str, str]]:
    """What is to be said of a contract once it is in force, each with a kind; nothing where it is exact.

    Args:
        head: the model's class.
        found: its contract.
        attempts: windows that were observed.
        outcome: what becomes of a loss that no rule counts.
    """
    if found.reduction is Reduction.SUM:
        yield "sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch."
    if found.reduction is Reduction.PLAIN:
        coupled = found.coupling is Coupling.COUPLED
        advice = " Use micro-batches of more than one sample." if coupled else ""
        yield "inexact", f"{head}: {found.reason}. It {outcome}: {found.coupling.value}.{advice}"
    elif found.doubt:
        yield "inexact", f"{head}: {found.doubt}. It is not called exact."
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
            **known.kinds_told(),
            **beside,
        }
    )
    known.windows.recorded = True


# --- how many items it has ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """A window, counted.

    Attributes:
        by_rule: items of each micro-batch, 0-dim, by each of its contract's rules.
        total: N over all ranks, of all kinds.
        cuts: n_mean, G and W of each loss, in the order of `Known.losses`.
        number: the other count that was handed over, over all ranks; None: there was none.
    """

    by_rule: list[dict[Items, Tensor]]
    total: Tensor
    cuts: list[Cut]
    number: Tensor | None

    @property
    def cut(self) -> Cut:
        """How the first kind is cut."""
        return self.cuts[0]


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

    Beside the items ride: another count, three numbers that tell of a rank that fails or has less to run, the samples
    of each kind and whether one is new, the routing of a mixture of experts, and whether windows before were as they
    had been observed.

    Args:
        run: the training.
        known: what its windows have shown; changed where other ranks tell of theirs.
        contract: how the first kind's loss is reduced.
        batches: the micro-batches of this rank.
        number: another count of them; None: there is none.
        trouble: what this rank failed with, raised on all ranks; None: nothing.
        router: whose loss is to be the global batch's; None: none.
        routing: its numbers of this rank.
    """
    device, several, closing = run.device, run.world_size > 1, known.closing
    if known.reconsidered and not known.can_be_exact:
        # Windows before may have been exact.
        known.windows.note_inexact()
    zero = torch.zeros((), dtype=count_dtype(device), device=device)
    contracts = [contract, *known.contracts[1:]]
    by_rule: list[dict[Items, Tensor]] = []
    totals = [[zero] * max(len(each.rules), 1) for each in contracts]
    # A mean over one loss's samples alone is weighed by how many they are.
    samples = [zero] * len(contracts) if len(contracts) > 1 else []
    new = known.reconsiders or not all(known.knows(kind_of(batch)) for batch in batches)
    try:
        # One that is new is observed, and all are counted again.
        by_rule, totals, samples = _of_each_loss(known, contracts, batches, device, several_ranks=several and not new)
    except Exception as error:
        trouble = trouble or error
    other = zero if number is None else torch.as_tensor(number).to(zero)
    if several:
        runs = len(batches) if run.shards else min(len(batches), 1)
        # A window of several losses is not corrected.
        corrected = closing.corrects and len(contracts) == 1
        tells = any(each.is_read for each in contracts) and not corrected
        told = [zero + closing.differs, zero + known.windows.news] if tells else []
        asks = [zero + new] if known.kinds else []
        main, *rest = (total for each in totals for total in each)
        numbers = torch.stack([main, other, *ranks.marks(runs, trouble, zero), *rest, *samples, *asks, *told])
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
        # Tensor-parallel ranks hold the same samples, and have all counted them.
        copies = run.world_size // run.data_ranks
        summed = iter([sums[0], *sums[5:]])
        totals = [[next(summed) / copies for _ in each] for each in totals]
        samples = [next(summed) / copies for _ in samples]
        other = sums[1]
        flags = [next(summed) for _ in (*asks, *told)]
        # Read only where that waits for no device: there what they tell is never set on another.
        if asks and device.type == "cpu":
            new = bool(flags[0])
            known.asks = new
        if tells and device.type == "cpu":
            closing.corrects = closing.corrects or bool(flags[-2])
            if float(flags[-1]) > known.windows.news:
                known.windows.note_inexact(known.windows.opened - bool(batches))
        if routing is not None:
            routing = sums[-len(routing) :] / copies
    elif trouble is not None:
        raise trouble
    known.windows.news = False
    if device.type == "cpu" and not run.shards and not known.asks and known.kinds:
        _reconsider_rules(run, known, contracts, totals)
    if not known.kinds:
        _say_if_tasks_differ(run, known, contract, batches)
    if new and not known.asks:
        run.tell("it holds micro-batches of a kind that was not observed")
    if any(not known.contract_of(batch).exact for batch in batches if len(contracts) > 1):
        # The first kind's may be.
        known.windows.note_inexact()
    parts: Sequence[Tensor | None] = [
        each.clamp(min=1) / torch.stack(samples).sum().clamp(min=1) for each in samples
    ] or [None]
    # Off the CPU every window may be one of several.
    held = [each for each in samples if device.type != "cpu" or each]
    closing.several_losses = len(held) > 1
    is_corrected, divisor = closing.will_correct(run), run.engine_divisor
    cuts = [
        Cut.of(
            each,
            total[0],
            len(batches),
            run.data_ranks,
            total[1:],
            part,
            is_corrected=is_corrected,
            engine_divisor=divisor,
        )
        for each, total, part in zip(contracts, totals, parts, strict=True)
    ]
    if router is not None and routing is not None:
        router.settle(routing, cuts[0].micro_batches, cuts[0].world_size)
    total = totals[0][0] if len(totals) == 1 else torch.stack([each[0] for each in totals]).sum()
    return Counted(by_rule, total, cuts, None if number is None else other)


def _reconsider_rules(
    run: Run, known: Known, contracts: Sequence[LossContract], totals: Sequence[Sequence[Tensor]]
) -> None:
    """Have the losses observed again, on this window, if rules that fitted so far count it differently."""
    for contract, total in zip(contracts, totals, strict=True):
        if not contract.has_rules_to_compare:
            continue
        if contract.is_ambiguous(dict(zip(contract.rules, map(float, total), strict=True))):
            if known.compared != known.windows.opened:
                known.compared = known.windows.opened
                known.reconsider()
                known.asks = known.asks or known.reconsiders
            if not known.reconsiders:
                run.tell("several rules fit the items of its terms, and count this window differently")


def _say_if_tasks_differ(run: Run, known: Known, contract: LossContract, batches: Sequence[Any]) -> None:
    """A contract given by hand covers one kind of micro-batch: warn of a window with another than the first one's."""
    counted = {key for rule in contract.rules for key in rule.keys}
    for batch in batches if counted else ():
        held = frozenset((key, axes) for key, axes in kind_of(batch) if key in counted)
        known.given_for = held if known.given_for is None else known.given_for
        if held != known.given_for:
            covered = words_of(known.given_for)
            run.tell(f"a micro-batch holds {words_of(kind_of(batch))}, and the contract given covers {covered}")
            return


def _of_each_loss(
    known: Known,
    contracts: Sequence[LossContract],
    batches: Sequence[Any],
    device: torch.device,
    *,
    several_ranks: bool,
) -> tuple[list[dict[Items, Tensor]], list[list[Tensor]], list[Tensor]]:
    """Items of each micro-batch by its contract's rules; of each loss their sums and, beside others, its samples."""
    nothing = [torch.zeros((), dtype=count_dtype(device), device=device)]
    alone = len(contracts) == 1
    by_batch: dict[int, dict[Items, Tensor]] = {}
    totals, samples = [], []
    for contract in contracts:
        held = [batch for batch in batches if alone or known.contract_of(batch) is contract]
        by_rule, counted = count_by_rules(contract.rules, held, device, several_ranks=several_ranks)
        totals.append(counted or nothing)
        by_batch |= {id(batch): each for batch, each in zip(held, by_rule, strict=True)}
        if not alone:
            samples += count_by_rules([Items()], held, device)[1]
    return [by_batch[id(batch)] for batch in batches] if any(by_batch.values()) else [], totals, samples


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
