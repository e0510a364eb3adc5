"""Settle how the loss is reduced: observed in its first windows, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hf_accum_fix.data.balancing import unfit
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.model import is_compiled
from hf_accum_fix.errors import BY_DESIGN, ContractError, RankError, StandAsideError, UnsupportedSetupError
from hf_accum_fix.learning.agreement import SyncedRanks, agree
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, LossContract, Reduction
from hf_accum_fix.learning.look import is_of_forward, out_of_memory
from hf_accum_fix.learning.observe import observe
from hf_accum_fix.window.host import Host

logger = logging.getLogger("hf_accum_fix")


def settle(host: Host, batches: Sequence[Any], number: Any = None, error: Exception | None = None) -> None:
    """Settle how the loss of a window is reduced: as given, or as observed on every rank.

    Arguments as of `window.window.open_window`.

    Raises:
        RankError: if another rank failed, has no window, or has labels where this one has none.
    """
    loss, given = host.state.loss, host.options.contract
    was_settled, before = loss.is_settled, loss.contract
    if given is None:
        _observe(host, batches, number, error)
    elif not was_settled:
        loss.use_contract(given)
    if not was_settled or loss.contract is not before:
        host.contained("saying how the loss is reduced", partial(_say, host), None)


def _observe(host: Host, batches: Sequence[Any], number: Any, error: Exception | None) -> None:
    """Observe the loss on all ranks if no window has shown it yet, or it changed on one."""
    loss = host.state.loss
    changed, mixed = check_alike(host, batches, error)
    loss.reconsiders = False
    loss.reconsidered += changed
    if loss.is_settled and not changed:
        return
    found = _of_all(host, batches, number)
    if loss.contract is None or loss.contract.yields_to(found):
        found = found.with_one_rule()
        loss.attempts += found.reason != NO_TARGET_SEEN
        # One rank's looks may have shown that.
        host.source.requires_number |= bool(found.terms) and found.hands_number
        loss.use_contract(found)
    elif mixed > 1:
        # Windows in a row, and nothing that is looked at shows it: CenterNet's sum where nothing is to be found.
        reason = "some of its micro-batches have other terms than those that are looked at"
        loss.use_contract(loss.contract.averaged(reason, stays=loss.contract.by_number and host.source.has_stock))


def _of_all(host: Host, batches: Sequence[Any], number: Any) -> LossContract:
    """The contract of all ranks, from what each observes; what training would raise as well is raised on all."""
    seen, error = None, None
    try:
        # Where ranks meet in every forward, none runs fewer.
        batches = [batch for batch in batches if host.world.shards or host.labels_of(batch) == host.state.loss.labels]
        with SyncedRanks(host.gather if host.world.size > 1 else None) as synced:
            look = partial(_observed, host, number=number, synced=synced)
            seen = look(batches) if host.in_pieces is None else host.in_pieces.looking(look, batches)
    except Exception as caught:
        error = caught
    by_design = isinstance(error, BY_DESIGN) or (error is not None and out_of_memory(error))
    told = (seen, error is not None, by_design, error is not None and is_of_forward(error), str(error or ""))
    every, failed, designed, of_forward, why = zip(*host.all_of(told, None), strict=True)
    # Where the forward of one rank fails alone, the others would wait for it in training.
    if any(designed) or (any(of_forward) and not all(failed)):
        host.all_of(None, error)
    plain, found = LossContract(Reduction.STOCK if host.source.has_stock else Reduction.PLAIN), None
    if any(failed):
        # If training runs this forward, it raises the error itself.
        return replace(plain, reason=f"its loss could not be observed: {next(filter(None, why), '')}")
    try:
        found = agree([each for each in every if each is not None])
    except ContractError as caught:
        found = replace(plain, reason=str(caught))
    except Exception as caught:
        host.note_trouble("comparing the ranks' losses", caught)
    agreed: list[LossContract | None] = host.all_of(found, None)
    return found if found and None not in agreed else replace(plain, reason="looking at its loss failed on a rank")


def _observed(host: Host, batches: Sequence[Any], number: Any, synced: SyncedRanks) -> LossContract | None:
    """The loss on micro-batches of this rank; None: there is nothing to observe."""
    if not batches or host.trained is None:
        return None
    try:
        setting = host.facts(batches, number)
        if isinstance(setting, LossContract):
            return setting
        with host.run(batches) as run:
            found = observe(run, batches, setting, synced)
    except Exception as error:
        if not out_of_memory(error):
            words = "If training itself runs, pass the contract: contract=LossContract(...)"
            logger.error("%s: the forward that observes the loss failed. %s", host.head, words)
        raise
    if setting.custom and host.source.scales_itself and not found.by_number:
        found = found.averaged("the trainer declares that it scales the loss itself", stays=True)
    if setting.doubt:
        found = replace(found, doubt=setting.doubt, reason=setting.doubt)
    return found.by_rule() if is_compiled(host.model) else found


def check_alike(host: Host, batches: Sequence[Any], error: Exception | None) -> tuple[bool, int]:
    """Check, before the ranks run forwards together, that all fetched a window, with labels or without.

    Returns:
        Whether any rank reconsiders its loss, and in how many windows in a row one had other terms than expected.
    """
    labels = {key for batch in batches if isinstance(batch, Mapping) for key in batch if "label" in key}
    held = f"{len(batches)} micro-batches with {sorted(labels) or 'no labels'}" if batches else None
    loss = host.state.loss
    mine = (len(batches), bool(labels), held, loss.reconsiders, host.state.told.troubled, loss.labels, loss.mixed)
    lengths, labelled, found, changed, troubled, observed, mixed = zip(*host.all_of(mine, error), strict=True)
    if any(troubled):
        raise StandAsideError
    if len({length if host.world.shards else bool(length) for length in lengths}) > 1:
        raise ranks.uneven(dict(enumerate(lengths)))
    if len(set(labelled)) > 1:
        raise RankError(
            f"got {ranks.by_rank(found)}; expected labels on every rank or on none; look at the collator and its "
            "inputs on the rank without"
        )
    # One loss on all ranks; where each has labels of its own it is the first rank's.
    loss.labels = next((each for each in observed if each is not None), None)
    return any(changed), max(mixed)


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
    # Even a global batch of one micro-batch may have a wrong number.
    matters = host.is_split or (contract.by_number and not contract.conclusive)
    if matters and (words := remark(contract, loss.attempts)):
        host.warn_once("inexact", f"{host.head}: {words}")


def remark(found: LossContract, attempts: int) -> str:
    """Why a contract is not exact after so many ``attempts``, and what its loss gets; empty: it is."""
    if not found.is_weighed:
        stays = found.reduction is Reduction.STOCK
        outcome = "stays as the trainer scales it" if stays else "gets the plain mean over micro-batches"
        why = "it is unknown whether the split changes it."
        if found.coupled:
            why = "its samples are coupled, so it depends on the split. coupled_loss='exact' trains the whole window's."
        return f"{found.reason}. It {outcome}: {why}"
    doubt = found.doubt
    if not (doubt or found.conclusive):
        doubt = f"after {attempts} windows it is not sure that the loss {found}: {found.reason}"
    return f"{doubt}. It is reported as not exact." if doubt else ""
