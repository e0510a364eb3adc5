"""Is this distributed run healthy, and does its loss curve tell the truth? One symptom, one file.

    loss            a curve that shows every micro-batch, with its error
    loss_over_time  a loss that diverges, jumps, swings, stands or starts too high; an accuracy that stands
    batch_schedule  another global batch, and the learning rates of the old one
    rank_loss       a rank whose loss is off
    rank_gradients  a rank whose gradient is off, before it is averaged
    gradient_norm   spikes and clipping over time
    replicas        replicas that are no longer alike
    batch_norm      statistics of a batch that was cut; SyncBatchNorm in the wrong order
    pipeline        a sentinel where there is no loss
    memory          warm-up, plateau or leak
    noise_scale     is this much accumulation worth it?
    shared_samples  ranks that are given one another's samples
    pace            a rank that keeps the others waiting
    stage_balance   a pipeline stage that keeps the others waiting
    loss_check      is the loss that a Trainer logs the mean over the items?
    watch           a run's logs in one look

``monitor.Monitor`` is all of them in one object.

Each is a plain object for any PyTorch loop, each stands alone, and ``callbacks`` has them for transformers.Trainer.
Ranks are reached through ``ranks.Ranks``: one sum. Nothing here knows the rest of the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_accum_fix.monitor.alarms import Alarm, Alarms, MonitorAlarmError
    from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers, convert_sync_batch_norm
    from hf_accum_fix.monitor.batch_schedule import BatchSchedule
    from hf_accum_fix.monitor.callbacks import (
        BatchNormCallback,
        GradientNormCallback,
        LossCallback,
        MemoryCallback,
        MonitorsCallback,
        NoiseScaleCallback,
        PaceCallback,
        RankGradientsCallback,
        ReplicasCallback,
        SharedSamplesCallback,
        all_callbacks,
    )
    from hf_accum_fix.monitor.gradient_norm import GradientNorm
    from hf_accum_fix.monitor.loss import LossMeter
    from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
    from hf_accum_fix.monitor.memory import MemoryMonitor
    from hf_accum_fix.monitor.monitor import Monitor
    from hf_accum_fix.monitor.noise_scale import NoiseScale
    from hf_accum_fix.monitor.pace import Pace
    from hf_accum_fix.monitor.pipeline import without_sentinels
    from hf_accum_fix.monitor.rank_gradients import RankGradients
    from hf_accum_fix.monitor.rank_loss import RankLoss
    from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
    from hf_accum_fix.monitor.replicas import Replicas
    from hf_accum_fix.monitor.shared_samples import SharedSamples
    from hf_accum_fix.monitor.stage_balance import StageBalance

_HOMES = {
    "AccuracyTrend": "loss_over_time",
    "Alarm": "alarms",
    "Alarms": "alarms",
    "BatchNormCallback": "callbacks",
    "BatchSchedule": "batch_schedule",
    "FirstLoss": "loss_over_time",
    "GradientNorm": "gradient_norm",
    "GradientNormCallback": "callbacks",
    "LossCallback": "callbacks",
    "LossMeter": "loss",
    "LossOscillation": "loss_over_time",
    "LossStall": "loss_over_time",
    "LossTrend": "loss_over_time",
    "MemoryCallback": "callbacks",
    "MemoryMonitor": "memory",
    "Monitor": "monitor",
    "MonitorAlarmError": "alarms",
    "MonitorsCallback": "callbacks",
    "NoiseScale": "noise_scale",
    "NoiseScaleCallback": "callbacks",
    "Pace": "pace",
    "PaceCallback": "callbacks",
    "RankGradients": "rank_gradients",
    "RankGradientsCallback": "callbacks",
    "RankLoss": "rank_loss",
    "Ranks": "ranks",
    "Replicas": "replicas",
    "ReplicasCallback": "callbacks",
    "SharedSamples": "shared_samples",
    "SharedSamplesCallback": "callbacks",
    "StageBalance": "stage_balance",
    "TorchRanks": "ranks",
    "all_callbacks": "callbacks",
    "check_batch_norm": "batch_norm",
    "compare_buffers": "batch_norm",
    "convert_sync_batch_norm": "batch_norm",
    "without_sentinels": "pipeline",
}

__all__ = [
    "AccuracyTrend",
    "Alarm",
    "Alarms",
    "BatchNormCallback",
    "BatchSchedule",
    "FirstLoss",
    "GradientNorm",
    "GradientNormCallback",
    "LossCallback",
    "LossMeter",
    "LossOscillation",
    "LossStall",
    "LossTrend",
    "MemoryCallback",
    "MemoryMonitor",
    "Monitor",
    "MonitorAlarmError",
    "MonitorsCallback",
    "NoiseScale",
    "NoiseScaleCallback",
    "Pace",
    "PaceCallback",
    "RankGradients",
    "RankGradientsCallback",
    "RankLoss",
    "Ranks",
    "Replicas",
    "ReplicasCallback",
    "SharedSamples",
    "SharedSamplesCallback",
    "StageBalance",
    "TorchRanks",
    "all_callbacks",
    "check_batch_norm",
    "compare_buffers",
    "convert_sync_batch_norm",
    "without_sentinels",
]


def __getattr__(name: str) -> Any:
    # Import them on first use: each monitor imports torch, and the callbacks import transformers.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_accum_fix.monitor.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
