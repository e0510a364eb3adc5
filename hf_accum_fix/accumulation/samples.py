"""The batches that a loss is observed on: a batch, and two parts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.accumulation.rules import BLOCKS, has_ignored, listed_targets, ways_of_counting
from hf_accum_fix.accumulation.window import has_rows, sample_count

Batch = Mapping[str, Any]
#: A batch, and two parts of it.
Parts = tuple[Batch, Batch, Batch]


class Split(NamedTuple):
    """A batch, and two parts that hold all of its samples; or three batches.

    Attributes:
        apart: the parts are parts of the whole.
        shows_coupling: coupled samples would be detected.
        tasks: the parts are micro-batches that may be of two tasks.
        kind: which rows it assumes to belong together; all splits of a kind have to show the same.
        decides: it is the last of its kind.
    """

    whole: Batch
    one: Batch
    other: Batch
    apart: bool = True
    shows_coupling: bool = True
    tasks: bool = False
    kind: str = ""
    decides: bool = True


def splits(window: Sequence[Batch]) -> Iterator[Split]:
    """Splits of a window's samples, most reliable first; a model may be unable to run some of them.

    Rows of its most informative micro-batch; two micro-batches and the batch of both; rows in two or three blocks, one
    row of each a sample (DPO, TPO); a doubled micro-batch; and unchanged micro-batches.
    """
    ordered = sorted(window, key=_informative, reverse=True)
    batch = ordered[0]
    # The least similar one with targets comes first.
    others = [each for each in reversed(ordered[1:]) if _informative(each)[0]] or ordered[1:]
    # If a column names tasks, observe them together.
    unseen = _unseen(window, batch)
    others.sort(key=lambda each: -len(unseen & _marks(each)))
    rows = sample_count(batch)
    by_row = _has_rows_alone(batch, rows)
    if unseen and by_row and (both := _merged(batch, others[0])) is not None:
        yield Split(both, batch, others[0], tasks=True)
    alike = [batch, *(each for each in others if sample_count(each) == rows)]
    by_rows = [each for each in alike if _has_rows_alone(each, rows)]
    if by_row and unseen:
        yield from _of_one_kind("rows", map(_row_alone, by_rows))
    elif by_row:
        yield Split(*_row_alone(batch))
    # The last one is most similar, so a sum over tasks has fewer terms there.
    for other in () if by_row else others[:: max(len(others) - 1, 1)]:
        if (both := _merged(batch, other)) is not None:
            yield Split(both, batch, other, tasks=bool(unseen & _marks(other)), kind="micro-batches")
    # Rows that belong together in groups.
    for size in (size for size in range(2, rows // 2 + 1) if by_row and rows % size == 0):
        yield from _of_one_kind(f"groups of {size}", _in_groups(by_rows, size))
    blocks = [each for each in sorted({blocks for _, blocks in BLOCKS}) if rows % each == 0]
    for number in blocks:
        height = rows // number
        flat = [each for each in alike if not any(isinstance(value, Mapping) for value in each.values())]
        in_blocks = [each for each in flat if all(_is_plain(v) and len(v) in (rows, height) for v in _sized(each))]
        if height > 1 and in_blocks and in_blocks[0] is batch:
            yield from _of_one_kind(f"{number} blocks", _across_blocks(in_blocks, height, number))
    for kind in ("merged", "interleaved") if by_row else ():
        if (kind == "merged" and not unseen) or (kind == "interleaved" and blocks):
            merged = ((_merged(batch, other, interleaved=kind == "interleaved"), batch, other) for other in others[:3])
            yield from _of_one_kind(kind, ((both, one, two) for both, one, two in merged if both is not None))
    if (twice := _twice(batch)) is not None:
        yield Split(twice, batch, batch, shows_coupling=False)
    one, other, *_ = (*others, batch, batch)
    yield Split(batch, one, other, apart=False, shows_coupling=False)
    for each in ordered:
        yield Split(each, each, each, apart=False, shows_coupling=False)


def _of_one_kind(kind: str, found: Iterable[Parts]) -> Iterator[Split]:
    """At most three splits that assume the same rows to belong together, since one may fit by chance."""
    some = list(islice(found, 3))
    for place, each in enumerate(some):
        yield Split(*each, kind=kind, decides=place + 1 == len(some))


def _row_alone(batch: Batch) -> Parts:
    """The row with the fewest targets, and the others."""
    rows = sample_count(batch)
    least = _least_row(batch, rows)
    return batch, _rows(batch, [least]), _rows(batch, [row for row in range(rows) if row != least])


def _in_groups(batches: Sequence[Batch], size: int) -> Iterator[Parts]:
    """One group of ``size`` rows, and the others."""
    rows = sample_count(batches[0])
    # Of two groups the second leaves the same parts as the first.
    for start in range(0, rows if 2 * size < rows else size, size):
        group, rest = [*range(start, start + size)], [*range(start), *range(start + size, rows)]
        yield from ((each, _rows(each, group), _rows(each, rest)) for each in batches)


def _across_blocks(batches: Sequence[Batch], height: int, blocks: int) -> Iterator[Parts]:
    """One row of every block of ``height`` rows, and the others: a pair (DPO), or a triple (TPO)."""
    for row in range(height if height > 2 else 1):
        its = [each for each in range(blocks * height) if each % height == row]
        rest = [each for each in range(blocks * height) if each % height != row]
        yield from ((each, _of_blocks(each, its, height), _of_blocks(each, rest, height)) for each in batches)


def _informative(batch: Batch) -> tuple[bool, bool, int, float]:
    """Sort key of micro-batches: how many rules differ in them, and their targets."""
    # Halves differ in any batch, as do masks with and without their first position.
    rules = [rule for rule in ways_of_counting(batch) if not (rule.block or (rule.shift and not rule.ignore_index))]
    counts = [float(rule.count(batch)) for rule in rules]
    return counts[0] > 0, sample_count(batch) > 1, len(set(counts)), counts[0]


def _marks(batch: Batch) -> set[tuple[str, int]]:
    """The values in columns of integers, which may name tasks."""
    vectors = [(key, value) for key, value in batch.items() if isinstance(value, Tensor) and value.ndim == 1]
    columns = [(key, value) for key, value in vectors if not value.is_floating_point() and "label" not in key]
    return {(key, each) for key, value in columns for each in value.tolist()}


def _unseen(window: Sequence[Batch], batch: Batch) -> set[tuple[str, int]]:
    """The values that only other micro-batches have, of columns with few values."""
    marks = set[tuple[str, int]]().union(*map(_marks, window))
    few = {
        key for key, count in Counter(key for key, _ in marks).items() if 2 * count <= sum(map(sample_count, window))
    }
    return {(key, each) for key, each in marks - _marks(batch) if key in few}


def _has_rows_alone(batch: Batch, rows: int) -> bool:
    """Whether a batch can be split by rows: it has several samples, and every input has as many rows."""
    return rows > 1 and all(_is_plain(value) and len(value) == rows for value in _sized(batch))


def _is_plain(value: Any) -> bool:
    """Whether a value can be indexed by rows: sparse and nested tensors cannot."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)


def _sized(batch: Batch) -> Iterator[Any]:
    """The values that may have a row for each sample, also inside nested inputs."""
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from _sized(value)
        elif has_rows(value):
            yield value


def _least_row(batch: Batch, rows: int) -> int:
    """The row with the fewest targets above 0; of listed targets the one furthest from the mean."""
    listed = next(listed_targets(batch), None)
    if listed is not None:
        counts = [float(listed.count(_rows(batch, [row]))) for row in range(rows)]
        return max(range(rows), key=lambda row: abs(counts[row] - sum(counts) / rows))
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        return 0
    counts = (labels != -100).flatten(1).sum(1).tolist() if labels.ndim > 1 else (labels != -100).tolist()
    return min(range(rows), key=lambda row: (counts[row] == 0, counts[row]))


def _rows(batch: Batch, rows: list[int]) -> dict[str, Any]:
    def taken(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _rows(value, rows)
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
            return value[rows]
        return type(value)(value[row] for row in rows) if type(value) in (list, tuple) else value

    return {key: taken(value) for key, value in batch.items()}


def _of_blocks(batch: Batch, rows: list[int], height: int) -> dict[str, Any]:
    """Rows of a batch in blocks; inputs as high as one block have one row for each row of the first."""
    each = {key: value for key, value in batch.items() if has_rows(value) and len(value) == height}
    every = {key: value for key, value in batch.items() if key not in each}
    return {**_rows(every, rows), **_rows(each, [row for row in rows if row < height])}


def _merged(one: Batch, other: Batch, *, interleaved: bool = False) -> dict[str, Any] | None:
    """Two micro-batches as one, padded on the right; None where that cannot be done safely."""
    result: dict[str, Any] = {}
    for key, value in one.items():
        second = other.get(key)
        if isinstance(value, Tensor) and isinstance(second, Tensor):
            if value.ndim == 0 or value.ndim != second.ndim or (interleaved and len(value) != len(second)):
                return None
            if value.ndim == 2 or not value.is_floating_point():
                width = max(value.shape[-1], second.shape[-1])
                fill = -100 if "label" in key or has_ignored(value) or has_ignored(second) else 0
                value, second = (
                    F.pad(each, (0, width - each.shape[-1]), value=fill) if each.ndim > 1 else each
                    for each in (value, second)
                )
            if value.shape[1:] != second.shape[1:]:
                return None
            result[key] = torch.stack([value, second], 1).flatten(0, 1) if interleaved else torch.cat([value, second])
        elif isinstance(value, list) and isinstance(second, list) and not interleaved:
            result[key] = [*value, *second]
        elif isinstance(value, (bool, str)) or value is None:
            result[key] = value
        else:
            return None
    return result


def _twice(batch: Batch) -> dict[str, Any] | None:
    """A doubled batch; position ids of three axes have their samples second. None: it has nothing to double."""
    doubled = {key: _doubled(key, value) for key, value in batch.items()}
    return doubled if any(doubled[key] is not batch[key] for key in batch) else None


def _doubled(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _twice(value) or value
    if isinstance(value, Tensor):
        of_positions = "position" in key and value.ndim == 3 and len(value) == 3
        return torch.cat([value, value], int(of_positions)) if value.ndim and _is_plain(value) else value
    if isinstance(value, np.ndarray):
        return np.concatenate([value, value]) if value.ndim else value
    return type(value)([*value, *value]) if type(value) in (list, tuple) else value
