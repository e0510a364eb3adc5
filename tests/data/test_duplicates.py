"""Which rows of a last micro-batch are repetitions, on every rank, beside what accelerate's own samplers hand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from hf_accum_fix import Items, UnsupportedSetupError
from hf_accum_fix.counting.items import ZeroWeightBatch, scale_mean
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.weighing.part import Part
from tests.numerics.heads import HEADS, Batch, Head, Sample, before
from tests.numerics.parity import Step, cut, reference_step, take_step


class Numbers(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def collate(samples: list[int]) -> dict[str, Any]:
    return {"number": torch.tensor(samples)}


def loader(kind: str, count: int, rows: int, ranks: int, rank: int) -> DataLoaderShard:
    if kind == "stream":
        shard = IterableDatasetShard(Numbers(count), rows, num_processes=ranks, process_index=rank)
        return DataLoaderShard(shard, batch_size=rows, collate_fn=collate)
    split = kind == "split"
    inner = BatchSampler(SequentialSampler(range(count)), rows * (ranks if split else 1), drop_last=False)
    shard = BatchSamplerShard(inner, num_processes=ranks, process_index=rank, split_batches=split)
    return DataLoaderShard(list(range(count)), batch_sampler=shard, collate_fn=collate)


@given(
    kind=st.sampled_from(["batches", "split", "stream"]),
    count=st.integers(1, 30),
    rows=st.integers(1, 4),
    ranks=st.integers(1, 4),
)
def test_an_epoch_over_all_ranks_has_every_sample_once(kind: str, count: int, rows: int, ranks: int) -> None:
    told: list[int] = []
    own = []
    for rank in range(ranks):
        whole = list(loader(kind, count, rows, ranks, rank))
        batches = list(WithoutDuplicates(loader(kind, count, rows, ranks, rank), True, told.append))
        assert len(batches) == len(whole)
        assert not any(isinstance(batch, ZeroWeightBatch) for batch in batches[:-1])
        own += [int(n) for batch in batches if not isinstance(batch, ZeroWeightBatch) for n in batch["number"]]
        # Left in, they are only counted.
        kept = list(WithoutDuplicates(loader(kind, count, rows, ranks, rank), False, lambda samples: None))
        assert [batch["number"].tolist() for batch in kept] == [batch["number"].tolist() for batch in whole]
    assert sorted(own) == list(range(count))
    repeated = -count % (rows * ranks)
    assert told == [repeated] * ranks * bool(repeated)


def test_what_has_no_row_for_each_sample_and_a_stream_that_workers_read_are_refused() -> None:
    inner = BatchSampler(SequentialSampler(range(3)), 2, drop_last=False)
    of_second = BatchSamplerShard(inner, num_processes=2, process_index=1)
    rows = {"collate_fn": lambda samples: {"input_ids": torch.tensor([samples])}}
    packed = DataLoaderShard(list(range(3)), batch_sampler=of_second, **rows)
    with pytest.raises(UnsupportedSetupError, match="expected one row for each sample"):
        list(WithoutDuplicates(packed, True, lambda samples: None))
    shard = IterableDatasetShard(Numbers(3), 2, num_processes=2, process_index=0)
    read_elsewhere = DataLoaderShard(shard, batch_size=2, num_workers=1)
    with pytest.raises(UnsupportedSetupError, match="dispatch_batches=True"):
        WithoutDuplicates(read_elsewhere, True, lambda samples: None).check()
    WithoutDuplicates(read_elsewhere, False, lambda samples: None).check()


@pytest.mark.parametrize("reduction", Reduction)
def test_a_weightless_micro_batch_is_worth_nothing(reduction: Reduction) -> None:
    contract = LossContract(reduction, Items(("labels",)))
    inputs = ZeroWeightBatch(labels=torch.tensor([[3, -100, 4]]))
    assert contract.items is not None and int(contract.items.count(inputs)) == 0
    *_, ratio = Part(contract, {contract.items: torch.tensor(10.0)}, 2, 2).scale_of(inputs, None)
    assert ratio is not None
    assert float(scale_mean(torch.tensor(7.0), ratio)) == 0.0
    assert float(scale_mean(torch.tensor(7.0), ratio, torch.tensor(0.5))) == 0.5
    assert int(Items().count(inputs)) == 0


def with_a_weightless_one(head: Head) -> Head:
    """The third sample's micro-batch counts nothing."""
    third = head.samples[2]

    def collated(samples: Sequence[Sample]) -> Batch:
        batch = head.batch(samples)
        return ZeroWeightBatch(batch) if samples[0] is third else batch

    return replace(head, collate=collated)


def others(head: Head) -> Step:
    """The full batch of the other seven."""
    return reference_step(head, cut([*head.samples[:2], *head.samples[3:]], 1))


@pytest.mark.parametrize(
    "name",
    ["llama", "bert-mlm", "bert-classes", "uses-int", "wav2vec2-ctc-sum",
     *(pytest.param(name, marks=pytest.mark.slow) for name in
       ("no-kwargs", "llama-smoothing", *([] if before("4.46") else ["func-with-mean", "func-with-number"])))],
)  # fmt: skip
def test_the_step_is_that_of_the_others(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    step = take_step(with_a_weightless_one(head), head.samples, 1, 8, "apply", tmp_path)
    wanted = others(head)
    assert step.error(wanted) <= head.tolerance
    assert step.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert take_step(head, head.samples, 1, 8, "apply", tmp_path).error(wanted) > 1e-3
