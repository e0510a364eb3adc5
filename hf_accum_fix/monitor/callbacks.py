"""`Monitor` as a callback of transformers.Trainer: the one file here that knows it.

    trainer.add_callback(MonitorsCallback(trainer))

It adds what is measured to the Trainer's log at each ``logging_steps``, so that trainer_state.json and every tracker
(TensorBoard, W&B, Trackio ...) have it next to ``loss``, as ``hf_accum_fix/...``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_accum_fix.monitor.alarms import Alarm, Alarms, OnAlarm
from hf_accum_fix.monitor.loss import HeadReading, LossCheck, LossMeter
from hf_accum_fix.monitor.monitor import Monitor
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, read_together
from hf_accum_fix.monitor.series import PREFIX


class MonitorsCallback(TrainerCallback):
    """Every monitor, for a Trainer: ``trainer.add_callback(MonitorsCallback(trainer))``.

    ``hf_accum_fix/loss`` is the mean over the items of the log interval, where the Trainer's own ``loss`` averages
    steps, however many items they hold: of a head that returns means, weighted by items (`LossCheck` decides that from
    the logits); of one that divides by the number N it gets, with r what a micro-batch adds to the Trainer's loss,
    ``sum(r N) / sum(N)`` over micro-batches above and steps below. A loss that cannot be checked (label smoothing,
    one's own, a compiled model) counts as the latter; then ``hf_accum_fix/loss_repeats_the_trainers`` is 1.

    A Trainer's number that is off by a known factor, such as a mean that nothing divided by the accumulation steps,
    is an alarm. Where the Trainer takes no gradient norm (DeepSpeed), the one that it logs is judged.

    Args:
        trainer: the one that the callback is added to; the Trainer does not pass itself on.
        ranks: the data-parallel ranks; None: torch.distributed.
        on_alarm: as in `Monitor`; "stop" ends training after the step.
        noise_scale_every: as in `Monitor`; micro-batches must be weighted by their items, as with
            ``hf_accum_fix.apply()``, and gradients be clipped.
        samples: of a micro-batch's inputs, what `SharedSamples.update` takes, or None. Default: rows of ``input_ids``
            without their padding on the right, else of the first tensor. Where samples are augmented, give indices,
            or ``lambda inputs: inputs["labels"][None]``.

    Raises:
        ValueError: if ``on_alarm`` is something else.
    """

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks | None = None,
        on_alarm: OnAlarm = "log",
        noise_scale_every: int | None = None,
        samples: Callable[[Mapping[str, Any]], Tensor | None] | None = None,
    ) -> None:
        self._trainer, self._ranks = trainer, ranks or TorchRanks()
        self._alarms, self._noise_scale_every = Alarms(self._ranks, on_alarm), noise_scale_every
        self._samples_of = samples or samples_of
        self._monitor: Monitor | None = None
        self._model: Any = None
        self._check, self._of_trainer, self._steps = LossCheck(), LossMeter(self._ranks), 1
        self._norm: Tensor | float | None = None
        self._norms_seen, self._last, self._hook = False, math.nan, None
        #: Of each method that we stand before: its object, what that held itself, and ours.
        self._heard: dict[str, tuple[Any, Any, Callable[..., Any]]] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Watch the model, and listen to it and to the Trainer."""
        its, arguments = self._trainer, self._trainer.args
        if self._monitor is None or self._model is not its.model_wrapped:
            self._model = its.model_wrapped
            self._monitor = Monitor(
                self._model,
                its.optimizer,
                ranks=self._ranks,
                max_norm=arguments.max_grad_norm or None,
                per_device_batch=arguments.per_device_train_batch_size,
                accumulation_steps=arguments.gradient_accumulation_steps,
                noise_scale_every=None if arguments.fp16 else self._noise_scale_every,
            )
            self._monitor.alarms = self._alarms
        if self._hook is None and not arguments.torch_compile:
            self._hook = its.model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._hear(its, "log", self._log, before=True)
        self._hear(its, "training_step", self._micro_batch)
        self._hear(its.accelerator, "clip_grad_norm_", self._clipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended; the run too, where an alarm is to end it."""
        if self._monitor is None:
            return  # The callback was added in the midst of a run.
        self._check.step()
        self._monitor.end_of_step(self._norm)
        self._norm = None
        control.should_training_stop = control.should_training_stop or self._alarms.stop

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Hold the accuracy against the loss, if one was measured: an evaluation's first."""
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        names = sorted(name for name in metrics if name.endswith(("accuracy", "_acc")))
        if names and self._monitor is not None:
            self._monitor.evaluated(self._last, _number(metrics[names[0]]))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        for name, (owner, standing, ours) in self._heard.items():
            if vars(owner).get(name) is ours:
                delattr(owner, name)
                vars(owner).update({name: standing} if standing is not None else {})
        self._heard = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._monitor is not None:
            self._monitor.close()

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

    def _after_forward(self, model: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._check.forward(output, kwargs.get("labels"))

    def _micro_batch(
        self, loss: Tensor, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        assert self._monitor is not None
        counted, loss, number = labels_counted(inputs), loss.detach(), num_items_in_batch
        steps = getattr(self._trainer, "current_gradient_accumulation_steps", None)
        self._steps = steps or self._trainer.args.gradient_accumulation_steps
        self._monitor.micro_batch(self._check.trained(loss, counted, number, self._steps), counted)
        # A mean, or the sum over the number that the step got.
        whole = loss * self._steps if number is None else loss * number
        self._of_trainer.update(whole, counted, summed=number is not None)
        samples = self._samples_of(inputs)
        if samples is not None:
            self._monitor.samples(samples)

    def _clipped(self, norm: Any, *args: Any, **kwargs: Any) -> None:
        """The gradient's norm; None where it is not known yet, as a DTensor's."""
        self._norm = norm if type(norm) in (Tensor, float) else None
        self._norms_seen = self._norms_seen or self._norm is not None

    def _log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" not in logs or self._monitor is None:
            return
        if not self._norms_seen and isinstance(logs.get("grad_norm"), (int, float)):
            self._monitor.norms.update(logs["grad_norm"])
        readings = read_together(self._ranks, [self._check, self._of_trainer, *self._monitor.gathered()])
        verdict: HeadReading = readings[self._check]
        loss = readings[self._monitor.meter if verdict.is_mean else self._of_trainer]
        if not verdict.is_mean:
            loss = loss.times((loss.total.items / verdict.handed if verdict.handed else 1.0) / verdict.factor)
        if verdict.factor != 1:
            words = (
                f"the Trainer counts a micro-batch for {verdict.factor:.3g} times its share of the loss, "
                f"{loss.mean:.4g} in the mean over the items, with {self._steps} micro-batches a step and "
                f"{self._ranks.size} ranks: its logged loss and its gradient are that much off; look at "
                "`hf-accum-fix doctor`"
            )
            self._alarms.say(Alarm("trainer-loss-scaled", words), self._trainer.state.global_step)
        self._last = loss.mean
        rate, epoch = _number(logs.get("learning_rate")), _number(self._trainer.state.epoch)
        found = self._monitor.logged({**readings, self._monitor.meter: loss}, rate, epoch, verdict.guess)
        found |= {} if verdict.is_known else {"loss_repeats_the_trainers": 1.0}
        found |= {} if math.isnan(verdict.guess) else {"loss_of_a_guess": verdict.guess}
        logs.update((PREFIX + name, value) for name, value in found.items())


def _number(value: Any) -> float:
    """As a float; nan where it is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def labels_counted(inputs: Mapping[str, Any]) -> Tensor | int:
    """Number of labels other than -100 where labels are integers, else of samples, by the first tensor."""
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != -100).sum()
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)


def samples_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """Rows of ``input_ids``, zero where the mask is, else of the first tensor; None without one."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids * (mask != 0)
    return next((its for its in (ids, *inputs.values()) if isinstance(its, Tensor) and its.ndim), None)
