"""The contract of a trainer: given by hand or observed, agreed on by all ranks, and held against later windows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    SEVERAL_FIT,
    SHIFT_UNKNOWN,
    Coupling,
    Divides,
    LossContract,
    Reduction,
)
from hf_accum_fix.accumulation.declared import (
    takes_number,
)
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.second_look import ATTEMPTS, as_before, is_due, look, several_fit, trained_wrongly
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import ContractError, RankError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import (
    accepts_number,
    data_ranks,
    head_name,
    is_cut,
    loss_func,
    place,
    scales_itself,
)
from hf_accum_fix.overrides.loader import check_dealing
from hf_accum_fix.overrides.observing import observed_of
from hf_accum_fix.overrides.response import Response
from hf_accum_fix.overrides.session import Session, session_of
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")


def settle(trainer: TrainerLike, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    return settle_contract(trainer, session_of(trainer, options), window, options)


def settle_contract(
    trainer: TrainerLike, session: Session, window: list[Any], options: Options, trouble: Exception | None = None
) -> LossContract:
    """The contract of this trainer's loss as it is now; observed where it has not been, on every rank alike."""
    computed_by = (accepts_number(trainer), loss_func(trainer), trainer.label_smoother)
    if session.observed_for != computed_by:
        session.contract, session.observed_for, session.attempts = None, computed_by, 0
        session.passes_number = accepts_number(trainer) and takes_number(trainer.model_wrapped)
        session.response, session.closing.corrects = Response(shown=False), False
    known = session.contract
    settled = known is not None and (known.conclusive or session.attempts >= ATTEMPTS)
    alone = data_ranks(trainer) == 1
    # A rank whose data have ended counts this window as the others do.
    number = session.windows.opened + (not window)
    given = options.contract is not None
    if settled and known is not None and (given or not is_due(known, number, window, alone=alone)):
        _say_if_several_fit(trainer, session, known, window)
        return known
    if options.contract is not None:
        found = _given(trainer, session, options.contract)
    else:
        _check_alike(trainer, window, trouble)
        seen, trouble = look(
            lambda again: observed_of(trainer, session, window, again=again),
            lambda mine, trouble: any(ranks.agreed(mine, trouble, **place(trainer))),
            window,
            # Labels are smoothed where they are observed to be, even if nothing is cut.
            matters=is_cut(trainer) or trainer.label_smoother is not None,
        )
        found = _agreed(trainer, seen, trouble, window, session)
        if options.per_sample:
            found = by_sample(found)
        if settled and known is not None:
            return _still(trainer, session, known, found, window)
        session.attempts += found.reason != NO_TARGET_SEEN
    if trained_wrongly(known, found):
        session.windows.note_inexact()
    session.contract = found
    if not found.conclusive and session.attempts < ATTEMPTS:
        if found.reason != NO_TARGET_SEEN:
            _warn(trainer, session, found)
        return found
    check_dealing(trainer, found, options)
    session.closing.corrects = found.made_of is not None and not found.made_of.counted
    _warn(trainer, session, found)
    return found


def _still(
    trainer: TrainerLike, session: Session, known: LossContract, found: LossContract, window: Sequence[Any]
) -> LossContract:
    """The contract after a later window was observed too: as it was, narrowed down, or with a warning another one."""
    narrowed = as_before(known, found)
    session.contract = narrowed or (
        found if known.reduction is Reduction.PLAIN else replace(found, changed_by_trainer=True)
    )
    if narrowed is None or narrowed.rules != known.rules:
        # The windows before counted by a rule that this one rules out.
        session.windows.note_inexact()
    if narrowed is not None:
        _say_if_several_fit(trainer, session, narrowed, window)
    elif known.reduction is not Reduction.PLAIN:
        session.warn_once(
            "inexact",
            f"{head_name(trainer)}: window {session.windows.opened}: the loss {found}; it was observed as: {known}. "
            "The windows since then may not be exact; look at what changes in the data, or give "
            "contract=LossContract(...).",
        )
    return session.contract


def _say_if_several_fit(trainer: TrainerLike, session: Session, known: LossContract, window: Sequence[Any]) -> None:
    if known.conclusive and several_fit(known, window):
        session.windows.note_inexact()
        session.warn_once("inexact", f"{head_name(trainer)}: window {session.windows.opened}: {SEVERAL_FIT}.")


def _warn(trainer: TrainerLike, session: Session, found: LossContract) -> None:
    """Say once why a loss is not exact, where it shows."""
    head = head_name(trainer)
    if found.reduction is Reduction.SUM:
        session.warn_once("sum", f"{head}: the loss is a sum over the global batch, and grows with the global batch.")
    # A number, or a shift, may be wrong even then.
    wrong_when_whole = found.reason == SHIFT_UNKNOWN or (found.by_number and not found.conclusive)
    if found.exact or (not is_cut(trainer) and not wrong_when_whole):
        return
    if found.reduction is Reduction.PLAIN:
        if found.owned_by_trainer and (scales_itself(trainer) or found.divides is not Divides.NEVER):
            outcome = "stays as the trainer scales it"
        elif found.items is None:
            outcome = "gets the plain mean over micro-batches"
        else:
            outcome = "gets each micro-batch weighed by its items"
        words = f"{head}: {found.reason}. It {outcome}: {found.coupling.value}."
        if found.coupling is Coupling.COUPLED:
            session.warn_once(
                "inexact", f"{words} Keep per_device_train_batch_size large: one sample may teach nothing."
            )
        else:
            session.warn_once("inexact", words)
    elif found.changed_by_trainer:
        words = f"{type(trainer).__name__}.compute_loss changes the base's loss, so that it is not called exact."
        session.warn_once("inexact", f"{head}: {words}")
    elif found.beside:
        session.warn_once("inexact", f"{head}: {found.reason}, so that it is not called exact.")
    else:
        told = f"the loss {found}, as far as {session.attempts} windows tell: {found.reason}"
        session.warn_once("inexact", f"{head}: {told}.")


def _check_alike(trainer: TrainerLike, window: list[Any], trouble: Exception | None) -> None:
    """Before the ranks run forwards together: each has fetched its window, and all hold labels or none does."""
    labels = {key for batch in window if isinstance(batch, Mapping) for key in batch if "label" in key}
    told = f"{len(window)} micro-batches with {sorted(labels) or 'no labels'}" if window else None
    gathered = ranks.agreed((len(window), bool(labels), told), trouble, **place(trainer))
    if len({bool(length) for length, _, _ in gathered}) > 1:
        raise ranks.uneven({rank: length for rank, (length, _, _) in enumerate(gathered)})
    if len({labelled for _, labelled, _ in gathered}) > 1:
        raise RankError(
            f"got {ranks.by_rank([each for _, _, each in gathered])}; expected labels on every rank or on none; look "
            "at the collator, and at what it was given on the rank without"
        )


def _given(trainer: TrainerLike, session: Session, contract: LossContract) -> LossContract:
    """A contract given by hand, held against what can be known without a forward."""
    if contract.by_number and not session.passes_number and loss_func(trainer) is None:
        raise ContractError(
            f"the contract given says that the loss {contract.reduction.words}, but {head_name(trainer)} is not "
            "handed the number; give Reduction.MEAN, or let model_accepts_loss_kwargs be True"
        )
    if not contract.by_number:
        # A head that would divide by the number returns its own mean without it.
        session.passes_number = False
    return contract


def _agreed(
    trainer: TrainerLike,
    found: LossContract | None,
    trouble: Exception | None = None,
    window: Sequence[Any] = (),
    session: Session | None = None,
) -> LossContract:
    """The ranks' one contract; None: this rank had no window to observe."""
    axes = {
        (key, value.ndim)
        for batch in window
        if isinstance(batch, Mapping)
        for key, value in batch.items()
        if "label" in key and isinstance(value, Tensor)
    }
    response = None if session is None else session.response
    gathered = ranks.agreed((found, axes, response), trouble, **place(trainer))
    agreed = agree([each for each, *_ in gathered if each is not None])
    if session is not None and not session.response.shown:
        # A rank without a target takes what the others have seen.
        session.response = next((each for *_, each in gathered if each is not None and each.shown), session.response)
    held = set().union(*(each for _, each, _ in gathered))
    if len(gathered) > 1 and len({key for key, _ in held}) < len(held) and not agreed.owned_by_trainer:
        reason = "the ranks train different tasks, on labels with and without an axis of tokens"
        return LossContract(Reduction.PLAIN, dtype=agreed.dtype, reason=reason)
    return agreed
