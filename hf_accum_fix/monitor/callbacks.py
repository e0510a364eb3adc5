"""The monitors as callbacks of transformers.Trainer: the one file here that knows it.

    trainer.add_callback(MonitorsCallback(trainer))                # all of them; or any one alone:
    trainer.add_callback(MemoryCallback(trainer))

They add what they measure to the Trainer's log at each ``logging_steps``, so that trainer_state.json and every tracker
(TensorBoard, W&B, Trackio ...) have it next to ``loss``, as ``hf_accum_fix/...``. Alarms are warnings of the logger
``hf_accum_fix.monitor``; their number is logged too. Reductions and host reads happen only then (and at every hundredth
step for the replicas): all callbacks of a trainer share one sum over the ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarm, Alarms, Gathered, OnAlarm
from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossCheck, LossMeter, LossReading, Verdict
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.monitor import LossJudges
from hf_accum_fix.monitor.noise_scale import NoiseScale
from hf_accum_fix.monitor.pace import Pace
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, alike, on_every_rank, read_together
from hf_accum_fix.monitor.replicas import Replicas
from hf_accum_fix.monitor.series import PREFIX
from hf_accum_fix.monitor.shared_samples import SharedSamples

logger = logging.getLogger("hf_accum_fix.monitor")

Readings = Mapping[Gathered[Any], Any]
"""The reading of each monitor, from the rows of all ranks."""
#: Attribute of a Trainer that holds its `_Parts` while it trains.
_PARTS = "_hf_accum_fix_monitors"


class MonitorCallback(TrainerCallback):
    """Base of the callbacks: add what they measure to the Trainer's own log.

    Args:
        trainer: the one that the callback is added to; the Trainer does not pass itself on.
        ranks: the data-parallel ranks; None: torch.distributed.
    """

    #: How its alarms' names begin, in the log ``..._alarms``; others are logged under their own names.
    alarms_group = ""
    #: What is read over the ranks; None: nothing.
    monitor: Any = None
    _model: Any = None

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        self.trainer, self.ranks = trainer, ranks or TorchRanks()
        self.alarms = Alarms(self.ranks)

    def made(self, model: Any) -> Any:
        """The monitor of the wrapped model, which exists when training begins.

        Raises:
            UnsupportedSetupError: if it cannot be watched.
        """
        return self.monitor

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        """A micro-batch was trained: its share of the Trainer's loss; the number that its step got, None: none."""

    def clipped(self, norm: Tensor | float | None) -> None:
        """The gradient was clipped; None: its norm is not known yet, as a DTensor's, or at all."""

    def gathered(self) -> Sequence[Gathered[Any]]:
        """What is read over the ranks at a log."""
        return () if self.monitor is None else (self.monitor,)

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """What to log now, of the Trainer's logs and the readings of what is `gathered`."""
        if self.monitor is None:
            return {}
        self.say(self.monitor.judge(readings[self.monitor]))
        found: dict[str, float] = self.monitor.logged(readings[self.monitor])
        return found

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Take part in the Trainer's logs, and watch its model; log where it cannot be watched."""
        parts: _Parts = vars(self.trainer).setdefault(_PARTS, _Parts(self.trainer))
        parts.join(self)
        model = self.trainer.model_wrapped
        if self._model is model:
            return
        try:
            self._model, self.monitor = model, self.made(model)
        except UnsupportedSetupError as error:
            self.monitor = None
            self.not_watched(error)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        parts: _Parts | None = vars(self.trainer).get(_PARTS)
        if parts is not None and parts.leave(self):
            del vars(self.trainer)[_PARTS]

    def say(self, alarm: Alarm | None) -> None:
        """Tell an alarm with its step."""
        self.alarms.say(alarm, self.trainer.state.global_step)

    def not_watched(self, error: UnsupportedSetupError) -> None:
        """Log that this monitor cannot watch the setup; training goes on."""
        if self.ranks.rank == 0:
            logger.warning("not watched by %s: %s", type(self).__name__, error)


class _Parts:
    """The callbacks of one trainer: they hear what it does, and are read by one sum over the ranks a log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parts: list[MonitorCallback] = []
        self._watched: list[MonitorCallback] | None = None
        # Of each method that we stand before: its object, what that held itself, and ours.
        self._heard: dict[str, tuple[Any, Any, Callable[..., Any]]] = {}

    def join(self, part: MonitorCallback) -> None:
        # A run that ended by an exception has not left.
        if part not in self._parts:
            self._parts.append(part)
        self._watched = None
        self._hear(self._trainer, "log", self._log, before=True)
        self._hear(self._trainer, "training_step", self._micro_batch)
        self._hear(self._trainer.accelerator, "clip_grad_norm_", self._clipped)

    def leave(self, part: MonitorCallback) -> bool:
        """Whether it was the last to leave."""
        self._parts = [each for each in self._parts if each is not part]
        if self._parts:
            return False
        for name, (owner, standing, ours) in self._heard.items():
            if vars(owner).get(name) is ours:
                delattr(owner, name)
                vars(owner).update({name: standing} if standing is not None else {})
        return True

    def _hear(self, owner: Any, name: str, heard_of: Callable[..., None], *, before: bool = False) -> None:
        """Hear of every call of a method of this object: before it, or after it with the result in front."""
        # Whoever had put a method there before, and took theirs away after an exception, took ours away as well.
        if name in self._heard and vars(owner).get(name) is self._heard[name][2]:
            return
        method = getattr(owner, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            if before:
                heard_of(*args, **kwargs)
            result = method(*args, **kwargs)
            if not before:
                heard_of(result, *args, **kwargs)
            return result

        self._heard[name] = owner, vars(owner).get(name), heard
        setattr(owner, name, heard)

    def _micro_batch(
        self, loss: Tensor, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        for part in self._parts:
            part.micro_batch(loss, inputs, num_items_in_batch)

    def _clipped(self, norm: Any, *args: Any, **kwargs: Any) -> None:
        for part in self._parts:
            part.clipped(norm if type(norm) in (Tensor, float) else None)

    def _log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if self._watched is None:
            self._watched = self._agreed()
        ranks = self._parts[0].ranks
        readings = read_together(ranks, [monitor for part in self._watched for monitor in part.gathered()])
        for part in self._parts:
            found = part.measured(logs, readings) if readings.keys() >= {*part.gathered()} else {}
            if part.alarms_group:
                found |= part.alarms.counters(part.alarms_group)
            # nan is a number that does not exist yet; a loss that is nan was measured.
            its = {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}
            logs.update((PREFIX + name, value) for name, value in its.items())

    def _agreed(self) -> list[MonitorCallback]:
        """The parts that every rank can watch: rows of other lengths must not be added up. One collective."""
        ranks, parts = self._parts[0].ranks, {f"{type(its).__name__} {at}": its for at, its in enumerate(self._parts)}
        mine = [name for name, part in parts.items() if part.gathered()]
        every = {*mine} if ranks.size == 1 else on_every_rank(ranks, mine)
        for name in mine:
            if name not in every:
                error = UnsupportedSetupError("got a setup in which other ranks cannot; expected ranks alike")
                parts[name].not_watched(error)
        return [part for name, part in parts.items() if name in every]


class LossCallback(MonitorCallback):
    """`LossMeter`, and all that is judged by the loss (`LossJudges`); the accuracy is an evaluation's first.

    ``hf_accum_fix/loss`` is the mean over the items of the log interval, where the Trainer's own ``loss`` averages
    steps, however many items they hold. `LossCheck` decides from the logits which of these the model's loss is:

    - a head that returns the mean over its micro-batch: then that mean, weighted by the micro-batch's items;
    - a head that divides by the number it gets: with r what a micro-batch adds to the Trainer's loss and N the
      number, ``sum(r N) / sum(N)`` over the micro-batches above and the steps below, of all ranks;
    - a loss that cannot be checked (label smoothing, a loss of one's own, a compiled model): the same, from the
      Trainer's number; then ``hf_accum_fix/loss_repeats_the_trainers`` is 1, and one warning is logged.

    A Trainer's number that is off by a known factor, such as a mean that nothing divided by the accumulation steps,
    is an alarm.

    Args:
        trainer, ranks: as in `MonitorCallback`.
    """

    alarms_group = "rank_loss"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self._judges, self._last, self._logged_at = LossJudges(), math.nan, 0
        self._of_head, self._of_trainer = LossMeter(self.ranks), LossMeter(self.ranks)
        self._check, self._steps, self._repeats, self._hook = LossCheck(), 1, False, None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Listen to the model."""
        super().on_train_begin()
        self._logged_at = self.trainer.state.global_step
        if self._hook is None and not self.trainer.args.torch_compile:
            self._hook = self.trainer.model.register_forward_hook(self._after_forward, with_kwargs=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        counted, loss = labels_counted(inputs), loss.detach()
        steps = getattr(self.trainer, "current_gradient_accumulation_steps", None)
        self._steps = steps or self.trainer.args.gradient_accumulation_steps
        self._of_head.update(self._check.trained(loss, counted, items, self._steps), counted)
        # A mean, or the sum over the number that the step got.
        whole = loss * self._steps if items is None else loss * items
        self._of_trainer.update(whole, counted, summed=items is not None)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._check.step()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Hold the accuracy against the loss, if one was measured."""
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        names = sorted(name for name in metrics if name.endswith(("accuracy", "_acc")))
        if names:
            self.say(self._judges.accuracy.judge(self._last, _number(metrics[names[0]])))

    def gathered(self) -> Sequence[Gathered[Any]]:
        """The check, and the loss as it would have the head's and the Trainer's."""
        return self._check, self._of_head, self._of_trainer

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Mean loss with its error, spread over the ranks, and the most unusual rank."""
        verdict: Verdict = readings[self._check]
        reading: LossReading = readings[self._of_head if verdict.is_mean else self._of_trainer]
        if not verdict.is_mean:
            reading = reading.times((reading.total.items / verdict.handed if verdict.handed else 1.0) / verdict.factor)
        self._say_scale(verdict, reading.mean)
        rate, epoch = _number(logs.get("learning_rate")), _number(self.trainer.state.epoch)
        for alarm in self._judges.judge(reading, rate, epoch, verdict.guess):
            self.say(alarm)
        self._last = reading.mean
        found = {**self._of_head.logged(reading), **self._judges.logged(), "loss_of_a_guess": verdict.guess}
        steps = self.trainer.state.global_step - self._logged_at
        self._logged_at += steps
        if steps > 0:
            found |= {"items_per_step": reading.total.items / steps, "ranks": float(self.ranks.size)}
        return found if verdict.is_known else {**found, "loss_repeats_the_trainers": 1.0}

    def _say_scale(self, verdict: Verdict, mean: float) -> None:
        if not verdict.is_known and not self._repeats:
            self._repeats = True
            if self.ranks.rank == 0:
                logger.info(
                    "hf_accum_fix/loss repeats the Trainer's number, weighted by items: it cannot be computed "
                    "again from logits and labels, so that its scale is not checked"
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


def _number(value: Any) -> float:
    """As a float; nan where it is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def labels_counted(inputs: Mapping[str, Any]) -> Tensor | int:
    """Number of labels other than -100 where labels are integers, else of samples, by the first tensor."""
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != -100).sum()
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)


class GradientNormCallback(MonitorCallback):
    """`GradientNorm`: every step's norm before clipping, as ``Accelerator.clip_grad_norm_`` returns it.

    Where the Trainer takes no norm (older releases without clipping), none is logged.
    """

    alarms_group = "gradient_norm"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self.monitor, self._clips = GradientNorm(trainer.args.max_grad_norm or None), 0
        self._items: Tensor | int = 0

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """As in `GradientNorm`; where no clipping was seen, of the norm that the Trainer logs."""
        clips, self._clips = self._clips, 0
        if clips == 0 and isinstance(logs.get("grad_norm"), (int, float)):
            self.monitor.update(logs["grad_norm"])
        return super().measured(logs, readings if clips else {self.monitor: self.monitor.read()})

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        self._items = self._items + labels_counted(inputs)

    def clipped(self, norm: Tensor | float | None) -> None:
        """Take the norm; where there is none, the logged one counts instead."""
        if norm is not None:
            self._clips += 1
            self.monitor.update(norm, self._items)
        self._items = 0


class RankGradientsCallback(MonitorCallback):
    """`RankGradients`: the gradient norm of each rank before DDP averages it. Nothing on one process."""

    alarms_group = "rank_gradient"

    def made(self, model: Any) -> RankGradients | None:
        if self.ranks.size == 1:
            return None
        gradients = RankGradients(self.ranks)
        gradients.attach(model)
        return gradients


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
        self._norm: Any = None

    def made(self, model: Any) -> NoiseScale:
        args = self.trainer.args
        sampling = getattr(args, "train_sampling_strategy", "")
        by_length = getattr(args, "group_by_length", False) or sampling == "group_by_length"
        if args.fp16:
            raise UnsupportedSetupError("got a loss that is scaled (fp16); expected bfloat16 or float32")
        if not hasattr(TrainerCallback, "on_pre_optimizer_step"):
            raise UnsupportedSetupError("got a release that does not announce the optimizer's step; expected newer")
        return NoiseScale(model, self._every, self.ranks, dealt=self._dealt or by_length)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(self._norm)
        self._norm = None

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_end()
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = self._model = None

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        if self.monitor is not None:
            self.monitor.micro_batch(self._items(inputs))

    def clipped(self, norm: Tensor | float | None) -> None:
        self._norm = norm


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
        """Collect the tensors to compare; what one rank cannot compare nobody waits for."""
        self._model = self._replicas = None
        super().on_train_begin()
        if self.ranks.size > 1 and not alike(self.ranks, self._replicas is None):
            self._replicas = None

    def made(self, model: Any) -> None:
        if self.ranks.size > 1:
            self._replicas = Replicas(model, self.trainer.optimizer, self.ranks, self._every)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._replicas is not None:
            self.say(self._replicas.step())


class BatchNormCallback(MonitorCallback):
    """`check_batch_norm` after the first step, and the running statistics over the ranks at the end."""

    alarms_group = "batch_norm"
    _checked = False

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

    def made(self, model: Any) -> Pace | None:
        return Pace(model, self.ranks) if self.ranks.size > 1 else None

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
        self._samples_of = samples or samples_of
        self.monitor = SharedSamples(self.ranks) if self.ranks.size > 1 else None

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        samples = self._samples_of(inputs) if self.monitor is not None else None
        if samples is not None:
            self.monitor.update(samples)


def samples_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """Rows of ``input_ids``, zero where the mask is, else of the first tensor; None without one."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids * (mask != 0)
    return next((its for its in (ids, *inputs.values()) if isinstance(its, Tensor) and its.ndim), None)


class MemoryCallback(MonitorCallback):
    """`MemoryMonitor`: sampled at every step, decided at every log."""

    alarms_group = "memory"

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        super().__init__(trainer, ranks)
        self.monitor = MemoryMonitor(ranks=self.ranks)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.monitor.sample()


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
