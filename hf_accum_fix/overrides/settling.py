"""The contract of a trainer: given by hand or observed, agreed on by all ranks, and held against later windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_accum_fix import counting
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    SHIFT_UNKNOWN,
    Divides,
    LossContract,
    Reduction,
)
from hf_accum_fix.accumulation.declared import (
    takes_number,
)
from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import ContractError
from hf_accum_fix.known import Settled
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.live import (
    accepts_number,
    head_name,
    is_cut,
    loss_func,
    place,
    scales_itself,
)
from hf_accum_fix.overrides.loader import check_dealing
from hf_accum_fix.overrides.observing import observed_of
from hf_accum_fix.overrides.response import Response
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, Task, session_of
from hf_accum_fix.upstream.protocols import TrainerLike


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
    was_settled = session.is_settled
    if options.contract is not None:
        if not was_settled:
            session.take(_given(trainer, session, options.contract))
    else:
        _settle_observed(trainer, session, window, options, trouble)
    contract = session.contract
    assert contract is not None
    if not was_settled:
        if session.is_settled:
            check_dealing(trainer, contract, options)
        if contract.reason != NO_TARGET_SEEN or session.is_settled:
            _warn(trainer, session, contract)
    return contract


def _settle_observed(
    trainer: TrainerLike, session: Session, window: list[Any], options: Options, trouble: Exception | None
) -> None:
    """Observe the loss in this window, where it has not been or is due again."""

    def observed(settled: Settled, batches: Sequence[Any], again: int) -> counting.Seen:
        with _answers(session, settled):
            return observed_of(trainer, session, list(batches), again=again)

    def agreed(
        settled: Settled, batches: Sequence[Any], seen: LossContract | None, trouble: Exception | None
    ) -> LossContract:
        with _answers(session, settled):
            return _agreed(trainer, seen, trouble, batches, session)

    counting.settle(
        TrainerRun(trainer, session),
        session,
        window,
        observed,
        agreed,
        per_sample=options.per_sample,
        # Labels are smoothed where they are observed to be, even if nothing is cut.
        matters=is_cut(trainer) or trainer.label_smoother is not None,
        trouble=trouble,
    )


@contextmanager
def _answers(session: Session, settled: Settled) -> Iterator[None]:
    """Let the session hold what a ``compute_loss`` makes of the base's loss of these micro-batches."""
    if not isinstance(settled, Task):
        yield
        return
    first, session.response = session.response, settled.response
    try:
        yield
    finally:
        settled.response, session.response = session.response, first


def _warn(trainer: TrainerLike, session: Session, found: LossContract) -> None:
    """Say once why a loss is not exact, where it shows."""
    # A number, or a shift, may be wrong even where nothing is cut.
    wrong_when_whole = found.reason == SHIFT_UNKNOWN or (found.by_number and not found.conclusive)
    if found.owned_by_trainer and (scales_itself(trainer) or found.divides is not Divides.NEVER):
        outcome = "stays as the trainer scales it"
    elif found.items is None:
        outcome = "gets the plain mean over micro-batches"
    else:
        outcome = "gets each micro-batch weighed by its items"
    changed_by = f"{type(trainer).__name__}.compute_loss"
    for kind, words in counting.remarks(
        head_name(trainer), found, session.attempts, outcome=outcome, changed_by=changed_by
    ):
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
