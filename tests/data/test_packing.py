"""The plan for one global batch: every sample once, no bound broken, nothing cheaper, and quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_accum_fix.data import packing
from hf_accum_fix.data.packing import MicroBatch, pack
from hf_accum_fix.data.whole_windows import PlaceholderBatch, WholeWindows
from hf_accum_fix.errors import OptionsError


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Lengths, steps, ranks and rows of a window that stock could have cut: full micro-batches, the last ones short."""
    steps, ranks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    count = steps * ranks
    longest = draw(st.sampled_from([1, 3, 20, 5000]))
    size = draw(st.integers(max(count, (count - 1) * rows + 1), count * rows))
    return draw(st.lists(st.integers(1, longest), min_size=size, max_size=size)), steps, ranks, rows


def stock(lengths: Sequence[int], rows: int) -> list[MicroBatch]:
    """The window as it comes, ``rows`` at a time."""
    return [list(range(len(lengths)))[at : at + rows] for at in range(0, len(lengths), rows)]


def padded_tokens(lengths: Sequence[int], micro_batch: Sequence[int]) -> int:
    """Tokens of a micro-batch as it is computed: its rows times the longest of them."""
    return len(micro_batch) * max(lengths[row] for row in micro_batch)


def tokens(lengths: Sequence[int], micro_batches: Sequence[MicroBatch]) -> int:
    return sum(padded_tokens(lengths, each) for each in micro_batches)


def fewest_by_trying(ascending: Sequence[int], count: int, cap: int, max_rows: int) -> int:
    """Padded tokens of the best cut, by the recursion over all cuts, O(count * n**2)."""
    best = [0, *[10**15] * len(ascending)]
    for _ in range(count):
        best = [10**15] + [
            min(
                best[start] + (end - start) * ascending[end - 1]
                for start in range(end)
                if start >= end - min(max_rows, cap // ascending[end - 1])
            )
            for end in range(1, len(ascending) + 1)
        ]
    return best[-1]


@given(windows(), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_every_sample_once_and_no_bound_broken(
    window: tuple[list[int], int, int, int], lockstep: bool, data: st.DataObject
) -> None:
    lengths, steps, ranks, rows = window
    max_rows = data.draw(st.none() | st.integers(-(-len(lengths) // (steps * ranks)), 30))
    plan = pack(lengths, steps, ranks, rows=rows, max_rows=max_rows, lockstep=lockstep)
    assert len(plan) == ranks and all(len(own) == steps for own in plan)
    micro_batches = [micro_batch for own in plan for micro_batch in own]
    assert sorted(row for micro_batch in micro_batches for row in micro_batch) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        assert 1 <= len(micro_batch) <= (max_rows or len(lengths))
        if max_rows is None or max_rows >= rows:
            assert padded_tokens(lengths, micro_batch) <= rows * max(lengths)
    assert plan == pack(lengths, steps, ranks, rows=rows, max_rows=max_rows, lockstep=lockstep)


@given(windows())
@settings(max_examples=100, deadline=None)
def test_never_more_padding_than_stock(window: tuple[list[int], int, int, int]) -> None:
    lengths, steps, ranks, rows = window
    [own] = pack(lengths, steps * ranks, rows=rows)
    assert tokens(lengths, own) <= tokens(lengths, stock(lengths, rows))


@given(windows(), st.data())
@settings(max_examples=100, deadline=None)
def test_no_cut_of_the_sorted_window_pads_less(window: tuple[list[int], int, int, int], data: st.DataObject) -> None:
    """Beside the recursion over all cuts, under every cap that fits."""
    lengths, steps, ranks, _ = window
    ascending, count = sorted(lengths), steps * ranks
    max_rows = data.draw(st.integers(-(-len(lengths) // count), len(lengths)))
    tightest = packing._tightest_cap(ascending, count, max_rows)
    cap = data.draw(st.integers(tightest, ascending[-1] * len(lengths)))
    ends = packing._fewest_tokens(ascending, count, cap, max_rows)
    assert len(ends) == count
    for start, end in packing._runs(ends):
        assert 0 < end - start <= max_rows and (end - start) * ascending[end - 1] <= cap
    cost = sum(packing._tokens(ascending, run) for run in packing._runs(ends))
    assert cost == fewest_by_trying(ascending, count, cap, max_rows)
    if tightest > ascending[-1]:
        assert fewest_by_trying(ascending, count, tightest - 1, max_rows) >= 10**15


@pytest.mark.parametrize(("rows", "max_rows"), [(3, None), (8, 1)])
def test_a_window_that_cannot_be_dealt_is_refused(rows: int, max_rows: int | None) -> None:
    with pytest.raises(OptionsError, match="for 4 micro-batches; expected 1 to"):
        pack([5] * rows, 4, rows=2, max_rows=max_rows)


def loader(batches: int) -> DataLoader[int]:
    return DataLoader(list(range(batches)), batch_size=1)  # type: ignore[arg-type]


@settings(deadline=None)
@given(batches=st.integers(0, 20), steps=st.integers(1, 6))
def test_an_epoch_is_whole_windows_and_loses_nothing(batches: int, steps: int) -> None:
    whole = WholeWindows(loader(batches), steps)
    handed = list(whole)
    assert len(handed) == len(whole) == -(-batches // steps) * steps
    assert [int(batch) for batch in handed if not isinstance(batch, PlaceholderBatch)] == list(range(batches))
    # What is run stands last in its window, where engines reduce over ranks.
    for start in range(0, len(handed), steps):
        assert not isinstance(handed[start : start + steps][-1], PlaceholderBatch)
        ran = [not isinstance(batch, PlaceholderBatch) for batch in handed[start : start + steps]]
        assert ran == sorted(ran)


def test_a_window_opens_before_its_first_micro_batch_and_without_blanks() -> None:
    seen: list[Any] = []
    for batch in WholeWindows(loader(5), 3, lambda window: seen.append([int(each) for each in window])):
        seen.append(None if isinstance(batch, PlaceholderBatch) else int(batch))
    assert seen == [[0, 1, 2], 0, 1, 2, [3, 4], None, 3, 4]


def test_a_blank_has_the_keys_of_its_neighbour_and_no_row() -> None:
    batch = {"input_ids": torch.ones(2, 3), "names": ["a", "b"], "scale": torch.ones(()), "longest": 3}
    blank = PlaceholderBatch.like(batch)
    assert blank.keys() == batch.keys()
    assert blank["input_ids"].shape == (0, 3) and blank["names"] == []
    assert blank["scale"].shape == () and blank["longest"] == 3
    assert PlaceholderBatch.like(["no", "mapping"]) == {}
