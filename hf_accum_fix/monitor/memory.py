"""Memory: still warming up, on its plateau, or leaking?

Symptom: the first steps allocate and later ones should not; logged every tenth step that looks like growth, and a real
leak of a few hundred KiB a step looks like noise until it ends the run.

    memory = MemoryMonitor()
    ...
    memory.sample()                                  # every step; no device sync
    reading = memory.read()                          # at every log: one collective
    alarms.say(memory.judge(reading))
    print(reading.ranks[0])                          # "3.21 GiB, plateau since step 12 ..."

On CUDA the memory that tensors hold is judged, and reserved and peak memory are shown beside it; elsewhere it is the
resident set of the process, without the pages of files that it has mapped (a dataset that is read through).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median

import psutil
import torch
from torch import Tensor

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, by_rank
from hf_accum_fix.monitor.robust import blocks, median_and_sigma, noise_sigma, theil_sen

MIB = 2.0**20
#: Samples kept; beyond, every other is dropped and half as many are taken from then on.
_KEPT = 4096
#: Fewest samples for a decision; fewest samples since the warm-up for an alarm about growth (memory that a collector
#: frees every hundred steps grows in between); and number of blocks behind a trend.
_ENOUGH, _ENOUGH_FOR_ALARM, _BLOCKS = 40, 250, 24
#: Total growth that counts as none: this much (the resident set of a healthy process creeps by a few MiB over
#: its first thousand steps), or this share of the level.
_NO_GROWTH, _NO_GROWTH_SHARE = 16 * MIB, 0.002
_CONFIDENCE, _RISING = 0.999, 0.4
#: The later half's pace over the earlier's below which growth comes to rest: the rest of a geometric series is less
#: than twenty times the growth of the later half.
_SLOWING = 0.95
#: Numbers of last samples to examine by themselves.
_WINDOWS = (2048, 1024, 512, 256)
#: Steps that a plateau has to last.
_PLATEAU_STEPS = 1000
#: Steps until memory is full beyond which nobody would act.
_FAR_AWAY = 1_000_000


class TrendKind(Enum):
    """The decision."""

    TOO_FEW_STEPS = "too few steps"
    PLATEAU = "plateau"
    GROWS = "grows"


@dataclass(frozen=True)
class Trend:
    """Where memory is going.

    Attributes:
        kind: the decision.
        samples: number behind it, without the warm-up.
        since: first step after the warm-up.
        level: median since then [bytes].
        slope: growth since then [bytes per step], with its interval of 99.9 %; nan where there were too few steps.
        low: its lower end.
        high: its upper end.
    """

    kind: TrendKind
    samples: float = 0
    since: float = math.nan
    level: float = math.nan
    slope: float = math.nan
    low: float = math.nan
    high: float = math.nan


def trend(steps: Sequence[float], sizes: Sequence[float]) -> Trend:
    """Where memory is going: since the warm-up, else since a late start, else by steps up.

    A leak that starts late is lost in a long plateau, so the last 256, 512, 1024 and 2048 samples are examined by
    themselves where they end above all earlier memory, by more than memory wandered then. A leak of some hundreds of
    MiB every few thousand steps has no slope: it shows as a level that goes up three times or more, never down, and no
    slower in the later half than in the earlier.

    Args:
        steps: increasing.
        sizes: bytes, as many.
    """
    whole = _trend(steps, sizes)
    if whole.kind is TrendKind.GROWS or len(steps) < _ENOUGH:
        return whole
    for window in _WINDOWS:
        if len(steps) > 2 * window and _is_record(sizes, window):
            late = _trend(steps[-window:], sizes[-window:])
            if late.kind is TrendKind.GROWS:
                return late
    first = _end_of_warm_up(steps, sizes)
    return _staircase(steps[first:], sizes[first:]) or whole


def _is_record(sizes: Sequence[float], window: int) -> bool:
    """Whether the last samples lie above all blocks before the window, by more than these wandered."""
    # Blocks as short as the last one, so that a peak, or the tip of a saw, counts as held before.
    parts = blocks(len(sizes) - window, (len(sizes) - window) // (window // 8))
    before = [median(sizes[part.start : part.stop]) for part in parts]
    now = median(sizes[-window // 8 :])
    settled = before[len(before) // 2 :]
    return now > max(before) + max(_no_growth(now), 2 * (max(settled) - min(settled)))


def _staircase(steps: Sequence[float], sizes: Sequence[float]) -> Trend | None:
    """Growth by steps up; None where there is none."""
    parts = blocks(len(steps), _BLOCKS)
    levels = [median(sizes[part.start : part.stop]) for part in parts]
    none, growth, span = _no_growth(levels[-1]), levels[-1] - levels[0], steps[-1] - steps[0]
    rises = [place for place in range(1, len(levels)) if levels[place] - levels[place - 1] > none]
    falls = any(before - after > none for before, after in pairwise(levels))
    half = len(levels) // 2
    slowing = levels[-1] - levels[half] < 0.4 * growth
    # Two neighbouring blocks share a step that falls into one of them.
    apart = [place for number, place in enumerate(rises) if number == 0 or place > rises[number - 1] + 1]
    if len(apart) < 3 or growth < 3 * none or falls or slowing or len(steps) < _ENOUGH_FOR_ALARM:
        return None
    pace = growth / span
    return Trend(TrendKind.GROWS, len(steps), steps[0], median(sizes), pace, pace / 2, pace * 2)


def _trend(steps: Sequence[float], sizes: Sequence[float]) -> Trend:
    """Warm-up set aside, then plateau, growth, or too few steps to tell them apart.

    The warm-up ends where the samples first reach the line through the second half of them, less four robust standard
    deviations or what counts as no growth. From there on the medians of up to 24 blocks are taken, so that neither
    single peaks nor correlations over a few steps decide, and the slope is Theil and Sen's.

    It *grows* if the whole interval is above zero, the growth so far is more than 16 MiB and 0.2 % of the level, each
    half grows at no less than half that pace, and at least two blocks in five are above the one before (of noise, every
    second is): a few steps up (an evaluation, a longer batch, a heap that settles) are no leak. It is on a *plateau* if
    not even the upper end of the interval makes a growth of that size, over a thousand steps at least. Else it is too
    early, as it is where the later half surely grows more slowly than the earlier: a slow warm-up.
    """
    if len(steps) < _ENOUGH:
        return Trend(TrendKind.TOO_FEW_STEPS)
    first = _end_of_warm_up(steps, sizes)
    steps, sizes = steps[first:], sizes[first:]
    level, span = median(sizes), steps[-1] - steps[0]
    x, y = _medians(steps, sizes)
    slope = theil_sen(x, y, _CONFIDENCE)
    none = _no_growth(level)
    kind = TrendKind.TOO_FEW_STEPS
    if slope.high * max(span, _PLATEAU_STEPS) < none:
        kind = TrendKind.PLATEAU
    elif slope.low > 0 and slope.value * span > none:
        half = len(x) // 2
        early, late = theil_sen(x[:half], y[:half], _CONFIDENCE), theil_sen(x[half:], y[half:], _CONFIDENCE)
        rising = sum(after > before for before, after in pairwise(y)) / (len(y) - 1)
        slowing = late.high < _SLOWING * early.low
        if min(early.value, late.value) > slope.value / 2 and rising > _RISING and not slowing:
            kind = TrendKind.GROWS
    return Trend(kind, len(steps), steps[0], level, slope.value, slope.low, slope.high)


def _end_of_warm_up(steps: Sequence[float], sizes: Sequence[float]) -> int:
    """The first place, in the first half at most, from which on the line through the second half holds."""
    half = len(steps) // 2
    x, y = _medians(steps[half:], sizes[half:])
    slope = theil_sen(x, y).value
    later = zip(steps[half:], sizes[half:], strict=True)
    offset, sigma = median_and_sigma([size - slope * step for step, size in later])
    below = max(4 * sigma, 4 * noise_sigma(sizes[half:]), _no_growth(median(sizes[half:])))
    for place in range(half):
        if sizes[place] >= offset + slope * steps[place] - below:
            return place
    return half


def _no_growth(level: float) -> float:
    return max(_NO_GROWTH, _NO_GROWTH_SHARE * level)


def _medians(steps: Sequence[float], sizes: Sequence[float]) -> tuple[list[float], list[float]]:
    parts = blocks(len(steps), _BLOCKS)
    return [median(steps[i.start : i.stop]) for i in parts], [median(sizes[i.start : i.stop]) for i in parts]


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
        its = self.trend
        if its.kind is TrendKind.PLATEAU:
            return f"plateau at {_size(its.level)} since step {its.since:.0f} (now {_size(self.used)})"
        if its.kind is TrendKind.GROWS:
            return (
                f"grows {its.slope / MIB:.3g} MiB/step ({its.low / MIB:.3g} to {its.high / MIB:.3g}) since step "
                f"{its.since:.0f}, now {_size(self.used)}, {self.steps_until_full:,.0f} steps until "
                f"{_size(self.capacity)} are full"
            )
        return f"too few steps to tell plateau from leak (now {_size(self.used)})"


@dataclass(frozen=True)
class MemoryReading:
    """Memory of every rank.

    Attributes:
        ranks: one each.
    """

    ranks: tuple[RankMemory, ...]


class MemoryMonitor:
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
        self._steps: list[float] = []
        self._sizes: list[float] = []
        self._step, self._stride, self._largest = 0, 1, 0.0
        self._capacity = capacity if capacity is not None else self._total()
        self._room: dict[int, float] = {}

    def sample(self) -> None:
        """Sample this step's memory: no device sync."""
        self._step += 1
        if self._step % self._stride:
            return
        used = self._now()[0]
        self._largest = max(self._largest, used)
        self._steps.append(float(self._step))
        self._sizes.append(used)
        if len(self._steps) >= _KEPT:
            del self._steps[::2], self._sizes[::2]
            self._stride *= 2

    def read(self) -> MemoryReading:
        """The decision for every rank: no device sync, one collective of eleven numbers a rank."""
        return self.reading(by_rank(self._ranks, self.row()))

    def row(self) -> Tensor:
        """This rank's part of a reading: no device sync, no collective."""
        used, reserved, peak = self._now()
        its = trend(self._steps, self._sizes)
        kinds = list(TrendKind)
        row = [used, reserved, peak, self._capacity, kinds.index(its.kind), its.samples, its.since, its.level]
        row += [its.slope, its.low, its.high]
        return torch.tensor(row, dtype=torch.float64)

    def reading(self, table: Tensor) -> MemoryReading:
        """The reading, from the rows of all ranks."""
        kinds, rows = list(TrendKind), table.tolist()
        return MemoryReading(
            tuple(RankMemory(of[0], of[1], of[2], of[3], Trend(kinds[int(of[4])], *of[5:])) for of in rows)
        )

    def judge(self, reading: MemoryReading) -> Alarm | None:
        """An alarm where memory grows and would be full in a million steps: for the rank that is full first.

        It comes after 250 samples, or as soon as memory would be full within as many steps as were seen; and again each
        time that half of the room left is taken, so that a cache that fills up and is emptied alarms once. Every rank
        judges alike.
        """
        growing = [rank for rank, its in enumerate(reading.ranks) if self._is_due(rank, its)]
        if not growing:
            return None
        first = min(growing, key=lambda rank: reading.ranks[rank].steps_until_full)
        self._room.update((rank, reading.ranks[rank].room) for rank in growing)
        return Alarm(
            f"memory-grows-{first}",
            f"rank {first}: memory {reading.ranks[first]}; look for what is kept from step to step: losses or outputs "
            "appended without detach().item(), caches, hooks that collect",
        )

    def _is_due(self, rank: int, its: RankMemory) -> bool:
        seen, full = its.trend.samples, its.steps_until_full
        soon = full < min(seen * self._stride, _FAR_AWAY)
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

    def _total(self) -> float:
        if self._device is None:
            return float(psutil.virtual_memory().available + self._resident())
        return float(torch.cuda.get_device_properties(self._device).total_memory)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
