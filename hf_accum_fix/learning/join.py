"""Two micro-batches as one, and rows alone, as their collator would have made them: they show whether a loss adds up.

Two micro-batches are joined in one, two or three blocks of rows (DPO's chosen and rejected texts); the first in which
the loss adds up decides. Where that is one block, some rows stand alone, each part as narrow as its own mask: padding
that enters a mean, and what samples have in common, may add up in two micro-batches of equal width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.counting.items import has_rows, sample_count
from hf_accum_fix.counting.rules import has_ignored, ways_of_counting

Batch = Mapping[str, Any]
#: Blocks of rows, and rows that belong together next to one another.
_BLOCKS, _GROUPS = (1, 2, 3), (1, 2, 3, 4)
#: Parts of the names of inputs that are no rows of samples: the edges of a graph, whose rows are its nodes.
_OF_GRAPHS = ("edge_index", "adj")
#: Samples that show what they have in common, as two may not.
_ENOUGH = 4


class Split(NamedTuple):
    """A batch, and two parts that hold all of its samples; or three batches."""

    whole: Batch
    one: Batch
    other: Batch
    blocks: int = 0  # of rows, in which the parts are joined; 0: they are rows, or what runs
    group: int = 0  # rows of the first part, where both are as narrow as their own; 0: they are not narrowed
    apart: bool = True  # the parts are parts of the whole

    @property
    def are_distinct(self) -> bool:
        """Whether the parts are different batches: not of a doubled one."""
        return self.one is not self.other

    @property
    def shows_coupling(self) -> bool:
        """Whether coupled samples would be detected."""
        return self.apart and self.are_distinct

    @property
    def pads(self) -> bool:
        """Whether a part is padded further in the whole."""
        return self.apart and bool(row_sizes(self.one) ^ row_sizes(self.other))


def splits(window: Sequence[Batch], *, has_decoder: bool = False) -> Iterator[Split]:
    """What to run of a window's samples, most reliable first; a model may be unable to run some of them.

    ``has_decoder``: labels are as wide as a decoder's texts, not as the inputs.
    """
    batch, *others = _ordered(window)
    for blocks in _BLOCKS:
        joined = ((join(batch, other, blocks), other) for other in others)
        pairs = ((whole, batch, other) for whole, other in joined if whole is not None)
        found = next(pairs, None) or _halves(batch, blocks)
        if found is not None:
            yield Split(*found, blocks=blocks)
    whole: Batch = batch
    for other in others:
        # A micro-batch that cannot be joined is left out.
        whole = (sample_count(whole) < _ENOUGH and join(whole, other)) or whole
    yield from _narrowed(whole, has_decoder=has_decoder)
    if sample_count(batch) > 1 and can_divide(batch):
        rows = range(1, sample_count(batch))
        yield Split(batch, take_rows(batch, [0]), take_rows(batch, rows))
    if (twice := join(batch, batch)) is not None and any(twice[key] is not batch[key] for key in batch):
        yield Split(twice, batch, batch)
    one, other, *_ = (*others, batch, batch)
    yield Split(batch, one, other, apart=False)
    for each in (batch, *(other for other in window if other is not batch)):
        yield Split(each, each, each, apart=False)


def _ordered(window: Sequence[Batch]) -> list[Batch]:
    """Micro-batches, the one with most targets first, then those of another width, of which the joined one is small."""

    def targets(batch: Batch) -> float:
        return float(next(ways_of_counting(batch)).count(batch))

    batch, *rest = sorted(window, key=targets, reverse=True)
    # What has no target shows nothing, but beside a single sample.
    others = [each for each in reversed(rest) if targets(each)] or (rest if sample_count(batch) == 1 else [])
    return [batch, *sorted(others, key=lambda each: (not row_sizes(batch) ^ row_sizes(each), _size(batch, each)))]


def _size(one: Batch, other: Batch) -> int:
    """Positions of two micro-batches as one, in the memory of which it has to run."""
    width = max((columns for _, columns in row_sizes(one) | row_sizes(other)), default=1)
    return (sample_count(one) + sample_count(other)) * width


def _halves(batch: Batch, blocks: int) -> tuple[Batch, Batch, Batch] | None:
    """One micro-batch, and the halves of it in which so many blocks of rows have a half each; None: it has none."""
    rows = sample_count(batch)
    height, rest = divmod(rows, blocks)
    if height < 2 or rest or not can_divide(batch, height if blocks > 1 else 0):
        return None
    first = [row for row in range(rows) if row % height < height // 2]
    last = [row for row in range(rows) if row % height >= height // 2]
    return batch, take_rows(batch, first, height), take_rows(batch, last, height)


def _narrowed(whole: Batch, *, has_decoder: bool) -> Iterator[Split]:
    """The first rows with a target and all others, and the last ones and all others, as narrow as they are."""
    rows = sample_count(whole)
    if rows < 2 or not can_divide(whole):
        return
    rule = next(ways_of_counting(whole))
    counts = [float(rule.count(take_rows(whole, [row]))) for row in range(rows)]
    first = next((row for row, count in enumerate(counts) if count), 0)
    for size in (size for size in _GROUPS if size == 1 or (size < rows and rows % size == 0)):
        for start in dict.fromkeys((first - first % size, rows - size)):
            alone = range(start, start + size)
            rest = [row for row in range(rows) if row not in alone]
            one, other = (narrow(take_rows(whole, its), has_decoder=has_decoder) for its in (alone, rest))
            yield Split(whole, one, other, group=size)


def narrow(part: Batch, *, has_decoder: bool) -> dict[str, Any]:
    """A part of a batch without the columns that only pad it: each text by its own mask, a decoder's by its targets."""
    texts = {key.replace("attention_mask", ""): value for key, value in part.items() if "attention_mask" in key}
    masks = {key: mask != 0 for key, mask in texts.items() if isinstance(mask, Tensor) and mask.ndim == 2}
    labels = part.get("labels")
    targets = labels != -100 if has_decoder and isinstance(labels, Tensor) and labels.ndim == 2 else None

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return narrow(value, has_decoder=has_decoder)
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        text = max((each for each in masks if each and each in key), key=len, default="")
        kept = masks.get(text) if text or not key.startswith("decoder") else None
        is_decoders = kept is None or value.shape[:2] != kept.shape
        if is_decoders:
            kept = targets if "label" in key or key.startswith("decoder") else None
        if kept is None or value.shape[:2] != kept.shape:
            return value
        columns = kept.any(0).nonzero().flatten().tolist() or [0]
        own = slice(0 if is_decoders else columns[0], columns[-1] + 1)
        rest = torch.cat([value[:, : own.start], value[:, own.stop :]], 1)
        # Another text, or its labels, may be as wide by chance.
        is_labels = "label" in key or has_ignored(value)
        may_be_others = value.ndim == 2 and "position" not in key and key != "input_ids" and rest.numel() > 0
        padding = -100 if is_labels else rest[0, 0] if may_be_others else rest
        return value if bool((rest != padding).any()) else value[:, own]

    return {key: cut(key, value) for key, value in part.items()}


def row_sizes(batch: Batch) -> set[tuple[str, int]]:
    """The numbers that a row has of inputs that have rows and columns."""
    each = ((key, v) for part in _mappings_in(batch) for key, v in part.items() if isinstance(v, Tensor))
    return {(key, math.prod(v.shape[1:])) for key, v in each if v.ndim > 1 and _is_plain(v)}


def _mappings_in(batch: Batch) -> Iterator[Batch]:
    """A batch, and the mappings in it (texts to forget and to retain)."""
    yield batch
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from _mappings_in(value)


def can_divide(batch: Batch, height: int = 0) -> bool:
    """Whether a batch can be split by rows: every input has as many, or ``height``, where no input is a mapping."""
    parts, heights = [*_mappings_in(batch)], {sample_count(batch), height or sample_count(batch)}
    if height and len(parts) > 1:
        return False
    values = (pair for part in parts for pair in part.items() if has_rows(pair[1]))
    return all(
        _is_plain(v) and len(v) in heights and not (_is_of_graph(k, v) or _is_crosswise(k, v)) for k, v in values
    )


def _is_of_graph(key: str, value: Any) -> bool:
    """Whether its rows are no samples: edges, or PyG's ``batch`` (the graph of each node, from 0 on) and ``ptr``."""
    is_index = key in ("batch", "ptr") and isinstance(value, Tensor) and value.ndim == 1 and not value[:1].any()
    return any(each in key for each in _OF_GRAPHS) or (is_index and bool((value.diff() >= 0).all()))


def _is_crosswise(key: str, value: Any) -> bool:
    """Whether its samples are second: position ids of three axes."""
    return "position" in key and isinstance(value, Tensor) and value.ndim == 3 and len(value) == 3


def _is_plain(value: Any) -> bool:
    """Whether a value can be indexed by rows: sparse and nested tensors cannot."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)


def take_rows(batch: Batch, rows: Sequence[int], height: int = 0) -> dict[str, Any]:
    """Some rows; an input of ``height`` rows, the first block, has one row for each of that block."""

    def taken(value: Any) -> Any:
        if isinstance(value, Mapping):
            return take_rows(value, rows)
        chosen = [row for row in rows if row < height] if has_rows(value) and len(value) == height else [*rows]
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
            return value[chosen]
        return type(value)(value[row] for row in chosen) if type(value) in (list, tuple) else value

    return {key: taken(value) for key, value in batch.items()}


def join(one: Batch, other: Batch, blocks: int = 1) -> dict[str, Any] | None:
    """Two micro-batches as one, padded on the side where they are; None where that cannot be done safely.

    Several ``blocks``: both parts of the first, then of the second. A batch joined with itself keeps what has no rows.
    """
    numbers_on = blocks == 1 and all(_is_of_graph("batch", each.get("batch")) for each in (one, other))
    if any(each in key and not (numbers_on and key == "edge_index") for key in one for each in _OF_GRAPHS):
        return None
    result: dict[str, Any] = {}
    on_left = _pads_on_left(one) | _pads_on_left(other)
    for key, value in one.items():
        second: Any = other.get(key)
        joined: Any = None
        if isinstance(value, Tensor) and isinstance(second, Tensor) and key == "edge_index":
            joined = torch.cat([value, second + len(one["batch"])], 1) if len(value) == len(second) == 2 else None
        elif isinstance(value, Tensor) and isinstance(second, Tensor):
            joined = _concatenated(key, value, second, on_left=key in on_left)
        elif isinstance(value, Mapping) and isinstance(second, Mapping):
            joined = join(value, second) if blocks == 1 else None
        elif blocks == 1 and isinstance(value, np.ndarray) and value.ndim and value is second:
            joined = np.concatenate([value, value])
        elif isinstance(value, (list, tuple)) and type(value) is type(second):
            joined = type(value)([*value, *second])
        elif key.startswith("max_") and isinstance(value, int) and isinstance(second, int):
            # A size of the batch, as of its longest row.
            joined = max(value, second)
        if joined is None and value is not None and value is not second and not isinstance(value, (bool, str)):
            return None
        result[key] = value if joined is None else joined
    return result if blocks == 1 else _in_blocks(result, sample_count(one), sample_count(other), blocks)


def _in_blocks(joined: dict[str, Any], one: int, other: int, blocks: int) -> dict[str, Any] | None:
    """A batch of ``one`` and ``other`` rows, ordered by blocks; None: it has none. What has fewer rows stays."""
    heights, rows = ((0, one // blocks), (one, other // blocks)), one + other
    whole = {key: value for key, value in joined.items() if has_rows(value) and len(value) == rows}
    if one % blocks or other % blocks or not whole or not all(map(_is_plain, whole.values())):
        return None
    order = [start + block * n + row for block in range(blocks) for start, n in heights for row in range(n)]
    return joined | take_rows(whole, order)


def _pads_on_left(batch: Batch) -> set[str]:
    """The inputs that are padded on the left, as wide as the mask that shows it."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask[:, 0].all()) or not bool(mask[:, -1].all()):
        return set()
    return {key for key, value in batch.items() if isinstance(value, Tensor) and value.shape[:2] == mask.shape}


def _concatenated(key: str, one: Tensor, other: Tensor, *, on_left: bool) -> Tensor | None:
    """Two inputs as one, padded along the axis that differs; position ids of three axes have their samples second."""
    if one.ndim == 0 or one.ndim != other.ndim or not (_is_plain(one) and _is_plain(other)):
        return None
    if _is_of_graph(key, one) and _is_of_graph(key, other):
        other = other + one[-1] + 1 if key == "batch" else other[1:] + one[-1]
    axis = int(_is_crosswise(key, one))
    wider = [at for at in range(one.ndim) if at != axis and one.shape[at] != other.shape[at]]
    if len(wider) == 1:
        width = max(one.shape[wider[0]], other.shape[wider[0]])
        fill = -100 if "label" in key or has_ignored(one) or has_ignored(other) else 0
        inner = [0, 0] * (one.ndim - 1 - wider[0])
        more = [width - each.shape[wider[0]] for each in (one, other)]
        sides = [[*inner, each, 0] if on_left else [*inner, 0, each] for each in more]
        one, other = (F.pad(each, side, value=fill) for each, side in zip((one, other), sides, strict=True))
    alike = one.movedim(axis, 0).shape[1:] == other.movedim(axis, 0).shape[1:]
    return torch.cat([one, other], axis) if alike else None
