"""``train``: refuse unsupported setups before anything runs, and start a new session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.errors import SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.live import is_custom, parallel_size
from hf_accum_fix.overrides.loader import get_train_dataloader, log_padding_saved, skip_first_batches
from hf_accum_fix.overrides.loss_log import SWITCH, LossLog, is_loss
from hf_accum_fix.overrides.micro_batch import training_step
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, known_session, new_session
from hf_accum_fix.overrides.windows import count_returned_batches, load_without_marker
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import LOSS_LOG

#: Name in the log of the number of exact windows, once one was not.
EXACT_WINDOWS = "hf_accum_fix/exact_windows"
#: The running trainings.
_TRAINING: Final[list[Session]] = []


def train(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Refuse unsupported setups, train in a new session, and at the end give the warnings kept on the device."""
    outer = known_session(trainer)
    if not enabled() or (outer is not None and "train" in outer.busy):
        return wrapped(*args, **kwargs)
    off = check_setup(trainer)
    session = new_session(trainer, options)
    session.warn_off(off)
    filtered = LOSS_LOG not in off and trainer.args.logging_nan_inf_filter
    session.loss_log = LossLog(trainer) if filtered else None
    _TRAINING.append(session)
    try:
        with ExitStack() as stack:
            for holder, name, replacement in _replacements(session):
                if hasattr(holder, name):
                    stack.enter_context(overridden(holder, name, partial(replacement, getattr(holder, name))))
            if session.loss_log is not None:
                # The user's again, whatever ends the training.
                stack.enter_context(overridden(trainer.args, SWITCH, True))
            # torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it.
            stack.enter_context(register_optimizer_step_pre_hook(lambda each, *_: _check_step(session, each)))
            stack.enter_context(session.inside("train"))
            result = wrapped(*args, **kwargs)
    finally:
        _TRAINING.remove(session)
        session.window = None
        session.gradient.drop()
    state = session.state
    session.read()
    state.amend(exact=state.exact, windows=state.opened, inexact_windows=state.inexact)
    log_padding_saved(trainer)
    return result


def _replacements(session: Session) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What a training replaces while it runs, where it exists; each function gets the original first."""
    trainer, accelerator, loss_log = session.trainer, session.trainer.accelerator, session.loss_log
    yield trainer, "get_train_dataloader", partial(get_train_dataloader, session)
    yield sys.modules[Trainer.__module__], "skip_first_batches", partial(skip_first_batches, session)
    if is_custom(trainer, "get_batch_samples"):
        yield trainer, "get_batch_samples", partial(count_returned_batches, session)
    if session.own_step is not None:
        yield trainer, "training_step", partial(_own_step, session)
    yield accelerator, "backward", partial(_backward, session)
    yield accelerator, "clip_grad_norm_", partial(_clip, session)
    yield trainer, "log", partial(_log, session)
    yield trainer, "_load_callback_state", partial(load_without_marker, session)
    if loss_log is not None:
        yield trainer, "floating_point_ops", loss_log.end_micro_batch
        yield trainer, "_maybe_log_save_evaluate", loss_log.end_step


def hand_back(options: Options) -> None:
    """Let trainings with these options continue as stock: put the sum of an open window into ``.grad``."""
    for session in _TRAINING:
        if session.options is options:
            session.gradient.finish()


def _log(session: Session, original: Original, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Log what the training loss hides: losses that are not finite, and windows that were not exact."""
    state = session.state
    if is_loss(logs) or "train_loss" in logs:
        if session.loss_log is not None:
            session.loss_log.add_filtered(logs)
        # The loss was just read, so this does not wait.
        session.read()
        if state.inexact and session.is_split:
            logs[EXACT_WINDOWS] = state.opened - state.inexact
    return original(logs, *args, **kwargs)


def _own_step(session: Session, step: Original, *args: Any, **kwargs: Any) -> Any:
    """A custom step that never reaches the class's, as a micro-batch."""
    return training_step(step, session.trainer, args, kwargs, options=session.options)


def _backward(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.backward``, which warns of gradients from outside of a micro-batch."""
    if session.base_loss is None and session.window is not None:
        if session.accelerator.sync_gradients:
            # The engine now reduces what is in .grad.
            session.gradient.finish()
        if session.is_split:
            session.not_exact("second backward", "calls accelerator.backward outside Trainer.training_step")
    return original(*args, **kwargs)


def _clip(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``accelerator.clip_grad_norm_``, which first closes a window whose last micro-batch was skipped."""
    if session.base_loss is None and session.accelerator.sync_gradients:
        _close_unfinished(session)
    return original(*args, **kwargs)


def _check_step(session: Session, optimizer: Optimizer) -> None:
    """Refuse an optimizer step without a micro-batch that came through its wrapped step, before it is taken.

    Skipped micro-batches leave no gradient, and one micro-batch on one rank is not split: neither is refused.
    """
    window = session.window
    # DeepSpeed and layerwise optimizers step inside a micro-batch.
    if session.base_loss is not None:
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
    elif session.steps * session.world_size > 1 and _has_gradients(optimizer):
        raise SeamError(
            "got a gradient that came through neither Trainer.training_step nor accelerator.backward; expected one "
            "of them, since otherwise nothing is corrected; call super().training_step or accelerator.backward in "
            f"the step or loop of {type(session.trainer).__name__}, or revert()"
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _close_unfinished(session: Session) -> None:
    """Close a window whose last micro-batch was skipped, on every rank."""
    window = session.window
    if window is not None and window.done and not window.ended:
        window.close(session.trainer.model_wrapped)


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
    split = {axis: size for axis in ("cp", "sp") if (size := parallel_size(trainer, axis)) > 1}
    if split:
        found = ", ".join(f"{axis}_size={size}" for axis, size in split.items())
        raise UnsupportedSetupError(
            f"{name}: got samples that are split over ranks ({found}), so that no rank sees the items of a sample; "
            "expected ranks with whole samples; remove context and sequence parallelism from parallelism_config (data "
            "and tensor parallelism are supported)"
        )
    return off
