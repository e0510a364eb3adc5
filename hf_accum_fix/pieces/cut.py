"""Cut a micro-batch by samples, as the split was cut that has shown that its loss adds up.

Its rows are one block, or two or three of which each has a row of every sample (DPO's chosen and rejected texts); or
rows next to one another belong together, in groups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from hf_accum_fix.counting.items import has_rows, sample_count
from hf_accum_fix.learning.join import can_divide, join, narrow, row_sizes, take_rows

#: Places of rows in a block.
Places = Sequence[int]


def rows_of(batch: Any) -> int:
    """Its rows; 1, if nothing in it has rows."""
    return sample_count(batch) if _has_rows(batch) else 1


def _has_rows(batch: Any) -> bool:
    return isinstance(batch, Mapping) and any(map(has_rows, batch.values()))


def width_of(batch: Any) -> int:
    """The numbers in a row of the widest input: of a text its tokens, with padding."""
    return max((size for _, size in row_sizes(batch)), default=1)


def places_in(batch: Any, blocks: int) -> range:
    """Every place of a block."""
    return range(max(rows_of(batch) // blocks, 1))


def can_be_cut(batch: Any, blocks: int) -> bool:
    """Whether every input has rows of samples, in so many blocks."""
    rows = rows_of(batch)
    return _has_rows(batch) and rows % blocks == 0 and can_divide(batch, rows // blocks if blocks > 1 else 0)


def in_pieces(places: Places, group: int, at_most: int) -> list[Places]:
    """Places of a block in as few pieces as can be, of alike length, groups whole; ``at_most``: places of a piece."""
    groups = -(-len(places) // group)
    count = -(-groups // max(at_most // group, 1))
    ends = [len(places) if at == count else at * groups // count * group for at in range(count + 1)]
    return [places[start:end] for start, end in pairwise(ends)]


def packed(
    batches: Sequence[Any], blocks: int, group: int, limit: int | None, *, has_decoder: bool
) -> list[Any] | None:
    """The samples of micro-batches in as few as are within a size (rows times width), alike lengths together.

    Each is as narrow as its texts, as the samples were that have shown how the loss adds up. None: they do not join.
    """
    wholes = list(batches)
    # Pairs of them, so that no sample is copied more often than need be.
    while len(wholes) > 1:
        joined = [join(one, other, blocks) for one, other in zip(wholes[::2], wholes[1::2], strict=False)]
        if any(each is None for each in joined):
            return None
        wholes = [*joined, *wholes[2 * len(joined) :]]
    [whole] = wholes
    places = places_in(whole, blocks)
    lengths = _lengths(whole, blocks)
    groups = [places[at : at + group] for at in range(0, len(places), group)]
    groups.sort(key=lambda its: max(lengths[place] for place in its), reverse=True)
    micro_batches, width = list[list[int]](), 0
    for its in groups:
        # The first is the longest.
        if not micro_batches or (limit is not None and (len(micro_batches[-1]) + group) * blocks * width > limit):
            micro_batches.append([])
            width = max(lengths[place] for place in its)
        micro_batches[-1] += its
    found = [taken(whole, each, blocks) for each in micro_batches]
    for each in found:
        narrowed = narrow(each, has_decoder=has_decoder)
        each.update({key: value.contiguous() for key, value in narrowed.items() if isinstance(value, Tensor)})
    return found


def _lengths(batch: Any, blocks: int) -> list[int]:
    """The width that each place needs: of its longest text, or of what is wider than any; of all, without a mask."""
    mask, height, width = batch.get("attention_mask"), rows_of(batch) // blocks, width_of(batch)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != blocks * height or width > mask.shape[1]:
        return [width] * height
    # One wait for the device a window.
    return [int(each) for each in (mask != 0).sum(1).view(blocks, height).amax(0).tolist()]


def taken(batch: Any, places: Places, blocks: int) -> Any:
    """The samples of a micro-batch at these places of each block, as a batch of its class."""
    height = sample_count(batch) // blocks
    rows = [block * height + place for block in range(blocks) for place in places]
    piece = copy.copy(batch)
    piece.update(take_rows(batch, rows, height if blocks > 1 else 0))
    return piece
