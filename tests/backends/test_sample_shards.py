"""What is made of a part of a sample, on one rank and without DeepSpeed."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.engines.sample_shards import complete_shard, skip_shards
from hf_accum_fix.learning.contract import Reduction
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.learning.observe import observe


def test_a_part_gets_the_labels_that_its_loss_asks_for() -> None:
    batch = {"shift_labels": torch.arange(32).view(2, 16)[:, :8]}
    complete_shard(batch)
    assert batch["labels"] is batch["shift_labels"] and batch["labels"].view(-1)[8] == 16


class Adapter:
    """As `UlyssesSPDataLoaderAdapter`: of each batch of the loader inside, as many micro-batches as ranks share it."""

    sp_world_size = 2

    def __init__(self, inside: list[int]) -> None:
        self.dl, self.iter, self.micro_batches = inside, iter(inside), deque[Any]()

    def __iter__(self) -> Adapter:
        return self

    def __next__(self) -> str:
        if not self.micro_batches:
            batch = next(self.iter)
            self.micro_batches.extend(f"{batch}.{part}" for part in range(2))
        return str(self.micro_batches.popleft())


def test_a_loader_of_cut_samples_skips_micro_batches_and_begins_the_next_epoch_at_the_first() -> None:
    loader = Adapter([0, 1, 2])
    rest = skip_shards(lambda inside, count: inside[count:], loader, 3)
    assert list(rest) == ["1.1", "2.0", "2.1"] and list(loader)[:2] == ["0.0", "0.1"]


def test_a_loss_of_parts_is_observed_in_the_first_micro_batch_as_it_was_fetched() -> None:
    model, seen = nn.Linear(3, 5), list[Any]()

    def call(inputs: Any, _: Tensor | None) -> Tensor:
        seen.append(inputs)
        return nn.functional.cross_entropy(model(inputs["x"]).flatten(0, 1), inputs["shift_labels"].flatten())

    window = []
    # By its targets, the last would be run.
    for targets in (2, 3, 6):
        labels = torch.arange(8).view(2, 4) % 5
        window.append({"x": torch.randn(2, 4, 3), "shift_labels": labels.masked_fill(labels >= targets, -100)})
    for is_part in (True, False):
        seen.clear()
        found = observe(LossRun(call, model, torch.device("cpu")), window, Setting(is_cut=is_part))
        assert found.reduction is Reduction.MEAN and str(found.items) == "'shift_labels' other than -100"
        assert all(each["x"] is window[0]["x"] for each in seen) == is_part
