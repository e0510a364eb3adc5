"""The global batch to verify on: drawn in the trainer's own order, collated by its own collator, split anew."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_accum_fix.accumulation.preserve import overridden, reached
from hf_accum_fix.accumulation.tasks import Task, describe, task_of
from hf_accum_fix.accumulation.window import has_rows
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.traceless import seed

logger = logging.getLogger("hf_accum_fix")

Collate = Callable[[list[Any]], Any]

#: Times as many samples are drawn where they are of several kinds, to have enough of one.
_SEVERAL_KINDS = 4


class Rows:
    """The samples of a micro-batch as the data set gave them; a loader yields them instead of a batch."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)


@dataclass(frozen=True)
class Drawn:
    """What this rank would train on.

    Attributes:
        windows: this rank's samples of each global batch.
        collate: makes a micro-batch of samples, the same one at every call.
        notes: what the reader has to know.
    """

    windows: tuple[tuple[Any, ...], ...]
    collate: Collate
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """One way of cutting this rank's samples of a window: ``per_device`` samples x ``steps`` accumulation steps."""

    per_device: int
    steps: int

    def micro_batches(self, rows: Sequence[Any], collate: Collate) -> list[Any]:
        """The samples, split and collated; the last micro-batch may be short."""
        return [collate(list(rows[at : at + self.per_device])) for at in range(0, len(rows), self.per_device)]


def splits_of(samples: int, own: int, asked: Sequence[tuple[int, int] | int] | None) -> list[Split]:
    """The splits to verify: the two extremes, the user's own, and one with a short last window; or those asked for.

    Args:
        samples: of this rank's window.
        own: the user's per_device_train_batch_size.
        asked: pairs (samples of a micro-batch, accumulation steps), or the first of the two alone.

    Raises:
        OptionsError: if a split asked for does not hold the samples.
    """
    if asked is None:
        sizes = dict.fromkeys(min(size, samples) for size in (own, samples, 1))
        found = [Split(size, -(-samples // size)) for size in sizes]
        if samples > 1:
            ragged = next((size for size in range(2, samples) if samples % size), 1)
            found.append(Split(ragged, -(-samples // ragged) + 1))
        return found
    pairs = [(each, -(-samples // each)) if isinstance(each, int) and each > 0 else each for each in asked]
    if not pairs:
        raise OptionsError("got splits=[]; expected at least one split, or None for the usual ones")
    for pair in pairs:
        fits = isinstance(pair, tuple) and len(pair) == 2 and 1 <= pair[0] <= samples <= pair[0] * pair[1]
        if not fits:
            raise OptionsError(
                f"got {pair!r} in splits; expected pairs (samples of a micro-batch, accumulation steps) that hold "
                f"the {samples} samples of a rank, or the first alone, such as splits=[1, (2, {-(-samples // 2)})]"
            )
    return [Split(*pair) for pair in pairs if isinstance(pair, tuple)]


def draw(trainer: TrainerLike, windows: int, samples: Sequence[Any] | None) -> Drawn:
    """This rank's samples of the first windows, by the trainer's own loader, which starts anew afterwards.

    Args:
        trainer: the trainer, or a copy of it.
        windows: global batches wanted.
        samples: this rank's samples, instead of the data set's.

    Raises:
        UnsupportedSetupError: if they cannot be drawn without disturbing the training that follows.
    """
    size = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    notes: list[str] = []
    collate: Collate | None
    if samples is not None:
        rows, collate = list(samples), _collator(trainer)
    else:
        if trainer.train_dataset is not None and getattr(trainer.train_dataset, "__len__", _unknown)() == 0:
            raise UnsupportedSetupError("got an empty train data set; expected at least one sample")
        if trainer.train_dataset is None and type(trainer).get_train_dataloader is Trainer.get_train_dataloader:
            raise UnsupportedSetupError("got no train_dataset; expected one; give it to the trainer, or samples=[...]")
        loader = trainer.get_train_dataloader()
        _refuse_streams_that_run_out(loader)
        collate = getattr(loader, "collate_fn", None)
        first_rows = _first_rows
        # One of torch's that makes no batches yields those of its data set.
        if collate is None or not getattr(loader, "_auto_collation", True):
            notes.append(
                f"{type(loader).__name__} collates nothing: the rows of its batches were split anew, as padded"
            )
            first_rows = partial(_rows_of_batches, samples=trainer.args.per_device_train_batch_size)
            collate = _Once(_only)
        rows = list(first_rows(loader, windows * size))
    if not rows:
        raise UnsupportedSetupError("got no sample from the dataloader; expected one; look at dataloader_drop_last")
    # Several ranks go on together: one that drew one kind would wait for another that is refused.
    kinds = _kinds(collate, rows) if trainer.args.world_size == 1 else {}
    if len(kinds) > 1 and samples is not None:
        raise UnsupportedSetupError(
            f"got samples with {' and with '.join(map(describe, kinds))}; expected samples of one kind, since they are "
            "put into new micro-batches; give samples=[...] of one kind"
        )
    if len(kinds) > 1:
        kind, rows = next(iter(_kinds(collate, list(first_rows(loader, _SEVERAL_KINDS * windows * size))).items()))
        notes.append(f"the samples are of several kinds; only those with {describe(kind)} were split anew")
    groups = tuple(tuple(rows[at : at + size]) for at in range(0, min(len(rows), windows * size), size))
    if len(rows) < windows * size:
        notes.append(f"the data has {len(rows)} samples for a rank, fewer than the {windows * size} asked for")
    collate = fresh(collate)
    if _is_random(collate, list(groups[0])):
        notes.append("the collator is random: each sample was collated once, by itself, and padded on the right")
        together, collate = collate(list(groups[0])), _Once(collate)
        if not _is_as_long(together, collate(list(groups[0]))):
            raise UnsupportedSetupError(
                "the collator is random, and a batch is not its samples one after the other, so that it cannot be "
                "split; give the collator a fixed seed, or give samples=[...]"
            )
    return Drawn(groups, collate, tuple(notes))


def _kinds(collate: Collate, rows: Sequence[Any]) -> dict[Task, list[Any]]:
    """The samples by the labels that the collator makes of them; as one kind, if it takes no single sample."""
    found: dict[Task, list[Any]] = {}
    for place, row in enumerate(rows):
        seed(place)
        try:
            kind = task_of(fresh(collate)([row]))
        except Exception:
            # The split into single samples reports it.
            logger.debug("a sample was not collated by itself", exc_info=True)
            return {task_of(None): list(rows)}
        found.setdefault(kind, []).append(row)
    return found


def _collator(trainer: TrainerLike) -> Collate:
    """The collator of the trainer's own loader, which may take columns away first."""
    loader = trainer.get_train_dataloader() if trainer.train_dataset is not None else None
    collate: Collate = getattr(loader, "collate_fn", None) or trainer.data_collator
    return collate


def _first_rows(loader: Any, count: int) -> Iterator[Any]:
    """The first samples in the loader's own order, not collated; the loader may be used again."""
    found = 0
    with ExitStack() as stack:
        for each in (loader, getattr(loader, "base_dataloader", None)):
            if each is not None:
                stack.enter_context(overridden(each, "collate_fn", Rows))
                # Workers that outlive an epoch have a collator of their own.
                stack.enter_context(overridden(each, "_iterator", None))
        for batch in loader:
            if not isinstance(batch, Rows):
                raise UnsupportedSetupError(
                    f"{type(loader).__name__} yields {type(batch).__name__} past its collate_fn (a dispatched stream, "
                    "or a data set that is batched already), so its samples cannot be split anew; give samples=[...]"
                )
            yield from batch.rows
            found += len(batch.rows)
            if found >= count:
                return


def _rows_of_batches(loader: Any, count: int, samples: int) -> Iterator[Any]:
    """The first samples of a loader that collates by itself: its batches, row by row, or several rows to a sample.

    Args:
        loader: yields batches.
        count: samples wanted.
        samples: of a batch; one that has a multiple of as many rows holds groups, such as the passages of a query.
    """
    found = group = 0
    for batch in loader:
        sizes = {len(value) for value in batch.values() if has_rows(value)} if isinstance(batch, Mapping) else {0}
        rows = min(sizes, default=0)
        group = group or max(1, rows // samples if rows % samples == 0 else 1)
        if not rows or rows % group or any(size % rows for size in sizes):
            raise UnsupportedSetupError(
                f"{type(loader).__name__} has no collate_fn, and its {type(batch).__name__} does not hold as many rows "
                "for each sample, so that its samples cannot be split; give samples=[...]"
            )
        number = rows // group
        for place in range(number):
            yield {
                key: value[place * len(value) // number : (place + 1) * len(value) // number]
                if has_rows(value)
                else value
                for key, value in batch.items()
            }
        found += number
        if found >= count:
            return


def _only(rows: list[Any]) -> Any:
    return rows[0]


def _refuse_streams_that_run_out(loader: Any) -> None:
    """Refuse a stream that loses a sample to us; decide it without taking one."""
    dataset: Any = getattr(loader, "dataset", loader)
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        return
    while isinstance(inner := getattr(dataset, "dataset", None), IterableDataset):
        dataset = inner
    one, other = iter(dataset), iter(dataset)
    read = (type(dataset).__iter__, *((type(one).__iter__,) if hasattr(one, "__iter__") else ()))
    if one is other or any(_runs_out(each) for each in reached(dataset, *read)):
        raise UnsupportedSetupError(
            f"{type(dataset).__name__} is a stream that cannot be rewound: the training would lose the samples drawn "
            "here; give a sample of it, samples=[...]"
        )


def _runs_out(value: Any) -> bool:
    """Whether reading a sample removes it: an iterator, a queue, a pipe, a socket."""
    kind = type(value)
    # A file system has get and put as well, and is never empty.
    return any(hasattr(kind, name) for name in ("__next__", "recv", "poll", "get_nowait")) or all(
        hasattr(kind, name) for name in ("get", "put", "empty")
    )


def _unknown() -> int:
    return -1


# --- samples that a collator may change -------------------------------------------------------------------------------


def fresh(collate: Collate) -> Collate:
    """Hand the collator copies: it may pop fields of its samples, or write into them."""

    def on_copies(rows: list[Any]) -> Any:
        return collate([copied(row) for row in rows])

    return on_copies


def copied(value: Any) -> Any:
    """Copy a sample's containers, tensors and arrays; share what else it holds (images, readers)."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        mapping.update((key, copied(value[key])) for key in value)
        return mapping
    if type(value) in (list, tuple, set):
        return type(value)(map(copied, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        vars(record).update((name, copied(each)) for name, each in vars(value).items())
        return record
    return value


# --- a collator that draws at random ----------------------------------------------------------------------------------


def _is_random(collate: Collate, rows: list[Any]) -> bool:
    batches = []
    for number in (0, 1):
        seed(number)
        batches.append(collate(list(rows)))
    return not _equal(*batches)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) if isinstance(one, (int, float, str, bool, type(None))) else True


def _is_as_long(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(len(value) == len(other[key]) for key, value in one.items() if has_rows(value))


class _Once:
    """Collate each sample once, and make batches of the results."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._batches: dict[int, tuple[Any, Mapping[str, Any]]] = {}

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        for row in rows:
            if id(row) not in self._batches:
                seed(len(self._batches))
                self._batches[id(row)] = (row, self._collate([row]))
        batches = [self._batches[id(row)][1] for row in rows]
        return {key: _stacked(key, [batch[key] for batch in batches]) for key in batches[0]}


def _stacked(key: str, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [each for value in values for each in value]
    rows = {len(value) if isinstance(value, Tensor) and value.ndim > 0 else 0 for value in values}
    if 0 in rows or len(rows) > 1:
        raise UnsupportedSetupError(
            f"{key!r} of single samples cannot be put together; give the collator a fixed seed, or give samples=[...]"
        )
    if values[0].ndim == 2:
        width, fill = max(value.shape[1] for value in values), -100 if "label" in key else 0
        values = [F.pad(value, (0, width - value.shape[1]), value=fill) for value in values]
    return torch.cat(values)
