"""``get_batch_samples``: count the fetched window over all ranks, by one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.core.window import Window, open_window
from hf_accum_fix.data.whole_windows import without_placeholders
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.host import TrainerHost, session_of
from hf_accum_fix.upstream.protocols import TrainerLike

#: The marker in a trainer's state, and so in its checkpoints.
_STATE_KEY = "hf_accum_fix"


def get_batch_samples(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """Count the fetched window over all ranks, and return N instead of upstream's number."""
    session = session_of(trainer, options)
    if not enabled() or "get_batch_samples" in session.busy:
        return wrapped(*args, **kwargs)
    with session.inside("get_batch_samples"):
        # Upstream's gather would be a second collective, which a rank without micro-batches does not join.
        error: Exception | None = None
        try:
            with overridden(trainer.args, "average_tokens_across_devices", False):
                fetched, upstream_number = wrapped(*args, **kwargs)
        except Exception as caught:
            # Raised once the other ranks have it.
            fetched, upstream_number, error = [], None, caught
        if session.deferred is not None and error is None:
            # A custom method may change the batches, so its result is counted.
            session.deferred.append(upstream_number)
            return fetched, upstream_number
        window = open_in(session, without_placeholders(fetched), upstream_number, error)
    return fetched, _number_of(trainer, window, upstream_number)


def _number_of(trainer: TrainerLike, window: Window, upstream_number: Any) -> Any:
    """num_items_in_batch for a ``compute_loss``."""
    contract, normalizer = window.parts[0].contract, window.parts[0].normalizer
    if contract.items is None or not (contract.by_number if contract.custom else upstream_number is not None):
        return upstream_number
    if contract.custom and normalizer.is_whole and upstream_number is not None:
        return upstream_number
    if not (contract.custom and contract.by_number):
        return window.total.long()
    # A custom loss may multiply by W; if that is unknown, assume it where tokens are averaged across devices.
    multiplies = contract.takes_world_size
    if multiplies is None:
        multiplies = getattr(trainer.args, "average_tokens_across_devices", False)
    return window.total.long() if multiplies else window.total / normalizer.world_size


@contextmanager
def count_returned_batches(session: TrainerHost) -> Iterator[None]:
    """Count the result of a custom ``get_batch_samples``, not its input."""
    trainer = session.trainer
    own = getattr(trainer, "get_batch_samples", None)
    defining = next((cls for cls in type(trainer).__mro__ if "get_batch_samples" in vars(cls)), None)
    if own is None or defining is None or defining.__module__ in ("hf_accum_fix.trainer", Trainer.__module__):
        yield
        return

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        session.deferred = []
        try:
            result = own(*args, **kwargs)
            reached = session.deferred
        finally:
            session.deferred = None
        if not reached or not isinstance(result, tuple) or len(result) != 2:
            return result
        fetched, number = result
        window = open_in(session, without_placeholders(fetched), reached[-1])
        # A custom number stays.
        return fetched, _number_of(trainer, window, number) if number is reached[-1] else number

    with overridden(trainer, "get_batch_samples", get_batch_samples):
        yield


def open_in(session: TrainerHost, batches: list[Any], number: Any = None, error: Exception | None = None) -> Window:
    """Count the window that is about to run, or raise the ``error`` of fetching it."""
    _mark_state(session)
    session.state.opened += bool(batches)
    session.window, session.gradients = open_window(session, batches, number, error), None
    if len(batches) > session.steps:
        session.warn_inexact(
            "more micro-batches",
            f"got {len(batches)} micro-batches in a window; expected at most gradient_accumulation_steps="
            f"{session.steps}, after which the Trainer steps; the step is reported as not exact",
        )
    if session.options.balance_windows and session.router_loss_depends_on_split:
        session.warn_once(
            "router loss of length-balanced windows",
            f"balance_windows: the router loss of {session.head} depends on the split, and is further from the global "
            "batch's when each micro-batch has samples of one length; use router_loss='exact'",
        )
    return session.window


def _mark_state(session: TrainerHost) -> None:
    trainer = session.trainer
    marks = trainer.state.stateful_callbacks
    if _STATE_KEY not in marks and trainer.state.global_step > 0 and session.window is None:
        session.warn_once(
            "resumed",
            f"step {trainer.state.global_step} was reached without hf_accum_fix; from here on gradient and log are of "
            "the global batch, and learning rate, clipping and the curve may not match the earlier steps",
        )
    marks[_STATE_KEY] = {"active": True}


@contextmanager
def hide_state_marker(trainer: TrainerLike) -> Iterator[None]:
    """Hide our marker while the Trainer restores the states of its callbacks."""
    load = getattr(trainer, "_load_callback_state", None)
    if load is None:
        yield
        return

    def load_without_mark() -> None:
        marks = trainer.state.stateful_callbacks
        mark = marks.pop(_STATE_KEY, None)
        try:
            load()
        finally:
            if mark is not None:
                trainer.state.stateful_callbacks[_STATE_KEY] = mark

    with overridden(trainer, "_load_callback_state", load_without_mark):
        yield
