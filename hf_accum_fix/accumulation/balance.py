"""Dealing a global batch into micro-batches by length, so that almost nothing is padded.

The gradient of the global batch is  sum over rows of grad S_row / N,  and every micro-batch is divided by one number
(see ``window.py``). A row's S does not depend on the rows beside it, nor N on anything but the set: any partition
of the same rows into ``G`` micro-batches on each of ``W`` ranks, of any sizes, has one gradient. So take the cheapest:

1. Sort the rows by length and cut them into ``G * W`` runs. Some run-wise cut pads least of all partitions, since
   swapping the rows of two micro-batches into order lengthens neither.
2. Of all cuts with micro-batches under a cap, take the one with the fewest padded tokens. The cap is ``b`` times the
   longest row, which stock's own micro-batch of that row takes: peak memory never exceeds stock's in the same window.
3. Where several ranks wait for the slowest once a window (DDP), deal the micro-batches out longest first; if one rank
   still has clearly more to do, try the tightest cap that fits as well. Where they wait for one another in every
   micro-batch (FSDP, ZeRO-3), take that cap at once and put micro-batches of about one size side by side.

The number of micro-batches is never changed: fewer would break loops that step after every ``G``.

Everything is in padded tokens: rows times the longest of them. Pure; no tensor, no randomness.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hf_accum_fix.errors import OptionsError

#: Positions of the rows of one micro-batch.
MicroBatch: TypeAlias = list[int]
#: First and last place of a micro-batch in the sorted window, the last one excluded.
_Run: TypeAlias = tuple[int, int]

#: A slowest rank within this factor of the least there can be is not improved further.
_GOOD_ENOUGH = 1.02
#: Prices that are guessed from the last one, and runs that two cuts may differ by, before they are narrowed in.
_GUESSES, _NEAR = 6, 4


def padded_tokens(lengths: Sequence[int], micro_batch: Sequence[int]) -> int:
    """Tokens of a micro-batch as it is computed: its rows times the longest of them."""
    return len(micro_batch) * max(lengths[row] for row in micro_batch)


def deal(
    lengths: Sequence[int],
    steps: int,
    ranks: int = 1,
    *,
    rows: int,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    lockstep: bool = False,
) -> list[list[MicroBatch]]:
    """Deal the rows of one global batch into micro-batches.

    Args:
        lengths: tokens of each row.
        steps: G, micro-batches of every rank.
        ranks: W.
        rows: b, rows of stock's micro-batch; none becomes larger than ``rows`` times the longest row.
        max_rows: rows of a micro-batch at most; None: as many as fit.
        max_tokens: padded tokens of a micro-batch at most; where a window does not fit into ``steps * ranks`` of them,
            the smallest that it does fit into. None: ``rows`` times the longest row.
        lockstep: the ranks wait for one another after every micro-batch (FSDP, ZeRO-3), not once a window (DDP).

    Returns:
        For each rank its ``steps`` micro-batches, largest first; none is empty, every row is in one of them.

    Raises:
        OptionsError: if there are fewer rows than micro-batches, or more than ``max_rows`` lets in.
    """
    count = steps * ranks
    if not count <= len(lengths) <= (max_rows or len(lengths)) * count:
        raise OptionsError(
            f"{len(lengths)} samples cannot be dealt into {count} micro-batches of 1 to {max_rows or 'any number of'} "
            "samples; needed is a max_rows_per_micro_batch of at least the per-device batch size"
        )
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = [max(lengths[row], 1) for row in order]
    at_most = max_rows or len(order)
    tightest = _tightest_cap(ascending, count, at_most)
    loosest = max(min(rows * ascending[-1], max_tokens or rows * ascending[-1]), tightest)
    caps = [loosest] if ranks == 1 else [tightest] if lockstep else [loosest, tightest]
    plans: list[tuple[int, list[list[_Run]]]] = []
    for cap in caps:
        runs = list(_runs(_fewest_tokens(ascending, count, cap, at_most)))
        runs.sort(key=lambda run: _tokens(ascending, run), reverse=True)
        dealt = [runs[rank::ranks] for rank in range(ranks)] if lockstep else _longest_first(ascending, runs, ranks)
        slowest = max(sum(_tokens(ascending, run) for run in own) for own in dealt)
        plans.append((slowest, dealt))
        ideal = sum(_tokens(ascending, run) for run in runs) / ranks
        if slowest <= _GOOD_ENOUGH * max(ideal, ascending[-1]):
            break
    _, best = min(plans, key=lambda plan: plan[0])
    return [[sorted(order[start:end]) for start, end in own] for own in best]


# --- the cut --------------------------------------------------------------------------------------------------------


def _fewest_tokens(ascending: Sequence[int], count: int, cap: int, max_rows: int) -> list[int]:
    """Ends of the ``count`` runs that pad least, none above ``cap`` tokens or ``max_rows`` rows.

    The tokens of a run obey the quadrangle inequality, so the fewest tokens in k runs are convex in k. Charging every
    run a price therefore leads to each k on the convex curve, and one run more or less is settled by crossing two
    cuts of the same price: O(n log n) a price, a handful of prices, whatever the number of runs.

    Source: A. Aggarwal, B. Schieber, T. Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave
    Monge property and applications", 1994 (the price and the crossing).
    """
    first = _first_rows(ascending, cap, max_rows)
    expires = [bisect_left(first, row + 1) + 1 for row in range(len(first))]
    few: list[int] | None = None
    across: list[int] | None
    many = list(range(1, len(ascending) + 1))  # what no price at all leads to
    if len(many) == count:
        return many
    dearest = 1 + len(ascending) * ascending[-1]  # than all padding there can be: leads to as few runs as are allowed
    low, high = 0, dearest + 1
    price, unit = dearest if _fewest_runs(first) == count else _likely_price(ascending, count), 1
    for attempt in itertools.count(1):
        found = _priced(ascending, expires, price, unit)
        if len(found) == count:
            return found
        if len(found) < count:
            few, across, high = found, many, price // unit
        else:
            many, across, low = found, few, -(-price // unit)
        if few is None:
            # Where the cap binds, a run is worth more than its padding tells.
            price = min(4 * price, dearest) if attempt > 1 else _scaled(price, len(found) / count, low, high)
            continue
        if across is not None and _charged(ascending, across, price, unit) == _charged(ascending, found, price, unit):
            break
        if attempt < _GUESSES and high - low > 1 and len(many) - len(few) > _NEAR:
            price = _between(low, high, len(many), len(few), count)
        else:
            # Where both ends are the cheapest at the price that makes them equally dear, all between them are.
            price, unit = _cost(ascending, few) - _cost(ascending, many), len(many) - len(few)
    assert few is not None
    return _crossed(few, many, count)


def _scaled(price: int, times: float, low: int, high: int) -> int:
    """The price for another number of runs, as k runs pad about 1/k and the next one saves about 1/k**2."""
    return min(max(int(price * times**2), low + 1), high - 1)


def _between(low: int, high: int, many: int, few: int, count: int) -> int:
    """The price between two for a number of runs between theirs, as if it were a power of that number."""
    share = math.log(many / count) / math.log(many / few)
    least = max(low, 1)
    return min(max(round(least * math.pow(high / least, share)), low + 1), high - 1)


def _likely_price(ascending: Sequence[int], count: int) -> int:
    """About what a run saves where there are ``count``, as if lengths grew evenly between the quantiles."""
    at = [ascending[(len(ascending) - 1) * step // count] for step in range(count + 1)]
    roots = sum(math.sqrt(right - left) for left, right in itertools.pairwise(at))
    return 1 + int(roots**2 * len(ascending) / (2 * count**3))


def _first_rows(ascending: Sequence[int], cap: int, max_rows: int) -> list[int]:
    """For every end of a run the first row that it may reach back to; ascending as well."""
    return [max(0, end - min(max_rows, cap // longest)) for end, longest in enumerate(ascending, start=1)]


def _fewest_runs(first: Sequence[int]) -> int:
    end, runs = len(first), 0
    while end:
        end, runs = first[end - 1], runs + 1
    return runs


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


def _priced(ascending: Sequence[int], expires: Sequence[int], price: int, unit: int) -> list[int]:
    """Ends of the runs that are cheapest where a token costs ``unit`` and a run ``price``.

    The cheapest start of a run moves rightwards with its end. A candidate start is kept with the end from which it
    beats the one before it, be it that it is cheaper or that the other may no longer be reached.

    Args:
        ascending: the lengths.
        expires: for every row the first end that a run from it may no longer have.
        price: of a run.
        unit: of a token.
    """
    total = len(ascending)
    cheapest, start_of = [0] * (total + 1), [0] * (total + 1)
    starts, beats_from, head = [0], [0], 0
    for end, longest in enumerate(ascending, start=1):
        while head + 1 < len(starts) and beats_from[head + 1] <= end:
            head += 1
        start = starts[head]
        value = cheapest[start] + (end - start) * longest * unit + price
        cheapest[end], start_of[end] = value, start
        if end == total:
            break
        while True:
            last = starts[-1]
            # The length from which a start at ``end`` is as cheap as one at ``last``, and the end that has it.
            worth = -((cheapest[last] - value) // ((end - last) * unit))
            from_end = min(bisect_left(ascending, worth, end) + 1, expires[last])
            if from_end > beats_from[-1] or len(starts) - head == 1:
                break
            starts.pop()
            beats_from.pop()
        starts.append(end)
        beats_from.append(from_end)
    ends = []
    while total:
        ends.append(total)
        total = start_of[total]
    return ends[::-1]


def _crossed(few: Sequence[int], many: Sequence[int], count: int) -> list[int]:
    """A cut into ``count`` runs as cheap as two of fewer and more runs: the one's beginning and the other's end.

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


def _charged(ascending: Sequence[int], ends: Sequence[int], price: int, unit: int) -> int:
    return _cost(ascending, ends) * unit + len(ends) * price


def _cost(ascending: Sequence[int], ends: Sequence[int]) -> int:
    return sum(_tokens(ascending, run) for run in _runs(ends))


# --- the ranks ------------------------------------------------------------------------------------------------------


def _longest_first(ascending: Sequence[int], runs: Sequence[_Run], ranks: int) -> list[list[_Run]]:
    """Each micro-batch, largest first, to the rank with the least to do of those that lack one."""
    steps = len(runs) // ranks
    dealt: list[list[_Run]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for run in runs:
        load, rank = heapq.heappop(loads)
        dealt[rank].append(run)
        if len(dealt[rank]) < steps:
            heapq.heappush(loads, (load + _tokens(ascending, run), rank))
    return dealt
