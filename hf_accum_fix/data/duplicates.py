"""Samples that accelerate repeats so that every rank has equally many: their number, and an epoch without them.

If a data set does not fill the last round of micro-batches over all ranks, accelerate fills it up with samples from the
epoch's beginning (``even_batches``; streams and dispatched batches, too). They come last in the round, so a rank's last
micro-batch of an epoch may have some, or nothing else; no other micro-batch has any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import wrapt
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard

from hf_accum_fix.counting.items import ZeroWeightBatch, has_rows, sample_count
from hf_accum_fix.data.balancing import is_balanced
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.upstream.presence import require
from hf_accum_fix.upstream.seams import BATCH_SHARD, DISPATCHER, STREAM_SHARD

logger = logging.getLogger("hf_accum_fix")


def note_repeated(training: Training, samples: int) -> None:
    """Note and log once that a training's dataloader repeats samples, over all ranks."""
    if "repeated" in training.warned:
        return
    drops = training.options.drop_duplicates
    training.warned.add("repeated")
    training.note(repeated_samples=samples, repeated_samples_dropped=drops)
    if training.world.rank == 0:
        outcome = "; they are dropped" if drops else ", which count twice; drop_duplicates=True drops them"
        words = "an epoch's last micro-batches repeat %d samples to even out the ranks%s"
        logger.log(logging.INFO if drops else logging.WARNING, words, samples, outcome)


@dataclass(frozen=True)
class LastRound:
    """The last micro-batches of an epoch: samples of the data set in them, rows of each with repeated ones, W, rank."""

    samples: int
    rows: int
    ranks: int
    rank: int

    @property
    def repeated(self) -> int:
        """Repeated samples of the round, on all ranks."""
        return self.rows * self.ranks - self.samples

    @property
    def own(self) -> int:
        """Rows of this rank's micro-batch that are not repeated; they come first."""
        return min(max(self.samples - self.rank * self.rows, 0), self.rows)


class CountedSamples(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A stream that counts the samples of its last pass."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._self_samples = 0

    def __iter__(self) -> Iterator[Any]:
        """One pass."""
        self._self_samples = 0
        for sample in self.__wrapped__:
            self._self_samples += 1
            yield sample

    @property
    def samples(self) -> int:
        """Samples of the last pass, so far."""
        return self._self_samples


class WithoutDuplicates(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A train dataloader of accelerate without repeated samples, or with their number reported.

    Args:
        loader: the dataloader, prepared by accelerate.
        drop: drop them: a micro-batch keeps its own rows, and one of repeated samples alone becomes a
            `ZeroWeightBatch` of one row, so that the ranks stay in step.
        found: called with the number of repeated samples, over all ranks, of an epoch that has some.
    """

    def __init__(self, loader: Any, drop: bool, found: Callable[[int], object]) -> None:
        super().__init__(loader)
        self._self_drop = drop
        self._self_found = found
        shard = loader.dataset
        if isinstance(loader, DataLoaderDispatcher):
            require(DISPATCHER, loader, "object")
        if isinstance(shard, IterableDatasetShard):
            require(STREAM_SHARD, shard, "object")
        elif (sampler := _batch_sampler_shard(loader)) is not None:
            require(BATCH_SHARD, sampler, "object")
        if isinstance(shard, IterableDatasetShard) and not isinstance(shard.dataset, CountedSamples):
            shard.dataset = CountedSamples(shard.dataset)

    def around(self, loader: Any) -> WithoutDuplicates:
        """The same for another loader: the rest of a resumed epoch."""
        return WithoutDuplicates(loader, self._self_drop, self._self_found)

    def __iter__(self) -> Iterator[Any]:
        """One epoch.

        Raises:
            UnsupportedSetupError: if repeated samples are to be dropped and cannot be identified.
        """
        for batch in self.__wrapped__:
            last = _last_round(self.__wrapped__, batch) if self.__wrapped__.end_of_dataloader else None
            if last is None or last.repeated <= 0:
                yield batch
                continue
            self._self_found(last.repeated)
            yield _own_rows(batch, last) if self._self_drop else batch

    def check(self) -> None:
        """Raise `UnsupportedSetupError` if repeated samples are to be dropped and cannot be counted."""
        if not self._self_drop or isinstance(self.__wrapped__, DataLoaderDispatcher):
            return
        if is_balanced(self.__wrapped__):
            raise UnsupportedSetupError(
                "drop_duplicates: got length-balanced windows, where a repeated sample may be in any micro-batch; "
                "expected one of the two options; omit one, or use dataloader_drop_last=True without drop_duplicates"
            )
        if isinstance(self.dataset, IterableDatasetShard) and self.num_workers > 0:
            raise UnsupportedSetupError(
                f"drop_duplicates: got a stream that {self.num_workers} workers read, which hides how often it repeats "
                "samples; expected dataloader_num_workers=0, or dispatch_batches=True"
            )
        shard = _batch_sampler_shard(self.__wrapped__)
        if shard is not None and not hasattr(shard.batch_sampler, "sampler"):
            raise UnsupportedSetupError(
                f"drop_duplicates: got the batch sampler {type(shard.batch_sampler).__name__} without an attribute "
                "`sampler`, whose length gives the number of repeated samples; add it, or omit the option"
            )


def _last_round(loader: Any, batch: Any) -> LastRound | None:
    """The round of a loader's last micro-batch; None: accelerate repeats nothing, or it is unknown how much."""
    if isinstance(loader, DataLoaderDispatcher):
        ranks, rank = loader.state.num_processes, loader.state.process_index
        return None if loader._drop_last else LastRound(loader.remainder, sample_count(batch), ranks, rank)
    shard: Any = loader.dataset
    if isinstance(shard, IterableDatasetShard):
        samples = shard.dataset.samples
        if samples == 0:
            return None
        repeats = not shard.drop_last
    else:
        shard = _batch_sampler_shard(loader)
        if shard is None or not hasattr(shard.batch_sampler, "sampler"):
            return None
        repeats = shard.even_batches and not shard.drop_last
        samples = len(shard.batch_sampler.sampler)
    if not repeats or shard.batch_size is None:
        return None
    rows = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    whole = rows * shard.num_processes
    return LastRound(samples % whole or whole, rows, shard.num_processes, shard.process_index)


def _batch_sampler_shard(loader: Any) -> Any:
    """The sampler that shards batches over ranks, also below the sampler of a resumed epoch; None: there is none."""
    sampler = loader.batch_sampler
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _own_rows(batch: Any, last: LastRound) -> Any:
    if last.own == last.rows:
        return batch
    sized = {key: len(value) for key, value in batch.items() if has_rows(value)} if isinstance(batch, Mapping) else {}
    if set(sized.values()) != {last.rows}:
        raise UnsupportedSetupError(
            f"drop_duplicates: the last {last.rows - last.own} of {last.rows} samples of a micro-batch are repeated, "
            f"but its inputs have {sized or type(batch).__name__} rows, so they cannot be removed; expected one "
            "row for each sample; omit the option, or use dataloader_drop_last=True"
        )
    # If all are repeated, keep one: every rank has to run a micro-batch.
    kept = {key: value[: max(last.own, 1)] if has_rows(value) else value for key, value in batch.items()}
    return kept if last.own else ZeroWeightBatch(kept)
