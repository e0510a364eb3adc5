"""The monitors on two real gloo ranks, by one start of them."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor import MonitorsCallback, NoiseScale, RankGradients, Replicas
from tests.monitor import test_callbacks
from tests.monitor.quadratic import Quadratic, closed_form, micro_batches
from tests.ranks import on_ranks

BATCH = 16


def classifier(*hidden: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), *hidden, nn.Linear(32, 10))


def batches(steps: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's part of global batches: ten clouds of points that overlap."""
    draw, mine = torch.Generator().manual_seed(1), slice(rank * BATCH, (rank + 1) * BATCH)
    centres = torch.randn(10, 64, generator=draw)
    for _ in range(steps):
        labels = torch.randint(10, (2 * BATCH,), generator=draw)
        yield (centres[labels] + 2.0 * torch.randn(2 * BATCH, 64, generator=draw))[mine], labels[mine]


class Counted:
    """The protocol, plugged in: torch.distributed, counting the sums of each step."""

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        self.rank, self.size, self.step = dist.get_rank(), dist.get_world_size(), step
        self.steps = Counter[int]()

    def sum(self, tensor: Tensor) -> Tensor:
        self.steps[self.step()] += 1
        result = tensor.clone()
        dist.all_reduce(result)
        return result


def gradients_before_reduction(rank: int) -> dict[str, Any]:
    """The hook's norm of an accumulated gradient against one by hand; and the averaged gradient with and without it."""
    window = list(batches(2, rank))
    averaged: list[list[Tensor]] = []
    for gradients in (None, RankGradients()):
        model = classifier()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
        if gradients is not None:
            gradients.attach(wrapped)
        for _ in range(2):
            wrapped.zero_grad()
            for place, (points, labels) in enumerate(window):
                with nullcontext() if place else wrapped.no_sync():
                    cross_entropy(wrapped(points), labels).backward()
        averaged.append([parameter.grad.clone() for parameter in model.parameters()])
    assert gradients is not None
    reading, model = gradients.read(), classifier()
    sum(cross_entropy(model(points), labels) for points, labels in window).backward()
    by_hand = float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()])))
    refused = ""
    try:
        gradients.attach(wrapped)
    except UnsupportedSetupError as error:
        refused = str(error)
    return {
        "steps": [len(norms) for norms in reading.norms],
        "apart": abs(reading.norms[rank][-1] - by_hand) / by_hand,
        "ranks_differ": reading.norms[0] != reading.norms[1],
        "same_bits": all(torch.equal(a, b) for a, b in zip(*averaged, strict=True)),
        "refused": refused,
    }


def noise_scale(rank: int) -> dict[str, Any]:
    """Ragged micro-batches on both ranks, each rank's in two sizes of its own, against the closed form."""
    wrapped = DistributedDataParallel(Quadratic())
    noise = NoiseScale(wrapped, every=1, windows=500)
    draw = torch.Generator().manual_seed(rank)
    sizes = ([1, 40, 3, 25], [50, 2])
    mean_items = sum(map(sum, sizes)) / 2
    for _ in range(500):
        wrapped.zero_grad()
        for place, points in enumerate(micro_batches(draw, sizes[rank])):
            with nullcontext() if place == len(sizes[rank]) - 1 else wrapped.no_sync():
                # As S / n_mean averaged over the window and by DDP: the sum of all over the items of all.
                (wrapped(points) * len(points) / mean_items).backward()
            noise.micro_batch(len(points))
        noise.step()
    reading = noise.read()
    return {"scale": reading.scale, "items": reading.items, "error": reading.error}


def replicas_in_step(rank: int) -> dict[str, Any]:
    """Healthy training with dropout that differs by rank, and faults of the second rank."""
    model = classifier(nn.Dropout(0.5), nn.BatchNorm1d(32))
    wrapped = DistributedDataParallel(model)
    optimizer, counted = torch.optim.AdamW(model.parameters()), Counted()
    replicas = Replicas(wrapped, optimizer, counted, every=5)
    torch.manual_seed(rank)
    healthy = []
    for points, labels in batches(20, rank):
        optimizer.zero_grad()
        cross_entropy(wrapped(points), labels).backward()
        optimizer.step()
        healthy.append(replicas.step())
    draws = torch.zeros(2)
    draws[rank] = torch.rand(())
    found: dict[str, Any] = {
        "healthy": [str(alarm) for alarm in healthy if alarm is not None],
        "sums_in_20_steps": counted.steps.total(),
        "generators_differ": len(set(counted.sum(draws).tolist())) == 2,
    }
    good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for name, change in {
        "one element": lambda: model[4].weight.view(-1)[7].add_(0.25),
        "one parameter": lambda: model[0].bias.sub_(0.5),
        "optimizer": lambda: optimizer.state[model[0].weight]["exp_avg"].view(-1)[3].add_(1e-3),
        "one bit": lambda: model[0].weight.view(torch.int32).view(-1)[0].add_(1),
        "state missing on one rank": lambda: optimizer.state[model[0].bias].clear(),
    }.items():
        with torch.no_grad():
            change() if rank == 1 else None
        alarm = replicas.check()
        found[name] = "" if alarm is None else alarm.message
        model.load_state_dict(good[0])
        optimizer.load_state_dict(copy.deepcopy(good[1]))
        found[f"{name}, fixed"] = replicas.check() is None
    return found


def trainer(rank: int) -> dict[str, Any]:
    """The Trainer on two ranks with every callback on: what is logged, when it is summed, what is left behind."""
    steps = {"max_steps": 12, "logging_steps": 4, "ddp_backend": "gloo"}
    its = test_callbacks.trainer(Path(tempfile.mkdtemp()), count=192, **steps)
    numbers: list[tuple[float, float]] = []
    counted = Counted(lambda: its.state.global_step)
    its.add_callback(MonitorsCallback(its, counted, noise_scale_every=1))
    step = its.training_step

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        loss = step(*args, **kwargs)
        numbers.append((float(loss), float(args[2])))
        return loss

    its.training_step = recorded
    its.train()
    # By hand: the Trainer's losses of every micro-batch of the first interval, weighed by the items of their step.
    first = torch.tensor(numbers[:8], dtype=torch.float64)
    sums = torch.stack([(first[:, 0] * first[:, 1]).sum(), first[::2, 1].sum()])
    dist.all_reduce(sums)
    return {
        "rows": [row for row in its.state.log_history if "loss" in row],
        "by_hand": float(sums[0] / sums[1]),
        "sums_at_steps": dict(sorted(counted.steps.items())),
        "as_it_was": vars(its)["training_step"] is recorded,
        "left_behind": sorted({"log"} & vars(its).keys() | {"clip_grad_norm_"} & vars(its.accelerator).keys()),
    }


CHECKS = (gradients_before_reduction, noise_scale, replicas_in_step, trainer)


def found_on_rank() -> dict[str, Any]:
    """What each check finds on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    return {check.__name__: check(dist.get_rank()) for check in CHECKS}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each check found, on rank 0 and on rank 1."""
    one, other = on_ranks(found_on_rank)
    return {name: [one[name], other[name]] for name in one}


def test_the_hook_sees_the_accumulated_gradient_before_its_reduction(found: dict[str, Any]) -> None:
    for its in found["gradients_before_reduction"]:
        assert its["steps"] == [2, 2] and its["apart"] < 1e-5 and its["ranks_differ"]
        assert its["same_bits"], "the hook changed the averaged gradient"
        assert "has a communication hook already" in its["refused"]


def test_the_noise_scale_over_two_ranks_is_the_closed_form(found: dict[str, Any]) -> None:
    one, other = found["noise_scale"]
    assert one == other and one["scale"] == pytest.approx(closed_form(), rel=0.05)
    assert one["items"] == 121 and 0.001 < one["error"] < 0.02


#: A fault, and the first tensor that is out of step.
OUT_OF_STEP = {
    "one element": "parameter module.4.weight",
    "one parameter": "parameter module.0.bias",
    "optimizer": "exp_avg of module.0.weight",
    "one bit": "parameter module.0.weight",
}


def test_replicas_in_step_are_left_alone_and_one_out_of_step_is_told_by_its_first_tensor(found: Any) -> None:
    for its in found["replicas_in_step"]:
        assert its["generators_differ"], "the control needs dropout that differs"
        assert its["healthy"] == [] and its["sums_in_20_steps"] == 4
        for fault, name in OUT_OF_STEP.items():
            assert re.match(rf"{name} differs: rank 1; 1 of \d+ tensors differ", its[fault])
            assert its[f"{fault}, fixed"]
        assert "the ranks hold [24, 21] tensors" in its["state missing on one rank"]


def test_the_trainer_logs_every_monitor_beside_its_loss_and_is_left_as_it_was(found: dict[str, Any]) -> None:
    names = {
        "loss", "loss_standard_error", "rank_loss_0", "rank_loss_1", "all_alarms", "gradient_norm_median",
        "gradient_norm_spikes", "memory_mib", "slowest_rank", "slowest_rank_lag_s", "items_per_step", "ranks",
    }  # fmt: skip
    for its in found["trainer"]:
        first, *rest = its["rows"]
        assert [row["step"] for row in its["rows"]] == [4, 8, 12]
        for row in rest:
            assert {f"hf_accum_fix/{name}" for name in names} <= row.keys()
            assert all(value == 0 for key, value in row.items() if key.endswith("_alarms"))
        # It weighs tokens where the Trainer averages steps.
        assert first["hf_accum_fix/loss"] == pytest.approx(its["by_hand"], rel=1e-6)
        assert first["hf_accum_fix/loss"] != pytest.approx(first["loss"], rel=1e-6)
        assert its["as_it_was"] and its["left_behind"] == []
        # What all ranks can watch after the first step, whether any has BatchNorm after the second, and one sum a log.
        assert its["sums_at_steps"] == {1: 1, 2: 1, 4: 1, 8: 1, 12: 1}
