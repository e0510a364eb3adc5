"""Ranks that are given one another's samples, at once, in another order and later; and ranks that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.callbacks import samples_of
from hf_accum_fix.monitor.shared_samples import SharedSamples
from tests.monitor.side_by_side import OneOf, side_by_side

STEPS, BATCH, LOG_EVERY = 60, 8, 10


def places(fault: str, rank: int, ranks: int) -> Tensor:
    """Indices [steps, batch] of the samples that a rank is given."""
    draw = torch.Generator().manual_seed(3)
    every = torch.randperm(STEPS * BATCH * ranks * 2, generator=draw)[: STEPS * BATCH * ranks]
    mine = every[rank::ranks]
    if fault == "small data, shuffled over the ranks":
        mine = torch.cat([torch.randperm(64, generator=draw)[rank::ranks] for _ in range(STEPS * BATCH)])
    elif rank == ranks - 1 and fault == "later":
        mine = every[0::ranks].roll(3 * BATCH)
    elif rank == ranks - 1 and fault == "in another order":
        mine = every[0::ranks].view(-1, BATCH * LOG_EVERY)
        mine = mine[:, torch.randperm(mine.shape[1], generator=draw)].flatten()
    elif rank == ranks - 1 and fault == "one in four":
        mine = torch.where(torch.arange(len(mine)) % 4 == 0, every[0::ranks], mine)
    return mine[: STEPS * BATCH].view(STEPS, BATCH)


def kinds(fault: str, ranks: int, dtype: torch.dtype) -> list[tuple[int, str, str]]:
    """Steps, kinds and messages of the alarms."""

    def work(its: OneOf) -> list[tuple[int, str, str]]:
        samples, found = SharedSamples(its), []
        for step, rows in enumerate(places(fault, its.rank, ranks), start=1):
            samples.update((rows[:, None] * torch.arange(1, 6)).to(dtype))
            if step % LOG_EVERY == 0:
                alarm = samples.judge(samples.read())
                found += [] if alarm is None else [(step, alarm.kind, alarm.message)]
        return found

    results = side_by_side(work, ranks)
    assert all(its == results[0] for its in results)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_a_share_of_one_half_and_more_is_told(dtype: torch.dtype) -> None:
    for fault in ("later", "in another order"):
        found = kinds(fault, 3, dtype)
        assert found[0][:2] == (20, "ranks-share-samples") and "ranks 0 and 2" in found[0][2]
    assert kinds("none", 3, dtype) == [] and kinds("one in four", 3, dtype) == []
    assert kinds("small data, shuffled over the ranks", 2, dtype) == []


@pytest.mark.parametrize("handed_over", ["images", "indices", "labels in their order"])
def test_augmented_samples_are_found_by_what_stays_the_same(handed_over: str) -> None:
    """Both ranks read one order, with crops and noise of their own, rank 1 three micro-batches later."""

    def work(ranks: OneOf) -> list[str]:
        ours, told = SharedSamples(ranks), list[str]()
        draw, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + ranks.rank)
        order, classes = torch.randperm(4096, generator=draw), torch.randint(10, (4096,), generator=draw)
        for place in range(80):
            rows = order[8 * (place + 3 - 3 * ranks.rank) :][:8]
            left = int(torch.randint(5, (), generator=own))
            images = torch.sin(rows[:, None] * torch.arange(1.0, 37.0))[:, left : left + 32]
            images = images + 0.01 * torch.randn(images.shape, generator=own)
            what = {"images": images, "indices": rows, "labels in their order": classes[rows][None]}
            ours.update(what[handed_over])
            if place % 20 == 19:
                alarm = ours.judge(ours.read())
                told += [] if alarm is None else [alarm.kind]
        return told

    told = side_by_side(work)[0]
    assert told == ([] if handed_over == "images" else ["ranks-share-samples"] * 3)


def test_the_trainer_s_ranks_are_compared_without_their_padding() -> None:
    def work(ranks: OneOf) -> list[str]:
        samples, told = SharedSamples(ranks), list[str]()
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            for _ in range(4):
                ids = torch.randint(1, 99, (8, 6), generator=draw)
                # Rank 1 gets them in another order, and padded further, by a number that is no zero.
                ids = nn.functional.pad(ids.flip(0), (0, 2), value=7) if ranks.rank else ids
                mask = torch.ones_like(ids)
                mask[:, 6:] = 0
                found = samples_of({"attention_mask": mask, "input_ids": ids})
                assert found is not None
                samples.update(found)
            alarm = samples.judge(samples.read())
            told += [] if alarm is None else [alarm.kind]
        return told

    assert side_by_side(work) == [["ranks-share-samples"] * 2] * 2


def test_one_process_and_few_samples_say_nothing() -> None:
    samples = SharedSamples()
    samples.update(torch.arange(0))
    samples.update(torch.arange(3))
    reading = samples.read()
    assert len(reading.now[0]) == 3 and samples.judge(reading) is None
