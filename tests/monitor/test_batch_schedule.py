"""A run that goes on with other ranks and the same learning rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

from hf_accum_fix.monitor import Alarm, LossCallback, Monitor
from hf_accum_fix.monitor.batch_schedule import BatchSchedule
from tests.monitor.test_callbacks import trainer


@pytest.mark.parametrize(
    ("items", "rate", "told"),
    [
        (512, 1e-3, True), (2048, 1e-3, True), (1100, 1e-3, False), (512, 0.5e-3, False),
        (512, 1e-3 / math.sqrt(2), False), (2048, 2e-3, False), (512, math.nan, True), (512, 0.0, True),
    ],
)  # fmt: skip
def test_another_batch_is_told_unless_the_rate_was_changed_to_match(items: float, rate: float, told: bool) -> None:
    before = BatchSchedule()
    assert before.judge(1024, 1e-3, ranks=8) is None
    # Within a run the batch may change by design.
    assert before.judge(1500, 1e-3, ranks=8) is None
    for _ in range(20):
        assert before.judge(1024, 1e-3, ranks=8) is None
    resumed = BatchSchedule()
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    alarm = resumed.judge(items, rate, ranks=4)
    assert (alarm is not None) == told
    assert resumed.judge(items, rate, ranks=4) is None
    if alarm is not None:
        assert alarm.kind == "batch-changed" and "1,024 on 8 ranks" in alarm.message


def test_ragged_batches_are_the_same_batch() -> None:
    before, resumed = BatchSchedule(), BatchSchedule()
    for items in (300, 1200, 700, 500, 1100):
        before.judge(items, 1e-3, ranks=8)
    for items, told in ((320, False), (1250, False), (200, True)):
        resumed.load_state_dict(before.state_dict())
        assert (resumed.judge(items, 1e-3, ranks=4) is not None) == told


def test_a_new_run_and_a_state_of_an_older_release_say_nothing() -> None:
    resumed = BatchSchedule()
    resumed.load_state_dict({})
    assert resumed.judge(512, 1e-3, ranks=4) is None


def test_a_monitor_that_is_resumed_tells() -> None:
    def run(items: int, state: dict[str, object] | None) -> tuple[list[Alarm], dict[str, object]]:
        model, told = nn.Linear(2, 2), list[Alarm]()
        monitor = Monitor(model, SGD(model.parameters(), lr=0.1), on_alarm=told.append)
        if state is not None:
            monitor.load_state_dict(state)
        for _ in range(10):
            monitor.step(1.0, items, norm=1.0)
        assert monitor.log()["items_per_step"] == items
        return told, json.loads(json.dumps(monitor.state_dict()))

    told, state = run(64, None)
    assert not told and not run(64, state)[0]
    assert [alarm.kind for alarm in run(32, state)[0]] == ["batch-changed"]


def test_a_trainer_that_is_resumed_with_half_the_micro_batches_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Releases before 4.48 read a checkpoint's random states by torch.load, which refuses them since torch 2.6.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    def run(steps: int, accumulation: int, checkpoint: str | None) -> list[str]:
        its = trainer(
            tmp_path, max_steps=steps, gradient_accumulation_steps=accumulation, save_strategy="steps", save_steps=3,
            lr_scheduler_type="constant",
        )  # fmt: skip
        told: list[str] = []
        callback = LossCallback(its)
        callback.alarms.on_alarm = lambda alarm: told.append(alarm.kind)
        its.add_callback(callback)
        its.train(resume_from_checkpoint=checkpoint)
        return told

    assert run(3, 4, None) == []
    assert run(6, 4, str(tmp_path / "checkpoint-3")) == []
    assert run(6, 1, str(tmp_path / "checkpoint-3")) == ["batch-changed"]
