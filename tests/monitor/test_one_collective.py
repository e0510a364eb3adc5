"""One sum a log for all monitors of `Monitor`, and Horovod's way to a rank's own gradients, over a fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor import LossMeter, Monitor, RankGradients, SharedSamples
from hf_accum_fix.monitor.ranks import read_together
from tests.monitor.side_by_side import OneOf, side_by_side


def test_a_log_is_one_sum() -> None:
    def work(ranks: OneOf) -> tuple[list[int], dict[str, float]]:
        model = nn.Linear(3, 2)
        monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks)
        sums = []
        for step in range(10):
            monitor.samples(torch.arange(8) + 8 * (2 * step + ranks.rank))
            model(torch.ones(1, 3)).sum().backward()
            monitor.step(torch.tensor(1.0 + ranks.rank), items=4)
            sums.append(ranks.sums)
        return sums, monitor.log() | {"sums": ranks.sums}

    (sums, ours), (_, theirs) = side_by_side(work)
    # The first step agrees on what every rank can watch.
    assert sums == [1] * 10 and ours["sums"] == 2
    assert ours["loss"] == theirs["loss"] == 1.5 and ours["rank_loss_1"] == 2.0 and "slowest_rank" in ours


def test_what_one_rank_cannot_watch_is_left_out_on_all() -> None:
    """Also what is checked between two logs, before the first of them."""

    def work(ranks: OneOf) -> dict[str, float]:
        model = nn.Linear(3, 2)
        if ranks.rank:
            model.weight.placements = ()
        monitor = Monitor(model, ranks=ranks, check_every=2)
        if ranks.rank:
            monitor.samples(torch.arange(3))
        for _ in range(3):
            monitor.step(1.0, norm=1.0)
        return monitor.log()

    assert all(found["loss"] == 1.0 for found in side_by_side(work))


def test_read_together_is_read_apart() -> None:
    def work(ranks: OneOf) -> bool:
        def monitors() -> tuple[LossMeter, RankGradients, SharedSamples]:
            meter, gradients, samples = LossMeter(ranks), RankGradients(ranks), SharedSamples(ranks)
            draw = torch.Generator().manual_seed(ranks.rank)
            for step in range(9 + ranks.rank):
                meter.update(torch.rand((), generator=draw), step)
                gradients.add(torch.rand(5, generator=draw))
                gradients.end_of_step()
                samples.update(torch.randint(99, (3, 2), generator=draw))
            return meter, gradients, samples

        return list(read_together(ranks, monitors()).values()) == [each.read() for each in monitors()]

    assert side_by_side(work, 3) == [True] * 3


class FakeHorovod:
    """What `horovod.torch` 0.28 does, by its names: ``compress`` sees the local gradient, then it is averaged."""

    def __init__(self, ranks: OneOf) -> None:
        self._ranks = ranks
        self.Sum = "sum"

    def rank(self) -> int:
        return self._ranks.rank

    def size(self) -> int:
        return self._ranks.size

    def allreduce(self, tensor: Tensor, op: str) -> Tensor:
        assert op == self.Sum
        return self._ranks.sum(tensor)

    class Compression:
        class none:
            @staticmethod
            def compress(tensor: Tensor) -> tuple[Tensor, Any]:
                return tensor, None

            @staticmethod
            def decompress(tensor: Tensor, context: Any) -> Tensor:
                return tensor

    def step(self, parameters: list[nn.Parameter], compression: Any, update: Callable[[], Any]) -> None:
        """``DistributedOptimizer.step``."""
        for parameter in parameters:
            assert parameter.grad is not None
            compressed, context = compression.compress(parameter.grad)
            average = self._ranks.sum(compressed) / self._ranks.size
            parameter.grad = compression.decompress(average, context)
        update()


def test_horovods_local_gradients_are_seen_by_its_compression() -> None:
    def work(its: OneOf) -> tuple[list[str], float]:
        hvd = FakeHorovod(its)

        class HorovodRanks:
            rank, size = hvd.rank(), hvd.size()

            def sum(self, tensor: Tensor) -> Tensor:
                return hvd.allreduce(tensor, op=hvd.Sum)

        gradients = RankGradients(HorovodRanks())

        class Measured(hvd.Compression.none):
            @staticmethod
            def compress(tensor: Tensor) -> tuple[Tensor, Any]:
                gradients.add(tensor)
                return hvd.Compression.none.compress(tensor)

        model = nn.Linear(3, 2)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)  # Threads share torch's generator.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        draw, told, ratio = torch.Generator().manual_seed(its.rank), list[str](), 0.0
        for step in range(1, 61):
            optimizer.zero_grad()
            for _ in range(2):  # backward_passes_per_step=2
                loss = (model(1 + 0.1 * torch.randn(4, 3, generator=draw)) - 5).square().mean()
                (loss * (3.0 if its.rank == 1 else 1.0)).backward()
            hvd.step(list(model.parameters()), Measured, optimizer.step)
            gradients.end_of_step()
            if step % 10 == 0:
                reading = gradients.read()
                ratio = reading.norms[1][0] / reading.norms[0][0]
                alarm = gradients.judge(reading)
                told += [] if alarm is None else [alarm.kind]
        return told, ratio

    for told, ratio in side_by_side(work, 4):
        assert told and set(told) == {"rank-gradient-1"} and 2.5 < ratio < 3.5
