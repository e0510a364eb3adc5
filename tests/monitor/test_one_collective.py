"""One sum a log for all monitors of `Monitor`, and Horovod's way to a rank's own gradients, over a fake."""

from __future__ import annotations

import torch
from torch import nn

from hf_accum_fix.monitor import LossMeter, Monitor, RankGradients, SharedSamples
from hf_accum_fix.monitor.ranks import read_together
from tests.monitor.side_by_side import OneOf, side_by_side


def test_what_one_rank_cannot_watch_is_left_out_on_all() -> None:
    """Also what is checked between two logs, before the first of them."""

    def work(ranks: OneOf) -> dict[str, float]:
        model = nn.Linear(3, 2)
        if ranks.rank:
            model.weight.placements = ()
        monitor = Monitor(model, ranks=ranks)
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
