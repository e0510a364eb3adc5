"""The global batch to verify: in the trainer's own order, collated by its own collator, split in other ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix.counting.items import has_rows
from hf_accum_fix.data.balancing import Samples
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.trace.preserve import overridden, seed_generators
from hf_accum_fix.verification.projection import hash_of

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Drawn:
    """This rank's samples of each global batch, what makes the same micro-batch of them at every call, and notes."""

    windows: tuple[tuple[Any, ...], ...]
    collate: Collate
    notes: tuple[str, ...]


def micro_batches(rows: Sequence[Any], per_device: int, collate: Collate) -> list[Any]:
    """Split and collate the samples; the last micro-batch may be short."""
    return [collate(list(rows[at : at + per_device])) for at in range(0, len(rows), per_device)]


def splits_of(
    samples: int, own: tuple[int, int], asked: Sequence[tuple[int, int] | int] | None
) -> list[tuple[int, int]]:
    """The splits of this rank's samples to verify, as pairs (samples per micro-batch, accumulation steps).

    They are those asked for, or ``own``, the two extremes, and a ragged one.

    Raises:
        OptionsError: if a split does not hold the samples.
    """
    if asked is None:
        found = [own, *((size, -(-samples // size)) for size in dict.fromkeys((samples, 1)) if size != own[0])]
        if samples > 1:
            ragged = next((size for size in range(2, samples) if samples % size), 1)
            found.append((ragged, -(-samples // ragged) + 1))
        return found
    pairs = [(each, -(-samples // each)) if isinstance(each, int) and each > 0 else each for each in asked]
    example = -(-samples // 2)
    shown = f"such as splits=[1, (2, {example})], on the command line --splits 1x{samples},2x{example}"
    if not pairs:
        raise OptionsError(f"got splits=[]; expected at least one split, or None for the usual ones; {shown}")
    for pair in pairs:
        fits = isinstance(pair, tuple) and len(pair) == 2 and 1 <= pair[0] <= samples <= pair[0] * pair[1]
        if not fits and pair != own:
            got = "x".join(map(str, pair)) if isinstance(pair, tuple) else repr(pair)
            raise OptionsError(
                f"got {got} in splits; expected samples per micro-batch x accumulation steps that hold the {samples} "
                f"sample{'s' * (samples != 1)} of a rank, with no more samples per micro-batch; {shown}"
            )
    return [pair for pair in pairs if isinstance(pair, tuple)]


def draw(trainer: Any, windows: int, samples: Sequence[Any] | None) -> Drawn:
    """Draw this rank's samples of the first windows by the trainer's own loader, which is reset afterwards.

    Raises:
        UnsupportedSetupError: if drawing them would change the training that follows, or the collator refuses them.
    """
    size = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    notes: list[str] = []
    if samples is not None:
        # The trainer's own loader may remove columns first.
        loader = trainer.get_train_dataloader() if trainer.train_dataset is not None else None
        rows, collator = list(samples), getattr(loader, "collate_fn", None) or trainer.data_collator
    else:
        rows, collator = _rows_and_collator(trainer, windows * size, notes)
    if not rows:
        raise UnsupportedSetupError(
            "got no sample from the dataloader; expected at least one; check dataloader_drop_last"
        )
    groups = [rows[at : at + size] for at in range(0, min(len(rows), windows * size), size)]
    if len(rows) < windows * size:
        number = f"{len(rows)} sample{'' if len(rows) == 1 else 's'}"
        notes.append(f"the data has {number} for a rank, fewer than the {windows * size} requested")

    def collate(rows: list[Any]) -> Any:
        # It may pop fields of its samples or write into them.
        return collator([_copied(row) for row in rows])

    try:
        is_random = _is_random(collate, groups[0])
    except Exception as error:  # anything that a user's collator raises
        raise UnsupportedSetupError(
            f"got samples that the collator does not take together ({type(error).__name__}: {error}); expected samples "
            "of one task, which can be mixed in new micro-batches; pass samples=[...] of one task"
        ) from error
    if is_random:
        notes.append("the collator is random: each global batch was collated once, and its rows were split")
        groups = [_rows_of(collate(group), len(group), type(collator).__name__) for group in groups]
    return Drawn(tuple(map(tuple, groups)), _concatenated if is_random else collate, tuple(notes))


def _rows_and_collator(trainer: Any, number: int, notes: list[str]) -> tuple[list[Any], Collate]:
    """The first rows of the trainer's loader, and what collates them; ``notes`` get what is special."""
    if hasattr(trainer.train_dataset, "__len__") and len(trainer.train_dataset) == 0:
        raise UnsupportedSetupError("got an empty train data set; expected at least one sample")
    if trainer.train_dataset is None and type(trainer).get_train_dataloader is Trainer.get_train_dataloader:
        raise UnsupportedSetupError("got no train_dataset; expected one; pass it to the trainer, or pass samples=[...]")
    loader = trainer.get_train_dataloader()
    _refuse_streams_that_run_out(loader)
    collate: Collate | None = getattr(loader, "collate_fn", None)
    # A torch loader without automatic batching yields the batches of its data set.
    if collate is not None and getattr(loader, "_auto_collation", True):
        rows = _uncollated(loader)
    else:
        name, samples = type(loader).__name__, trainer.args.per_device_train_batch_size
        notes.append(f"{name} collates nothing: the rows of its batches were split, with their padding")
        rows, collate = (row for batch in loader for row in _rows_of(batch, samples, name)), _concatenated
    with closing(rows):
        # The rest of the epoch is not read.
        return list(islice(rows, number)), collate


def _uncollated(loader: Any) -> Generator[Any, None, None]:
    """The samples in the loader's own order, not collated; the loader can be used again."""
    with ExitStack() as stack:
        for each in (loader, getattr(loader, "base_dataloader", None)):
            if each is not None:
                stack.enter_context(overridden(each, "collate_fn", Samples))
                # Persistent workers have copied the collator.
                stack.enter_context(overridden(each, "_iterator", None))
        for batch in loader:
            if not isinstance(batch, Samples):
                raise UnsupportedSetupError(
                    f"got {type(loader).__name__}, which yields {type(batch).__name__} without its collate_fn (a "
                    "dispatched stream, or a batched data set); expected samples that can be split; pass samples=[...]"
                )
            yield from batch.rows


def _rows_of(batch: Any, samples: int, made_by: str) -> list[Any]:
    """The rows of a batch of so many samples; of a multiple of them groups, such as the passages of a query."""
    sizes = {len(value) for value in batch.values() if has_rows(value)} if isinstance(batch, Mapping) else {0}
    rows = min(sizes, default=0)
    number = samples if rows and rows % samples == 0 else rows
    if not rows or any(size % number for size in sizes):
        raise UnsupportedSetupError(
            f"got {made_by}, whose {type(batch).__name__} does not hold equally many rows per sample; expected rows "
            "that can be split; give the collator a fixed seed, or pass samples=[...]"
        )
    return [
        {
            key: value[place * len(value) // number : (place + 1) * len(value) // number] if has_rows(value) else value
            for key, value in batch.items()
        }
        for place in range(number)
    ]


def _concatenated(rows: list[Any]) -> dict[str, Any]:
    return {key: _stacked(key, [row[key] for row in rows]) for key in rows[0]}


def _stacked(key: str, values: list[Any]) -> Any:
    """Parts of one input, those of another batch padded to one width; what has no rows is the first's."""
    if not has_rows(values[0]):
        return values[0]
    if not isinstance(values[0], Tensor):
        return [each for value in values for each in value]
    if values[0].ndim == 2:
        width, fill = max(value.shape[1] for value in values), -100 if "label" in key else 0
        values = [F.pad(value, (0, width - value.shape[1]), value=fill) for value in values]
    return torch.cat(values)


def _refuse_streams_that_run_out(loader: Any) -> None:
    """Refuse a stream that is its own iterator: what is read of it here would be lost to the training."""
    dataset: Any = getattr(loader, "dataset", loader)
    while isinstance(inner := getattr(dataset, "dataset", None), IterableDataset):
        dataset = inner
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream and iter(dataset) is iter(dataset):
        raise UnsupportedSetupError(
            f"got {type(dataset).__name__}, a stream that cannot be rewound, so that training would lose the samples "
            "read here; expected one that can; pass some of its samples: samples=[...]"
        )


def _copied(row: Any) -> Any:
    try:
        return copy.deepcopy(row)
    except Exception:  # Readers and the like; these are shared.
        return row


def _is_random(collate: Collate, rows: list[Any]) -> bool:
    batches = []
    for number in (0, 1):
        seed_generators(number)
        batches.append(hash_of(*leaves(collate(list(rows)))))
    return batches[0] != batches[1]


def leaves(batch: Any) -> list[Any]:
    """The tensors and plain values of a batch."""
    found = tree_leaves({**batch} if isinstance(batch, Mapping) else batch)
    return [each for each in found if isinstance(each, (Tensor, int, float, str, type(None)))]
