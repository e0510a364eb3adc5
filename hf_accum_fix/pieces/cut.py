"""Cut a micro-batch by samples, as the split was cut that has shown that its loss adds up.

Its rows are one block, or two or three of which each has a row of every sample (DPO's chosen and rejected texts); or
rows next to one another belong together, in groups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hf_accum_fix.counting.items import has_rows, sample_count
from hf_accum_fix.learning.join import can_divide, row_sizes, take_rows

#: Places of rows in a block.
Places = Sequence[int]


def rows_of(batch: Any) -> int:
    """Its rows; 1, if nothing in it has rows."""
    return sample_count(batch) if isinstance(batch, Mapping) and any(map(has_rows, batch.values())) else 1


def width_of(batch: Any) -> int:
    """The numbers in a row of the widest input: of a text its tokens, with padding."""
    return max((size for _, size in row_sizes(batch)), default=1)


def places_in(batch: Any, blocks: int) -> range:
    """Every place of a block."""
    return range(max(rows_of(batch) // blocks, 1))


def can_be_cut(batch: Any, blocks: int) -> bool:
    """Whether every input has rows of samples, in so many blocks."""
    rows = rows_of(batch)
    if rows < 2:
        return False
    # Position ids of three axes have their samples second.
    crosswise = any("position" in key and getattr(value, "ndim", 0) == 3 for key, value in batch.items())
    return rows % blocks == 0 and not crosswise and can_divide(batch, rows // blocks if blocks > 1 else 0)


def in_pieces(places: Places, group: int, at_most: int) -> list[Places]:
    """Places of a block in as few pieces as can be, of alike length, groups whole; ``at_most``: places of a piece."""
    groups = -(-len(places) // group)
    count = -(-groups // max(at_most // group, 1))
    ends = [len(places) if at == count else at * groups // count * group for at in range(count + 1)]
    return [places[start:end] for start, end in pairwise(ends)]


def taken(batch: Any, places: Places, blocks: int) -> Any:
    """The samples of a micro-batch at these places of each block, as a batch of its class."""
    height = sample_count(batch) // blocks
    rows = [block * height + place for block in range(blocks) for place in places]
    piece = copy.copy(batch)
    piece.update(take_rows(batch, rows, height if blocks > 1 else 0))
    return piece
