"""What ranks have in common, or should not have, as callbacks: replicas, BatchNorm, pace, samples, memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.memory import MemoryMonitor, TrendKind
from hf_accum_fix.monitor.pace import Pace
from hf_accum_fix.monitor.ranks import Ranks, alike
from hf_accum_fix.monitor.replicas import Replicas
from hf_accum_fix.monitor.shared_samples import SharedSamples

logger = logging.getLogger("hf_accum_fix.monitor")


class ReplicasCallback(MonitorCallback):
    """`Replicas`: parameters, buffers and optimizer state, compared over the ranks every ``every`` steps.

    Args:
        trainer, ranks: as in `MonitorCallback`.
        every: steps from one check to the next.
    """

    alarms_group = "replicas"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, every: int = 100) -> None:
        super().__init__(trainer, ranks)
        self._every = every
        self._replicas: Replicas | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Collect the tensors to compare; log that a sharded model has none."""
        self._replicas = None
        super().on_train_begin()
        if self.ranks.size > 1 and not alike(self.ranks, self._replicas is None):
            self._replicas = None  # What one rank cannot compare nobody waits for.

    def watch(self, model: Any) -> None:
        if self.ranks.size > 1:
            self._replicas = Replicas(model, self.trainer.optimizer, self.ranks, self._every)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._replicas is not None:
            self.say(self._replicas.step())


class BatchNormCallback(MonitorCallback):
    """`check_batch_norm` after the first step, and the running statistics over the ranks at the end."""

    alarms_group = "batch_norm"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self._checked = False

    def on_step_end(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """Look at the layers once, as training has left them."""
        if self._checked:
            return
        self._checked = True
        for alarm in check_batch_norm(
            self.trainer.model_wrapped,
            per_device_batch=args.per_device_train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
            optimizer=self.trainer.optimizer,
            ranks=self.ranks,
        ):
            self.say(alarm)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Check the statistics with which the model is evaluated."""
        super().on_train_end()
        steps = self.trainer.args.gradient_accumulation_steps
        self.say(compare_buffers(self.trainer.model_wrapped, self.ranks, steps))


class PaceCallback(MonitorCallback):
    """`Pace`: the rank that keeps the others waiting. Nothing on one process."""

    alarms_group = "rank_lags"
    monitor: Pace | None = None
    _model: Any = None

    def watch(self, model: Any) -> None:
        if self.ranks.size > 1 and self._model is not model:
            self._model, self.monitor = model, Pace(model, self.ranks)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.step()


class SharedSamplesCallback(MonitorCallback):
    """`SharedSamples`: ranks that are given one another's samples. Nothing on one process.

    Args:
        trainer, ranks: as in `MonitorCallback`.
        samples: of a micro-batch's inputs, what `SharedSamples.update` takes, or None. Default: rows of ``input_ids``
            without their padding on the right, else of the first tensor. Where samples are augmented, give indices,
            or ``lambda inputs: inputs["labels"][None]``.
    """

    alarms_group = "ranks_share_samples"

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks | None = None,
        samples: Callable[[Mapping[str, Any]], Tensor | None] | None = None,
    ) -> None:
        super().__init__(trainer, ranks)
        self._samples, self._samples_of = SharedSamples(self.ranks), samples or samples_of
        self.monitor = self._samples if self.ranks.size > 1 else None

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        samples = self._samples_of(inputs) if self.monitor is not None else None
        if samples is not None:
            self._samples.update(samples)


class MemoryCallback(MonitorCallback):
    """`MemoryMonitor`: sampled at every step, decided at every log."""

    alarms_group = "memory"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self.monitor = self._memory = MemoryMonitor(ranks=self.ranks)
        self._reported: list[TrendKind] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._memory.sample()

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """As in `MemoryMonitor`; a decision that has changed is logged in words."""
        ranks = readings[self._memory]
        kinds = [its.trend.kind for its in ranks]
        if kinds != self._reported and self.ranks.rank == 0:
            self._reported = kinds
            words = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(ranks))
            logger.info("step %d: memory of %s", self.trainer.state.global_step, words)
        return super().measured(logs, readings)


def samples_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """Rows of ``input_ids``, zero where the mask is, else of the first tensor; None without one."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids * (mask != 0)
    return next((its for its in (ids, *inputs.values()) if isinstance(its, Tensor) and its.ndim), None)
