"""``train``, ``get_batch_samples``, and all that one training replaces: refused setups, windows, log, checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.core.window import Window
from hf_accum_fix.engines.engine import is_being_made
from hf_accum_fix.engines.sample_shards import attention_over_ranks, check_shards, is_one_of
from hf_accum_fix.errors import SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.loader import get_train_dataloader, skip_first_batches
from hf_accum_fix.overrides.session import MARKER, Args, Kwargs, Original, Session, session_of
from hf_accum_fix.overrides.trainer_facts import averages_tokens, counts_itself, is_custom, parallel_size
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import CUTS

#: Name in the log of the number of exact windows, once one was not.
EXACT_WINDOWS = "hf_accum_fix/exact_windows"
#: The running trainings.
_TRAINING: Final[list[Session]] = []


def train(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Refuse unsupported setups, train in a new session, and at the end give the warnings kept on the device."""
    if not enabled() or any(each.trainer is trainer for each in _TRAINING):
        return wrapped(*args, **kwargs)
    off = check_setup(trainer)
    sizes = {axis: parallel_size(trainer, axis) for axis in ("cp", "sp")}
    func = getattr(trainer, "compute_loss_func", None)
    check_shards(type(trainer).__name__, sizes, options, func=func is not None)
    session = session_of(trainer, options, new=True)
    session.warn_off(off)
    _TRAINING.append(session)
    try:
        with ExitStack() as stack:
            for holder, name, replacement in _replacements(session):
                if hasattr(holder, name):
                    stack.enter_context(overridden(holder, name, partial(replacement, session, getattr(holder, name))))
            # torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it.
            stack.enter_context(register_optimizer_step_pre_hook(lambda each, *_: _check_step(session, each)))
            result = wrapped(*args, **kwargs)
    finally:
        _TRAINING.remove(session)
        session.window = None
        session.gradient.drop()
    state = session.state
    session.contained("reading what windows have shown", session.read, None)
    state.amend(exact=state.exact, windows=state.opened, inexact_windows=state.inexact)
    return result


def _replacements(session: Session) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What a training replaces while it runs, where it exists; each function gets session and original first."""
    trainer, accelerator = session.trainer, session.trainer.accelerator
    yield trainer, "get_train_dataloader", get_train_dataloader
    yield sys.modules[Trainer.__module__], "skip_first_batches", skip_first_batches
    if is_custom(trainer, "get_batch_samples"):
        yield trainer, "get_batch_samples", _count_returned
    yield accelerator, "backward", _backward
    yield accelerator, "clip_grad_norm_", _clip
    yield trainer, "log", _log
    yield trainer, "_load_callback_state", _resume
    if session.context_parallel:
        yield trainer, CUTS, _not_cut_again
    if session.coupled is not None:
        yield trainer, "_load_rng_state", _load_random_state


def _load_random_state(session: Session, original: Original, *args: Any, **kwargs: Any) -> None:
    """A checkpoint's random state, which upstream loads after it has fetched a window: the vectors are made anew."""
    original(*args, **kwargs)
    window, coupled = session.window, session.coupled
    if coupled is not None and window is not None and window.done == 0:
        session.contained("resuming a coupled loss", partial(coupled.open, session, window.batches), None)


def _not_cut_again(session: Session, original: Original, model: nn.Module, inputs: Any) -> Any:
    """A step gets samples that were cut as their window was counted."""
    if session.window is not None and is_one_of(inputs, session.window.batches):
        return attention_over_ranks(session.trainer.accelerator, inputs), inputs
    return original(model, inputs)


def hand_back(options: Options) -> None:
    """Let trainings with these options continue as stock: put the sum of an open window into ``.grad``."""
    for session in _TRAINING:
        if session.options is options:
            session.gradient.finish()
            # An open window is stock's from here on.
            session.state.aside, session.window = True, None
            session.state.note_inexact()


# --- windows: counted over all ranks by one collective, before their first micro-batch -------------------------------


def get_batch_samples(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Count the fetched window over all ranks, and return N instead of upstream's number."""
    session = session_of(trainer, options)
    if "get_batch_samples" in session.busy or not (session in _TRAINING or enabled()):
        return wrapped(*args, **kwargs)
    error: Exception | None = None
    with overridden(session, "busy", session.busy | {"get_batch_samples"}):
        try:
            # Upstream's gather would be a second collective, which a rank without micro-batches does not join.
            with overridden(trainer.args, "average_tokens_across_devices", False):
                fetched, upstream_number = wrapped(*args, **kwargs)
        except Exception as caught:
            # Raised once the other ranks have it.
            fetched, upstream_number, error = [], None, caught
        if session.uncounted is not None and error is None:
            session.uncounted.append(upstream_number)
            return fetched, upstream_number
        window = session.open(fetched, upstream_number, error)
    if window is not None and counts_itself(trainer):
        _stand_aside_for(session, window, upstream_number)
    return fetched, _number_of(session, None if session.window is None else window, upstream_number)


def _count_returned(session: Session, custom: Original, *args: Any, **kwargs: Any) -> Any:
    """Count the result of a custom ``get_batch_samples``, which may change the batches, not its input."""
    with overridden(session, "uncounted", []):
        (fetched, number), upstream_numbers = custom(*args, **kwargs), session.uncounted
    if not upstream_numbers:
        return fetched, number
    window = session.open(fetched, upstream_numbers[-1])
    if number is not upstream_numbers[-1]:
        # Other ranks may not know.
        if window is not None and session.world_size == 1:
            _stand_aside_for(session, window, number)
        # A custom number stays.
        return fetched, number
    return fetched, _number_of(session, window, number)


def _stand_aside_for(session: Session, window: Window, number: Any) -> None:
    """Train as stock where a trainer counts the items that its model divides by in its own way."""
    contract = window.part.contract
    if number is None or contract.custom or not session.accepts_number or not session.reads_are_free:
        return
    of_all, total = float(number if session.world_size == 1 else window.number or 0), float(window.part.total)
    if abs(of_all - total) > 1e-6 * total:
        words = f"counts {of_all:g} items of a window that has {total:g}, by which its model divides in stock"
        session.not_exact("own number", words)
        session.state.aside, session.window = True, None


def _number_of(session: Session, window: Window | None, upstream_number: Any) -> Any:
    """num_items_in_batch for a ``compute_loss``."""
    trainer = session.trainer
    if window is None:
        return stock_number(session, upstream_number)
    part, number, averages = window.part, window.number, averages_tokens(trainer)
    contract = part.contract
    # Of all ranks, or of this one.
    window.stock_number = number.long() if number is not None and averages else upstream_number
    if number is None:
        return window.stock_number
    if contract.items is not None and not contract.custom:
        return part.total.long()
    if not contract.by_number:
        return upstream_number
    if part.is_whole:
        if window.host.reads_are_free and part.total != number:
            n, upstreams = float(part.total), float(number)
            window.host.report_inexact(f"its loss has {n:g} items, and num_items_in_batch counts {upstreams:g}")
        return upstream_number
    # A custom loss may multiply by W; if that is unknown, assume it where tokens are averaged across devices.
    multiplies = averages if contract.takes_world_size is None else contract.takes_world_size
    return part.total.long() if multiplies else part.total / part.world_size


def stock_number(session: Session, upstream_number: Any) -> Any:
    """num_items_in_batch as the stock Trainer counts it, of all ranks where it does so: then a collective."""
    averages = averages_tokens(session.trainer) and session.world_size > 1
    if upstream_number is None or not averages:
        return upstream_number
    number = torch.as_tensor(upstream_number, device=session.device)
    gathered: Tensor = session.trainer.accelerator.gather(number)  # type: ignore[attr-defined]
    return gathered.sum()


# --- a step: what comes from outside of a micro-batch ----------------------------------------------------------------


def _backward(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.backward``, which warns of gradients from outside of a micro-batch."""
    if session.base_loss is None and session.window is not None and not session.state.aside:
        if session.accelerator.sync_gradients:
            # The engine now reduces what is in .grad.
            session.gradient.finish()
        if session.is_split:
            session.not_exact("second backward", "calls accelerator.backward outside Trainer.training_step")
    return original(*args, **kwargs)


def _check_step(session: Session, optimizer: Optimizer) -> None:
    """Refuse an optimizer step without a micro-batch that came through its wrapped step, before it is taken.

    Skipped micro-batches leave no gradient, and one micro-batch on one rank is not split: neither is refused.
    """
    window = session.window
    # DeepSpeed and layerwise optimizers step inside a micro-batch, and DeepSpeed as it makes 16-bit optimizer states.
    if session.base_loss is not None or session.state.aside or is_being_made(session.trainer.accelerator):
        return
    if session.refused is not None:
        raise session.refused
    outer: Any = session.trainer.optimizer
    # Engines (accelerate, DeepSpeed) wrap optimizers.
    while outer is not None and outer is not optimizer:
        outer = vars(outer).get("optimizer")
    if outer is None:
        return
    if window is not None and (window.value is not None or not window.batches):
        _close_unfinished(session)
    elif (
        not session.state.troubled
        and session.steps * session.world_size > 1
        and any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
    ):
        raise SeamError(
            "got a gradient that came through neither Trainer.training_step nor accelerator.backward; expected one "
            "of them, since otherwise nothing is corrected; call super().training_step or accelerator.backward in "
            f"the step or loop of {type(session.trainer).__name__}, or revert()"
        )


def _clip(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.clip_grad_norm_``, which first closes a window whose last micro-batch was skipped."""
    if session.base_loss is None:
        _close_unfinished(session)
    return original(*args, **kwargs)


def _close_unfinished(session: Session) -> None:
    """Close a window whose last micro-batch was skipped, on every rank."""
    window = session.window
    if window is not None and window.done and not window.ended:
        window.close(session.trainer.model_wrapped)


# --- the log and the checkpoint --------------------------------------------------------------------------------------


def _log(session: Session, original: Original, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Log windows that were not exact, and warn of a loss that is not finite."""
    state = session.state
    # A trainer's other logs have no learning rate.
    is_loss = "loss" in logs and "learning_rate" in logs
    if is_loss or "train_loss" in logs:
        # The loss was just read, so these do not wait.
        if is_loss and not math.isfinite(session.finite):
            words = "the loss of a window is not finite; logging_nan_inf_filter=False logs it as it is"
            session.warn_once("not finite", f"step {session.trainer.state.global_step}: {words}")
        session.contained("reading what windows have shown", session.read, None)
        if state.inexact and session.is_split:
            logs[EXACT_WINDOWS] = state.opened - state.inexact
    return original(logs, *args, **kwargs)


def _resume(session: Session, load: Original) -> None:
    """``_load_callback_state`` of a checkpoint without our marker, which is of no callback."""
    state = session.trainer.state
    if state.stateful_callbacks.pop(MARKER, None) is None:
        session.warn_once(
            "resumed",
            f"step {state.global_step} was reached without hf_accum_fix; from here on gradient and log are of "
            "the global batch, and learning rate, clipping and the curve may not match the earlier steps",
        )
    load()


def check_setup(trainer: TrainerLike) -> dict[str, str]:
    """Refuse a setup that does not average losses as assumed here.

    Returns:
        Features that are off because the installed release lacks something, and why.

    Raises:
        SeamError: if it lacks something that is required.
        UnsupportedSetupError: if its ranks or its engine average in another way.
    """
    off = require_trainer(trainer)
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"got torch.nn.DataParallel on {trainer.args.n_gpu} GPUs in {name}; expected one process per GPU; start it "
            "with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if getattr(trainer, "use_apex", False):
        raise UnsupportedSetupError(f"got apex in {name}, which bypasses accelerate; expected torch's bf16 or fp16")
    if trainer.args.world_size > 1 and is_present("last-micro-batch-not-reduced", transformers.__version__):
        raise UnsupportedSetupError(
            f"got transformers {transformers.__version__} on {trainer.args.world_size} ranks, which it synchronises in "
            "every micro-batch but the last; expected another release; install 4.46.3"
        )
    return off
