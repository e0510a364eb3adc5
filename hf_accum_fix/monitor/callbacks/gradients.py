"""The gradient as callbacks: its norm over time, that of single ranks, and its noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.callbacks.listening import listen, stop_listening
from hf_accum_fix.monitor.callbacks.loss import labels_counted
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.noise_scale import NoiseScale
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.ranks import Gathered, Ranks


class GradientNormCallback(MonitorCallback):
    """`GradientNorm`: every step's norm before clipping, as ``Accelerator.clip_grad_norm_`` returns it.

    Where the Trainer takes no norm (older releases without clipping), none is logged.
    """

    alarms_name = "gradient_norm_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, norms: GradientNorm | None = None) -> None:
        super().__init__(trainer, ranks)
        self._norms = norms or GradientNorm()
        self._clips = 0
        self._items: Tensor | int = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to ``Trainer.training_step`` and ``Accelerator.clip_grad_norm_`` too."""
        super().on_train_begin()
        listen(self.trainer, "training_step", self._after_step)
        if self._norms.max_norm is None:
            self._norms.max_norm = self.trainer.args.max_grad_norm or None
        listen(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        super().on_train_end()
        stop_listening(self.trainer, "training_step", self._after_step)
        stop_listening(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def gathered(self) -> Sequence[Gathered]:
        """The items of every rank's steps."""
        return (self._norms,)

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Median and MAD of the last steps' norms, spikes and share of clipped steps since the last log."""
        clips, self._clips = self._clips, 0
        if clips == 0 and isinstance(logs.get("grad_norm"), (int, float)):
            self._norms.update(logs["grad_norm"])
        reading = readings[self._norms] if clips else self._norms.read()
        if not reading.steps:
            return {}
        self.say(self._norms.judge(reading))
        found = {"gradient_norm_median": reading.median, "gradient_norm_mad": reading.mad}
        found["gradient_norm_spikes"] = len(reading.spikes)
        if reading.clipped is not None:
            found["clipped_steps_share"] = reading.clipped
        return found

    def _after_clip(self, norm: Any, *args: Any, **kwargs: Any) -> None:
        # Take the logged norm instead: a DTensor's norm is not reduced yet, and DeepSpeed's is sometimes None.
        if type(norm) in (Tensor, float):
            self._clips += 1
            self._norms.update(norm, self._items)
        self._items = 0

    def _after_step(self, loss: Tensor, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self._items = self._items + labels_counted(inputs)


class RankGradientsCallback(MonitorCallback):
    """`RankGradients`: the gradient norm of each rank before DDP averages it. Nothing on one process."""

    alarms_name = "rank_gradient_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, gradients: RankGradients | None = None) -> None:
        super().__init__(trainer, ranks)
        self._gradients = gradients or RankGradients(self.ranks)
        self._attached_to: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Register with DDP; log that nothing is watched without DDP, or where DDP has a hook already."""
        super().on_train_begin()
        model = self.trainer.model_wrapped
        if self._attached_to is not model and (self.ranks.size > 1 or isinstance(model, DistributedDataParallel)):
            self._attached_to = model
            try:
                self._gradients.attach(model)
            except UnsupportedSetupError as error:
                self.not_watched(error)

    def gathered(self) -> Sequence[Gathered]:
        """The norms of the ranks, of which none is off on one process."""
        return (self._gradients,) if self.ranks.size > 1 else ()

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Jitter of the norms over the ranks, and the most unusual rank."""
        if self.ranks.size == 1:
            return {}
        reading = readings[self._gradients]
        self.say(self._gradients.judge(reading))
        found = {"rank_gradient_norm_jitter": reading.jitter}
        if self._gradients.worst is not None:
            found["rank_gradient_worst_rank"] = self._gradients.worst.rank
            found["rank_gradient_worst_in_standard_errors"] = self._gradients.worst.unusual
        return found


class NoiseScaleCallback(MonitorCallback):
    """`NoiseScale`: is this much accumulation worth it?

    Micro-batches must be weighted by their items, as with ``hf_accum_fix.apply()``, or hold as many each.

    Args:
        trainer: as in `MonitorCallback`.
        ranks: as in `MonitorCallback`.
        every: steps from one that is measured to the next.
        items: counts the items of one micro-batch's inputs, 0-dim or int, without a device sync.
        dealt: whether samples are dealt into micro-batches by length; then nothing is measured.
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
        self._noise: NoiseScale | None = None
        self._norm: Any = None
        self._ended = self._listens = False

    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """Listen to the micro-batches and to clipping; log where nothing can be measured."""
        super().on_train_begin()
        sampling = getattr(args, "train_sampling_strategy", "")
        by_length = getattr(args, "group_by_length", False) or sampling == "group_by_length"
        try:
            if args.fp16:
                raise UnsupportedSetupError("got a loss that is scaled (fp16); expected bfloat16 or float32")
            dealt = self._dealt or by_length
            self._noise = NoiseScale(self.trainer.model_wrapped, self._every, self.ranks, dealt=dealt)
        except UnsupportedSetupError as error:
            self.not_watched(error)
            return
        self._listens = True
        listen(self.trainer, "training_step", self._after_step)
        listen(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A window has ended."""
        if self._noise is not None:
            self._noise.step(self._norm)
            self._norm, self._ended = None, True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The same in releases that do not announce the optimizer's step: only clipping has shown the norm there."""
        if self._noise is not None and not self._ended:
            if self._norm is None:
                self.not_watched(UnsupportedSetupError("got no gradient norm; expected max_grad_norm above 0"))
                self._noise.close()
                self._noise = None
            else:
                self._noise.step(self._norm)
        self._norm, self._ended = None, False

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer and the model as they were."""
        super().on_train_end()
        if self._listens:
            stop_listening(self.trainer, "training_step", self._after_step)
            stop_listening(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)
            self._listens = False
        if self._noise is not None:
            self._noise.close()
            self._noise = None

    def gathered(self) -> Sequence[Gathered]:
        """The noise scale, where it can be measured."""
        return (self._noise,) if self._noise is not None else ()

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """The noise scale, its relative error, and what a step achieves."""
        reading = readings[self._noise] if self._noise is not None else None
        if reading is None or not math.isfinite(reading.scale):
            return {}
        return {"noise_scale_items": reading.scale, "noise_scale_error": reading.error, "step_gain": reading.gain}

    def _after_step(self, loss: Tensor, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._noise is not None:
            self._noise.micro_batch(self._items(inputs))

    def _after_clip(self, norm: Any, *args: Any, **kwargs: Any) -> None:
        self._norm = norm if type(norm) in (Tensor, float) else None
