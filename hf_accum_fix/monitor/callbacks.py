"""The monitors as callbacks of transformers.Trainer: the one file here that knows it.

    for callback in all_callbacks(trainer):                        # all of them; or any one alone:
        trainer.add_callback(callback)
    trainer.add_callback(MemoryCallback(trainer))

They add what they measure to the Trainer's log at each ``logging_steps``, so that trainer_state.json and every tracker
(TensorBoard, W&B, Trackio ...) have it beside ``loss``, as ``hf_accum_fix/...``. Alarms are warnings of the logger
``hf_accum_fix.monitor``; their number is logged too. Reductions and host reads happen only then (and at every hundredth
step for the replicas).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.accuracy_trend import AccuracyTrend
from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.batch_schedule import BatchSchedule
from hf_accum_fix.monitor.first_loss import FirstLoss
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter
from hf_accum_fix.monitor.loss_check import LossCheck, Verdict
from hf_accum_fix.monitor.loss_oscillation import LossOscillation
from hf_accum_fix.monitor.loss_stall import LossStall
from hf_accum_fix.monitor.loss_trend import LossTrend
from hf_accum_fix.monitor.memory import MIB, MemoryMonitor, TrendKind
from hf_accum_fix.monitor.monitor import MonitorAlarmError, OnAlarm
from hf_accum_fix.monitor.noise_scale import NoiseScale
from hf_accum_fix.monitor.pace import Pace
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.replicas import Replicas
from hf_accum_fix.monitor.run_logs import PREFIX
from hf_accum_fix.monitor.shared_samples import SharedSamples

logger = logging.getLogger("hf_accum_fix.monitor")


class MonitorCallback(TrainerCallback):
    """Base of the callbacks: add what they measure to the Trainer's own log.

    Args:
        trainer: the one that the callback is added to; the Trainer does not pass itself on.
        ranks: the data-parallel ranks; None: torch.distributed.
    """

    #: Key of the number of alarms in the log.
    alarms_name = ""
    #: As in `Monitor`; and whether an alarm stops the run.
    on_alarm: OnAlarm = "log"
    stop = False

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        self.trainer = trainer
        self.ranks = ranks or TorchRanks()
        self.alarms = Alarms(self.ranks)

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """What to log now, beside ``logs``; the one place with collectives."""
        raise NotImplementedError

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to ``Trainer.log``."""
        _listen(self.trainer, "log", self._before_log, before=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        _stop_listening(self.trainer, "log", self._before_log)

    def say(self, alarm: Alarm | None) -> None:
        """Log an alarm with its step."""
        if alarm is not None:
            alarm = Alarm(alarm.kind, f"step {self.trainer.state.global_step}: {alarm.message}")
        self.alarms.say(alarm)
        if alarm is None:
            return
        if callable(self.on_alarm):
            self.on_alarm(alarm)
        self.stop = self.stop or self.on_alarm == "stop"
        if self.on_alarm == "raise":
            raise MonitorAlarmError(f"{alarm.kind}: {alarm.message}")

    def _before_log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        found = self.measured(logs)
        if self.alarms_name:
            found[self.alarms_name] = self.alarms.count
        # nan stands for a number that does not exist yet; a loss that is nan was measured.
        logs.update((PREFIX + name, value) for name, value in found.items() if name == "loss" or not math.isnan(value))

    def _not_watched(self, error: UnsupportedSetupError) -> None:
        """Log that this monitor cannot watch the setup; training goes on."""
        if self.ranks.rank == 0:
            logger.warning("not watched by %s: %s", type(self).__name__, error)


class LossCallback(MonitorCallback):
    """`LossMeter`, and all that is judged by the loss.

    `RankLoss`, `LossTrend`, `LossOscillation`, `LossStall`, `FirstLoss`, `AccuracyTrend` (of the first metric of an
    evaluation that is named so) and `BatchSchedule` (of a run that is resumed from a checkpoint with these logs).

    ``hf_accum_fix/loss`` is the mean over the items of the log interval, where the Trainer's own ``loss`` averages
    steps, however many items they hold. `LossCheck` decides from the logits which of these the model's loss is:

    - a head that returns the mean over its micro-batch: then that mean, weighted by the micro-batch's items;
    - a head that divides by the number it is handed: with r what a micro-batch adds to the Trainer's loss and N the
      number, ``sum(r N) / sum(N)`` over the micro-batches above and the steps below, of all ranks;
    - a loss that cannot be checked (label smoothing, a loss of one's own, a compiled model): the same, from the
      Trainer's number; then ``hf_accum_fix/loss_repeats_the_trainers`` is 1, and one warning is logged.

    A Trainer's number that is off by a known factor, such as a mean that nothing divided by the accumulation steps,
    is an alarm.

    Args:
        trainer: as in `MonitorCallback`.
        ranks: as in `MonitorCallback`.
        items: counts the items of one micro-batch's inputs, 0-dim or int, without a device sync; they weigh the ranks.
        judge: of the ranks; default: ``RankLoss()``.
    """

    alarms_name = "rank_loss_alarms"

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks | None = None,
        items: Callable[[Mapping[str, Any]], Tensor | int] | None = None,
        judge: RankLoss | None = None,
    ) -> None:
        super().__init__(trainer, ranks)
        self._items = items or labels_counted
        self._judge = judge or RankLoss()
        self._trends = (LossTrend(), LossOscillation(), LossStall())
        self._first, self._accuracy, self._schedule = FirstLoss(), AccuracyTrend(), BatchSchedule()
        self._last, self._logged_at = math.nan, 0
        self._of_head, self._of_trainer = LossMeter(self.ranks), LossMeter(self.ranks)
        self._check = LossCheck()
        self._steps, self._repeats, self._hook = 1, False, None
        self._number: Any = None
        self._numbers: Any = 0.0
        self._counted: Any = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to ``Trainer.training_step`` and to the model too; of a resumed run, find the last batch."""
        super().on_train_begin()
        state = self.trainer.state
        self._logged_at = state.global_step
        if state.global_step:
            self._schedule.load_state_dict(_last_batches(state.log_history))
        _listen(self.trainer, "training_step", self._after_step)
        if self._hook is None and not self.trainer.args.torch_compile:
            self._hook = self.trainer.model.register_forward_hook(self._after_forward, with_kwargs=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        super().on_train_end()
        _stop_listening(self.trainer, "training_step", self._after_step)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Add up the item counts that the steps were handed."""
        if self._number is not None:
            self._numbers = self._numbers + self._number

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Hold the accuracy against the loss, if one was measured."""
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        names = sorted(name for name in metrics if name.endswith(("accuracy", "_acc")))
        if names:
            self.say(self._accuracy.judge(self._last, _number(metrics[names[0]])))

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Mean loss with its error, spread over the ranks, and the most unusual rank."""
        handed, verdict = self._check.judge(self.ranks, float(self._numbers), float(self._counted))
        self._numbers, self._counted = 0.0, 0.0
        meter, other = self._of_trainer, self._of_head
        if verdict.is_mean:
            meter, other = other, meter
        other.clear()
        reading = meter.read()
        if not verdict.is_mean:
            reading = reading.times((reading.total.items / handed if handed else 1.0) / verdict.factor)
        self._say_scale(verdict, reading.mean)
        self.say(self._judge.judge(reading))
        for trend in self._trends:
            self.say(trend.judge(reading))
        self.say(self._first.judge(reading, verdict.guess))
        self._last = reading.mean
        found = self._batch(reading.total.items, logs)
        found |= {"loss_standard_error": reading.standard_error, "loss_of_a_guess": verdict.guess}
        if reading.total.items:
            found["loss"] = reading.mean
        if not verdict.is_known:
            found["loss_repeats_the_trainers"] = 1.0
        if self.ranks.size > 1:
            found["rank_loss_spread"] = reading.spread
            found.update((f"rank_loss_{rank}", its.mean) for rank, its in enumerate(reading.ranks) if its.items)
        if self._judge.worst is not None:
            found["rank_loss_worst_rank"] = self._judge.worst.rank
            found["rank_loss_worst_in_standard_errors"] = self._judge.worst.unusual
        return found

    def _batch(self, items: float, logs: Mapping[str, Any]) -> dict[str, float]:
        step = self.trainer.state.global_step
        steps, self._logged_at = step - self._logged_at, step
        if steps <= 0:
            return {}
        found = {"items_per_step": items / steps, "ranks": float(self.ranks.size)}
        rate = _number(logs.get("learning_rate"))
        self.say(self._schedule.judge(found["items_per_step"], rate, self.ranks.size))
        return found

    def _say_scale(self, verdict: Verdict, mean: float) -> None:
        if not verdict.is_known and not self._repeats:
            self._repeats = True
            if self.ranks.rank == 0:
                logger.info(
                    "hf_accum_fix/loss repeats the Trainer's number, weighed by items: this loss could not be computed "
                    "once more from logits and labels, so that nothing tells whether it is scaled right"
                )
        if verdict.factor != 1:
            self.say(
                Alarm(
                    "trainer-loss-scaled",
                    f"the Trainer counts a micro-batch for {verdict.factor:.3g} times its share of the loss, "
                    f"{mean:.4g} in the mean over the items, with {self._steps} micro-batches a step and "
                    f"{self.ranks.size} ranks: its logged loss and its gradient are that much off; "
                    "look at `hf-accum-fix doctor`",
                )
            )

    def _after_forward(self, model: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._check.forward(output, kwargs.get("labels"))

    def _after_step(
        self,
        loss: Tensor,
        model: Any,
        inputs: Mapping[str, Any],
        num_items_in_batch: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        items, loss = self._items(inputs), loss.detach()
        self._counted = self._counted + items
        self._number = num_items_in_batch
        steps = getattr(self.trainer, "current_gradient_accumulation_steps", None)
        self._steps = steps or self.trainer.args.gradient_accumulation_steps
        self._of_head.update(self._check.trained(loss, num_items_in_batch, self._steps), items)
        if num_items_in_batch is None:
            self._of_trainer.update(loss * self._steps, items)
        else:
            self._of_trainer.update_sum(loss * num_items_in_batch, items)


class GradientNormCallback(MonitorCallback):
    """`GradientNorm`: every step's norm before clipping, as ``Accelerator.clip_grad_norm_`` returns it.

    Where the Trainer takes no norm (older releases without clipping), none is logged.
    """

    alarms_name = "gradient_norm_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, norms: GradientNorm | None = None) -> None:
        super().__init__(trainer, ranks)
        self._norms = norms or GradientNorm()
        self._clips = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to ``Accelerator.clip_grad_norm_`` too."""
        super().on_train_begin()
        if self._norms.max_norm is None:
            self._norms.max_norm = self.trainer.args.max_grad_norm or None
        _listen(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        super().on_train_end()
        _stop_listening(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Median and MAD of the last steps' norms, spikes and share of clipped steps since the last log."""
        if self._clips == 0 and isinstance(logs.get("grad_norm"), (int, float)):
            self._norms.update(logs["grad_norm"])
        self._clips = 0
        reading = self._norms.read()
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
            self._norms.update(norm)


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
                self._not_watched(error)

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Jitter of the norms over the ranks, and the most unusual rank."""
        if self.ranks.size == 1:
            return {}
        reading = self._gradients.read()
        self.say(self._gradients.judge(reading))
        found = {"rank_gradient_norm_jitter": reading.jitter}
        if self._gradients.worst is not None:
            found["rank_gradient_worst_rank"] = self._gradients.worst.rank
            found["rank_gradient_worst_in_standard_errors"] = self._gradients.worst.unusual
        return found


class ReplicasCallback(MonitorCallback):
    """`Replicas`: parameters, buffers and optimizer state, compared over the ranks every ``every`` steps.

    Args:
        trainer: as in `MonitorCallback`.
        ranks: as in `MonitorCallback`.
        every: steps from one check to the next.
    """

    alarms_name = "replicas_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None, every: int = 100) -> None:
        super().__init__(trainer, ranks)
        self._every = every
        self._replicas: Replicas | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Collect the tensors to compare; log that a sharded model has none."""
        super().on_train_begin()
        if self.ranks.size > 1:
            model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
            try:
                self._replicas = Replicas(model, optimizer, self.ranks, self._every)
            except UnsupportedSetupError as error:
                self._not_watched(error)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Compare, if it is due."""
        if self._replicas is not None:
            self.say(self._replicas.step())

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Only the number of alarms."""
        return {}


class BatchNormCallback(MonitorCallback):
    """`check_batch_norm` after the first step, and the running statistics over the ranks at the end."""

    alarms_name = "batch_norm_alarms"

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
        self.say(compare_buffers(self.trainer.model_wrapped, self.ranks))

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Only the number of alarms."""
        return {}


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

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Used, reserved and peak memory of the rank that uses most, and how fast the fastest grows [MiB]."""
        reading = self._memory.read()
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


class PaceCallback(MonitorCallback):
    """`Pace`: the rank that keeps the others waiting. Nothing on one process."""

    alarms_name = "pace_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self._pace: Pace | None = None
        self._of: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to the model as it is called."""
        super().on_train_begin()
        if self.ranks.size > 1 and self._of is not self.trainer.model_wrapped:
            self._of = self.trainer.model_wrapped
            self._pace = Pace(self._of, self.ranks)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step has ended."""
        if self._pace is not None:
            self._pace.step()

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The rank that is ready last, and how much later than the others [s]."""
        if self._pace is None:
            return {}
        reading = self._pace.read()
        self.say(self._pace.judge(reading))
        if not reading.steps:
            return {}
        return {"slowest_rank": reading.slowest, "slowest_rank_lag_s": reading.lag(reading.slowest)}


class SharedSamplesCallback(MonitorCallback):
    """`SharedSamples`: ranks that are given one another's samples. Nothing on one process.

    Samples are rows of ``input_ids`` without their padding on the right, else of the first tensor of the inputs.
    """

    alarms_name = "shared_samples_alarms"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self._samples = SharedSamples(self.ranks)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to ``Trainer.training_step`` too."""
        super().on_train_begin()
        if self.ranks.size > 1:
            _listen(self.trainer, "training_step", self._after_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        super().on_train_end()
        if self.ranks.size > 1:
            _stop_listening(self.trainer, "training_step", self._after_step)

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Only the number of alarms."""
        if self.ranks.size > 1:
            self.say(self._samples.judge(self._samples.read()))
        return {}

    def _after_step(self, loss: Tensor, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
            ids = ids * (mask != 0)
        tensors = (ids, *inputs.values())
        samples = next((its for its in tensors if isinstance(its, Tensor) and its.ndim), None)
        if samples is not None:
            self._samples.update(samples)


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
            self._not_watched(error)
            return
        self._listens = True
        _listen(self.trainer, "training_step", self._after_step)
        _listen(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A window has ended."""
        if self._noise is not None:
            self._noise.step(self._norm)
            self._norm, self._ended = None, True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The same in releases that do not announce the optimizer's step: only clipping has shown the norm there."""
        if self._noise is not None and not self._ended:
            if self._norm is None:
                self._not_watched(UnsupportedSetupError("got no gradient norm; expected max_grad_norm above 0"))
                self._noise.close()
                self._noise = None
            else:
                self._noise.step(self._norm)
        self._norm, self._ended = None, False

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer and the model as they were."""
        super().on_train_end()
        if self._listens:
            _stop_listening(self.trainer, "training_step", self._after_step)
            _stop_listening(self.trainer.accelerator, "clip_grad_norm_", self._after_clip)
            self._listens = False
        if self._noise is not None:
            self._noise.close()
            self._noise = None

    def measured(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The noise scale, its relative error, and what a step achieves."""
        reading = self._noise.read() if self._noise is not None else None
        if reading is None or not math.isfinite(reading.scale):
            return {}
        return {"noise_scale_items": reading.scale, "noise_scale_error": reading.error, "step_gain": reading.gain}

    def _after_step(self, loss: Tensor, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._noise is not None:
            self._noise.micro_batch(self._items(inputs))

    def _after_clip(self, norm: Any, *args: Any, **kwargs: Any) -> None:
        self._norm = norm if type(norm) in (Tensor, float) else None


class MonitorsCallback(TrainerCallback):
    """All of them as one callback: ``trainer.add_callback(MonitorsCallback(trainer))``.

    ``hf_accum_fix/all_alarms`` counts the alarms of all.

    Args:
        trainer: as in `MonitorCallback`.
        ranks: as in `MonitorCallback`.
        on_alarm: as in `Monitor`; "stop" ends training after the step.
        noise_scale_every: as in `Monitor`.
    """

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks | None = None,
        on_alarm: OnAlarm = "log",
        noise_scale_every: int | None = None,
    ) -> None:
        self._parts = all_callbacks(trainer, ranks)
        if noise_scale_every is not None:
            self._parts = (*self._parts, NoiseScaleCallback(trainer, ranks, noise_scale_every))
        self.stop = False
        for part in self._parts:
            part.on_alarm = on_alarm

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to listen."""
        for part in self._parts:
            part.on_train_begin(*args, **kwargs)
        # Listen last, so that every part has counted.
        _listen(self._parts[0].trainer, "log", self._count, before=True)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Every part's own."""
        for part in self._parts:
            part.on_pre_optimizer_step(*args, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every part's own, and the end of the run where an alarm is to be one."""
        for part in self._parts:
            part.on_evaluate(args, state, control, **kwargs)
        control.should_training_stop = control.should_training_stop or any(part.stop for part in self._parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every part's own, and the end of the run where an alarm is to be one."""
        for part in self._parts:
            part.on_step_end(args, state, control, **kwargs)
        control.should_training_stop = control.should_training_stop or any(part.stop for part in self._parts)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run where an alarm of this log asks for it."""
        control.should_training_stop = control.should_training_stop or any(part.stop for part in self._parts)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        _stop_listening(self._parts[0].trainer, "log", self._count)
        for part in self._parts:
            part.on_train_end(*args, **kwargs)

    def _count(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs[f"{PREFIX}all_alarms"] = sum(part.alarms.count for part in self._parts)


def all_callbacks(trainer: Any, ranks: Ranks | None = None) -> tuple[MonitorCallback, ...]:
    """One of each, for this trainer; add them to it."""
    kinds = (
        *(LossCallback, GradientNormCallback, RankGradientsCallback),
        *(ReplicasCallback, BatchNormCallback, PaceCallback, SharedSamplesCallback),
    )
    return (*(kind(trainer, ranks) for kind in kinds), MemoryCallback(trainer, ranks))


def _last_batches(history: list[dict[str, Any]]) -> dict[str, Any]:
    """What `BatchSchedule` compares with, from a checkpoint's log; nothing where these monitors did not write it."""
    rows = [row for row in history if f"{PREFIX}items_per_step" in row][-20:]
    if not rows:
        return {}
    items = [row[f"{PREFIX}items_per_step"] for row in rows]
    return {"items": items, "ranks": rows[-1][f"{PREFIX}ranks"], "rate": _number(rows[-1].get("learning_rate"))}


def _number(value: Any) -> float:
    """As a float; nan where it is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def labels_counted(inputs: Mapping[str, Any]) -> Tensor | int:
    """Number of labels other than -100 where labels are integers, else of samples, by the first tensor."""
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != -100).sum()
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)


# --- listening to a method of one object ------------------------------------------------------------------------------

_LISTENERS = "_hf_accum_fix_listeners"
_ABSENT = object()


def _listen(owner: Any, name: str, listener: Callable[..., None], *, before: bool = False) -> None:
    """Call ``listener`` with the arguments of every call: before it, or after it with the result in front of them.

    The instance's method hides the class's until the last listener leaves, in any order.
    """
    of_owner: dict[str, tuple[Any, list[tuple[bool, Callable[..., None]]], Callable[..., Any]]]
    of_owner = owner.__dict__.setdefault(_LISTENERS, {})
    # Whoever had put a method there before, and took theirs away after an exception, took ours away as well.
    if name not in of_owner or vars(owner).get(name) is not of_owner[name][2]:
        method = getattr(owner, name)
        listeners: list[tuple[bool, Callable[..., None]]] = of_owner[name][1] if name in of_owner else []

        def heard(*args: Any, **kwargs: Any) -> Any:
            for early, each in listeners:
                if early:
                    each(*args, **kwargs)
            result = method(*args, **kwargs)
            for early, each in listeners:
                if not early:
                    each(result, *args, **kwargs)
            return result

        of_owner[name] = vars(owner).get(name, _ABSENT), listeners, heard
        setattr(owner, name, heard)
    # A run that ended by an exception is still registered: nobody listens twice.
    listeners = of_owner[name][1]
    if (before, listener) not in listeners:
        listeners.append((before, listener))


def _stop_listening(owner: Any, name: str, listener: Callable[..., None]) -> None:
    of_owner = owner.__dict__[_LISTENERS]
    standing, listeners, heard = of_owner[name]
    listeners[:] = [(early, each) for early, each in listeners if each != listener]
    if listeners:
        return
    del of_owner[name]
    if vars(owner).get(name) is not heard:
        pass
    elif standing is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, standing)
    if not of_owner:
        delattr(owner, _LISTENERS)
