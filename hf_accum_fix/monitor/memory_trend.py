"""Where memory is going, from its sizes: warm-up, plateau or leak. Imports no torch: `watch` judges logs by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median

from hf_accum_fix.monitor.robust import blocks, median_and_sigma, noise_sigma, theil_sen

MIB = 2.0**20
LOOK_FOR = (
    "look for what is kept from step to step: losses or outputs appended without detach().item(), caches, hooks that "
    "collect"
)
#: Fewest samples for a decision, and number of blocks behind a trend.
ENOUGH, _BLOCKS = 30, 24
#: Total growth that counts as none: this much (the resident set of a healthy process creeps by a few MiB over
#: its first thousand steps), or this share of the level.
_NO_GROWTH, _NO_GROWTH_SHARE = 16 * MIB, 0.002
_CONFIDENCE, _RISING = 0.999, 0.4
#: The later half's pace over the earlier's below which growth comes to rest: the rest of a geometric series is less
#: than twenty times the growth of the later half.
_SLOWING = 0.95
#: Numbers of last samples to examine by themselves.
_WINDOWS = (1024, 512, 256, 128, 64, 32)
#: Steps over which a plateau grows by nothing, and fewest that show growth by steps up.
_PLATEAU_STEPS, _STAIRS = 1000, 250


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

    @property
    def decided_by(self) -> float:
        """The step before which nothing can be decided: the interval narrows with the steps to the power of 1.5."""
        if math.isnan(self.slope):
            return self.since
        too_wide = (self.high - self.low) * _PLATEAU_STEPS / _no_growth(self.level)
        return self.since + self.samples * max(math.pow(too_wide, 2 / 3), 1.5)

    def __str__(self) -> str:
        """The decision in words."""
        if self.kind is TrendKind.PLATEAU:
            warm_up = "warm-up ended, later steps will not grow: " if self.since > 1 else ""
            return f"{warm_up}plateau at {size_in_words(self.level)} since step {self.since:.0f}"
        if self.kind is TrendKind.GROWS:
            between = f"{self.low / MIB:.3g} to {self.high / MIB:.3g}"
            return f"grows {self.slope / MIB:.3g} MiB/step ({between}) since step {self.since:.0f}"
        return f"too few steps: plateau or leak is undecided before step {math.ceil(self.decided_by / 10) * 10:,}"


def trend(
    steps: Sequence[float], sizes: Sequence[float], before: Sequence[tuple[float, float]] = (), enough: int = ENOUGH
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
    whole = _trend(*of_run)
    if whole.kind is TrendKind.GROWS:
        return whole
    before = before if is_end else list(zip(steps, sizes, strict=True))
    for window in _WINDOWS:
        if len(steps) >= window and steps[-1] - before[0][0] > 2 * (steps[-1] - steps[-window]):
            # Blocks as short as the last one, so that a peak, or the tip of a saw, counts as held before.
            held = [level for step, level in before if step <= steps[-window]]
            if not is_end:
                held = [median(held[part.start : part.stop]) for part in blocks(len(held), 8 * len(held) // window)]
            if _is_record(held, median(sizes[-window // 8 :])):
                late = _trend(steps[-window:], sizes[-window:])
                if late.kind is TrendKind.GROWS:
                    return late
    first = _end_of_warm_up(*of_run)
    return _staircase(of_run[0][first:], of_run[1][first:]) or whole


def _is_record(held: Sequence[float], now: float) -> bool:
    """Whether memory is above all that was held before, by more than that wandered."""
    settled = held[len(held) // 2 :]
    return bool(settled) and now > max(held) + max(_no_growth(now), 2 * (max(settled) - min(settled)))


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
    if len(apart) < 3 or growth < 3 * none or falls or slowing or span < _STAIRS:
        return None
    pace = growth / span
    return Trend(TrendKind.GROWS, span + 1, steps[0], median(sizes), pace, pace / 2, pace * 2)


def _trend(steps: Sequence[float], sizes: Sequence[float]) -> Trend:
    """Warm-up set aside, then plateau, growth, or too few steps to decide.

    The warm-up ends where the samples first reach the line through the second half of them, less four robust standard
    deviations or what counts as no growth. From there on the medians of up to 24 blocks are taken, so that neither
    single peaks nor correlations over a few steps decide, and the slope is Theil and Sen's.

    It *grows* if the whole interval is above zero, the growth so far is more than 16 MiB and 0.2 % of the level, each
    half grows at no less than half that pace, and at least two blocks in five are above the one before (of noise, every
    second is): a few steps up (an evaluation, a longer batch, a heap that settles) are no leak. It is on a *plateau* if
    not even the upper end of the interval makes a growth of that size in a thousand steps. Else it is too
    early, as it is where the later half surely grows more slowly than the earlier: a slow warm-up.
    """
    first = _end_of_warm_up(steps, sizes)
    steps, sizes = steps[first:], sizes[first:]
    level, span = median(sizes), steps[-1] - steps[0]
    x, y = _medians(steps, sizes)
    slope = theil_sen(x, y, _CONFIDENCE)
    none = _no_growth(level)
    kind = TrendKind.TOO_FEW_STEPS
    if slope.low > 0 and slope.value * span > none:
        half = len(x) // 2
        early, late = theil_sen(x[:half], y[:half], _CONFIDENCE), theil_sen(x[half:], y[half:], _CONFIDENCE)
        rising = sum(after > before for before, after in pairwise(y)) / (len(y) - 1)
        slowing = late.high < _SLOWING * early.low
        if min(early.value, late.value) > slope.value / 2 and rising > _RISING and not slowing:
            kind = TrendKind.GROWS
    elif slope.high * _PLATEAU_STEPS < none:
        kind = TrendKind.PLATEAU
    return Trend(kind, span + 1, steps[0], level, slope.value, slope.low, slope.high)


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


def size_in_words(count: float) -> str:
    """In GiB, or in MiB where it is less than one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.1f} MiB"
