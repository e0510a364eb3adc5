"""Pipeline stages out of balance: all of them wait for the slowest.

    balance, alarms = StageBalance(stage_module), Alarms()       # this rank's stage; after it is on its device
    ...
    alarms.say(balance.judge(balance.read()))                    # at every log: one collective

The time of a stage's forwards measures its work: a backward costs about twice as much on every stage. On CUDA it is
taken by events on the stream and read at the log; elsewhere by the host's clock. Ranks that hold the same stage
(data parallelism as well) are stages of equal work here, which changes no verdict.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks

#: Forwards kept between two readings; fewest for a judgement; readings in a row in which a stage is slow; its
#: excess over the mean, as a share, that nobody would act upon.
_KEPT, _ENOUGH, _IN_A_ROW, _TOLERANCE = 256, 5, 5, 0.25


@dataclass(frozen=True)
class StageBalanceReading:
    """One forward of each rank's stage.

    Attributes:
        times: [s] of each rank, the median since the last reading; 0 without a forward.
        forwards: fewest of a rank.
    """

    times: tuple[float, ...]
    forwards: int

    @property
    def balance(self) -> float:
        """Share of the time that a stage works at most: mean over maximum; 1 where all are alike."""
        return fmean(self.times) / max(self.times) if max(self.times) > 0 else 1.0


class StageBalance(Gathered[StageBalanceReading]):
    """Compare the time that every pipeline stage takes for a micro-batch.

    Args:
        stage: this rank's part of the model, as it is called for every micro-batch.
        ranks: the stages; None: torch.distributed.
        clock: seconds; None: CUDA events where the stage lies on a GPU, else the host's.
    """

    def __init__(self, stage: nn.Module, ranks: Ranks | None = None, clock: Callable[[], float] | None = None) -> None:
        self._ranks = ranks or TorchRanks()
        on_gpu = any(parameter.is_cuda for parameter in stage.parameters())
        self._now: Callable[[], Any] = clock or (_event if on_gpu else time.perf_counter)
        self._began: Any = None
        self._forwards: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)
        self._slow = deque[int](maxlen=_IN_A_ROW)
        stage.register_forward_pre_hook(self._before_forward)
        stage.register_forward_hook(self._after_forward)

    def row(self) -> Tensor:
        times = [_seconds(began, ended) for began, ended in self._forwards]
        self._forwards.clear()
        return torch.tensor([median(times) if times else 0.0, len(times)], dtype=torch.float64)

    def reading(self, table: Tensor) -> StageBalanceReading:
        times, forwards = table.T.tolist()
        return StageBalanceReading(tuple(times), int(min(forwards)))

    def judge(self, reading: StageBalanceReading) -> Alarm | None:
        """An alarm where the same stage is the slowest in five readings in a row. Every rank judges alike."""
        if len(reading.times) < 2 or reading.forwards < _ENOUGH:
            return None
        slowest = max(reading.times)
        rank, mean = reading.times.index(slowest), fmean(reading.times)
        self._slow.append(rank if slowest > (1 + _TOLERANCE) * mean else -1)
        if set(self._slow) != {rank} or len(self._slow) < _IN_A_ROW:
            return None
        self._slow.clear()
        return Alarm(
            f"stage-slow-{rank}",
            f"the pipeline stage of rank {rank} takes {slowest:.3g} s for a forward, {slowest / mean:.3g} times the "
            f"mean, in {_IN_A_ROW} logs in a row: the stages work {reading.balance:.0%} of the time at most; move "
            "layers from it to others (the embedding and the head count, too)",
        )

    def _before_forward(self, module: nn.Module, *args: Any) -> None:
        self._began = self._now() if module.training and torch.is_grad_enabled() else None

    def _after_forward(self, module: nn.Module, *args: Any) -> None:
        if self._began is not None:
            self._forwards.append((self._began, self._now()))
            self._began = None


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, torch.cuda.Event):
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0
    return float(ended - began)
