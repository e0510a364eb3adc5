"""What is made of a part of a sample, on one rank and without DeepSpeed."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import Reduction
from hf_accum_fix.accumulation.look import LossRun, Setting
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.engines.sample_shards import complete_shard, is_cut, measured_divisor, skip_shards


def test_a_part_gets_the_labels_that_its_loss_asks_for() -> None:
    batch = {"shift_labels": torch.arange(32).view(2, 16)[:, :8]}
    complete_shard(batch)
    assert batch["labels"] is batch["shift_labels"] and batch["labels"].view(-1)[8] == 16


def test_labels_that_are_there_stay() -> None:
    labels = torch.zeros(1, 4, dtype=torch.long)
    batch = {"labels": labels, "shift_labels": labels + 1}
    complete_shard(batch)
    assert batch["labels"] is labels
    for other in ({"labels": labels}, [labels], None):
        complete_shard(other)
    assert other is None


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


def test_an_engine_whose_ranks_share_no_sample_divides_by_all_of_them() -> None:
    plain = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, parallelism_config=None)
    cut = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, parallelism_config=SimpleNamespace(sp_size=2))
    assert not is_cut(None) and not is_cut(plain) and is_cut(cut)  # type: ignore[arg-type]
    assert measured_divisor(plain, 6) == 6.0  # type: ignore[arg-type]


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
