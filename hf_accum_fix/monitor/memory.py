"""Memory: still warming up, on its plateau, or leaking?

Symptom: the first steps allocate and later ones should not; logged every tenth step that looks like growth, and a real
leak of a few hundred KiB a step looks like noise until it ends the run.

On CUDA the memory that tensors hold is judged; elsewhere it is the resident set of the process, without the pages of
files that it has mapped (a dataset that is read through).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Literal, TypeAlias, get_args

import psutil
import torch
from torch import Tensor

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.robust import blocks, median_and_sigma, noise_sigma, theil_sen

MIB = 2.0**20
#: Last samples kept; samples that a median replaces later on, and most of these medians; blocks behind a trend.
_LAST, _BLOCK, _BLOCKS, _PARTS = 1024, 32, 1024, 24
#: Numbers of last samples that are examined by themselves.
_WINDOWS = (1024, 256, 64)


#: What is decided of memory.
TrendKind: TypeAlias = Literal["too few steps", "plateau", "grows"]


@dataclass(frozen=True)
class Trend:
    """Where memory is going."""

    kind: TrendKind
    samples: float = 0  # steps behind it, without the warm-up
    since: float = math.nan  # first step after the warm-up
    level: float = math.nan  # median since then [bytes]
    slope: float = math.nan  # growth since then [bytes per step]

    def __str__(self) -> str:
        """The decision in words."""
        if self.kind == "too few steps":
            return "too few steps to decide"
        how = f"{self.slope / MIB:.3g} MiB/step" if self.kind == "grows" else f"at {_in_words(self.level)}"
        return f"{self.kind} {how} since step {self.since:.0f}"


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank."""

    used: float  # held by tensors on CUDA, the process's own resident pages elsewhere [bytes]
    capacity: float  # what used can grow to
    trend: Trend  # where it is going

    @property
    def room(self) -> float:
        """Memory left [bytes]."""
        return max(self.capacity - self.used, 0.0)

    @property
    def steps_until_full(self) -> float:
        """Steps until memory is full, at the slope found; inf where it does not grow."""
        return self.room / self.trend.slope if self.trend.kind == "grows" else math.inf

    def __str__(self) -> str:
        """The decision in words."""
        full = f", {self.steps_until_full:,.0f} steps until {_in_words(self.capacity)} are full"
        return f"{self.trend} (now {_in_words(self.used)}{full if math.isfinite(self.steps_until_full) else ''})"


class MemoryMonitor(Gathered[tuple[RankMemory, ...]]):
    """Sample memory at every step and distinguish warm-up, plateau and leak; a reading has the memory of every rank.

    Args:
        device: a CUDA device, or the CPU for the process; None is the current device, where there is one.
        ranks: the ranks; None: torch.distributed.
        capacity: bytes that memory can grow to; None is the device's, or what is available to the process now.
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
        self._step = 0
        if capacity is None and self._device is None:
            capacity = float(psutil.virtual_memory().available + self._now())
        elif capacity is None:
            capacity = float(torch.cuda.get_device_properties(self._device).total_memory)
        self._capacity = capacity
        self._room: dict[int, float] = {}

    def sample(self) -> None:
        """Sample this step's memory: no device sync."""
        self._step += 1
        self._sizes.append(self._now())
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
        steps = range(self._step + 1 - len(self._sizes), self._step + 1)
        its = self._trend(list(map(float, steps)), list(self._sizes))
        row = [self._now(), self._capacity, get_args(TrendKind).index(its.kind), its.samples, its.since, its.level]
        return torch.tensor([*row, its.slope], dtype=torch.float64)

    def reading(self, table: Tensor) -> tuple[RankMemory, ...]:
        kinds = get_args(TrendKind)
        return tuple(RankMemory(of[0], of[1], Trend(kinds[int(of[2])], *of[3:])) for of in table.tolist())

    def judge(self, reading: tuple[RankMemory, ...]) -> Alarm | None:
        """An alarm where memory grows and would be full in a million steps: for the rank that is full first.

        It comes after 250 steps of growth, or where memory would be full within twice as many steps as it has grown;
        and again each time that half of the room left is taken. Every rank judges alike.
        """
        due = [
            rank
            for rank, its in enumerate(reading)
            if its.steps_until_full
            < (at.FAR_AWAY if its.trend.samples >= at.STEPS_OF_A_LEAK else 2 * its.trend.samples)
            and its.room < self._room.get(rank, math.inf) / 2
        ]
        if not due:
            return None
        first = min(due, key=lambda rank: reading[rank].steps_until_full)
        self._room.update((rank, reading[rank].room) for rank in due)
        words = "look for what is kept from step to step: losses or outputs appended without detach().item(), caches, "
        return Alarm(f"memory-grows-{first}", f"rank {first}: memory {reading[first]}; {words}hooks that collect")

    def logged(self, reading: tuple[RankMemory, ...]) -> dict[str, float]:
        """Memory of the rank that uses most, and how fast the fastest grows [MiB]."""
        slopes = [its.trend.slope for its in reading if not math.isnan(its.trend.slope)]
        return {
            "memory_mib": max(its.used for its in reading) / MIB,
            "memory_growth_mib_per_step": max(slopes, default=math.nan) / MIB,
        }

    def _trend(self, steps: list[float], sizes: list[float]) -> Trend:
        """Where memory is going: over the whole run, else in its last samples, where these end above all before."""
        of_run = self._before if self._step > _LAST else list(zip(steps, sizes, strict=True))
        whole = trend([step for step, _ in of_run], [size for _, size in of_run])
        for window in _WINDOWS:
            held = [level for step, level in self._before if step <= steps[0] + len(steps) - window]
            if whole.kind == "grows" or len(held) < window // _BLOCK or len(steps) < window:
                continue
            now, settled = median(sizes[-window // 8 :]), held[len(held) // 2 :]
            if now > max(held) + max(_no_growth(now), 2 * (max(settled) - min(settled))):
                late = trend(steps[-window:], sizes[-window:])
                whole = late if late.kind == "grows" else whole
        return whole

    def _now(self) -> float:
        """Of tensors; else the process's own pages, without mapped files, whose pages the system can take back."""
        if self._device is not None:
            return float(torch.cuda.memory_allocated(self._device))
        try:
            with open(f"/proc/{self._process.pid}/status", "rb") as status:  # noqa: PTH123 - read at every step
                sizes = dict(line.split(b":", 1) for line in status)
            return 1024.0 * sum(int(sizes[name].split()[0]) for name in (b"RssAnon", b"RssShmem"))
        except (OSError, KeyError):
            return float(self._process.memory_info().rss)  # not Linux


def trend(steps: Sequence[float], sizes: Sequence[float]) -> Trend:
    """Where memory is going since its warm-up, by its sizes [bytes] at these steps.

    The medians of up to 24 blocks are taken, so that neither single peaks nor correlations over a few steps decide, and
    the slope is Theil and Sen's.

    It *grows* if the whole interval is above zero, the growth so far is more than 16 MiB and 0.2 % of the level, each
    half grows at no less than half that pace and the later no slower, and two blocks in five are above the one before
    (of noise, every second is). It is on a *plateau* if not even the upper end of the interval makes a growth of that
    size in a thousand steps. Else it is too early.
    """
    if len(steps) < at.SAMPLES:
        return Trend("too few steps")
    first = _end_of_warm_up(steps, sizes)
    steps, sizes = steps[first:], sizes[first:]
    level, span = median(sizes), steps[-1] - steps[0]
    x, y = _medians(steps), _medians(sizes)
    slope = theil_sen(x, y, at.CONFIDENCE)
    none = _no_growth(level)
    kind: TrendKind = "too few steps"
    if slope.low > 0 and slope.value * span > none:
        half = len(x) // 2
        early, late = theil_sen(x[:half], y[:half], at.CONFIDENCE), theil_sen(x[half:], y[half:], at.CONFIDENCE)
        rising = sum(after > before for before, after in pairwise(y)) / (len(y) - 1)
        slowing = late.high < at.SLOWING * early.low
        if min(early.value, late.value) > slope.value / 2 and rising > at.RISING and not slowing:
            kind = "grows"
    elif slope.high * at.PLATEAU_STEPS < none:
        kind = "plateau"
    return Trend(kind, span + 1, steps[0], level, slope.value)


def _end_of_warm_up(steps: Sequence[float], sizes: Sequence[float]) -> int:
    """The first place, in the first half at most, from which on the line through the second half holds."""
    half = len(steps) // 2
    slope = theil_sen(_medians(steps[half:]), _medians(sizes[half:])).value
    later = zip(steps[half:], sizes[half:], strict=True)
    offset, sigma = median_and_sigma([size - slope * step for step, size in later])
    below = max(4 * sigma, 4 * noise_sigma(sizes[half:]), _no_growth(median(sizes[half:])))
    reached = (place for place in range(half) if sizes[place] >= offset + slope * steps[place] - below)
    return next(reached, half)


def _no_growth(level: float) -> float:
    return max(at.NO_GROWTH, at.NO_GROWTH_SHARE * level)


def _medians(values: Sequence[float]) -> list[float]:
    return [median(values[part.start : part.stop]) for part in blocks(len(values), _PARTS)]


def _in_words(size: float) -> str:
    """In GiB, or in MiB where it is less than one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / MIB:.1f} MiB"
