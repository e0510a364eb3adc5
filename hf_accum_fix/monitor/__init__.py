"""Is this distributed run healthy, and is its loss curve true? One file a family of symptoms; the README lists them.

``monitor.Monitor`` is all of them in one object. Each is a plain object for any PyTorch loop and works alone: it has
readings in and alarms out (``alarms``), and decides by the numbers of ``thresholds``. ``callbacks`` has them for
transformers.Trainer; ``watch`` reads logs. Ranks are reached through ``ranks.Ranks``: one sum. Nothing here knows the
rest of the package.
"""

# ruff: noqa: I001 - several names a line
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_accum_fix.monitor.alarms import Alarm as Alarm, Alarms as Alarms, MonitorAlarmError as MonitorAlarmError
    from hf_accum_fix.monitor.batch_norm import check_batch_norm as check_batch_norm, compare_buffers as compare_buffers
    from hf_accum_fix.monitor.callbacks import MonitorsCallback as MonitorsCallback
    from hf_accum_fix.monitor.gradient_norm import GradientNorm as GradientNorm
    from hf_accum_fix.monitor.loss import LossMeter as LossMeter
    from hf_accum_fix.monitor.loss_over_time import AccuracyTrend as AccuracyTrend, FirstLoss as FirstLoss
    from hf_accum_fix.monitor.loss_over_time import LossOscillation as LossOscillation, LossStall as LossStall
    from hf_accum_fix.monitor.loss_over_time import LossTrend as LossTrend
    from hf_accum_fix.monitor.memory import MemoryMonitor as MemoryMonitor
    from hf_accum_fix.monitor.monitor import Monitor as Monitor
    from hf_accum_fix.monitor.noise_scale import NoiseScale as NoiseScale
    from hf_accum_fix.monitor.pace import Pace as Pace
    from hf_accum_fix.monitor.series import without_sentinels as without_sentinels
    from hf_accum_fix.monitor.rank_gradients import RankGradients as RankGradients
    from hf_accum_fix.monitor.rank_loss import RankLoss as RankLoss
    from hf_accum_fix.monitor.ranks import Ranks as Ranks, TorchRanks as TorchRanks
    from hf_accum_fix.monitor.replicas import Replicas as Replicas
    from hf_accum_fix.monitor.shared_samples import SharedSamples as SharedSamples

#: Public names, by the module that holds them.
_NAMES = {
    "alarms": "Alarm Alarms MonitorAlarmError",
    "batch_norm": "check_batch_norm compare_buffers",
    "callbacks": "MonitorsCallback",
    "gradient_norm": "GradientNorm",
    "loss": "LossMeter",
    "loss_over_time": "AccuracyTrend FirstLoss LossOscillation LossStall LossTrend",
    "memory": "MemoryMonitor",
    "monitor": "Monitor",
    "noise_scale": "NoiseScale",
    "pace": "Pace",
    "rank_gradients": "RankGradients",
    "rank_loss": "RankLoss",
    "ranks": "Ranks TorchRanks",
    "replicas": "Replicas",
    "series": "without_sentinels",
    "shared_samples": "SharedSamples",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Import them on first use: each monitor imports torch, and the callbacks import transformers.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_accum_fix.monitor.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
