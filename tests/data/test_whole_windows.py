"""Epochs of whole windows: what is handed out, when a window opens, what a loader is still taken for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from hf_accum_fix.data.whole_windows import PlaceholderBatch, WholeWindows


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
