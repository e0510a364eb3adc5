"""The loss as a callback, and all that is judged by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.callbacks.callback import MonitorCallback, Readings
from hf_accum_fix.monitor.loss import LossCheck, LossMeter, Verdict
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.ranks import Ranks

logger = logging.getLogger("hf_accum_fix.monitor")


class LossCallback(MonitorCallback):
    """`LossMeter`, and all that is judged by the loss.

    `RankLoss`, `LossTrend`, `LossOscillation`, `LossStall`, `FirstLoss` and `AccuracyTrend` (of the first metric of an
    evaluation that is named so).

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
        self._judge = RankLoss()
        self._trends = (LossTrend(), LossOscillation(), LossStall())
        self._first, self._accuracy = FirstLoss(), AccuracyTrend()
        self._last, self._logged_at = math.nan, 0
        self._of_head, self._of_trainer = LossMeter(self.ranks), LossMeter(self.ranks)
        self._check = LossCheck()
        self._steps, self._repeats, self._hook = 1, False, None

    def watch(self, model: Any) -> None:
        """Listen to the model."""
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
        take_trained(self._of_trainer, loss * self._steps if items is None else loss, counted, items)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._check.step()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Hold the accuracy against the loss, if one was measured."""
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        names = sorted(name for name in metrics if name.endswith(("accuracy", "_acc")))
        if names:
            self.say(self._accuracy.judge(self._last, _number(metrics[names[0]])))

    def gathered(self) -> Sequence[Gathered[Any]]:
        """The check, and the loss as it would have the head's and the Trainer's."""
        return self._check, self._of_head, self._of_trainer

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """Mean loss with its error, spread over the ranks, and the most unusual rank."""
        verdict: Verdict = readings[self._check]
        reading = readings[self._of_head if verdict.is_mean else self._of_trainer]
        if not verdict.is_mean:
            reading = reading.times((reading.total.items / verdict.handed if verdict.handed else 1.0) / verdict.factor)
        self._say_scale(verdict, reading.mean)
        self.say(self._judge.judge(reading))
        for trend in self._trends:
            self.say(trend.judge(reading, _number(logs.get("learning_rate")), _number(self.trainer.state.epoch)))
        self.say(self._first.add(reading.mean, verdict.guess))
        self._last = reading.mean
        found = self._batch(reading.total.items)
        found |= {**self._of_head.logged(reading), "loss_of_a_guess": verdict.guess}
        if not verdict.is_known:
            found["loss_repeats_the_trainers"] = 1.0
        if self._judge.worst is not None:
            found["rank_loss_worst_rank"] = self._judge.worst.rank
            found["rank_loss_worst_in_standard_errors"] = self._judge.worst.unusual
        return found

    def _batch(self, items: float) -> dict[str, float]:
        step = self.trainer.state.global_step
        steps, self._logged_at = step - self._logged_at, step
        return {"items_per_step": items / steps, "ranks": float(self.ranks.size)} if steps > 0 else {}

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


def take_trained(meter: LossMeter, loss: Tensor, counted: Tensor | int, items: Any) -> None:
    """Take a micro-batch's share of the Trainer's loss: a mean, or its sum over the number that the step got."""
    if items is None:
        meter.update(loss, counted)
    else:
        meter.update(loss.detach() * items, counted, summed=True)


def labels_counted(inputs: Mapping[str, Any]) -> Tensor | int:
    """Number of labels other than -100 where labels are integers, else of samples, by the first tensor."""
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != -100).sum()
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)
