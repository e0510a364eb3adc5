"""The train dataloader: whole windows, length-balanced if requested, and repeated samples found."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from typing import Any

import transformers
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import IterableDataset

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.data.balancing import BalancedStream, Dealer
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.data.whole_windows import WholeWindows
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.engines.sample_shards import skip_shards
from hf_accum_fix.options import BalanceOptions
from hf_accum_fix.overrides.session import Original, Session
from hf_accum_fix.overrides.trainer_facts import release_counts_windows
from hf_accum_fix.upstream.defects import is_present

logger = logging.getLogger("hf_accum_fix")

#: The trainer's attribute for its `Dealer`, which keeps lengths from one train() to the next; None turns balancing off.
DEALER = "_hf_accum_fix_dealer"
_ABSENT = object()
_WRAPPED = (WholeWindows, WithoutDuplicates, BalancedStream)


def get_train_dataloader(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Give the loop whole windows, if its release or a stream would lose the end of an epoch or carry it over."""
    with _not_dispatching(session):
        loader = original(*args, **kwargs)
    if isinstance(loader, _WRAPPED):
        return loader
    _let_epochs_through(loader)
    loader = _balanced(session, loader)
    # A loader that accelerate did not prepare repeats nothing.
    if session.world_size > 1 and isinstance(loader, DataLoaderStateMixin):
        loader = WithoutDuplicates(loader, session.options.drop_duplicates, session.warn_repeated)
        loader.check()
    if not release_counts_windows():
        # It fetches no windows: each is counted before its first micro-batch is run.
        return WholeWindows(loader, session.steps, session.open)
    loses_the_rest = _is_endless(loader) or is_present("epoch-tail-not-trained", transformers.__version__)
    return WholeWindows(loader, session.steps) if loses_the_rest else loader


def skip_first_batches(session: Session, original: Original, dataloader: Any, num_batches: int = 0) -> Any:
    """Resume inside of what wraps a dataloader."""
    if isinstance(dataloader, _WRAPPED):
        return dataloader.around(skip_first_batches(session, original, dataloader.__wrapped__, num_batches))
    # By its attributes: DeepSpeed may not be installed.
    if hasattr(dataloader, "sp_world_size"):
        return skip_shards(original, dataloader, num_batches)
    return original(dataloader, num_batches)


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
    dealer = vars(trainer).get(DEALER, _ABSENT)
    if not isinstance(balance, BalanceOptions) or dealer is None:
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
    if dealer is _ABSENT or dealer.options != balance:
        dealer = vars(trainer)[DEALER] = Dealer(balance, progress=not args.disable_tqdm)
    return dealer.around(
        loader,
        session.steps,
        lockstep=waits_every_micro_batch(trainer.accelerator),
        length_column=getattr(args, "length_column_name", None) or "length",
        columns=trainer.train_dataset,
    )


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


def _is_endless(loader: Any) -> bool:
    """Whether a loader has no length."""
    return length_hint(loader, -1) < 0
