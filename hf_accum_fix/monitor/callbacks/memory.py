"""Memory as a callback."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.memory_trend import MIB, TrendKind
from hf_accum_fix.monitor.ranks import Gathered, Ranks

logger = logging.getLogger("hf_accum_fix.monitor")


class MemoryCallback(MonitorCallback):
    """`MemoryMonitor`: sampled at every step, decided at every log."""

    alarms_name = "memory_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, memory: MemoryMonitor | None = None) -> None:
        super().__init__(trainer, ranks)
        self._memory = memory or MemoryMonitor(ranks=self.ranks)
        self._told: list[TrendKind] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Sample."""
        self._memory.sample()

    def gathered(self) -> Sequence[Gathered]:
        """Every rank's memory."""
        return (self._memory,)

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Used, reserved and peak memory of the rank that uses most, and how fast the fastest grows [MiB]."""
        reading = readings[self._memory]
        self.say(self._memory.judge(reading))
        kinds = [its.trend.kind for its in reading.ranks]
        if kinds != self._told and self.ranks.rank == 0:
            self._told = kinds
            words = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(reading.ranks))
            logger.info("step %d: memory of %s", self.trainer.state.global_step, words)
        slopes = [its.trend.slope for its in reading.ranks if not math.isnan(its.trend.slope)]
        return {
            "memory_mib": max(its.used for its in reading.ranks) / MIB,
            "memory_reserved_mib": max(its.reserved for its in reading.ranks) / MIB,
            "memory_peak_mib": max(its.peak for its in reading.ranks) / MIB,
            "memory_growth_mib_per_step": max(slopes, default=math.nan) / MIB,
        }
