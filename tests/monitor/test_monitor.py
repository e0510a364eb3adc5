"""One object for all monitors: in a plain loop, on one process and on several ranks, and as one callback."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_accum_fix.monitor import Alarm, Monitor, MonitorAlarmError, MonitorsCallback
from hf_accum_fix.monitor.alarms import Alarms
from tests.monitor.side_by_side import OneOf, side_by_side
from tests.monitor.test_callbacks import trainer


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class FlatParameter(nn.Parameter):
    pass


def test_the_gradient_s_norm_is_taken_where_none_is_given_and_it_is_whole() -> None:
    """Of FSDP1's part every rank would judge another number, and "raise" would end one of them alone."""
    for part in (False, True):
        model, optimizer = network()
        if part:
            model.weight = FlatParameter(torch.zeros(2, 3))
        monitor = Monitor(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        monitor.step(1.0)
        assert monitor.log().get("gradient_norm_median") == (None if part else pytest.approx(expected))
    monitor.step(1.0, norm=2.0)
    assert monitor.log()["gradient_norm_median"] == 2.0


def test_ranks_alike_log_alike_and_a_rank_that_is_off_is_named() -> None:
    # Made once: threads share one generator of random numbers.
    its = network()

    def work(ranks: OneOf) -> tuple[dict[str, float], list[Alarm]]:
        told: list[Alarm] = []
        monitor = Monitor(*its, ranks=ranks, on_alarm=told.append)
        draw = torch.Generator().manual_seed(ranks.rank)
        found: dict[str, float] = {}
        for step in range(1, 301):
            monitor.step(1 + 0.1 * torch.randn((), generator=draw) + (ranks.rank == 2), items=8, norm=1.0)
            found = monitor.log() if step % 10 == 0 else found
        return found, told

    results = side_by_side(work, 4)
    assert results[0][0]["rank_loss_2"] == pytest.approx(2.0, abs=0.2)
    assert {"rank_loss_0", "rank_loss_1", "rank_loss_3"} <= results[0][0].keys()
    for _, told in results:
        assert told and told[0].kind == "rank-loss-2"


@pytest.mark.parametrize("on_alarm", ["raise", "stop"])
def test_an_alarm_raises_or_stops_where_it_is_asked_to(on_alarm: Any) -> None:
    monitor = Monitor(*network(), on_alarm=on_alarm)
    monitor.step(math.nan, norm=1.0)
    if on_alarm == "stop":
        assert not monitor.stop
        monitor.log()
        assert monitor.stop
    else:
        with pytest.raises(MonitorAlarmError, match="loss-not-finite"):
            monitor.log()


def test_what_to_do_on_an_alarm_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'end'; expected a callable"):
        MonitorsCallback(trainer(tmp_path), on_alarm="end")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'end'; expected a callable"):
        Monitor(*network(), on_alarm="end")  # type: ignore[arg-type]


def test_a_callback_stops_the_trainer(tmp_path: Path) -> None:
    its = trainer(tmp_path, max_steps=6, logging_steps=1)
    with torch.no_grad():
        its.model.lm_head.weight.fill_(math.nan)
    its.add_callback(MonitorsCallback(its, on_alarm="stop"))
    its.train()
    assert its.state.global_step < 6


def test_a_counter_has_the_name_of_its_alarms() -> None:
    alarms = Alarms()
    for kind in ("rank-loss-1", "rank-loss-not-finite-0, 1", "loss-diverges", "trainer-loss-scaled", "rank-loss-0"):
        alarms.say(Alarm(kind, "x"))
    alarms.say(Alarm("loss-jumped", "x", observation=True))
    expected = {
        "all_alarms": 5,
        "rank_loss_alarms": 2,
        "rank_loss_not_finite_alarms": 1,
        "loss_diverges_alarms": 1,
        "trainer_loss_scaled_alarms": 1,
    }
    assert alarms.counters() == expected and Alarms().counters() == {"all_alarms": 0}
