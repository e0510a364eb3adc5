"""A pipeline stage that is slow; stages that are alike. Clocks are ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_accum_fix.monitor.stage_balance import StageBalance
from tests.monitor.side_by_side import OneOf, side_by_side


class Stage(nn.Module):
    """Takes as long as it is told, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.takes = 0.0, 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.now += self.takes
        return inputs


@pytest.mark.parametrize(("times", "kinds"), [([1.0, 1.0, 1.9, 1.0], ["stage-slow-2"]), ([1.0, 1.1, 1.2, 1.0], [])])
def test_the_slowest_stage_is_named(times: list[float], kinds: list[str]) -> None:
    def work(ranks: OneOf) -> list[str]:
        stage = Stage()
        balance, found = StageBalance(stage, ranks, clock=lambda: stage.now), []
        for log in range(7):
            for forward in range(10):
                # Once in a while any stage takes long: a checkpoint, another user of the machine.
                stage.takes = 9.0 if forward == log else times[ranks.rank]
                stage(torch.ones(1))
                stage.now += 5.0  # waiting for the others
            with torch.no_grad():
                stage(torch.ones(1))
            alarm = balance.judge(balance.read())
            found += [] if alarm is None else [alarm.kind]
        return found

    assert side_by_side(work, len(times)) == [kinds] * len(times)


def test_one_stage_and_stages_without_forwards_say_nothing() -> None:
    balance = StageBalance(Stage())
    reading = balance.read()
    assert reading.balance == 1.0 and balance.judge(reading) is None
