"""``get_batch_samples``: every window is counted over all ranks by one collective, before its first micro-batch."""

from __future__ import annotations

from typing import Any

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.core.window import Window, open_window
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.live import averages_tokens
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, session_of
from hf_accum_fix.upstream.protocols import TrainerLike

#: The marker in a trainer's state, and so in its checkpoints.
_STATE_KEY = "hf_accum_fix"


def get_batch_samples(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Count the fetched window over all ranks, and return N instead of upstream's number."""
    session = session_of(trainer, options)
    if "get_batch_samples" in session.busy or not ("train" in session.busy or enabled()):
        return wrapped(*args, **kwargs)
    error: Exception | None = None
    # Upstream's gather would be a second collective, which a rank without micro-batches does not join.
    alone = overridden(trainer.args, "average_tokens_across_devices", False)
    with session.inside("get_batch_samples"):
        try:
            with alone:
                fetched, upstream_number = wrapped(*args, **kwargs)
        except Exception as caught:
            # Raised once the other ranks have it.
            fetched, upstream_number, error = [], None, caught
        if session.uncounted is not None and error is None:
            session.uncounted.append(upstream_number)
            return fetched, upstream_number
        window = open_in(session, fetched, upstream_number, error)
    return fetched, _number_of(trainer, window, upstream_number)


def count_returned_batches(session: Session, custom: Original, *args: Any, **kwargs: Any) -> Any:
    """Count the result of a custom ``get_batch_samples``, which may change the batches, not its input."""
    with overridden(session, "uncounted", []):
        result, upstream_numbers = custom(*args, **kwargs), session.uncounted
    if not upstream_numbers or not isinstance(result, tuple) or len(result) != 2:
        return result
    (fetched, number), upstream_number = result, upstream_numbers[-1]
    window = open_in(session, fetched, upstream_number)
    # A custom number stays.
    return fetched, _number_of(session.trainer, window, number) if number is upstream_number else number


def _number_of(trainer: TrainerLike, window: Window, upstream_number: Any) -> Any:
    """num_items_in_batch for a ``compute_loss``."""
    counts, part = window.counts, window.counts.parts[0]
    contract, number = part.contract, counts.number
    if number is None:
        return upstream_number
    if contract.keeps_scale:
        # As from stock: of all ranks, or of this one.
        return number.long() if averages_tokens(trainer) else upstream_number
    if contract.items is not None and not contract.custom:
        return counts.total.long()
    if not contract.by_number:
        return upstream_number
    if part.is_whole:
        if window.host.on_cpu and counts.total != number:
            n, upstreams = float(counts.total), float(number)
            window.host.report_inexact(f"its loss has {n:g} items, and num_items_in_batch counts {upstreams:g}")
        return upstream_number
    # A custom loss may multiply by W; if that is unknown, assume it where tokens are averaged across devices.
    multiplies = averages_tokens(trainer) if contract.takes_world_size is None else contract.takes_world_size
    return counts.total.long() if multiplies else counts.total / part.world_size


def open_in(session: Session, batches: list[Any], number: Any = None, error: Exception | None = None) -> Window:
    """Count the window that is about to run, or raise the ``error`` of fetching it."""
    batches = [each for each in batches if not isinstance(each, PlaceholderBatch)]
    _mark_state(session)
    session.state.opened += bool(batches)
    session.window = open_window(session, batches, number, error)
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


def _mark_state(session: Session) -> None:
    state = session.trainer.state
    if _STATE_KEY not in state.stateful_callbacks and state.global_step > 0 and session.window is None:
        session.warn_once(
            "resumed",
            f"step {state.global_step} was reached without hf_accum_fix; from here on gradient and log are of "
            "the global batch, and learning rate, clipping and the curve may not match the earlier steps",
        )
    state.stateful_callbacks[_STATE_KEY] = {"active": True}


def load_without_marker(session: Session, load: Original) -> None:
    """Hide our marker while the Trainer restores the states of its callbacks."""
    state = session.trainer.state
    marker = state.stateful_callbacks.pop(_STATE_KEY, None)
    try:
        load()
    finally:
        if marker is not None:
            state.stateful_callbacks[_STATE_KEY] = marker
