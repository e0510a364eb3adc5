"""Length-balanced windows: a train dataloader whose micro-batches are packed by length, window by window.

Knows dataloaders as accelerate prepares them, and no Trainer. Both classes keep the loader's order, seed, epochs and
number of micro-batches, so that a window holds the same samples and resumes at the same place:

    BalancedBatches   if lengths are read beforehand: reads the batch sampler a window at a time, with the batches of
                      all ranks, and yields this rank's part of the plan. Samples move between ranks.
    BalancedStream    if not (streams): the loader yields uncollated samples; each rank packs and collates its own
                      window. Samples stay on their rank.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, tee, zip_longest
from typing import Any

import wrapt
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler, IterableDataset
from tqdm.auto import tqdm

from hf_accum_fix.data.packing import MicroBatch, pack
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.options import BalanceOptions

logger = logging.getLogger("hf_accum_fix")

#: Rows of a column to read at once.
_ROWS_AT_ONCE = 10_000


def unfit(contract: LossContract) -> str | None:
    """The reason why windows of this loss must not be length-balanced; None: they may."""
    return contract.reason if contract.conclusive and not contract.is_weighed else None


def is_balanced(loader: Any) -> bool:
    """Whether a loader's windows are length-balanced."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return isinstance(loader, BalancedStream) or any(isinstance(each, BalancedBatches) for each in samplers)


class Dealer:
    """Length-balance the windows of a training's dataloaders; read lengths once and keep them.

    Args:
        options: what the user decided.
        progress: show a bar while lengths are read.
    """

    def __init__(self, options: BalanceOptions, *, progress: bool = True) -> None:
        self.options = options
        self._progress = progress
        self._read: tuple[Any, list[int]] | None = None

    def around(
        self,
        loader: Any,
        steps: int,
        *,
        lockstep: bool = False,
        length_column: str = "length",
        columns: Any = None,
    ) -> Any:
        """The loader with length-balanced windows: itself, or a proxy of it.

        Args:
            loader: a torch DataLoader, prepared by accelerate or not.
            steps: G, micro-batches of a window on each rank.
            lockstep: the ranks wait for one another in every micro-batch; see `engine.waits_every_micro_batch`.
            length_column: the column of lengths, if it exists and the options name none.
            columns: a dataset with the same rows to look for that column in, if the loader's has lost it.

        Raises:
            UnsupportedSetupError: if the loader dispatches, or yields batches that its dataset made.
            OptionsError: if the length of a sample cannot be read.
        """
        if isinstance(loader, DataLoaderDispatcher):
            raise UnsupportedSetupError(
                "balance_windows: got a dataloader that dispatches (one process reads the batches of all ranks and "
                "slices them), which would slice samples; expected dispatch_batches=False: in the Trainer "
                'accelerator_config={"dispatch_batches": False}, in accelerate DataLoaderConfiguration(...)'
            )
        base = vars(loader).get("base_dataloader", loader)
        if isinstance(loader.dataset, IterableDataset):
            if not isinstance(base.collate_fn, Uncollated):
                base.collate_fn = Uncollated(base.collate_fn)
            return BalancedStream(loader, steps, self)
        # A dataset indexed by whole batches has its batch sampler as the loader's sampler.
        name = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
        sampler = getattr(loader, name)
        if sampler is None:
            raise UnsupportedSetupError(
                f"balance_windows: got a {type(loader).__name__} without a batch sampler, whose dataset makes the "
                "batches; expected a loader with a batch size or a batch sampler; pass one, or balance_windows=False"
            )
        if isinstance(sampler, BalancedBatches):
            sampler = sampler.__wrapped__
        multiple = _padded_to(loader.collate_fn)
        lengths = [_rounded(length, multiple) for length in self._lengths(loader.dataset, columns, length_column)]
        balanced = BalancedBatches(sampler, lengths, steps, self, lockstep)
        # torch forbids this, because something derived from the old sampler could go stale; nothing does here.
        object.__setattr__(base, name, balanced)
        return loader

    def deal(
        self, lengths: Sequence[int], batches: Sequence[Sequence[Any]], ranks: int, *, lockstep: bool
    ) -> list[list[MicroBatch]]:
        """The plan for a window of stock's ``batches``: positions of each micro-batch of each rank."""
        return pack(
            lengths,
            len(batches) // ranks,
            ranks,
            rows=max(map(len, batches)),
            max_rows=self.options.max_rows_per_micro_batch,
            lockstep=lockstep,
        )

    def length_of(self, sample: Any) -> int:
        """Tokens of one sample, as the options define them."""
        named = self.options.lengths
        try:
            if named is None:
                length = len(sample["input_ids"])
            else:
                length = int(named(sample) if callable(named) else sample[named])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            what = sorted(sample) if isinstance(sample, dict) else type(sample).__name__
            wanted = f"lengths={named!r}" if named is not None else "its input_ids"
            raise OptionsError(
                f"balance_windows: got a sample that holds {what}; expected its length by {wanted}; name the column, "
                "or pass a function of a sample: BalanceOptions(lengths=...)"
            ) from error
        return self._truncated(length)

    def _truncated(self, length: int) -> int:
        return max(1, min(length, self.options.truncated_to or length))

    def _lengths(self, dataset: Any, columns: Any, length_column: str) -> list[int]:
        """The length of every sample, the same on every rank; read once for a dataset."""
        if self._read is None or not _same(self._read[0], dataset):
            read = self._read_lengths(dataset, columns, length_column)
            self._read = dataset, [self._truncated(int(length)) for length in read]
        return self._read[1]

    def _read_lengths(self, dataset: Any, columns: Any, length_column: str) -> Sequence[int]:
        named = self.options.lengths
        if not callable(named):
            column = named if named is not None else length_column
            for source in (dataset, columns):
                if column in (getattr(source, "column_names", None) or ()) and len(source) == len(dataset):
                    return source[column]  # type: ignore[no-any-return]
            # A transform makes the sample only on access.
            stored = "input_ids" in (getattr(dataset, "column_names", None) or ())
            if named is None and stored and dataset.format["type"] != "custom":
                return self._lengths_of_lists(dataset, "input_ids")
        return self._sample_by_sample(dataset)

    def _lengths_of_lists(self, dataset: Any, column: str) -> list[int]:
        """Lengths of the lists in a column of a `datasets.Dataset`, without making a sample of each."""
        tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        with self._bar(len(dataset)) as bar:
            lengths: list[int] = []
            for table in tables:
                lengths += [len(value) for value in table.column(column)]
                bar.update(len(table))
        return lengths

    def _sample_by_sample(self, dataset: Any) -> list[int]:
        """Read a part on every rank: faster, and the ranks agree even if a dataset draws its samples at random."""
        state = PartialState()
        read: list[int] = []
        with self._bar(len(dataset)) as bar:
            for row in range(state.process_index, len(dataset), state.num_processes):
                read.append(self.length_of(dataset[row]))
                bar.update(state.num_processes)
        if state.num_processes == 1:
            return read
        lengths = [0] * len(dataset)
        for rank, share in enumerate(gather_object([read])):
            lengths[rank :: state.num_processes] = share
        return lengths

    def _bar(self, total: int) -> Any:
        hidden = not self._progress or not PartialState().is_main_process
        return tqdm(total=total, desc="balance_windows: lengths", unit=" samples", disable=hidden)


def _same(one: Any, other: Any) -> bool:
    """Whether two datasets are the same; every loader makes a new `datasets.Dataset`, with the same fingerprint."""
    return one is other or getattr(one, "_fingerprint", one) == getattr(other, "_fingerprint", None)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _padded_to(collate: Any) -> int:
    """The multiple that a collator pads to, also inside the Trainer's wrapper; 1: to the longest."""
    for each in (collate, getattr(collate, "data_collator", None)):
        multiple = getattr(each, "pad_to_multiple_of", None)
        if isinstance(multiple, int) and multiple > 0:
            return multiple
    return 1


# --- lengths are known ----------------------------------------------------------------------------------------------


class BalancedBatches(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A batch sampler with length-balanced windows, among all ranks it shards for.

    The sampler behind it answers everything else (length, sampler, epoch). It wraps `BatchSamplerShard` from outside,
    because that class loses samples of batches that vary in size. ``lengths`` are those of every sample, ``steps`` G.
    """

    def __init__(self, sampler: Any, lengths: Sequence[int], steps: int, dealer: Dealer, lockstep: bool) -> None:
        super().__init__(sampler)
        self._self_lengths = lengths
        self._self_steps = steps
        self._self_dealer = dealer
        self._self_lockstep = lockstep

    def __iter__(self) -> Iterator[list[int]]:
        """One epoch of this rank."""
        rank, slots = _slots(self.__wrapped__)
        while window := list(islice(slots, self._self_steps)):
            whole = [slot for slot in window if None not in slot]
            batches = [batch for slot in whole for batch in slot if batch is not None]
            if batches:
                rows = [row for batch in batches for row in batch]
                lengths = [self._self_lengths[row] for row in rows]
                plan = self._self_dealer.deal(lengths, batches, len(whole[0]), lockstep=self._self_lockstep)
                yield from ([rows[place] for place in micro_batch] for micro_batch in plan[rank])
            # Without even_batches, a slot at the end of an epoch that not every rank has stays as it is.
            rest = [slot[rank] for slot in window[len(whole) :]]
            yield from (batch for batch in rest if batch is not None)


def _slots(sampler: Any) -> tuple[int, Iterator[tuple[list[int] | None, ...]]]:
    """This rank, and slot by slot the batches that each rank would have got; None: a rank has no more.

    accelerate's own shard decides what every rank gets. Read the sampler behind it once, since it counts its epochs.
    """
    if not isinstance(sampler, BatchSamplerShard) or sampler.num_processes == 1:
        return 0, ((batch,) for batch in sampler)
    shards = []
    for rank, batches in enumerate(tee(sampler.batch_sampler, sampler.num_processes)):
        shard = copy.copy(sampler)
        shard.process_index, shard.batch_sampler = rank, _ReadOnce(sampler.batch_sampler, batches)
        shards.append(shard)
    return sampler.process_index, zip_longest(*shards)


class _ReadOnce(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A batch sampler whose epoch is being read already; each batch is a new list, because shards append to it."""

    def __init__(self, sampler: Any, batches: Iterator[Sequence[int]]) -> None:
        super().__init__(sampler)
        self._self_batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._self_batches)


# --- lengths are not known ------------------------------------------------------------------------------------------


class Samples:
    """The samples of one batch on their way through a loader: opaque, so that it neither moves nor slices them."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)


class Uncollated:
    """Replace a collator that is called later."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Sequence[Any]) -> Samples:
        """The samples as they are."""
        return Samples(rows)


class BalancedStream(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Pack the `Samples` that a dataloader, whose collator is `Uncollated`, yields into micro-batches."""

    def __init__(self, loader: Any, steps: int, dealer: Dealer) -> None:
        super().__init__(loader)
        self._self_steps = steps
        self._self_dealer = dealer

    def around(self, loader: Any) -> BalancedStream:
        """The same for another loader: the rest of a resumed epoch."""
        return BalancedStream(loader, self._self_steps, self._self_dealer)

    def __iter__(self) -> Iterator[Any]:
        """One epoch of this rank; a window is fetched whole before its first micro-batch is yielded."""
        dealer, collate = self._self_dealer, self.__wrapped__.collate_fn.collate
        multiple = _padded_to(collate)
        batches = iter(self.__wrapped__)
        while window := [batch.rows for batch in islice(batches, self._self_steps)]:
            rows = [row for batch in window for row in batch]
            lengths = [_rounded(dealer.length_of(row), multiple) for row in rows]
            for micro_batch in dealer.deal(lengths, window, 1, lockstep=False)[0]:
                yield collate([rows[place] for place in micro_batch])
