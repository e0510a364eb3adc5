"""Settle how the loss is reduced: observed in its first windows, the same on every rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hf_accum_fix.accumulation.agreement import SyncedRanks, agree
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, LossContract, Reduction
from hf_accum_fix.accumulation.declared import is_compiled
from hf_accum_fix.accumulation.look import is_of_forward, out_of_memory
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.core.host import Host
from hf_accum_fix.data.balancing import unfit
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import BY_DESIGN, ContractError, RankError, StandAsideError, UnsupportedSetupError

logger = logging.getLogger("hf_accum_fix")


def settle(
    host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None, *, asked: bool = False
) -> None:
    """Settle how the loss of a window is reduced: as given, or as observed on every rank.

    ``asked``: all ranks know that one of them has a changed loss; the rest as of `core.window.open_window`.

    Raises:
        RankError: if another rank failed, has no window, or has labels where this one has none.
    """
    host.contained("looking at what computes the loss", partial(host.refresh_loss_source, batches), None)
    loss, given = host.state.loss, host.options.contract
    was_settled, before = loss.is_settled, loss.contract
    host.contained("comparing the labels of a window", partial(_note_labels, host, batches), None)
    if given is None:
        _observe_if_due(host, batches, number, error, asked=asked)
    elif not was_settled:
        loss.use_contract(given)
    if not was_settled or host.state.loss.contract is not before:
        host.contained("saying how the loss is reduced", partial(_say, host), None)


def _note_labels(host: Host, batches: Sequence[Any]) -> None:
    """Note the labels that most micro-batches of the first window have."""
    if host.state.loss.labels is None and batches:
        [(host.state.loss.labels, _)] = Counter(map(host.labels_of, batches)).most_common(1)


def _observe_if_due(host: Host, batches: Sequence[Any], number: Any, error: Exception | None, *, asked: bool) -> None:
    """Observe the loss on all ranks if no window has shown it yet, or it changed."""
    loss = host.state.loss
    if not (asked or not loss.is_settled or (host.data_ranks == 1 and loss.reconsiders)):
        return
    again, mixed = check_alike(host, batches, error)
    loss.reconsiders = False
    loss.reconsidered += again
    if not (again or not loss.is_settled):
        return
    error = None
    try:
        # Where ranks meet in every forward, none runs fewer.
        batches = [batch for batch in batches if host.shards or host.labels_of(batch) == loss.labels]
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
    plain, found = LossContract(Reduction.PLAIN, as_stock=host.has_stock), None
    if any(failed) and not any(as_designed) and not alone:
        # If training runs this forward, it raises the error itself.
        found = replace(plain, reason=f"its loss could not be observed: {next(filter(None, why), '')}")
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
        opened, before = host.state.opened, loss.last_mixed
        loss.last_mixed = opened if mixed else before
        if mixed and opened - before == 1:
            # Twice in a row, and nothing that is looked at shows it: CenterNet's sum where nothing is to be found.
            reason = "some of its micro-batches have other terms than those that are looked at"
            stays = loss.contract.by_number and host.has_stock
            loss.use_contract(replace(loss.contract.averaged(reason), as_stock=stays))
        return
    if host.world_size == 1 or not host.readable:
        # Several ranks correct a window only after one has found a difference.
        found = found.with_one_rule()
    loss.attempts += found.reason != NO_TARGET_SEEN
    # One rank's looks may have shown that.
    host.requires_number |= found.is_read and found.hands_number
    loss.use_contract(found)


def _observed(host: Host, batches: Sequence[Any], number: Any, synced: SyncedRanks) -> LossContract | None:
    """The loss on micro-batches of this rank; None: there is nothing to observe."""
    if not batches or host.trained is None:
        return None
    try:
        facts = host.facts(batches, number)
        if facts.unobserved is not None:
            return facts.unobserved
        with host.run(batches) as run:
            found = observe(run, batches, facts.setting, synced)
    except Exception:
        logger.error(
            "%s: the forward that observes the loss failed. If training itself runs, pass the contract: "
            "contract=LossContract(...)",
            host.head,
        )
        raise
    if facts.setting.custom and host.scales_itself and found.reduction in (Reduction.MEAN, Reduction.SUM):
        found = found.averaged("the trainer declares that it scales the loss itself")
    if facts.doubt:
        found = replace(found, doubt=facts.doubt, reason=facts.doubt)
    return found.by_rule() if is_compiled(host.model) else found


def check_alike(host: Host, batches: Sequence[Any], error: Exception | None) -> tuple[bool, bool]:
    """Check, before the ranks run forwards together, that all fetched a window, with labels or without.

    Returns:
        Whether any rank reconsiders its loss, and whether one had micro-batches with other terms.
    """
    labels = {key for batch in batches if isinstance(batch, Mapping) for key in batch if "label" in key}
    held = f"{len(batches)} micro-batches with {sorted(labels) or 'no labels'}" if batches else None
    loss = host.state.loss
    mine = (len(batches), bool(labels), held, loss.reconsiders, host.state.troubled, loss.labels, loss.mixed)
    lengths, labelled, found, changed, troubled, observed, mixed = zip(*host.all_of(mine, error), strict=True)
    if any(troubled):
        raise StandAsideError
    if len({length if host.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len(set(labelled)) > 1:
        raise RankError(
            f"got {ranks.by_rank(found)}; expected labels on every rank or on none; look at the collator and its "
            "inputs on the rank without"
        )
    # One loss on all ranks; where each has labels of its own it is the first rank's.
    loss.labels = next((each for each in observed if each is not None), None)
    return any(changed), any(mixed)


def _say(host: Host) -> None:
    """Refuse to balance what a new contract couples, and warn once unless it is exact."""
    loss, contract = host.state.loss, host.state.loss.contract
    assert contract is not None
    if loss.is_settled and host.options.balance_windows and (reason := unfit(contract)) is not None:
        raise UnsupportedSetupError(
            f"balance_windows: got {host.head}: {reason}; length-balancing would change its loss; expected a mean "
            "over items or a sum; omit balance_windows"
        )
    if contract.reason == NO_TARGET_SEEN and not loss.is_settled:
        return
    if contract.reduction is Reduction.SUM:
        host.warn_once("sum", f"{host.head}: the loss is a sum, so it grows with the global batch.")
    stays = contract.as_stock or (contract.custom and host.scales_itself)
    # Even a global batch of one micro-batch may have a wrong number.
    matters = host.is_split or (contract.by_number and not contract.conclusive)
    if matters and (words := remark(contract, loss.attempts, stays=stays)):
        host.warn_once("inexact", f"{host.head}: {words}")


def remark(found: LossContract, attempts: int, *, stays: bool = False) -> str:
    """Why a contract is not exact after so many ``attempts``, and what its loss gets; empty: it is.

    ``stays``: as the trainer scales it.
    """
    if found.reduction is Reduction.PLAIN:
        outcome = "stays as the trainer scales it" if stays else "gets the plain mean over micro-batches"
        why = "it is unknown whether the split changes it."
        if found.coupled:
            why = "its samples are coupled, so it depends on the split. coupled_loss='exact' trains the whole window's."
        return f"{found.reason}. It {outcome}: {why}"
    doubt = found.doubt
    if not (doubt or found.conclusive):
        doubt = f"after {attempts} windows it is not sure that the loss {found}: {found.reason}"
    return f"{doubt}. It is reported as not exact." if doubt else ""
