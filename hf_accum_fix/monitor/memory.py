"""Memory: still warming up, on its plateau, or leaking?

Symptom: the first steps allocate and later ones should not; logged every tenth step that looks like growth, and a real
leak of a few hundred KiB a step looks like noise until it ends the run.

    memory = MemoryMonitor()
    ...
    memory.sample()                                  # every step; no device sync
    reading = memory.read()                          # at every log: one collective
    alarms.say(memory.judge(reading))
    print(reading.ranks[0])                          # "3.21 GiB, plateau since step 12 ..."

On CUDA the memory that tensors hold is judged, and reserved and peak memory are shown too; elsewhere it is the
resident set of the process, without the pages of files that it has mapped (a dataset that is read through).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import median

import psutil
import torch
from torch import Tensor

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.memory_trend import LOOK_FOR, MIB, Trend, TrendKind, size_in_words, trend
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks

#: Last samples kept; samples that a median replaces later on, and most of these medians.
_LAST, _BLOCK, _BLOCKS = 1024, 32, 1024
#: Fewest steps since the warm-up for an alarm about growth: memory that a collector frees every hundred steps grows in
#: between.
_ENOUGH_FOR_ALARM = 250
#: Steps until memory is full beyond which nobody would act.
_FAR_AWAY = 1_000_000


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        used: held by tensors on CUDA, the process's own resident pages elsewhere [bytes].
        reserved: by the caching allocator; as used off CUDA.
        peak: largest used so far (on CUDA since the process's peak was last reset).
        capacity: what used can grow to.
        trend: where it is going.
    """

    used: float
    reserved: float
    peak: float
    capacity: float
    trend: Trend

    @property
    def room(self) -> float:
        """Memory left [bytes]."""
        return max(self.capacity - self.used, 0.0)

    @property
    def steps_until_full(self) -> float:
        """Steps until memory is full, at the slope found; inf where it does not grow."""
        if self.trend.kind is not TrendKind.GROWS:
            return math.inf
        return self.room / self.trend.slope

    def __str__(self) -> str:
        """The decision in words."""
        now = f"{self.trend} (now {size_in_words(self.used)}"
        if self.trend.kind is not TrendKind.GROWS:
            return f"{now})"
        return f"{now}, {self.steps_until_full:,.0f} steps until {size_in_words(self.capacity)} are full)"


@dataclass(frozen=True)
class MemoryReading:
    """Memory of every rank.

    Attributes:
        ranks: one each.
    """

    ranks: tuple[RankMemory, ...]


class MemoryMonitor(Gathered[MemoryReading]):
    """Sample memory at every step and distinguish warm-up, plateau and leak.

    Args:
        device: whose memory; None is the current CUDA device where there is one, else the process.
        ranks: the ranks; None: torch.distributed.
        capacity: bytes that may be used; None is the device's memory, or what the machine had free at the start (a
            container's own limit is not known here: give it).
    """

    def __init__(
        self, device: torch.device | None = None, ranks: Ranks | None = None, capacity: float | None = None
    ) -> None:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._device = device if device is not None and device.type == "cuda" else None
        self._ranks = ranks or TorchRanks()
        self._process = psutil.Process()
        self._sizes = deque[float](maxlen=_LAST)
        self._before, self._part, self._merged = list[tuple[float, float]](), list[float](), 1
        self._step, self._largest = 0, 0.0
        if capacity is None and self._device is None:
            capacity = float(psutil.virtual_memory().available + self._resident())
        elif capacity is None:
            capacity = float(torch.cuda.get_device_properties(self._device).total_memory)
        self._capacity = capacity
        self._room: dict[int, float] = {}

    def sample(self) -> None:
        """Sample this step's memory: no device sync."""
        self._step += 1
        used = self._now()[0]
        self._largest = max(self._largest, used)
        self._sizes.append(used)
        if self._step % _BLOCK:
            return
        self._part.append(median(islice(reversed(self._sizes), _BLOCK)))
        if len(self._part) == self._merged:
            self._before.append((float(self._step), max(self._part)))
            self._part.clear()
        if len(self._before) == _BLOCKS:
            pairs = zip(self._before[::2], self._before[1::2], strict=True)
            self._before = [(step, max(size, level)) for (_, size), (step, level) in pairs]
            self._merged *= 2

    def row(self) -> Tensor:
        used, reserved, peak = self._now()
        steps = range(self._step + 1 - len(self._sizes), self._step + 1)
        its = trend(list(map(float, steps)), list(self._sizes), self._before)
        kinds = list(TrendKind)
        row = [used, reserved, peak, self._capacity, kinds.index(its.kind), its.samples, its.since, its.level]
        row += [its.slope, its.low, its.high]
        return torch.tensor(row, dtype=torch.float64)

    def reading(self, table: Tensor) -> MemoryReading:
        kinds, rows = list(TrendKind), table.tolist()
        return MemoryReading(
            tuple(RankMemory(of[0], of[1], of[2], of[3], Trend(kinds[int(of[4])], *of[5:])) for of in rows)
        )

    def judge(self, reading: MemoryReading) -> Alarm | None:
        """An alarm where memory grows and would be full in a million steps: for the rank that is full first.

        It comes after 250 steps of growth, or as soon as memory would be full within twice as many steps as it has
        grown; and again each time that half of the room left is taken, so that a cache that fills up and is emptied
        alarms once. Every rank judges alike.
        """
        growing = [rank for rank, its in enumerate(reading.ranks) if self._is_due(rank, its)]
        if not growing:
            return None
        first = min(growing, key=lambda rank: reading.ranks[rank].steps_until_full)
        self._room.update((rank, reading.ranks[rank].room) for rank in growing)
        return Alarm(f"memory-grows-{first}", f"rank {first}: memory {reading.ranks[first]}; {LOOK_FOR}")

    def logged(self, reading: MemoryReading) -> dict[str, float]:
        """Used, reserved and peak memory of the rank that uses most, and how fast the fastest grows [MiB]."""
        slopes = [its.trend.slope for its in reading.ranks if not math.isnan(its.trend.slope)]
        return {
            "memory_mib": max(its.used for its in reading.ranks) / MIB,
            "memory_reserved_mib": max(its.reserved for its in reading.ranks) / MIB,
            "memory_peak_mib": max(its.peak for its in reading.ranks) / MIB,
            "memory_growth_mib_per_step": max(slopes, default=math.nan) / MIB,
        }

    def _is_due(self, rank: int, its: RankMemory) -> bool:
        seen, full = its.trend.samples, its.steps_until_full
        soon = full < min(2 * seen, _FAR_AWAY)
        return (soon or (seen >= _ENOUGH_FOR_ALARM and full < _FAR_AWAY)) and (
            its.room < self._room.get(rank, math.inf) / 2
        )

    def _now(self) -> tuple[float, float, float]:
        """Used, reserved and peak [bytes]."""
        if self._device is None:
            used = self._resident()
            return used, used, max(self._largest, used)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        used, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return float(used["current"]), float(reserved["current"]), float(used["peak"])

    def _resident(self) -> float:
        """The process's own pages, without mapped files, whose pages the system can take back."""
        try:
            with open(f"/proc/{self._process.pid}/status", "rb") as status:  # noqa: PTH123 - read at every step
                sizes = dict(line.split(b":", 1) for line in status)
            return 1024.0 * sum(int(sizes[name].split()[0]) for name in (b"RssAnon", b"RssShmem"))
        except (OSError, KeyError):
            return float(self._process.memory_info().rss)  # not Linux
