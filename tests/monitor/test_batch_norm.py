"""BatchNorm on one process, and on ranks that are threads; what training does is in test_two_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.monitor.batch_norm import _uneven, check_batch_norm
from tests.monitor.side_by_side import OneOf, side_by_side


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))


def kinds(model: nn.Module, **kwargs: object) -> list[str]:
    return [found.kind for found in check_batch_norm(model, **{"per_device_batch": 32, **kwargs})]  # type: ignore[arg-type]


def test_accumulation_and_small_batches_are_told_with_the_batch_of_the_statistics() -> None:
    model = network()
    assert kinds(model) == []
    assert kinds(model, accumulation_steps=4) == ["batch-norm-accumulation"]
    (small,) = check_batch_norm(model, per_device_batch=2)
    assert small.kind == "batch-norm-small-batch" and "from 2 samples" in small.message
    (cut, _) = check_batch_norm(model, per_device_batch=2, accumulation_steps=8)
    assert "2 samples, while an optimizer step has 16; no scaling of loss or gradients changes that" in cut.message
    # Frozen layers take no statistics.
    assert kinds(model.eval(), per_device_batch=1, accumulation_steps=8) == []


def test_parameters_the_optimizer_does_not_hold_are_told() -> None:
    model = network()
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    assert kinds(model, optimizer=held) == []
    model[1] = nn.BatchNorm2d(4)
    (stale,) = check_batch_norm(model, per_device_batch=32, optimizer=held)
    assert stale.kind == "batch-norm-stale-parameters" and "2 are not held by the optimizer" in stale.message
    model[1].requires_grad_(False)
    assert kinds(model, optimizer=held) == []


def test_torchs_own_converter_after_wrapping_keeps_the_parameters(tmp_path: Path) -> None:
    """What the wrong order does with torch's converter: told, and not called stale."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(network())
        before = [id(parameter) for parameter in wrapped.parameters()]
        assert kinds(wrapped) == []
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)
        assert [id(parameter) for parameter in converted.parameters()] == before
        assert kinds(converted) == ["sync-batch-norm-after-ddp"]
    finally:
        dist.destroy_process_group()


def uneven(batch: int, accumulation: int, shift: bool, seed: int) -> bool:
    """Whether the ranks' data are told apart after 60 steps in which DDP copies rank 0's buffers, once a step."""

    def work(its: OneOf) -> str | None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        draw = torch.Generator().manual_seed(100 * seed + its.rank)
        for _ in range(60):
            for buffer in model.buffers():
                buffer.copy_(its.sum(torch.zeros_like(buffer) if its.rank else buffer.clone()))
            for _ in range(accumulation):
                samples = torch.randn(batch, 3, 6, 6, generator=draw)
                model(3 * samples + 2 if shift and its.rank == 1 else samples)
        alarm = _uneven(model, its, accumulation)
        return None if alarm is None else alarm.kind

    one, other = side_by_side(work)
    assert one == other and one in (None, "batch-norm-uneven-data-1")
    return one is not None


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 1), (2, 8), (16, 1), (16, 4)])
def test_data_of_other_statistics_on_a_rank_are_told_and_others_are_not(batch: int, accumulation: int) -> None:
    assert [uneven(batch, accumulation, True, seed) for seed in (1, 2, 3)] == [True] * 3
    assert not any(uneven(batch, accumulation, False, seed) for seed in range(4, 10))
