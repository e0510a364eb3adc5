"""One training: ``train``, the setups it refuses, what it replaces while it runs, its log and its dataloader."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import length_hint
from typing import Any, Final

import transformers
from accelerate.data_loader import DataLoaderStateMixin
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.data.balancing import BalancedStream, Dealer
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.data.whole_windows import WholeWindows
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.engines.sample_shards import attention_over_ranks, check_shards, is_one_of, skip_shards
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.options import BalanceOptions, Options, enabled
from hf_accum_fix.overrides.session import TRAINING, Args, Kwargs, Original, Session, session_of
from hf_accum_fix.overrides.step import backward, check_step, clip, counted
from hf_accum_fix.overrides.trainer_facts import parallel_size, release_counts_windows
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import CUTS

#: Name in the log of the number of exact windows, once one was not.
EXACT_WINDOWS: Final = "hf_accum_fix/exact_windows"
#: The trainer's attribute for its `Dealer`, which keeps lengths from one train() to the next; None turns balancing off.
DEALER: Final = "_hf_accum_fix_dealer"
_WRAPPED: Final = (WholeWindows, WithoutDuplicates, BalancedStream)


def train(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
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
            stack.enter_context(register_optimizer_step_pre_hook(lambda each, *_: check_step(session, each)))
            result = wrapped(*args, **kwargs)
    finally:
        TRAINING.remove(session)
        session.window = None
        session.gradient.drop()
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
            session.gradient.finish()
            # An open window is stock's from here on.
            session.state.aside, session.window = True, None
            session.state.note_inexact()


def check_setup(trainer: TrainerLike) -> dict[str, str]:
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
    with _not_dispatching(session):
        loader = original(*args, **kwargs)
    if isinstance(loader, _WRAPPED):
        return loader
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(shard, "batch_sampler", None)
    if hasattr(sampler, "set_epoch") and not hasattr(shard, "set_epoch"):
        # The Trainer passes the epoch to a sampler that draws by it (batch_rebalance) through accelerate's shard, but
        # not through a shard inside a resumed epoch's sampler.
        shard.set_epoch = sampler.set_epoch
    loader = _balanced(session, loader)
    # A loader that accelerate did not prepare repeats nothing.
    if session.world_size > 1 and isinstance(loader, DataLoaderStateMixin):
        loader = WithoutDuplicates(loader, session.options.drop_duplicates, session.warn_repeated)
        loader.check()
    if not release_counts_windows():
        # It fetches no windows: each is counted before its first micro-batch is run.
        return WholeWindows(loader, session.steps, session.open)
    # Without a length it is a stream.
    loses_the_rest = length_hint(loader, -1) < 0 or is_present("epoch-tail-not-trained", transformers.__version__)
    return WholeWindows(loader, session.steps) if loses_the_rest else loader


def skip_first_batches(session: Session, original: Original, dataloader: Any, num_batches: int = 0) -> Any:
    """Resume inside of what wraps a dataloader."""
    if isinstance(dataloader, _WRAPPED):
        return dataloader.around(skip_first_batches(session, original, dataloader.__wrapped__, num_batches))
    # By its attributes: DeepSpeed may not be installed.
    if hasattr(dataloader, "sp_world_size"):
        return skip_shards(original, dataloader, num_batches)
    return original(dataloader, num_batches)


def _balanced(session: Session, loader: Any) -> Any:
    """The loader with length-balanced windows, if requested."""
    trainer, args, balance = session.trainer, session.trainer.args, session.options.balance_windows
    kept = vars(trainer)
    if not isinstance(balance, BalanceOptions) or kept.get(DEALER, balance) is None:
        return loader
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and length_hint(loader, -1) >= 0:
        why = "train_sampling_strategy='batch_rebalance' balances the windows; gradient and log are corrected as well"
    elif not hasattr(loader, "dataset"):
        got = f"got a train dataloader {type(loader).__name__} without a data set"
        why = f"{got}; expected torch's DataLoader; its windows are not balanced"
    else:
        if DEALER not in kept or kept[DEALER].options != balance:
            kept[DEALER] = Dealer(balance, progress=not args.disable_tqdm)
        length_column = getattr(args, "length_column_name", None) or "length"
        lockstep, columns = waits_every_micro_batch(trainer.accelerator), trainer.train_dataset
        return kept[DEALER].around(
            loader, session.steps, lockstep=lockstep, length_column=length_column, columns=columns
        )
    session.warn_once("not balanced", f"balance_windows: {why}")
    return loader


def _not_dispatching(session: Session) -> AbstractContextManager[None]:
    """Turn off dispatching for a stream while its loader is made, where the user left it to the Trainer.

    A dispatched one cannot be balanced; on several ranks the user has to decide whether every rank may read the stream.
    Ranks that hold parts of a sample would each get another sample (``DataLoaderDispatcher`` of accelerate 1.15.0).
    """
    trainer = session.trainer
    holder: Any = getattr(trainer.accelerator, "dataloader_config", None) or trainer.accelerator
    balances = bool(session.options.balance_windows) and session.world_size == 1
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    if not (is_stream and holder.dispatch_batches is None and (balances or session.context_parallel)):
        return nullcontext()
    what = "balance_windows" if balances else "context parallelism"
    session.warn_once(
        "dispatching", f"{what}: dispatch_batches, the Trainer's default for a stream, is off in this training"
    )
    return overridden(holder, "dispatch_batches", False)
