"""The plan for one global batch: every sample once, no bound broken, nothing cheaper, and quick."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from transformers import trainer_pt_utils

from hf_accum_fix.data import packing
from hf_accum_fix.data.packing import MicroBatch, pack, padded_tokens
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
@settings(max_examples=300, deadline=None)
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
@settings(max_examples=300, deadline=None)
def test_never_more_padding_than_stock(window: tuple[list[int], int, int, int]) -> None:
    lengths, steps, ranks, rows = window
    [own] = pack(lengths, steps * ranks, rows=rows)
    assert tokens(lengths, own) <= tokens(lengths, stock(lengths, rows))


@given(windows(), st.data())
@settings(max_examples=300, deadline=None)
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
    assert packing._cost(ascending, ends) == fewest_by_trying(ascending, count, cap, max_rows)
    if tightest > ascending[-1]:
        assert fewest_by_trying(ascending, count, tightest - 1, max_rows) >= 10**15


def test_tokens_of_a_micro_batch_stay_under_a_limit_of_ones_own() -> None:
    lengths = [10, 20, 30, 40, 50, 60, 70, 80]
    assert max(padded_tokens(lengths, each) for each in pack(lengths, 4, rows=2)[0]) == 160
    assert max(padded_tokens(lengths, each) for each in pack(lengths, 4, rows=2, max_tokens=140)[0]) == 140
    # 80 tokens alone are more than 70: as little above the limit as can be.
    assert max(padded_tokens(lengths, each) for each in pack(lengths, 8, rows=1, max_tokens=70)[0]) == 80


@pytest.mark.parametrize(("rows", "max_rows"), [(3, None), (8, 1)])
def test_a_window_that_cannot_be_dealt_is_refused(rows: int, max_rows: int | None) -> None:
    with pytest.raises(OptionsError, match="for 4 micro-batches; expected 1 to"):
        pack([5] * rows, 4, rows=2, max_rows=max_rows)


# --- the bars -------------------------------------------------------------------------------------------------------


def drawn(choose: random.Random, count: int, mu: float, sigma: float, longest: int) -> list[int]:
    return [min(max(int(choose.lognormvariate(mu, sigma)), 8), longest) for _ in range(count)]


def slowest(lengths: Sequence[int], plan: Sequence[Sequence[MicroBatch]], lockstep: bool) -> float:
    """Padded tokens that the slowest rank computes or waits for, over the real tokens of a rank."""
    loads = [[padded_tokens(lengths, each) for each in own] for own in plan]
    waited = sum(map(max, zip(*loads, strict=True))) if lockstep else max(map(sum, loads))
    return waited * len(plan) / sum(lengths)


@pytest.mark.parametrize(
    ("steps", "ranks", "rows", "lockstep"),
    [(16, 1, 64, False), (128, 1, 8, False), (64, 4, 4, False), (16, 8, 8, False), (16, 8, 8, True)],
)
@pytest.mark.parametrize(("mu", "sigma", "longest"), [(3.9, 0.8, 1024), (5.3, 1.2, 4096)], ids=["chat", "heavy tails"])
def test_planning_1024_samples_takes_milliseconds(
    steps: int, ranks: int, rows: int, lockstep: bool, mu: float, sigma: float, longest: int
) -> None:
    choose = random.Random(0)
    taken = []
    for _ in range(9):
        lengths = drawn(choose, 1024, mu, sigma, longest)
        start = time.process_time()
        pack(lengths, steps, ranks, rows=rows, lockstep=lockstep)
        taken.append(time.process_time() - start)
    # 1 to 4 ms on an idle core; a machine that others load is given room.
    assert sorted(taken)[4] < 0.0125


needs_batch_rebalance = pytest.mark.skipif(
    not hasattr(trainer_pt_utils, "BatchRebalanceSampler"), reason="batch_rebalance came with 5.17"
)


@needs_batch_rebalance
@pytest.mark.parametrize(("lockstep", "ranks"), [(False, 4), (False, 8), (True, 4), (True, 8)])
@pytest.mark.parametrize(("mu", "sigma", "longest"), [(5.3, 0.8, 1024), (5.3, 1.2, 4096)], ids=["chat", "heavy tails"])
def test_the_slowest_rank_beside_stock_and_batch_rebalance(
    lockstep: bool, ranks: int, mu: float, sigma: float, longest: int
) -> None:
    choose, rows, steps = random.Random(1), 4, 32 // ranks
    ours, upstream, as_it_comes = [], [], []
    for _ in range(20):
        lengths = drawn(choose, rows * steps * ranks, mu, sigma, longest)
        ours.append(slowest(lengths, pack(lengths, steps, ranks, rows=rows, lockstep=lockstep), lockstep))
        sampler = trainer_pt_utils.BatchRebalanceSampler(lengths, len(lengths), ranks, steps)
        upstream.append(slowest(lengths, sampler._assign(list(range(len(lengths))), lengths), lockstep))
        as_it_comes.append(slowest(lengths, [stock(lengths, rows)[rank::ranks] for rank in range(ranks)], lockstep))
    mean = [sum(each) / len(each) for each in (ours, upstream, as_it_comes)]
    if lockstep:
        assert mean[0] < mean[1] < mean[2]
    elif sigma < 1:
        assert mean[0] <= 1.10 and mean[0] < mean[1] and mean[2] > 2
    else:
        # With eight micro-batches a rank batch_rebalance is itself at 1.24 of the ideal, and we are at 1.03.
        assert mean[0] <= 1.10 and mean[0] <= (0.6 if ranks == 8 else 0.87) * mean[1]


# --- epochs of whole windows: what is handed out, when a window opens, what a loader is still taken for -------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


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


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError):
        len(WholeWindows(DataLoader(Endless()), 2))
    assert len(list(WholeWindows(DataLoader(Endless(), batch_size=1), 2))) == 6


def test_it_is_taken_for_the_loader_it_holds() -> None:
    held = loader(4)
    whole = WholeWindows(held, 2)
    assert isinstance(whole, DataLoader) and whole.dataset is held.dataset
    assert isinstance(whole.around(held), WholeWindows) and whole.around(held).__wrapped__ is held


def test_a_blank_has_the_keys_of_its_neighbour_and_no_row() -> None:
    batch = {"input_ids": torch.ones(2, 3), "names": ["a", "b"], "scale": torch.ones(()), "longest": 3}
    blank = PlaceholderBatch.like(batch)
    assert blank.keys() == batch.keys()
    assert blank["input_ids"].shape == (0, 3) and blank["names"] == []
    assert blank["scale"].shape == () and blank["longest"] == 3
    assert PlaceholderBatch.like(["no", "mapping"]) == {}
