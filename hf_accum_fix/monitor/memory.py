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
resident set of the process.
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

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, by_rank
from hf_accum_fix.monitor.robust import blocks, median_and_sigma, noise_sigma, theil_sen

MIB = 2.0**20
#: Samples kept; beyond, every other is dropped and half as many are taken from then on.
_KEPT = 4096
#: Samples below which nothing is said; since the warm-up, below which growth is said but no alarm given (memory that a
#: collector frees every hundred steps grows in between); and blocks that a trend is taken from.
_ENOUGH, _ENOUGH_FOR_ALARM, _BLOCKS = 40, 250, 24
#: Growth over all that was seen that is none: this much (the resident set of a healthy process creeps by a few MiB over
#: its first thousand steps), or this share of the level.
_NO_GROWTH, _NO_GROWTH_SHARE = 16 * MIB, 0.002
_CONFIDENCE, _RISING = 0.999, 0.4
#: Steps that a plateau is to hold for.
_PLATEAU_STEPS = 1000
#: Steps until memory is full beyond which nobody would act.
_FAR_AWAY = 1_000_000


class TrendKind(Enum):
    """What the samples say."""

    TOO_FEW_STEPS = "too few steps"
    PLATEAU = "plateau"
    GROWS = "grows"


@dataclass(frozen=True)
class Trend:
    """Where memory is going.

    Attributes:
        kind: the decision.
        samples: that it was taken from, without the warm-up.
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
    """Warm-up set aside, then plateau, growth, or too few steps to tell them apart.

    The warm-up ends where the samples first reach the line through the second half of them, less four robust standard
    deviations or what counts as no growth. From there on the medians of up to 24 blocks are taken, so that neither
    single peaks nor what hangs together over a few steps decides, and the slope is Theil and Sen's.

    It *grows* if the whole interval is above zero, the growth so far is more than 16 MiB and 0.2 % of the level, each
    half grows at no less than half that pace, and at least two blocks in five are above the one before (of noise, every
    second is): a few steps up (an evaluation, a longer batch, a heap that settles) are no leak. It is on a *plateau* if
    not even the upper end of the interval makes a growth of that size, over a thousand steps at least. Else it is too
    early.

    Args:
        steps: increasing.
        sizes: bytes, as many.
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
        paces = (theil_sen(x[:half], y[:half]).value, theil_sen(x[half:], y[half:]).value)
        rising = sum(after > before for before, after in pairwise(y)) / (len(y) - 1)
        kind = TrendKind.GROWS if min(paces) > slope.value / 2 and rising > _RISING else kind
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
    return [median(steps[i] for i in part) for part in parts], [median(sizes[i] for i in part) for part in parts]


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        used: held by tensors on CUDA, resident set elsewhere [bytes].
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
    def steps_until_full(self) -> float:
        """At the slope found; inf where it does not grow."""
        if self.trend.kind is not TrendKind.GROWS:
            return math.inf
        return max(self.capacity - self.used, 0.0) / self.trend.slope

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
    """Samples memory at every step and tells warm-up, plateau and leak apart.

    Args:
        device: whose memory; None is the current CUDA device where there is one, else the process.
        ranks: the ranks; None are those of torch.distributed.
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

    def sample(self) -> None:
        """Look at this step's memory: no device sync."""
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
        used, reserved, peak = self._now()
        its = trend(self._steps, self._sizes)
        kinds = list(TrendKind)
        row = [used, reserved, peak, self._capacity, kinds.index(its.kind), its.samples, its.since, its.level]
        row += [its.slope, its.low, its.high]
        table = by_rank(self._ranks, torch.tensor(row, dtype=torch.float64)).tolist()
        return MemoryReading(
            tuple(RankMemory(of[0], of[1], of[2], of[3], Trend(kinds[int(of[4])], *of[5:])) for of in table)
        )

    def judge(self, reading: MemoryReading) -> Alarm | None:
        """An alarm where memory has grown for 250 samples, and would be full in a million steps: for the first rank.

        Every rank judges alike.
        """
        growing = [
            rank
            for rank, its in enumerate(reading.ranks)
            if its.trend.samples >= _ENOUGH_FOR_ALARM and its.steps_until_full < _FAR_AWAY
        ]
        if not growing:
            return None
        first = min(growing, key=lambda rank: reading.ranks[rank].steps_until_full)
        return Alarm(
            f"memory-grows-{first}",
            f"rank {first}: memory {reading.ranks[first]}; look for what is kept from step to step: losses or outputs "
            "appended without detach().item(), caches, hooks that collect",
        )

    def _now(self) -> tuple[float, float, float]:
        """Used, reserved and peak [bytes]."""
        if self._device is None:
            used = float(self._process.memory_info().rss)
            return used, used, max(self._largest, used)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        used, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return float(used["current"]), float(reserved["current"]), float(used["peak"])

    def _total(self) -> float:
        if self._device is None:
            return float(psutil.virtual_memory().available + self._process.memory_info().rss)
        return float(torch.cuda.get_device_properties(self._device).total_memory)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
