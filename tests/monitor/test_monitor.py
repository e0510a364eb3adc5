"""One object for all monitors in a plain loop, and what it may meet in a run that is set up otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.monitor import Alarm, Monitor, MonitorAlarmError, MonitorsCallback
from hf_accum_fix.monitor.alarms import Alarms
from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter, LossReading, Moments
from hf_accum_fix.monitor.rank_gradients import RankGradients, RankGradientsReading
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.replicas import Replicas
from tests.monitor.side_by_side import OneOf, side_by_side
from tests.monitor.test_callbacks import FlatParameter, trainer


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


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

    for found, told in side_by_side(work, 4):
        assert found["rank_loss_2"] == pytest.approx(2.0, abs=0.2)
        assert {"rank_loss_0", "rank_loss_1", "rank_loss_3"} <= found.keys()
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
    for make in (lambda **on: MonitorsCallback(trainer(tmp_path), **on), lambda **on: Monitor(*network(), **on)):
        with pytest.raises(ValueError, match="got 'end'; expected a callable"):
            make(on_alarm="end")


def test_a_counter_has_the_name_of_its_alarms() -> None:
    alarms = Alarms()
    for kind in ("rank-loss-1", "rank-loss-not-finite-0, 1", "loss-diverges", "trainer-loss-scaled", "rank-loss-0"):
        alarms.say(Alarm(kind, "x"))
    alarms.say(Alarm("loss-jumped", "x", observation=True))
    once = ("rank_loss_not_finite_alarms", "loss_diverges_alarms", "trainer_loss_scaled_alarms")
    assert alarms.counters() == {"all_alarms": 5, "rank_loss_alarms": 2, **dict.fromkeys(once, 1)}
    assert Alarms().counters() == {"all_alarms": 0}


def test_what_is_called_at_every_step_never_looks_at_a_number() -> None:
    """On the meta device no tensor has a value: whoever reads one fails."""
    loss, items, norm = (torch.zeros((), device="meta") for _ in range(3))
    meter, norms, gradients = LossMeter(), GradientNorm(max_norm=1.0), RankGradients()
    for _ in range(3):
        meter.update(loss, items)
        meter.update(loss, 5)
        meter.update(loss, items, summed=True)
        norms.update(norm)
        gradients.add(torch.zeros(4, device="meta"))
        gradients.end_of_step()
    for read in (meter.read, norms.read, gradients.read):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            read()


def stage(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


@pytest.mark.parametrize(
    "model",
    [
        lambda rank: stage(4 + rank),
        lambda rank: nn.Sequential(nn.Linear(3, 4), nn.ReLU()) if rank else nn.Sequential(nn.ReLU(), nn.Linear(3, 4)),
        lambda rank: nn.Linear(3, 4).double() if rank else nn.Linear(3, 4),
        lambda rank: nn.Linear(4, 3) if rank else nn.Linear(3, 4),
    ],
    ids=["other sizes", "other names", "other types", "other shapes"],
)
def test_ranks_that_hold_other_tensors_are_told(model: Callable[[int], nn.Module]) -> None:
    for alarm in side_by_side(lambda ranks: Replicas(model(ranks.rank), ranks=ranks).check()):
        assert alarm is not None and alarm.kind == "replicas-not-alike" and "ranks=" in alarm.message


def test_batch_norm_on_one_stage_leaves_no_rank_waiting_and_statistics_that_differ_are_told_without_ddp() -> None:
    def check(ranks: OneOf) -> list[str]:
        model = stage()
        model[1].running_mean.fill_(float(ranks.rank))
        its = model if ranks.rank else nn.Sequential(nn.Linear(3, 4))
        found = [*check_batch_norm(its, per_device_batch=32, ranks=ranks), compare_buffers(model, ranks)]
        return [str(alarm and alarm.kind) for alarm in found]

    assert side_by_side(check) == [["batch-norm-buffers-differ"]] * 2


def test_an_empty_micro_batch_now_and_then_is_no_fault_and_silences_nobody() -> None:
    draw, gradients, found = torch.Generator().manual_seed(0), RankGradients(), []
    # On every rank it is no rank's fault.
    assert gradients.judge(RankGradientsReading(((0.0,) * 10,) * 4)) is None
    for log in range(200):
        norms = torch.exp(0.2 * torch.randn(4, 10, generator=draw))
        norms[torch.rand(4, 10, generator=draw) < 0.05] = 0.0
        norms[2] *= 3.0 if log >= 100 else 1.0
        found.append(gradients.judge(RankGradientsReading(tuple(map(tuple, norms.tolist())))))
    assert not any(found[:100])
    assert any(alarm is not None and alarm.kind == "rank-gradient-2" for alarm in found[100:150])


FULL = Moments(10, 100, 200, 4000, 2000, 1000)
BROKEN = replace(FULL, loss=math.nan)
NOBODY, EVERYBODY = "loss-not-finite", "the loss is not finite on any rank that has one; look at"


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ((BROKEN,), NOBODY, EVERYBODY),
        ((Moments(), Moments(), BROKEN), NOBODY, EVERYBODY),
        ((BROKEN, BROKEN), NOBODY, EVERYBODY),
        ((Moments(), FULL, BROKEN), "rank-loss-not-finite-2", "of rank 2 is not finite, that of rank 1 is; look at"),
        ((FULL, replace(FULL, items=math.nan)), "rank-loss-not-finite-1", "of rank 1 is not finite, that of rank 0 is"),
    ],
    ids=["one", "of three", "both", "not the other", "items"],
)
def test_a_loss_that_is_not_finite_is_told_at_once(ranks: tuple[Moments, ...], kind: str, words: str) -> None:
    alarm = RankLoss().judge(LossReading(ranks))
    assert alarm is not None and alarm.kind == kind and words in alarm.message


@pytest.mark.parametrize("loss", [0.0, math.log(2)], ids=["zero", "a constant"])
def test_losses_that_never_differ_are_not_shared_data(loss: float) -> None:
    def read(ranks: OneOf) -> list[Any]:
        meter, judge, found = LossMeter(ranks), RankLoss(), []
        for _ in range(5):
            for _ in range(10):
                meter.update(loss, 16)
            found.append(judge.judge(meter.read()))
        return found

    assert not any(side_by_side(read)[0])


class Partial:
    """A norm that lies in parts on the ranks, as fully_shard's clipping returns it."""

    def full_tensor(self) -> Tensor:
        return torch.tensor(3.0)


def test_a_norm_in_parts_is_put_together_when_it_is_read() -> None:
    norms = GradientNorm()
    norms.update(Partial())  # type: ignore[arg-type]
    norms.update(2.0)
    assert norms.read().median == 2.5
