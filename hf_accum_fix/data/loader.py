"""A Trainer's dataloader, with what its options add: length-balanced windows, no duplicates, whole windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import length_hint
from typing import Any, Final

import torch
import wrapt
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import IterableDataset

from hf_accum_fix.data.balancing import BalancedStream, Dealer
from hf_accum_fix.data.duplicates import WithoutDuplicates, note_repeated
from hf_accum_fix.data.whole_windows import WholeWindows
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.engines.sample_shards import skip_shards
from hf_accum_fix.options import BalanceOptions
from hf_accum_fix.trace.preserve import overridden

#: The trainer's attribute for its `Dealer`, which keeps lengths from one train() to the next; None turns balancing off.
DEALER: Final = "_hf_accum_fix_dealer"
_WRAPPED: Final = (WholeWindows, WithoutDuplicates, BalancedStream)


def in_windows(
    host: Training, trainer: Any, loader: Any, opened: Callable[..., Any] | None, *, loses_the_rest: bool
) -> Any:
    """The train dataloader as the loop of a Trainer gets it.

    Args:
        host: the training.
        trainer: of it.
        loader: as the Trainer made it.
        opened: called with each window, where the release fetches none; None: it does.
        loses_the_rest: the release does not train the last, short window of an epoch; nor does a stream.
    """
    if isinstance(loader, _WRAPPED):
        return loader
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(shard, "batch_sampler", None)
    _seed(host, trainer, shard if sampler is None else sampler)
    if hasattr(sampler, "set_epoch") and not hasattr(shard, "set_epoch"):
        # The Trainer passes the epoch to a sampler that draws by it (batch_rebalance) through accelerate's shard, but
        # not through a shard inside a resumed epoch's sampler.
        shard.set_epoch = sampler.set_epoch
    loader = _balanced(host, trainer, loader)
    # A loader that accelerate did not prepare repeats nothing.
    if host.world.size > 1 and isinstance(loader, DataLoaderStateMixin):
        loader = WithoutDuplicates(loader, host.options.drop_duplicates, partial(note_repeated, host))
        loader.check()
    merged = host.in_pieces.merged if host.options.micro_batch == "auto" else None
    # Without a length it is a stream.
    if opened is not None or merged is not None or length_hint(loader, -1) < 0 or loses_the_rest:
        return WholeWindows(loader, host.steps, opened, merged)
    return loader


def skip_first_batches(training: Training, original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Resume inside of what wraps a dataloader; a stream, whose passes upstream does not count, by its windows."""
    if isinstance(dataloader, WholeWindows) and length_hint(dataloader, -1) < 0:
        return dataloader.past(num_batches)
    if isinstance(dataloader, _WRAPPED):
        return dataloader.around(skip_first_batches(training, original, dataloader.__wrapped__, num_batches))
    # By its attributes: DeepSpeed may not be installed.
    if hasattr(dataloader, "sp_world_size"):
        return skip_shards(original, dataloader, num_batches)
    return original(dataloader, num_batches)


class OfEpoch(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A sampler that groups by length, drawn by seed and epoch: of every cut and resumed epoch the same order.

    Args:
        sampler: transformers' ``LengthGroupedSampler``, which draws by the process's own generator.
        seed: of the training.
        batch: samples of a global batch, whatever its cut.
    """

    def __init__(self, sampler: Any, seed: int, batch: int) -> None:
        super().__init__(sampler)
        sampler.batch_size, self._self_seed, self._self_epoch = batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self._self_epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """One epoch."""
        self.__wrapped__.generator = torch.Generator().manual_seed(self._self_seed + self._self_epoch)
        # Older releases of accelerate pass no epoch on.
        self._self_epoch += 1
        return iter(self.__wrapped__)


def ranks_of_a_step(host: Training, args: Any) -> int:
    """The ranks that have batches of ``per_device_train_batch_size``: with ``split_batches`` each has a part of one."""
    return 1 if getattr(args.accelerator_config, "split_batches", False) else host.world.data_ranks


def _seed(host: Training, trainer: Any, sampler: Any) -> None:
    """Seed a batch sampler's order, if it groups samples by length."""
    inner: Any = getattr(sampler, "sampler", None)
    # By its name, since this folder knows no Trainer.
    if type(inner).__name__ == "LengthGroupedSampler":
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        sampler.sampler = OfEpoch(inner, seed, inner.batch_size * ranks_of_a_step(host, trainer.args))
        sampler.set_epoch = sampler.sampler.set_epoch


def _balanced(host: Training, trainer: Any, loader: Any) -> Any:
    """The loader with length-balanced windows, if requested."""
    args, balance = trainer.args, host.options.balance_windows
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
        return kept[DEALER].around(loader, host.steps, lockstep=lockstep, length_column=length_column, columns=columns)
    host.warn_once("not balanced", f"balance_windows: {why}")
    return loader


def not_dispatching(host: Training, trainer: Any) -> AbstractContextManager[None]:
    """Turn off dispatching for a stream while its loader is made, where the user left it to the Trainer.

    A dispatched one cannot be balanced; on several ranks the user has to decide whether every rank may read the stream.
    Ranks that hold parts of a sample would each get another sample (``DataLoaderDispatcher`` of accelerate 1.15.0).
    """
    holder: Any = getattr(trainer.accelerator, "dataloader_config", None) or trainer.accelerator
    balances = bool(host.options.balance_windows) and host.world.size == 1
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    if not (is_stream and holder.dispatch_batches is None and (balances or host.context_parallel)):
        return nullcontext()
    what = "balance_windows" if balances else "context parallelism"
    host.warn_once(
        "dispatching", f"{what}: dispatch_batches, the Trainer's default for a stream, is off in this training"
    )
    return overridden(holder, "dispatch_batches", False)
