"""Cut a batch into rows, narrow and join them, as its collator would have done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.accumulation.items import has_rows, sample_count
from hf_accum_fix.accumulation.rules import has_ignored

Batch = Mapping[str, Any]
#: A batch, and two parts of it.
Parts = tuple[Batch, Batch, Batch]


def one_row(batch: Batch, row: int) -> Parts:
    """A batch, one of its rows, and all others."""
    return divide(batch, [int(each != row) for each in range(sample_count(batch))])


def narrow(part: Batch, *, has_decoder: bool) -> dict[str, Any]:
    """A part of a batch without the columns that only pad it: each text by its own mask, a decoder's by its targets."""
    masks = {key.replace("attention_mask", ""): value != 0 for key, value in masks_of(part)}
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


def masks_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The masks of a batch's texts, with their names."""
    for key, value in batch.items():
        if "attention_mask" in key and isinstance(value, Tensor) and value.ndim == 2:
            yield key, value


def join_all(batches: Sequence[Batch]) -> Batch | None:
    """Micro-batches as one; None as for `joined`."""
    whole: Batch | None = batches[0]
    for each in batches[1:]:
        whole = whole and join(whole, each)
    return whole


def divide(batch: Batch, group_of: Sequence[int], height: int = 0) -> Parts:
    """A batch, the rows of its first group, and all others; ``group_of``: by row; ``height`` as for `some_rows`."""
    first = min(group_of)
    one = [row for row, group in enumerate(group_of) if group == first]
    other = [row for row, group in enumerate(group_of) if group != first]
    return batch, take_rows(batch, one, height), take_rows(batch, other, height)


def widths_of(batch: Batch) -> set[tuple[str, int]]:
    """The number of columns of inputs that have rows and columns."""
    each = (pair for part in mappings_in(batch) for pair in part.items())
    return {(key, value.shape[1]) for key, value in each if isinstance(value, Tensor) and value.ndim == 2}


def mappings_in(batch: Batch) -> Iterator[Batch]:
    """A batch, and the mappings in it (texts to forget and to retain)."""
    yield batch
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from mappings_in(value)


def can_divide(batch: Batch, *heights: int) -> bool:
    """Whether a batch can be split by rows: every input has one of these numbers of rows."""
    return all(_is_plain(value) and len(value) in heights for value in _sized(batch))


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


def join(one: Batch, other: Batch, *, interleaved: bool = False) -> dict[str, Any] | None:
    """Two micro-batches as one, padded on the side where they are; None where that cannot be done safely.

    A batch joined with itself keeps what has no rows.
    """
    result: dict[str, Any] = {}
    on_left = _pads_on_left(one) | _pads_on_left(other)
    for key, value in one.items():
        second: Any = other.get(key)
        joined: Any = None
        if isinstance(value, Tensor) and isinstance(second, Tensor):
            joined = _concatenated(key, value, second, interleaved=interleaved, on_left=key in on_left)
        elif isinstance(value, Mapping) and isinstance(second, Mapping):
            joined = join(value, second, interleaved=interleaved)
        elif not interleaved and isinstance(value, np.ndarray) and value.ndim and value is second:
            joined = np.concatenate([value, value])
        elif not interleaved and isinstance(value, (list, tuple)) and type(value) is type(second):
            joined = type(value)([*value, *second])
        elif key.startswith("max_") and isinstance(value, int) and isinstance(second, int):
            # A size of the batch, as of its longest row.
            joined = max(value, second)
        if joined is None and value is not None and value is not second and not isinstance(value, (bool, str)):
            return None
        result[key] = value if joined is None else joined
    return result


def _pads_on_left(batch: Batch) -> set[str]:
    """The inputs that are padded on the left, as wide as the mask that shows it."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask[:, 0].all()) or not bool(mask[:, -1].all()):
        return set()
    return {key for key, value in batch.items() if isinstance(value, Tensor) and value.shape[:2] == mask.shape}


def _concatenated(key: str, one: Tensor, other: Tensor, *, interleaved: bool, on_left: bool) -> Tensor | None:
    """Two inputs as one; position ids of three axes have their samples second."""
    if one.ndim == 0 or one.ndim != other.ndim or not (_is_plain(one) and _is_plain(other)):
        return None
    if one.ndim == 2 or (one.ndim > 1 and not one.is_floating_point()):
        width = max(one.shape[-1], other.shape[-1])
        fill = -100 if "label" in key or has_ignored(one) or has_ignored(other) else 0
        more = [width - each.shape[-1] for each in (one, other)]
        sides = [(each, 0) if on_left else (0, each) for each in more]
        one, other = (F.pad(each, side, value=fill) for each, side in zip((one, other), sides, strict=True))
    axis = int("position" in key and one.ndim == 3 and len(one) == 3)
    if one.movedim(axis, 0).shape[1:] != other.movedim(axis, 0).shape[1:]:
        return None
    if not interleaved:
        return torch.cat([one, other], axis)
    return torch.stack([one, other], axis + 1).flatten(axis, axis + 1) if one.shape == other.shape else None
