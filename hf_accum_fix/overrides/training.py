"""One training: ``train``, the setups it refuses, what it replaces while it runs, and its log."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import transformers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer

from hf_accum_fix.data.loader import in_windows, not_dispatching, skip_first_batches
from hf_accum_fix.engines.sample_shards import attention_over_ranks, check_shards, is_one_of
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.session import TRAINING, Args, Kwargs, Original, Session, session_of
from hf_accum_fix.overrides.step import backward, check_step, clip, counted
from hf_accum_fix.overrides.trainer_facts import parallel_size, release_counts_windows
from hf_accum_fix.trace.preserve import overridden
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.seams import CUTS

#: Name in the log of the number of exact windows, once one was not.
EXACT_WINDOWS: Final = "hf_accum_fix/exact_windows"


def train(wrapped: Original, trainer: Any, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Refuse unsupported setups, train in a new session, and at the end give the warnings kept on the device."""
    if not enabled() or any(each.trainer is trainer for each in TRAINING):
        return wrapped(*args, **kwargs)
    off = check_setup(trainer)
    sizes = {axis: parallel_size(trainer, axis) for axis in ("cp", "sp")}
    has_func = getattr(trainer, "compute_loss_func", None) is not None
    check_shards(type(trainer).__name__, sizes, options, func=has_func)
    session = session_of(trainer, options, new=True)
    session.warn_off(off)
    TRAINING.append(session)
    try:
        with ExitStack() as stack:
            for holder, name, replacement in _replacements(session):
                stack.enter_context(overridden(holder, name, partial(replacement, session, getattr(holder, name))))
            # torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it.
            stack.enter_context(register_optimizer_step_pre_hook(partial(check_step, session)))
            result = wrapped(*args, **kwargs)
    finally:
        TRAINING.remove(session)
        session.window = None
        session.delivery.gradient.drop()
    state = session.state
    session.contained("reading what windows have shown", session.read, None)
    state.amend(exact=state.exact, windows=state.opened, inexact_windows=state.inexact)
    return result


def _replacements(session: Session) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What a training replaces while it runs; each function gets session and original first."""
    trainer, accelerator = session.trainer, session.trainer.accelerator
    yield trainer, "get_train_dataloader", get_train_dataloader
    yield sys.modules[Trainer.__module__], "skip_first_batches", skip_first_batches
    if release_counts_windows():
        yield trainer, "get_batch_samples", counted
    yield accelerator, "backward", backward
    yield accelerator, "clip_grad_norm_", clip
    yield trainer, "log", _log
    if session.context_parallel:
        yield trainer, CUTS, _not_cut_again


def _not_cut_again(session: Session, original: Original, model: nn.Module, inputs: Any) -> Any:
    """A step gets samples that were cut as their window was counted."""
    if session.window is not None and is_one_of(inputs, session.window.batches):
        return attention_over_ranks(session.trainer.accelerator, inputs), inputs
    return original(model, inputs)


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


def hand_back(options: Options) -> None:
    """Let trainings with these options continue as stock: put the sum of an open window into ``.grad``."""
    for session in TRAINING:
        if session.options is options:
            session.delivery.gradient.finish()
            # An open window is stock's from here on.
            session.state.aside, session.window = True, None
            session.state.note_inexact()


def check_setup(trainer: Any) -> dict[str, str]:
    """Refuse a setup that does not average losses as assumed here.

    Returns:
        Features that are off because the installed release lacks something, and why.

    Raises:
        SeamError: if it lacks something that is required.
        UnsupportedSetupError: if its ranks or its engine average in another way.
    """
    off = require_trainer(trainer)
    name, ranks, release = type(trainer).__name__, trainer.args.world_size, transformers.__version__
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"got torch.nn.DataParallel on {trainer.args.n_gpu} GPUs in {name}; expected one process per GPU; start it "
            "with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if getattr(trainer, "use_apex", False):
        raise UnsupportedSetupError(f"got apex in {name}, which bypasses accelerate; expected torch's bf16 or fp16")
    if ranks > 1 and is_present("last-micro-batch-not-reduced", release):
        raise UnsupportedSetupError(
            f"got transformers {release} on {ranks} ranks, which it synchronises in every micro-batch but the last; "
            "expected another release; install 4.46.3"
        )
    return off


def get_train_dataloader(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Give the loop whole windows, if its release or a stream would lose the end of an epoch or carry it over."""
    with not_dispatching(session, session.trainer):
        loader = original(*args, **kwargs)
    # Where the release fetches no windows, each is counted before its first micro-batch is run.
    opened = None if release_counts_windows() else session.open
    loses = is_present("epoch-tail-not-trained", transformers.__version__)
    return in_windows(session, session.trainer, loader, opened, loses_the_rest=loses)
