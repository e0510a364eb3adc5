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
    together    all of them as one
"""

from __future__ import annotations

from hf_accum_fix.monitor.callbacks.across_ranks import (
    BatchNormCallback,
    MemoryCallback,
    PaceCallback,
    ReplicasCallback,
    SharedSamplesCallback,
)
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback
from hf_accum_fix.monitor.callbacks.gradients import GradientNormCallback, NoiseScaleCallback, RankGradientsCallback
from hf_accum_fix.monitor.callbacks.loss import LossCallback, labels_counted
from hf_accum_fix.monitor.callbacks.together import MonitorsCallback, all_callbacks

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
