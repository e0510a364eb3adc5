"""The base of the callbacks, and one log of a trainer, to which all of its callbacks add."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarm, Alarms
from hf_accum_fix.monitor.callbacks.listening import listen, stop_listening
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, on_every_rank, read_together
from hf_accum_fix.monitor.run_logs import PREFIX

logger = logging.getLogger("hf_accum_fix.monitor")

Readings = Mapping[Gathered[Any], Any]
"""The reading of each monitor, from the rows of all ranks."""


#: Attribute of a Trainer that holds its `_SharedLog` while it trains.
_LOG = "_hf_accum_fix_monitors"


class MonitorCallback(TrainerCallback):
    """Base of the callbacks: add what they measure to the Trainer's own log.

    Args:
        trainer: the one that the callback is added to; the Trainer does not pass itself on.
        ranks: the data-parallel ranks; None: torch.distributed.
    """

    #: Key of the number of alarms in the log.
    alarms_name = ""
    #: What is read over the ranks; None: nothing.
    monitor: Gathered[Any] | None = None

    def __init__(self, trainer: Any, ranks: Ranks | None = None) -> None:
        self.trainer = trainer
        self.ranks = ranks or TorchRanks()
        self.alarms = Alarms(self.ranks)
        self._listening: list[tuple[Any, str, Callable[..., None]]] = []

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
        """Take part in the Trainer's logs."""
        log: _SharedLog = vars(self.trainer).setdefault(_LOG, _SharedLog(self.trainer))
        log.join(self)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        for each in self._listening:
            stop_listening(*each)
        self._listening.clear()
        log: _SharedLog | None = vars(self.trainer).get(_LOG)
        if log is not None and log.leave(self):
            del vars(self.trainer)[_LOG]

    def listen(self, owner: Any, name: str, listener: Callable[..., None]) -> None:
        """Call ``listener`` after every call of a method, until the training ends."""
        listen(owner, name, listener)
        self._listening.append((owner, name, listener))

    def say(self, alarm: Alarm | None) -> None:
        """Tell an alarm with its step."""
        self.alarms.say(alarm, self.trainer.state.global_step)

    def not_watched(self, error: UnsupportedSetupError) -> None:
        """Log that this monitor cannot watch the setup; training goes on."""
        if self.ranks.rank == 0:
            logger.warning("not watched by %s: %s", type(self).__name__, error)


class WrappedModelCallback(MonitorCallback):
    """Base: what is read over the ranks watches the wrapped model, which exists when training begins."""

    _model: Any = None

    def watch(self, model: Any) -> Gathered[Any] | None:
        """The monitor of this model.

        Raises:
            UnsupportedSetupError: if it cannot watch the model.
        """
        raise NotImplementedError

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Watch the model, on several processes; log where it cannot be watched."""
        super().on_train_begin()
        model = self.trainer.model_wrapped
        if self.ranks.size > 1 and self._model is not model:
            self._model, self.monitor = model, None
            try:
                self.monitor = self.watch(model)
            except UnsupportedSetupError as error:
                self.not_watched(error)


class _SharedLog:
    """The callbacks of one trainer, whose readings are made of one sum over the ranks a log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parts: list[MonitorCallback] = []
        self._groups: list[tuple[Ranks, list[MonitorCallback]]] | None = None

    def join(self, part: MonitorCallback) -> None:
        # A run that ended by an exception has not left.
        if part not in self._parts:
            self._parts.append(part)
        self._groups = None
        listen(self._trainer, "log", self._before_log, before=True)

    def leave(self, part: MonitorCallback) -> bool:
        """Whether it was the last to leave."""
        self._parts = [each for each in self._parts if each is not part]
        if not self._parts:
            stop_listening(self._trainer, "log", self._before_log)
        return not self._parts

    def _before_log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if self._groups is None:
            self._groups = [_watched(*group) for group in _by_ranks(self._parts)]
        readings: dict[Gathered[Any], Any] = {}
        for ranks, parts in self._groups:
            readings |= read_together(ranks, [monitor for part in parts for monitor in part.gathered()])
        for part in self._parts:
            found = part.measured(logs, readings) if readings.keys() >= set(part.gathered()) else {}
            if part.alarms_name:
                found[part.alarms_name] = part.alarms.count
            # nan is a number that does not exist yet; a loss that is nan was measured.
            its = {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}
            logs.update((PREFIX + name, value) for name, value in its.items())


def _by_ranks(parts: Sequence[MonitorCallback]) -> list[tuple[Ranks, list[MonitorCallback]]]:
    groups: dict[Ranks, list[MonitorCallback]] = {}
    for part in parts:
        groups.setdefault(part.ranks, []).append(part)
    return list(groups.items())


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
