"""Memory: still warming up, on its plateau, or leaking?

Symptom: the first steps allocate and later ones should not; logged every tenth step that looks like growth, and a real
leak of a few hundred KiB a step looks like noise until it ends the run.

    memory = MemoryMonitor()
    ...
    memory.sample()                                  # every step; no device sync
    reading = memory.read()                          # at every log: one collective
    alarms.say(memory.judge(reading))
    print(reading[0])                                # "3.21 GiB, plateau since step 12 ..."

On CUDA the memory that tensors hold is judged, and reserved and peak memory are shown too; elsewhere it is the
resident set of the process, without the pages of files that it has mapped (a dataset that is read through). `trend` is
what `watch` judges logs by.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.robust import blocks, median_and_sigma, noise_sigma, theil_sen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_accum_fix.monitor.ranks import Ranks

MIB = 2.0**20
LOOK_FOR = (
    "look for what is kept from step to step: losses or outputs appended without detach().item(), caches, hooks that "
    "collect"
)
#: Last samples kept; samples that a median replaces later on, and most of these medians; blocks behind a trend.
_LAST, _BLOCK, _BLOCKS, _PARTS = 1024, 32, 1024, 24
#: Numbers of last samples to examine by themselves.
_WINDOWS = (1024, 512, 256, 128, 64, 32)


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
        samples: steps behind it, without the warm-up.
        since: first step after the warm-up; without a slope the first step that can be judged.
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

    def __str__(self) -> str:
        """The decision in words."""
        if self.kind is TrendKind.PLATEAU:
            warm_up = "warm-up ended, later steps will not grow: " if self.since > 1 else ""
            return f"{warm_up}plateau at {_in_words(self.level)} since step {self.since:.0f}"
        if self.kind is TrendKind.GROWS:
            between = f"{self.low / MIB:.3g} to {self.high / MIB:.3g}"
            return f"grows {self.slope / MIB:.3g} MiB/step ({between}) since step {self.since:.0f}"
        decided_by = self.since
        if not math.isnan(self.slope):
            # The interval narrows with the steps to the power of 1.5.
            too_wide = (self.high - self.low) * at.PLATEAU_STEPS / _no_growth(self.level)
            decided_by += self.samples * max(math.pow(too_wide, 2 / 3), 1.5)
        return f"too few steps: plateau or leak is undecided before step {math.ceil(decided_by / 10) * 10:,}"


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
        return self.room / self.trend.slope if self.trend.kind is TrendKind.GROWS else math.inf

    def __str__(self) -> str:
        """The decision in words."""
        full = f", {self.steps_until_full:,.0f} steps until {_in_words(self.capacity)} are full"
        return f"{self.trend} (now {_in_words(self.used)}{full if self.trend.kind is TrendKind.GROWS else ''})"


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
        import psutil
        import torch

        from hf_accum_fix.monitor.ranks import TorchRanks

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
        import torch

        used, reserved, peak = self._now()
        steps = range(self._step + 1 - len(self._sizes), self._step + 1)
        its = trend(list(map(float, steps)), list(self._sizes), self._before)
        row = [used, reserved, peak, self._capacity, list(TrendKind).index(its.kind), its.samples, its.since, its.level]
        return torch.tensor([*row, its.slope, its.low, its.high], dtype=torch.float64)

    def reading(self, table: Tensor) -> tuple[RankMemory, ...]:
        kinds = list(TrendKind)
        return tuple(RankMemory(of[0], of[1], of[2], of[3], Trend(kinds[int(of[4])], *of[5:])) for of in table.tolist())

    def judge(self, reading: tuple[RankMemory, ...]) -> Alarm | None:
        """An alarm where memory grows and would be full in a million steps: for the rank that is full first.

        It comes after 250 steps of growth, or as soon as memory would be full within twice as many steps as it has
        grown; and again each time that half of the room left is taken, so that a cache that fills up and is emptied
        alarms once. Every rank judges alike.
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
        return Alarm(f"memory-grows-{first}", f"rank {first}: memory {reading[first]}; {LOOK_FOR}")

    def logged(self, reading: tuple[RankMemory, ...]) -> dict[str, float]:
        """Used, reserved and peak memory of the rank that uses most, and how fast the fastest grows [MiB]."""
        slopes = [its.trend.slope for its in reading if not math.isnan(its.trend.slope)]
        return {
            "memory_mib": max(its.used for its in reading) / MIB,
            "memory_reserved_mib": max(its.reserved for its in reading) / MIB,
            "memory_peak_mib": max(its.peak for its in reading) / MIB,
            "memory_growth_mib_per_step": max(slopes, default=math.nan) / MIB,
        }

    def _now(self) -> tuple[float, float, float]:
        """Used, reserved and peak [bytes]."""
        if self._device is None:
            used = self._resident()
            return used, used, max(self._largest, used)
        import torch

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


def trend(
    steps: Sequence[float], sizes: Sequence[float], before: Sequence[tuple[float, float]] = (), enough: int = at.SAMPLES
) -> Trend:
    """Where memory is going: since the warm-up, else since a late start, else by steps up.

    A leak that starts late is lost in a long plateau, so the last 32, 64 ... 1024 samples are examined by
    themselves where they end above all earlier memory, by more than memory wandered then. A leak of some hundreds of
    MiB every few thousand steps has no slope: it shows as a level that goes up three times or more, never down, and no
    slower in the later half than in the earlier.

    Args:
        steps: increasing.
        sizes: bytes, as many.
        before: the whole run in few numbers, where steps and sizes are only its end: steps, and levels held until then.
        enough: fewest samples for a decision.
    """
    if len(steps) < enough:
        every = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
        return Trend(TrendKind.TOO_FEW_STEPS, since=(steps[-1] if steps else 0.0) + every * (enough - len(steps)))
    is_end = bool(before) and before[0][0] < steps[0]
    of_run = ([step for step, _ in before], [level for _, level in before]) if is_end else (steps, sizes)
    first = _end_of_warm_up(*of_run)
    of_run = of_run[0][first:], of_run[1][first:]
    whole = _since_warm_up(*of_run)
    if whole.kind is TrendKind.GROWS:
        return whole
    before = before if is_end else list(zip(steps, sizes, strict=True))
    for window in _WINDOWS:
        if len(steps) >= window and steps[-1] - before[0][0] > 2 * (steps[-1] - steps[-window]):
            # Blocks as short as the last one, so that a peak, or the tip of a saw, counts as held before.
            held = [level for step, level in before if step <= steps[-window]]
            if not is_end:
                held = _medians(held, 8 * len(held) // window)
            now, settled = median(sizes[-window // 8 :]), held[len(held) // 2 :]
            if settled and now > max(held) + max(_no_growth(now), 2 * (max(settled) - min(settled))):
                of_end = steps[-window:], sizes[-window:]
                start = _end_of_warm_up(*of_end)
                late = _since_warm_up(of_end[0][start:], of_end[1][start:])
                if late.kind is TrendKind.GROWS:
                    return late
    return _staircase(*of_run) or whole


def _staircase(steps: Sequence[float], sizes: Sequence[float]) -> Trend | None:
    """Growth by steps up; None where there is none."""
    levels = _medians(sizes)
    none, growth, span = _no_growth(levels[-1]), levels[-1] - levels[0], steps[-1] - steps[0]
    rises = [place for place in range(1, len(levels)) if levels[place] - levels[place - 1] > none]
    falls = any(earlier - later > none for earlier, later in pairwise(levels))
    slowing = levels[-1] - levels[len(levels) // 2] < at.LATER_HALF * growth
    # Two neighbouring blocks share a step that falls into one of them.
    apart = [place for number, place in enumerate(rises) if number == 0 or place > rises[number - 1] + 1]
    if len(apart) < at.RISES or growth < at.RISES * none or falls or slowing or span < at.STEPS_OF_A_LEAK:
        return None
    pace = growth / span
    return Trend(TrendKind.GROWS, span + 1, steps[0], median(sizes), pace, pace / 2, pace * 2)


def _since_warm_up(steps: Sequence[float], sizes: Sequence[float]) -> Trend:
    """Plateau, growth, or too few steps to decide, of samples without their warm-up.

    The medians of up to 24 blocks are taken, so that neither single peaks nor correlations over a few steps decide, and
    the slope is Theil and Sen's.

    It *grows* if the whole interval is above zero, the growth so far is more than 16 MiB and 0.2 % of the level, each
    half grows at no less than half that pace, and at least two blocks in five are above the one before (of noise, every
    second is): a few steps up (an evaluation, a longer batch, a heap that settles) are no leak. It is on a *plateau* if
    not even the upper end of the interval makes a growth of that size in a thousand steps. Else it is too
    early, as it is where the later half surely grows more slowly than the earlier: a slow warm-up.
    """
    level, span = median(sizes), steps[-1] - steps[0]
    x, y = _medians(steps), _medians(sizes)
    slope = theil_sen(x, y, at.CONFIDENCE)
    none = _no_growth(level)
    kind = TrendKind.TOO_FEW_STEPS
    if slope.low > 0 and slope.value * span > none:
        half = len(x) // 2
        early, late = theil_sen(x[:half], y[:half], at.CONFIDENCE), theil_sen(x[half:], y[half:], at.CONFIDENCE)
        rising = sum(after > before for before, after in pairwise(y)) / (len(y) - 1)
        slowing = late.high < at.SLOWING * early.low
        if min(early.value, late.value) > slope.value / 2 and rising > at.RISING and not slowing:
            kind = TrendKind.GROWS
    elif slope.high * at.PLATEAU_STEPS < none:
        kind = TrendKind.PLATEAU
    return Trend(kind, span + 1, steps[0], level, slope.value, slope.low, slope.high)


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


def _medians(values: Sequence[float], parts: int = _PARTS) -> list[float]:
    return [median(values[part.start : part.stop]) for part in blocks(len(values), parts)]


def _in_words(size: float) -> str:
    """In GiB, or in MiB where it is less than one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / MIB:.1f} MiB"
