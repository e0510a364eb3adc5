"""``get_batch_samples`` and the train dataloader: whole windows, each counted over all ranks by one collective."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import transformers
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.core.window import Window, open_window
from hf_accum_fix.data.balancing import BalancedStream, Dealer
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.data.whole_windows import PlaceholderBatch, WholeWindows
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.options import BalanceOptions, Options, enabled
from hf_accum_fix.overrides.live import averages_tokens, is_custom, release_counts_windows
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, session_of
from hf_accum_fix.upstream.defects import is_present
from hf_accum_fix.upstream.protocols import TrainerLike

logger = logging.getLogger("hf_accum_fix")

#: The trainer's attribute for its `Dealer`, which keeps lengths from one train() to the next; None turns balancing off.
DEALER = "_hf_accum_fix_dealer"
#: The marker in a trainer's state, and so in its checkpoints.
_STATE_KEY = "hf_accum_fix"
_ABSENT = object()


def get_batch_samples(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Count the fetched window over all ranks, and return N instead of upstream's number."""
    session = session_of(trainer, options)
    if "get_batch_samples" in session.busy or not ("train" in session.busy or enabled()):
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
        window = open_in(session, fetched, upstream_number, error)
    return fetched, _number_of(trainer, window, upstream_number)


def _number_of(trainer: TrainerLike, window: Window, upstream_number: Any) -> Any:
    """num_items_in_batch for a ``compute_loss``."""
    total, part = window.counts.total, window.counts.parts[0]
    contract, upstream_counts = part.contract, upstream_number is not None
    if not contract.custom:
        return total.long() if upstream_counts and contract.items is not None else upstream_number
    if not contract.depends_on_number or (part.normalizer.is_whole and upstream_counts):
        return upstream_number
    # A custom loss may multiply by W; if that is unknown, assume it where tokens are averaged across devices.
    multiplies = contract.takes_world_size
    if multiplies is None:
        multiplies = averages_tokens(trainer)
    return total.long() if multiplies else total / part.normalizer.world_size


@contextmanager
def count_returned_batches(session: Session) -> Iterator[None]:
    """Count the result of a custom ``get_batch_samples``, not its input."""
    trainer = session.trainer
    if not (hasattr(trainer, "get_batch_samples") and is_custom(trainer, "get_batch_samples")):
        yield
        return
    own = trainer.get_batch_samples

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
        window = open_in(session, fetched, reached[-1])
        # A custom number stays.
        return fetched, _number_of(trainer, window, number) if number is reached[-1] else number

    with overridden(trainer, "get_batch_samples", get_batch_samples):
        yield


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


@contextmanager
def whole_windows(session: Session) -> Iterator[None]:
    """Give the loop whole windows, if its release or a stream would lose the end of an epoch or carry it over."""
    trainer, options, module = session.trainer, session.options, sys.modules[Trainer.__module__]
    original_loader, original_skip = trainer.get_train_dataloader, module.skip_first_batches
    counts_windows = release_counts_windows()
    loses_the_rest = is_present("epoch-tail-not-trained", transformers.__version__) or not counts_windows

    def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
        with _not_dispatching(session):
            loader = original_loader(*args, **kwargs)
        if isinstance(loader, (WholeWindows, WithoutDuplicates, BalancedStream)):
            return loader
        _let_epochs_through(loader)
        loader = _balanced(session, loader)
        # A loader that accelerate did not prepare repeats nothing.
        if trainer.args.world_size > 1 and isinstance(loader, DataLoaderStateMixin):
            loader = WithoutDuplicates(loader, options.drop_duplicates, session.warn_repeated)
            loader.check()
        if not (loses_the_rest or _is_endless(loader)):
            return loader
        # A release that fetches no windows counts each before its first micro-batch is run.
        opened = None if counts_windows else partial(open_in, session)
        return WholeWindows(loader, trainer.args.gradient_accumulation_steps, opened)

    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(dataloader, (WholeWindows, WithoutDuplicates, BalancedStream)):
            return original_skip(dataloader, *args, **kwargs)
        return dataloader.around(skip_first_batches(dataloader.__wrapped__, *args, **kwargs))

    with (
        overridden(trainer, "get_train_dataloader", get_train_dataloader),
        overridden(module, "skip_first_batches", skip_first_batches),
    ):
        yield


def _let_epochs_through(loader: Any) -> None:
    """Pass the epoch through accelerate's shard to a batch sampler that draws by epoch (batch_rebalance).

    The Trainer passes it through a shard, but not through a shard inside a resumed epoch's sampler.
    """
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(shard, "batch_sampler", None)
    if hasattr(sampler, "set_epoch") and not hasattr(shard, "set_epoch"):
        shard.set_epoch = sampler.set_epoch


def _balanced(session: Session, loader: Any) -> Any:
    """The loader with length-balanced windows, if requested."""
    trainer, args, balance = session.trainer, session.trainer.args, session.options.balance_windows
    if not isinstance(balance, BalanceOptions) or isinstance(loader, (WholeWindows, BalancedStream)):
        return loader
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and not _is_endless(loader):
        session.warn_once(
            "balanced already",
            "balance_windows: train_sampling_strategy='batch_rebalance' balances the windows; gradient and log are "
            "corrected as well",
        )
        return loader
    if not hasattr(loader, "dataset"):
        session.warn_once(
            "not balanced",
            f"balance_windows: got a train dataloader {type(loader).__name__} without a data set; expected torch's "
            "DataLoader; its windows are not balanced",
        )
        return loader
    dealer = trainer.__dict__.get(DEALER, _ABSENT)
    if dealer is None:
        return loader
    if dealer is _ABSENT or dealer.options != balance:
        dealer = trainer.__dict__[DEALER] = Dealer(balance, progress=not args.disable_tqdm)
    return dealer.around(
        loader,
        args.gradient_accumulation_steps,
        lockstep=waits_every_micro_batch(trainer.accelerator),
        length_column=getattr(args, "length_column_name", None) or "length",
        columns=trainer.train_dataset,
    )


def log_padding_saved(trainer: TrainerLike) -> None:
    """Log the padded tokens that length-balancing saved, at the end of a training."""
    dealer = trainer.__dict__.get(DEALER)
    if dealer is None or not dealer.real or trainer.args.process_index > 0:
        return
    logger.info(
        "balance_windows: %.3f padded tokens for a real one; without balancing %.3f",
        dealer.dealt / dealer.real,
        dealer.as_they_come / dealer.real,
    )


@contextmanager
def _not_dispatching(session: Session) -> Iterator[None]:
    """Turn off dispatching for a stream on one rank while its loader is made, as a dispatched one cannot be balanced.

    On several ranks the user has to decide whether every rank may read the stream.
    """
    trainer = session.trainer
    holder: Any = getattr(trainer.accelerator, "dataloader_config", None) or trainer.accelerator
    is_stream = isinstance(trainer.train_dataset, IterableDataset) and session.world_size == 1
    if not (session.options.balance_windows and is_stream and holder.dispatch_batches is None):
        yield
        return
    session.warn_once(
        "dispatching", "balance_windows: dispatch_batches, the Trainer's default for a stream, is off in this training"
    )
    with overridden(holder, "dispatch_batches", False):
        yield


def _is_endless(loader: Any) -> bool:
    """Whether a loader has no length."""
    try:
        len(loader)
    except TypeError:
        return True
    return False
