"""The contract of a trainer: given by hand or observed, agreed on by all ranks, and held against later windows."""

from __future__ import annotations

from typing import Any

from hf_accum_fix import counting
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SHIFT_UNKNOWN, LossContract
from hf_accum_fix.accumulation.declared import takes_number
from hf_accum_fix.errors import ContractError
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import accepts_number, declares_scale, head_name, is_cut, loss_func, scales_itself
from hf_accum_fix.overrides.loader import check_dealing
from hf_accum_fix.overrides.observing import MADE_LATER, observed_of
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, session_of
from hf_accum_fix.upstream.protocols import TrainerLike


def settle(trainer: TrainerLike, window: list[Any], options: Options) -> LossContract:
    """The contract of a trainer's loss, observed on the micro-batches of one window outside of training."""
    return settle_contract(trainer, session_of(trainer, options), window, options)


def settle_contract(
    trainer: TrainerLike,
    session: Session,
    window: list[Any],
    options: Options,
    trouble: Exception | None = None,
    upstream_number: Any = None,
) -> LossContract:
    """The contract of this trainer's loss as it is now; observed where it has not been, on every rank alike."""
    computed_by = (accepts_number(trainer), loss_func(trainer), trainer.label_smoother)
    if session.observed_for != computed_by:
        session.contract, session.observed_for, session.attempts = None, computed_by, 0
        session.passes_number = accepts_number(trainer) and takes_number(trainer.model_wrapped)
        session.closing.corrects = False
    was_settled, before = session.is_settled, session.contract
    if options.contract is not None:
        if not was_settled:
            session.take(_given(trainer, session, options.contract))
    else:
        counting.settle(
            TrainerRun(trainer, session),
            session,
            window,
            lambda batches: observed_of(trainer, session, list(batches), upstream_number),
            per_sample=options.per_sample,
            # Labels are smoothed where they are observed to be, even if nothing is split.
            matters=is_cut(trainer) or trainer.label_smoother is not None,
            trouble=trouble,
        )
    contract = session.contract
    assert contract is not None
    if not was_settled or contract is not before:
        if session.is_settled:
            check_dealing(trainer, contract, options)
        if contract.reason != NO_TARGET_SEEN or session.is_settled:
            _warn(trainer, session, contract)
    return contract


def _warn(trainer: TrainerLike, session: Session, found: LossContract) -> None:
    """Say once why a loss is not exact, where it shows."""
    # A number, or a shift, may be wrong even where nothing is cut.
    wrong_when_whole = SHIFT_UNKNOWN in (found.reason, found.doubt) or (found.by_number and not found.conclusive)
    if found.reason == MADE_LATER and declares_scale(trainer):
        # It knows of windows; every one of them is looked at.
        return
    itself = found.custom and scales_itself(trainer)
    outcome = "stays as the trainer scales it" if itself else "gets the plain mean over micro-batches"
    for kind, words in counting.remarks(head_name(trainer), found, session.attempts, outcome=outcome):
        if kind == "sum" or is_cut(trainer) or wrong_when_whole:
            session.warn_once(kind, words)


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
