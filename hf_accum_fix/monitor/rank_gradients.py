"""The gradient of each rank before it is averaged away: its norm, and the rank that is off.

Symptom: the norm of the averaged gradient is healthy, or nan, and does not show which rank caused it.

DistributedDataParallel shows the local gradient to its communication hook alone, bucket by bucket, once a window (the
accumulated gradient of all its micro-batches). It takes one hook.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.deviation import OF_TWO, Deviation, Shifts
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.thresholds import COMPARED, FEWEST_STEPS, NORM_TOLERANCE, NORM_TOLERANCE_OF_FIRST

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

#: Steps kept between two readings.
_KEPT = 64


@dataclass(frozen=True)
class RankGradientsReading:
    """The local gradient norms since the last reading."""

    norms: tuple[tuple[float, ...], ...]  # [ranks][steps], in the order of the steps


class RankGradients(Gathered[RankGradientsReading]):
    """Norm of each rank's gradient before the reduction, and whether one rank's is off for good.

    Args:
        ranks: the ranks; None: torch.distributed.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or TorchRanks()
        self._squares: list[Tensor] = []
        self._norms: deque[Tensor] = deque(maxlen=_KEPT)
        self._shifts, self._first = Shifts(), 0.0
        self._carried: list[tuple[float, ...]] = []

    def attach(self, model: DistributedDataParallel) -> None:
        """Register with DDP, once, before its first backward; nothing on one process without DDP.

        Args:
            model: the wrapped model.

        Raises:
            UnsupportedSetupError: if the model has a hook already, or is not wrapped in DDP.
        """
        if not isinstance(model, DistributedDataParallel):
            if self._ranks.size == 1:
                return
            raise UnsupportedSetupError(
                f"{type(model).__name__} shows no gradient before its reduction; expected DistributedDataParallel; "
                "for FSDP and Horovod see hf_accum_fix/monitor/README.md"
            )
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def measured(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            self.add(bucket.buffer())
            if bucket.is_last():
                self.end_of_step()
            return allreduce_hook(state, bucket)

        # DDP compares annotations with its types, and does not recognise postponed ones.
        measured.__annotations__.clear()
        try:
            model.register_comm_hook(model.process_group, measured)
        except RuntimeError as error:
            raise UnsupportedSetupError(
                "this DistributedDataParallel has a communication hook already, and takes only one; call "
                "`add` and `end_of_step` from it"
            ) from error

    def add(self, gradient: Tensor) -> None:
        """A part of this rank's gradient, before its reduction; no device sync."""
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def end_of_step(self) -> None:
        """All parts of this step's gradient have been added."""
        if self._squares:
            self._norms.append(torch.linalg.vector_norm(torch.stack(self._squares)))
            self._squares.clear()

    def row(self) -> Tensor:
        norms = torch.zeros(_KEPT + 1, dtype=torch.float64)
        norms[-1] = len(self._norms)
        if self._norms:
            norms[: len(self._norms)] = torch.stack(tuple(self._norms))
            self._norms.clear()
        return norms

    def reading(self, table: Tensor) -> RankGradientsReading:
        steps = int(table[:, -1].min())
        return RankGradientsReading(tuple(map(tuple, table[:, :steps].tolist())))

    def judge(self, reading: RankGradientsReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        if len(reading.norms) < 2:
            return None
        of_steps = list(zip(*reading.norms, strict=True))
        some_finite = [step for step in of_steps if any(map(math.isfinite, step))]
        broken = [rank for rank, its in enumerate(zip(*some_finite, strict=True)) if not all(map(math.isfinite, its))]
        if broken:
            named = ", ".join(map(str, broken))
            return Alarm(
                f"rank-gradient-not-finite-{named}",
                f"the gradient of rank {named} is not finite while the others' are finite, and so spoils the average; "
                "look at its data (an empty micro-batch, an outlier) and its precision",
            )
        self._carried += [step for step in of_steps if 0 < max(step) < math.inf]
        seen = len(self._carried)
        if seen < FEWEST_STEPS:
            return None
        zeros = [column.count(0) for column in zip(*self._carried, strict=True)]
        dead = [rank for rank, count in enumerate(zeros) if 2 * count > seen]
        if dead:
            self._carried = []
            return Alarm(
                f"rank-gradient-zero-{dead[0]}",
                f"rank {', '.join(map(str, dead))}: its gradient is zero in {zeros[dead[0]]} of {seen} steps while "
                "those of others are not; look for a frozen or detached loss, micro-batches without targets, or a step "
                "under `if rank == 0`",
            )
        # Skip steps in which a rank has no targets: they show nothing about sizes.
        steps = [step for step in self._carried if min(step) > 0]
        if len(steps) < FEWEST_STEPS:
            self._carried = self._carried[-_KEPT:]
            return None
        self._carried = []
        norm = median(fmean(step) for step in steps)
        self._first = self._first or norm
        found = deviations(steps, max(NORM_TOLERANCE, NORM_TOLERANCE_OF_FIRST * (self._first / norm) ** 2))
        shifted = self._shifts.add(found)
        if shifted is None:
            return None
        return Alarm(
            f"rank-gradient-{shifted.rank}",
            f"rank {shifted.rank}: its gradient before the reduction is {math.exp(shifted.difference):.3g} times as "
            f"large as the others' over the last {COMPARED} logs, {abs(shifted.unusual):.1f} standard errors"
            f"{OF_TWO if len(reading.norms) == 2 else ''}; look at this rank's data shard and item counts, its seed "
            "and its precision",
        )


def deviations(steps: list[tuple[float, ...]], tolerance: float = 0.0) -> list[Deviation]:
    """Every rank's log norm against the mean of the others'.

    With y[t][r] the log norm minus the mean of its step over the R ranks, a rank's effect is its mean over the T steps,
    its distance to the others R / (R - 1) times that, and the variance of this distance

        s^2 / T * R / (R - 1),        s^2 = sum (y - effect)^2 / ((T - 1) (R - 1)).

    Args:
        steps: norms [steps][ranks], positive and finite; at least two of each.
        tolerance: absolute difference of log norms that counts as none.

    Source: two-way analysis of variance without replication, e.g. Scheffe 1959, "The Analysis of Variance", ch. 4.
    """
    count, ranks = len(steps), len(steps[0])
    logs = [[math.log(norm) for norm in step] for step in steps]
    centred = [[value - fmean(step) for value in step] for step in logs]
    effects = [fmean(column) for column in zip(*centred, strict=True)]
    freedom = (count - 1) * (ranks - 1)
    squares = sum((value - effect) ** 2 for step in centred for value, effect in zip(step, effects, strict=True))
    error = math.sqrt(squares / freedom / count * ranks / (ranks - 1))
    return [
        Deviation(rank, effect * ranks / (ranks - 1), error, freedom, tolerance) for rank, effect in enumerate(effects)
    ]
