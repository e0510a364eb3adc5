"""Memory as a callback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.memory_trend import TrendKind
from hf_accum_fix.monitor.ranks import Ranks

logger = logging.getLogger("hf_accum_fix.monitor")


class MemoryCallback(MonitorCallback):
    """`MemoryMonitor`: sampled at every step, decided at every log."""

    alarms_name = "memory_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self.monitor = self._memory = MemoryMonitor(ranks=self.ranks)
        self._reported: list[TrendKind] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._memory.sample()

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """As in `MemoryMonitor`; a decision that has changed is logged in words."""
        ranks = readings[self._memory].ranks
        kinds = [its.trend.kind for its in ranks]
        if kinds != self._reported and self.ranks.rank == 0:
            self._reported = kinds
            words = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(ranks))
            logger.info("step %d: memory of %s", self.trainer.state.global_step, words)
        return super().measured(logs, readings)
