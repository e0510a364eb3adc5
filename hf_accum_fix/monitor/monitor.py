"""Every monitor in one object, for any PyTorch loop. What the setup does not allow is left out, with one warning."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarms, Gathered, OnAlarm
from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.noise_scale import NoiseScale
from hf_accum_fix.monitor.pace import Pace
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, on_every_rank, read_together
from hf_accum_fix.monitor.replicas import Replicas
from hf_accum_fix.monitor.shared_samples import SharedSamples

logger = logging.getLogger("hf_accum_fix.monitor")

T = TypeVar("T")
#: Step at which running statistics have settled.
_SETTLED = 100


class Monitor:
    """All monitors in one: what judges a loss, gradients, replicas, BatchNorm, pace, memory, samples and noise scale.

    Args:
        model: the one in training, wrapped or not.
        optimizer: its state is compared over the ranks; None: no comparison.
        ranks: the data-parallel ranks; None: torch.distributed.
        on_alarm: as in `Alarms`: "log", "stop", "raise" or a callable.
        max_norm: norm that gradients are clipped to; None where they are not.
        per_device_batch: samples of one micro-batch; None leaves BatchNorm alone.
        accumulation_steps: micro-batches of one optimizer step on a rank.
        noise_scale_every: steps from one that the gradient noise scale is measured in to the next; None: none is. Where
            a `GradScaler` scales the loss, use `NoiseScale` by itself.
        classes: a first loss far above a guess, ln(classes), is an alarm: of a language model the vocabulary; None: not
            judged.

    Attributes:
        alarms: counts them.
        meter: the loss.
        norms: the gradient norms.

    Raises:
        ValueError: if ``on_alarm`` is something else.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each thing to watch
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        ranks: Ranks | None = None,
        on_alarm: OnAlarm = "log",
        max_norm: float | None = None,
        per_device_batch: int | None = None,
        accumulation_steps: int = 1,
        noise_scale_every: int | None = None,
        classes: int | None = None,
    ) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, ranks or TorchRanks()
        self._per_device_batch, self._accumulation_steps = per_device_batch, accumulation_steps
        self.alarms, self._step, self._steps_logged = Alarms(self._ranks, on_alarm), 0, 0
        self.meter, self._rank_loss = LossMeter(self._ranks), RankLoss()
        self._trends = (LossTrend(), LossOscillation(), LossStall())
        self._first, self._accuracy = FirstLoss(), AccuracyTrend()
        self._guess = math.log(classes) if classes else math.nan
        self.norms, self._memory = GradientNorm(max_norm), MemoryMonitor(ranks=self._ranks)
        self._agreed = self._ranks.size == 1
        self._items: Tensor | float = 0.0
        self._flat = any(type(parameter).__name__ == "FlatParameter" for parameter in model.parameters())
        several, every = self._ranks.size > 1, noise_scale_every
        self._samples = SharedSamples(self._ranks) if several else None
        self._pace = Pace(model, self._ranks) if several else None
        self._noise = self._made("gradient noise scale", every, lambda: NoiseScale(model, every or 1, self._ranks))
        self._rank_gradients = self._made("gradients of single ranks", several, self._attached)
        self._replicas = self._made("replicas", several, lambda: Replicas(model, optimizer, self._ranks))

    @property
    def stop(self) -> bool:
        """Whether an alarm asks to stop the run; the same on every rank."""
        return self.alarms.stop

    def samples(self, samples: Tensor) -> None:
        """A micro-batch's samples, [samples, ...], or indices, to see that no two ranks have the same; no sync."""
        if self._samples is not None:
            self._samples.update(samples)

    def micro_batch(self, loss: Tensor | float | None, items: Tensor | float = 1) -> None:
        """A micro-batch that is not the last of its step; no device sync.

        Args:
            loss: one number, the mean over its items; None on a rank that has none (an early pipeline stage).
            items: how many.
        """
        self.meter.update(loss, items)
        self._items = self._items + items
        if self._noise is not None:
            self._noise.micro_batch(items)

    def step(self, loss: Tensor | float | None, items: Tensor | float = 1, norm: Tensor | float | None = None) -> None:
        """The last micro-batch of a step, between its backward and the optimizer's step; no device sync.

        In the first step the ranks agree, by one collective, on what all of them can watch.

        Args:
            loss: one number, the mean over its items; None on a rank that has none.
            items: how many.
            norm: the gradient's norm before clipping, as ``clip_grad_norm_`` returns it, the same on every rank; None
                takes it here, but under FSDP1, where a rank has but a part of the gradient.
        """
        self.micro_batch(loss, items)
        self.end_of_step(norm)

    def end_of_step(self, norm: Tensor | float | None) -> None:
        """All micro-batches of the step have been taken; as `step`."""
        self._agree()
        self._step += 1
        if norm is None and not self._flat:
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients) if gradients else None
        if self._noise is not None:
            self._noise.step(math.nan if norm is None else norm)
        if norm is not None:
            self.norms.update(norm, self._items)
        self._items = 0.0
        self._memory.sample()
        if self._pace is not None:
            self._pace.step()
        if self._replicas is not None:
            self.alarms.say(self._replicas.step(), self._step)
        batch, steps = self._per_device_batch, self._accumulation_steps
        if batch is not None and self._step == _SETTLED:
            self.alarms.say(compare_buffers(self._model, self._ranks, steps), self._step)
        if batch is not None and self._step == 2:
            how = {"optimizer": self._optimizer, "ranks": self._ranks}
            for alarm in check_batch_norm(self._model, per_device_batch=batch, accumulation_steps=steps, **how):
                self.alarms.say(alarm, self._step)

    def log(self, accuracy: float | None = None, epoch: float = math.nan) -> dict[str, float]:
        """Everything since the last log, as numbers for any tracker; raises alarms. Call it on every rank.

        Args:
            accuracy: where the model has just been evaluated, between 0 and 1, the same on every rank.
            epoch: epochs so far, with fractions: a loss that swings with this period is no alarm; nan: not known.

        Raises:
            MonitorAlarmError: for an alarm, where ``on_alarm`` is "raise".
        """
        readings = read_together(self._ranks, self.gathered())
        rate = float(self._optimizer.param_groups[0]["lr"]) if self._optimizer is not None else math.nan
        if accuracy is not None:
            self.evaluated(readings[self.meter].mean, accuracy)
        return self.logged(readings, rate, epoch, self._guess)

    def gathered(self) -> list[Gathered[Any]]:
        """What is read over the ranks at a log."""
        self._agree()
        optional = (self.norms, self._memory, self._samples, self._rank_gradients, self._pace, self._noise)
        return [self.meter, *(each for each in optional if each is not None)]

    def logged(self, readings: Mapping[Any, Any], rate: float, epoch: float, guess: float) -> dict[str, float]:
        """Numbers and alarms of what was `gathered`, at this learning rate and epoch, of this loss of a guess."""
        loss = readings[self.meter]
        alarms = [self._rank_loss.judge(loss), *(trend.add(loss.mean, rate, epoch) for trend in self._trends)]
        alarms.append(self._first.add(loss.mean, guess))
        found = self.meter.logged(loss)
        for each in self.gathered()[1:]:
            alarms.append(each.judge(readings[each]))
            found |= each.logged(readings[each])
        for alarm in alarms:
            self.alarms.say(alarm, self._step)
        steps, self._steps_logged = self._step - self._steps_logged, self._step
        if steps:
            found |= {"items_per_step": loss.total.items / steps, "ranks": float(self._ranks.size)}
        found |= self.alarms.counters()
        # nan is a number that does not exist yet; a loss that is nan was measured.
        return {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}

    def evaluated(self, loss: float, accuracy: float) -> None:
        """An evaluation gave an accuracy, between 0 and 1, where training had this loss."""
        self.alarms.say(self._accuracy.judge(loss, accuracy), self._step)

    def close(self) -> None:
        """Let go of the parameters."""
        if self._noise is not None:
            self._noise.close()

    def _agree(self) -> None:
        """Leave out, once, what not every rank can watch: nobody must wait for it, nor add up rows of other lengths."""
        if not self._agreed:
            self._agreed = True
            optional = ("_rank_gradients", "_noise", "_replicas")
            every = on_every_rank(self._ranks, [name for name in optional if getattr(self, name) is not None])
            for name in {*optional} - every:
                setattr(self, name, None)

    def _attached(self) -> RankGradients:
        gradients = RankGradients(self._ranks)
        gradients.attach(self._model)  # type: ignore[arg-type]
        return gradients

    def _made(self, what: str, wanted: bool | int | None, make: Callable[[], T]) -> T | None:
        """A monitor; None where it is not wanted, or, with one warning, where the setup does not allow it."""
        try:
            return make() if wanted else None
        except UnsupportedSetupError as error:
            if self._ranks.rank == 0:
                logger.warning("%s not watched: %s", what, error)
            return None
