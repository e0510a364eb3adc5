"""Pack a global batch into micro-batches by length, so that almost nothing is padded.

The gradient of the global batch is  sum over rows of grad S_row / N,  and every micro-batch is divided by one number
(see ``window.py``). A row's S does not depend on its neighbours, nor N on anything but the set: any partition
of the same rows into ``G`` micro-batches on each of ``W`` ranks, of any sizes, has one gradient. So take the cheapest:

1. Sort the rows by length and split them into ``G * W`` runs: swapping the rows of two micro-batches into order
   lengthens neither.
2. Of the splits with micro-batches under a cap, take the one with the fewest padded tokens. The cap is at most ``b``
   times the longest row, so that peak memory never exceeds stock's in that window.
3. If ranks wait for the slowest once a window (DDP), assign the micro-batches longest first, under a cap somewhat above
   the tightest that fits, or the tightest. If they wait in every micro-batch (FSDP, ZeRO-3), take the tightest at once.

The number of micro-batches is never changed: fewer would break loops that step after every ``G``.

Everything is in padded tokens: rows times the longest of them. Pure; no tensor, no randomness.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hf_accum_fix.errors import OptionsError

#: Positions of the rows of one micro-batch.
MicroBatch: TypeAlias = list[int]
#: First and last place of a micro-batch in the sorted window, the last one excluded.
_Run: TypeAlias = tuple[int, int]

#: Times the tightest cap that fits: looser leaves a rank with too large a micro-batch, tighter pads more (measured).
_ROOMY = 2.5
#: A slowest rank within this factor of the least there can be is not improved further.
_GOOD_ENOUGH = 1.015


def pack(
    lengths: Sequence[int],
    steps: int,
    ranks: int = 1,
    *,
    rows: int,
    max_rows: int | None = None,
    lockstep: bool = False,
) -> list[list[MicroBatch]]:
    """Pack the rows of one global batch into micro-batches.

    Args:
        lengths: tokens of each row.
        steps: G, micro-batches of every rank.
        ranks: W.
        rows: b, rows of stock's micro-batch; none becomes larger than ``rows`` times the longest row.
        max_rows: rows of a micro-batch at most; None: as many as fit.
        lockstep: the ranks wait for one another after every micro-batch (FSDP, ZeRO-3), not once a window (DDP).

    Returns:
        For each rank its ``steps`` micro-batches, largest first; none is empty, every row is in one of them.

    Raises:
        OptionsError: if there are fewer rows than micro-batches, or more than ``max_rows`` lets in.
    """
    count = steps * ranks
    if not count <= len(lengths) <= (max_rows or len(lengths)) * count:
        raise OptionsError(
            f"got {len(lengths)} samples for {count} micro-batches; expected 1 to {max_rows or 'any number of'} "
            "samples in each; set max_rows_per_micro_batch to at least the per-device batch size"
        )
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = [max(lengths[row], 1) for row in order]
    at_most = max_rows or len(order)
    tightest = _tightest_cap(ascending, count, at_most)
    loosest = max(rows * ascending[-1], tightest)
    roomy = min(int(_ROOMY * tightest), loosest)
    caps = [loosest] if ranks == 1 else [tightest] if lockstep else [roomy, tightest]
    plans: list[tuple[int, list[list[_Run]]]] = []
    for cap in caps:
        runs = list(_runs(_fewest_tokens(ascending, count, cap, at_most)))
        runs.sort(key=lambda run: _tokens(ascending, run), reverse=True)
        plan = [runs[rank::ranks] for rank in range(ranks)] if lockstep else _longest_first(ascending, runs, ranks)
        slowest = max(sum(_tokens(ascending, run) for run in own) for own in plan)
        plans.append((slowest, plan))
        ideal = sum(_tokens(ascending, run) for run in runs) / ranks
        if slowest <= _GOOD_ENOUGH * max(ideal, ascending[-1]):
            break
    _, best = min(plans, key=lambda plan: plan[0])
    return [[sorted(order[start:end]) for start, end in own] for own in best]


# --- the split ------------------------------------------------------------------------------------------------------


def _fewest_tokens(ascending: Sequence[int], count: int, cap: int, max_rows: int) -> list[int]:
    """Ends of the ``count`` runs that pad least, none above ``cap`` tokens or ``max_rows`` rows.

    The tokens of a run obey the quadrangle inequality, so one run more never saves more tokens than the one before
    it did. Charging every run a price thus leads to the cheapest split into as many runs as save more than that, in
    O(n). Savings are whole numbers; where every run between two such splits saves the same, crossing the two
    gives each number of runs between theirs.

    Source: A. Aggarwal, B. Schieber, T. Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave
    Monge property and applications", 1994 (the price and the crossing).
    """
    first = _first_rows(ascending, cap, max_rows)
    out_of_reach = _out_of_reach(ascending, first)
    # Cheapest at half a token above each of these prices, since no saving equals that.
    low, high = -1, len(ascending) * ascending[-1]
    many, few = list(range(1, len(ascending) + 1)), _priced(ascending, first, out_of_reach, high + 0.5)
    while len(few) < count < len(many) and high - low > 1:
        price = (low + high) // 2
        found = _priced(ascending, first, out_of_reach, price + 0.5)
        few, high, many, low = (few, high, found, price) if len(found) > count else (found, price, many, low)
    return few if len(few) == count else many if len(many) == count else _crossed(few, many, count)


def _first_rows(ascending: Sequence[int], cap: int, max_rows: int) -> list[int]:
    """For every end of a run the first row that it may reach back to, below 0 where all; ascending as well."""
    by_tokens = (end - cap // longest for end, longest in enumerate(ascending, start=1))
    return list(map(max, by_tokens, range(1 - max_rows, len(ascending) + 1 - max_rows)))


def _out_of_reach(ascending: Sequence[int], first: Sequence[int]) -> list[float]:
    """For every row the longest row of the first run that may no longer start there."""
    lengths: list[float] = []
    for longest, row in zip(ascending, first, strict=True):
        lengths += [longest] * (row - len(lengths))
    return lengths + [math.inf] * (len(first) - len(lengths))


def _tightest_cap(ascending: Sequence[int], count: int, max_rows: int) -> int:
    """The smallest cap under which ``count`` runs hold all rows."""
    low, high = ascending[-1], ascending[-1] * -(-len(ascending) // count)
    while low < high:
        cap = (low + high) // 2
        end, runs = len(ascending), 0
        while end > 0 and runs <= count:
            end -= min(max_rows, cap // ascending[end - 1])
            runs += 1
        low, high = (low, cap) if runs <= count else (cap + 1, high)
    return low


def _priced(ascending: Sequence[int], first: Sequence[int], out_of_reach: Sequence[float], price: float) -> list[int]:
    """Ends of the runs that are cheapest where a token costs 1 and a run ``price``.

    The cheapest start of a run moves rightwards with its end. A candidate start is kept with the length from which it
    beats the one before it, and dropped if the next one beats it before that and before the other is out of reach.
    """
    total = len(ascending)
    cheapest, start_of = [0.0], [0]
    starts, beats_from, head = [0], [0.0], 0
    for end, (longest, least) in enumerate(zip(ascending, first, strict=True), start=1):
        while starts[head] < least or (head + 1 < len(starts) and beats_from[head + 1] <= longest):
            head += 1
        start = starts[head]
        value = cheapest[start] + (end - start) * longest + price
        cheapest.append(value)
        start_of.append(start)
        if end == total:
            break
        while True:
            last = starts[-1]
            # The length at which a start at ``end`` is as cheap as one at ``last``.
            worth = (value - cheapest[last]) / (end - last)
            if len(starts) - head == 1 or worth > beats_from[-1] or worth > out_of_reach[starts[-2]]:
                break
            starts.pop()
            beats_from.pop()
        starts.append(end)
        beats_from.append(worth)
    ends = []
    while total:
        ends.append(total)
        total = start_of[total]
    return ends[::-1]


def _crossed(few: Sequence[int], many: Sequence[int], count: int) -> list[int]:
    """A split into ``count`` runs, as cheap as one of fewer and one of more: the first's start and the second's end.

    They change over where a run of ``few`` holds one of ``many`` that leaves ``count`` runs in all.
    """
    ahead = len(many) - count
    few, many = [0, *few], [0, *many]
    place = next(k for k in range(len(few) - 1) if few[k] <= many[k + ahead] and many[k + ahead + 1] <= few[k + 1])
    return [*few[1 : place + 1], *many[place + ahead + 1 :]]


def _runs(ends: Sequence[int]) -> Iterator[_Run]:
    return zip([0, *ends[:-1]], ends, strict=True)


def _tokens(ascending: Sequence[int], run: _Run) -> int:
    return (run[1] - run[0]) * ascending[run[1] - 1]


# --- the ranks ------------------------------------------------------------------------------------------------------


def _longest_first(ascending: Sequence[int], runs: Sequence[_Run], ranks: int) -> list[list[_Run]]:
    """Assign each micro-batch, largest first, to the rank with the least to do of those that lack one."""
    steps = len(runs) // ranks
    plan: list[list[_Run]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for run in runs:
        load, rank = heapq.heappop(loads)
        plan[rank].append(run)
        if len(plan[rank]) < steps:
            heapq.heappush(loads, (load + _tokens(ascending, run), rank))
    return plan
