"""The gradient as callbacks: its norm over time, that of single ranks, and its noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.callbacks.loss import labels_counted
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.noise_scale import NoiseScale
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.ranks import Ranks


class GradientNormCallback(MonitorCallback):
    """`GradientNorm`: every step's norm before clipping, as ``Accelerator.clip_grad_norm_`` returns it.

    Where the Trainer takes no norm (older releases without clipping), none is logged.
    """

    alarms_group = "gradient_norm"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self.monitor = self._norms = GradientNorm()
        self._clips = 0
        self._items: Tensor | int = 0

    def watch(self, model: Any) -> None:
        self._norms.max_norm = self.trainer.args.max_grad_norm or None

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """As in `GradientNorm`; where no clipping was seen, of the norm that the Trainer logs."""
        clips, self._clips = self._clips, 0
        if clips == 0 and isinstance(logs.get("grad_norm"), (int, float)):
            self._norms.update(logs["grad_norm"])
        return super().measured(logs, readings if clips else {self._norms: self._norms.read()})

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        self._items = self._items + labels_counted(inputs)

    def clipped(self, norm: Tensor | float | None) -> None:
        """Take the norm; where there is none, the logged one counts instead."""
        if norm is not None:
            self._clips += 1
            self._norms.update(norm, self._items)
        self._items = 0


class RankGradientsCallback(MonitorCallback):
    """`RankGradients`: the gradient norm of each rank before DDP averages it. Nothing on one process."""

    alarms_group = "rank_gradient"
    monitor: RankGradients | None = None
    _model: Any = None

    def watch(self, model: Any) -> None:
        if self.ranks.size > 1 and self._model is not model:
            self._model, self.monitor, gradients = model, None, RankGradients(self.ranks)
            gradients.attach(model)
            self.monitor = gradients


class NoiseScaleCallback(MonitorCallback):
    """`NoiseScale`: is this much accumulation worth it?

    Micro-batches must be weighted by their items, as with ``hf_accum_fix.apply()``, or hold as many each.

    Args:
        trainer, ranks: as in `MonitorCallback`.
        every: steps from one that is measured to the next.
        items: counts the items of one micro-batch's inputs, 0-dim or int, without a device sync.
        dealt: whether windows are length-balanced; then nothing is measured.
    """

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks | None = None,
        every: int = 10,
        items: Callable[[Mapping[str, Any]], Tensor | int] | None = None,
        dealt: bool = False,
    ) -> None:
        super().__init__(trainer, ranks)
        self._every, self._items, self._dealt = every, items or labels_counted, dealt
        self.monitor: NoiseScale | None = None
        self._norm: Any = None
        self._ended = False

    def watch(self, model: Any) -> None:
        args = self.trainer.args
        sampling = getattr(args, "train_sampling_strategy", "")
        by_length = getattr(args, "group_by_length", False) or sampling == "group_by_length"
        if args.fp16:
            raise UnsupportedSetupError("got a loss that is scaled (fp16); expected bfloat16 or float32")
        self.monitor = NoiseScale(model, self._every, self.ranks, dealt=self._dealt or by_length)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(self._norm)
            self._norm, self._ended = None, True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The same in releases that do not announce the optimizer's step: only clipping has shown the norm there."""
        if self.monitor is not None and not self._ended:
            if self._norm is None:
                self.not_watched(UnsupportedSetupError("got no gradient norm; expected max_grad_norm above 0"))
                self._close()
            else:
                self.monitor.step(self._norm)
        self._norm, self._ended = None, False

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_end()
        self._close()

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        if self.monitor is not None:
            self.monitor.micro_batch(self._items(inputs))

    def clipped(self, norm: Tensor | float | None) -> None:
        self._norm = norm

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
