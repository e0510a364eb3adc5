"""The base of the callbacks, and one log of a trainer, to which all of its callbacks add."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarm, Alarms, Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, on_every_rank, read_together
from hf_accum_fix.monitor.series import PREFIX

logger = logging.getLogger("hf_accum_fix.monitor")

Readings = Mapping[Gathered[Any], Any]
"""The reading of each monitor, from the rows of all ranks."""


#: Attribute of a Trainer that holds its `_Parts` while it trains.
_PARTS = "_hf_accum_fix_monitors"
_ABSENT = object()


class MonitorCallback(TrainerCallback):
    """Base of the callbacks: add what they measure to the Trainer's own log.

    Args:
        trainer: the one that the callback is added to; the Trainer does not pass itself on.
        ranks: the data-parallel ranks; None: torch.distributed.
    """

    #: How its alarms' names begin, in the log ``..._alarms``; others are logged under their own names.
    alarms_group = ""
    #: What is read over the ranks; None: nothing.
    monitor: Gathered[Any] | None = None

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        self.trainer = trainer
        self.ranks = ranks or TorchRanks()
        self.alarms = Alarms(self.ranks)

    def watch(self, model: Any) -> None:
        """Begin to watch the wrapped model: it exists when training begins.

        Raises:
            UnsupportedSetupError: if it cannot be watched.
        """

    def micro_batch(self, loss: Tensor, inputs: Mapping[str, Any], items: Any) -> None:
        """A micro-batch was trained.

        Args:
            loss: its share of the Trainer's loss.
            inputs: of the model.
            items: the number that the step got; None: none.
        """

    def clipped(self, norm: Tensor | float | None) -> None:
        """The gradient was clipped; None: its norm is not known yet, as a DTensor's, or at all."""

    def gathered(self) -> Sequence[Gathered[Any]]:
        """What is read over the ranks at a log."""
        return () if self.monitor is None else (self.monitor,)

    def measured(self, logs: Mapping[str, Any], readings: Readings) -> dict[str, float]:
        """What to log now.

        Args:
            logs: of the Trainer.
            readings: of what is `gathered`; empty where another rank cannot watch it.
        """
        if self.monitor is None:
            return {}
        self.say(self.monitor.judge(readings[self.monitor]))
        return self.monitor.logged(readings[self.monitor])

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Take part in the Trainer's logs, and watch its model; log where it cannot be watched."""
        parts: _Parts = vars(self.trainer).setdefault(_PARTS, _Parts(self.trainer))
        parts.join(self)
        try:
            self.watch(self.trainer.model_wrapped)
        except UnsupportedSetupError as error:
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
    """The callbacks of one trainer: told what it does, and read by one sum over the ranks a log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parts: list[MonitorCallback] = []
        self._groups: list[tuple[Ranks, list[MonitorCallback]]] | None = None
        # Of each method that we stand before: its object, what that held itself, and ours.
        self._heard: dict[str, tuple[Any, Any, Callable[..., Any]]] = {}

    def join(self, part: MonitorCallback) -> None:
        # A run that ended by an exception has not left.
        if part not in self._parts:
            self._parts.append(part)
        self._groups = None
        self._hear(self._trainer, "log", self._log, before=True)
        self._hear(self._trainer, "training_step", self._micro_batch)
        self._hear(self._trainer.accelerator, "clip_grad_norm_", self._clipped)

    def leave(self, part: MonitorCallback) -> bool:
        """Whether it was the last to leave."""
        self._parts = [each for each in self._parts if each is not part]
        if self._parts:
            return False
        for name, (owner, standing, ours) in self._heard.items():
            if vars(owner).get(name) is not ours:
                continue
            if standing is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, standing)
        return True

    def _hear(self, owner: Any, name: str, told: Callable[..., None], *, before: bool = False) -> None:
        """Be told of every call of a method of this object: before it, or after it with the result in front."""
        # Whoever had put a method there before, and took theirs away after an exception, took ours away as well.
        if name in self._heard and vars(owner).get(name) is self._heard[name][2]:
            return
        method = getattr(owner, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            if before:
                told(*args, **kwargs)
            result = method(*args, **kwargs)
            if not before:
                told(result, *args, **kwargs)
            return result

        self._heard[name] = owner, vars(owner).get(name, _ABSENT), heard
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
        if self._groups is None:
            self._groups = [_watched(ranks, [its for its in self._parts if its.ranks == ranks])
                            for ranks in dict.fromkeys(part.ranks for part in self._parts)]  # fmt: skip
        readings: dict[Gathered[Any], Any] = {}
        for ranks, parts in self._groups:
            readings |= read_together(ranks, [monitor for part in parts for monitor in part.gathered()])
        for part in self._parts:
            found = part.measured(logs, readings) if readings.keys() >= set(part.gathered()) else {}
            if part.alarms_group:
                found |= part.alarms.counters(part.alarms_group)
            # nan is a number that does not exist yet; a loss that is nan was measured.
            its = {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}
            logs.update((PREFIX + name, value) for name, value in its.items())


def _watched(ranks: Ranks, parts: Sequence[MonitorCallback]) -> tuple[Ranks, list[MonitorCallback]]:
    """The parts that every rank can watch: rows of other lengths must not be added up. One collective a training."""
    if ranks.size == 1:
        return ranks, list(parts)
    names = [f"{type(part).__name__} {place}" for place, part in enumerate(parts)]
    mine = [name for name, part in zip(names, parts, strict=True) if part.gathered()]
    every = on_every_rank(ranks, mine)
    for name, part in zip(names, parts, strict=True):
        if name in mine and name not in every:
            part.not_watched(UnsupportedSetupError("got a setup in which other ranks cannot; expected ranks alike"))
    return ranks, [part for name, part in zip(names, parts, strict=True) if name in every]
