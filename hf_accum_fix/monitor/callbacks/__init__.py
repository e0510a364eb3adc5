"""The monitors as callbacks of transformers.Trainer: the one room here that knows it.

    trainer.add_callback(MonitorsCallback(trainer))                # all of them; or any one alone:
    trainer.add_callback(MemoryCallback(trainer))

They add what they measure to the Trainer's log at each ``logging_steps``, so that trainer_state.json and every tracker
(TensorBoard, W&B, Trackio ...) have it next to ``loss``, as ``hf_accum_fix/...``. Alarms are warnings of the logger
``hf_accum_fix.monitor``; their number is logged too. Reductions and host reads happen only then (and at every hundredth
step for the replicas): all callbacks of a trainer share one sum over the ranks.

    callback    the base: what a trainer does, and one log to which all its callbacks add
    loss        the loss, and all that is judged by it
    across_ranks  what ranks have in common, or should not have: replicas, BatchNorm, pace, samples, memory
    gradients   the gradient over time, of single ranks, and its noise
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partialmethod
from typing import Any

from hf_accum_fix.monitor.alarms import Alarms, OnAlarm
from hf_accum_fix.monitor.callbacks.across_ranks import (
    BatchNormCallback,
    MemoryCallback,
    PaceCallback,
    ReplicasCallback,
    SharedSamplesCallback,
)
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.callbacks.gradients import GradientNormCallback, NoiseScaleCallback, RankGradientsCallback
from hf_accum_fix.monitor.callbacks.loss import LossCallback, labels_counted
from hf_accum_fix.monitor.ranks import Ranks

__all__ = [
    "BatchNormCallback",
    "GradientNormCallback",
    "LossCallback",
    "MemoryCallback",
    "MonitorCallback",
    "MonitorsCallback",
    "NoiseScaleCallback",
    "PaceCallback",
    "RankGradientsCallback",
    "ReplicasCallback",
    "SharedSamplesCallback",
    "all_callbacks",
    "labels_counted",
]


class MonitorsCallback(MonitorCallback):
    """All of them as one callback: ``trainer.add_callback(MonitorsCallback(trainer))``.

    ``hf_accum_fix/all_alarms`` counts the alarms of all.

    Args:
        trainer, ranks: as in `MonitorCallback`.
        on_alarm: as in `Monitor`; "stop" ends training after the step.
        noise_scale_every: as in `Monitor`.

    Raises:
        ValueError: if ``on_alarm`` is something else.
    """

    def __init__(
        self, trainer: Any, ranks: Ranks | None = None, on_alarm: OnAlarm = "log", noise_scale_every: int | None = None
    ) -> None:
        super().__init__(trainer, ranks)
        self._parts = all_callbacks(trainer, ranks)
        if noise_scale_every is not None:
            self._parts = (*self._parts, NoiseScaleCallback(trainer, ranks, noise_scale_every))
        for part in self._parts:
            part.alarms = Alarms(part.ranks, on_alarm)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Take part in the Trainer's logs, last: every part has counted then."""
        for part in self._parts:
            part.on_train_begin(*args, **kwargs)
        super().on_train_begin()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_end()
        for part in self._parts:
            part.on_train_end(*args, **kwargs)

    def _pass_on(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every part's own; and the end of the run where an alarm is to be one."""
        for part in self._parts:
            getattr(part, event)(args, state, control, **kwargs)
        control.should_training_stop = control.should_training_stop or any(part.alarms.stop for part in self._parts)

    on_pre_optimizer_step = partialmethod(_pass_on, "on_pre_optimizer_step")
    on_step_end = partialmethod(_pass_on, "on_step_end")
    on_evaluate = partialmethod(_pass_on, "on_evaluate")
    on_log = partialmethod(_pass_on, "on_log")

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Only the number of alarms of all."""
        return {"all_alarms": sum(part.alarms.count for part in self._parts)}


def all_callbacks(trainer: Any, ranks: Ranks | None = None) -> tuple[MonitorCallback, ...]:
    """One of each, for this trainer; add them to it."""
    kinds = (LossCallback, GradientNormCallback, RankGradientsCallback, ReplicasCallback, BatchNormCallback)
    return tuple(its(trainer, ranks) for its in (*kinds, PaceCallback, SharedSamplesCallback, MemoryCallback))
