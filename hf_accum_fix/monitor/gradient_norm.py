"""The gradient norm over time: its usual size, its spikes, and how often it is clipped.

Symptom: the run diverges, or learns nothing because every step is clipped; the last gradient norm before each log, one
in ten, shows neither.

    norms = GradientNorm(max_norm=1.0)
    ...
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms.update(norm, items)                                                    # every step; no device sync
    reading = norms.read()                                                       # at every log: one device sync
    alarms.say(norms.judge(reading))

The norm after the reduction is the same on every rank, so `read` communicates nothing. The noise of a gradient falls
with the root of its items: the short step at the end of an epoch is large by that, and no spike. Imports no torch by
itself: `watch` judges logs by it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gathered import Gathered
from hf_accum_fix.monitor.robust import SIGMA_PER_MAD, median_and_sigma, noise_sigma

if TYPE_CHECKING:
    from torch import Tensor

LOOK_AT = "look at the samples of that step, the learning rate (a longer warm-up) and the precision"


@dataclass(frozen=True)
class Spike:
    """A norm far above the usual.

    Attributes:
        steps_ago: steps between it and the reading.
        norm: its size.
        usual: median of the steps before it.
        unusual: distance of its logarithm from the usual one's, in standard deviations of the noise.
        items: of the step, as a share of the usual; 1 where they are not known.
    """

    steps_ago: int
    norm: float
    usual: float
    unusual: float
    items: float = 1.0


@dataclass(frozen=True)
class GradientNormReading:
    """The norms since the last reading, compared with the last steps before them.

    Attributes:
        steps: how many.
        median: of the norms of the window, these included; nan without any.
        mad: median absolute deviation from it, in the unit of the norm.
        spikes: norms far above the usual.
        clipped: share of the steps whose norm exceeded ``max_norm``; None where that is not known.
        not_finite: share of the window's steps whose norm was inf or nan.
    """

    steps: int
    median: float
    mad: float
    spikes: tuple[Spike, ...]
    clipped: float | None
    not_finite: float


class GradientNorm(Gathered[GradientNormReading]):
    """Compare every step's gradient norm with a window of the steps before it.

    A spike is a norm whose logarithm is more than 9 times its noise above its median over the window, and at
    least 3 times as large, after what few items alone make of it: ``sqrt(usual items / items)`` at most, and
    as much more noise. Logarithms, because norms are skewed; the noise from step to step (`noise_sigma`) and the
    median, because neither the trend of a run that learns nor the spikes themselves must raise the bar.

    Args:
        max_norm: norm that gradients are clipped to; None where they are not.
        every: steps from one norm to the next.
        before_a_spike: fewest norms before one that is a spike.
    """

    def __init__(self, max_norm: float | None = None, every: float = 1, before_a_spike: int = 30) -> None:
        self.max_norm, self._every, self._before_a_spike = max_norm, every, before_a_spike
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._items: deque[float] = deque(maxlen=_WINDOW)
        self._finite: deque[bool] = deque(maxlen=_WINDOW)
        self._new: list[tuple[Any, Any]] = []
        self._norms: list[float] = []
        self._candidates: list[Spike] = []
        self._clipped = 0
        self._block: list[float] = []
        self._logs = deque[float](maxlen=_BLOCKS)
        self._reported: dict[str, float] = {}

    def update(self, norm: Tensor | float, items: Tensor | float = math.nan) -> None:
        """Take one step's norm into account, before clipping; no device sync.

        A norm whose parts lie on the ranks (fully_shard's) is reduced when it is read, by every rank.

        Args:
            norm: of the gradient, one number, the same on every rank.
            items: of the step: all of them for `read`, this rank's for `row`; nan: not known.
        """
        self._new.append((norm.detach() if hasattr(norm, "detach") else norm, items))

    def read(self) -> GradientNormReading:
        """The norms since the last reading: one device sync, no collective."""
        return self.reading(self.row()[None])

    def row(self) -> Tensor:
        """This rank's part of a reading: the items of steps that may be spikes, and the usual ones. One device sync."""
        import torch

        self.add(*_numbers(self._new))
        self._new.clear()
        row = torch.full((_CANDIDATES + 1,), math.nan, dtype=torch.float64)
        row[: len(self._candidates)] = torch.tensor([its.items for its in self._candidates], dtype=torch.float64)
        row[-1] = median(self._items) if self._items else math.nan
        return row

    def add(self, norms: Sequence[float], items: Sequence[float]) -> None:
        """Add norms that are numbers already."""
        self._norms = list(norms)
        for place, (norm, its) in enumerate(zip(norms, items, strict=True)):
            self._finite.append(math.isfinite(norm))
            self._clipped = self._clipped + 1 if self.max_norm is not None and norm > self.max_norm else 0
            if math.isfinite(norm):
                self._add(math.log(max(norm, _LEAST_NORM)))
            if not math.isfinite(norm) or norm <= 0:
                continue
            self._candidates += self._spike(norm, its, len(norms) - 1 - place)
            self._usual.append(norm)
            if its > 0:
                self._items.append(its)
        self._candidates = sorted(self._candidates, key=lambda spike: -spike.unusual)[:_CANDIDATES]

    def reading(self, table: Tensor | None = None) -> GradientNormReading:
        """The reading, from the rows of all ranks; None: no step's items are known."""
        norms, spikes = self._norms, []
        *items, usual = table.sum(0).tolist() if table is not None else [math.nan] * (_CANDIDATES + 1)
        for its, candidate in zip(items, self._candidates, strict=False):
            share = min(its / usual, 1.0) if its > 0 and usual > 0 else 1.0
            few, far = -math.log(share) / 2, math.log(candidate.norm / candidate.usual)
            # The noise of a norm of few items is larger by the same root.
            unusual = candidate.unusual * (far - few) / far * math.sqrt(share)
            if far > math.log(_FACTOR) + few and unusual > _UNUSUAL:
                spikes.append(replace(candidate, unusual=unusual, items=share))
        self._norms, self._candidates = [], []
        centre, sigma = median_and_sigma(self._usual) if self._usual else (math.nan, math.nan)
        max_norm = self.max_norm
        return GradientNormReading(
            steps=len(norms),
            median=centre,
            mad=sigma / SIGMA_PER_MAD,
            spikes=tuple(spikes),
            clipped=None if max_norm is None or not norms else sum(norm > max_norm for norm in norms) / len(norms),
            not_finite=1 - sum(self._finite) / len(self._finite) if self._finite else 0.0,
        )

    def logged(self, reading: GradientNormReading) -> dict[str, float]:
        """Median and MAD of the last norms, spikes and share of clipped steps since the last log."""
        if not reading.steps:
            return {}
        found = {"gradient_norm_median": reading.median, "gradient_norm_mad": reading.mad}
        found["gradient_norm_spikes"] = float(len(reading.spikes))
        return found if reading.clipped is None else {**found, "clipped_steps_share": reading.clipped}

    def state_dict(self) -> dict[str, list[float] | list[bool]]:
        """The window of norms, for JSON, without norms that were not read yet."""
        return {"usual": list(self._usual), "finite": list(self._finite)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that window."""
        self._usual.extend(state["usual"])
        self._finite.extend(state["finite"])

    def judge(self, reading: GradientNormReading) -> Alarm | None:
        """An alarm where norms are not finite (over 1 in 20 of the window), spike, are always clipped, or drift."""
        if reading.not_finite > 0.05 and len(self._finite) >= _ENOUGH:
            return Alarm(
                "gradient-norm-not-finite",
                f"{reading.not_finite:.0%} of the last {len(self._finite)} gradient norms are inf or nan (a loss "
                "scaler makes few); look at the learning rate and the precision",
            )
        if not reading.spikes:
            return self._always_clipped(reading) or self._drift()
        worst = max(reading.spikes, key=lambda spike: spike.unusual)
        return Alarm(
            "gradient-norm-spike",
            f"gradient norm {worst.norm:.3g}, {worst.norm / worst.usual:.3g} times the usual {worst.usual:.3g}"
            f"{f', {worst.steps_ago} steps before this log' * (worst.steps_ago > 0)}"
            f"{f', of a step with {worst.items:.2g} times the usual items' * (worst.items < _FEW)}; {LOOK_AT}",
        )

    def _always_clipped(self, reading: GradientNormReading) -> Alarm | None:
        """Every step of the last 1,000, 2,000, 4,000 ... was clipped, to a fifth or less."""
        clipped, before = self._clipped, self._clipped - reading.steps
        due = clipped >= _ALWAYS and (clipped // _ALWAYS).bit_length() > (max(before, 0) // _ALWAYS).bit_length()
        if self.max_norm is None or not due or reading.median < _FAR_CLIPPED * self.max_norm:
            return None
        return Alarm(
            "gradient-norm-always-clipped",
            f"each of the last {clipped:,} steps was clipped, from {reading.median:.3g} in the median to "
            f"{self.max_norm:.3g}: all are equally long, for any gradient; a loss that nothing divided by the "
            "accumulation steps looks like this (`hf-accum-fix doctor`), and so does a max_norm that is too small",
        )

    def _add(self, log: float) -> None:
        self._block.append(log)
        if len(self._block) == _BLOCK:
            self._logs.append(median(self._block))
            self._block.clear()

    def _drift(self) -> Alarm | None:
        """A norm that has grown from block to block, or vanished; reported again after as much again."""
        for verb, sign, factor, rising in (("grows", 1.0, _GROWN, _RISING), ("vanishes", -1.0, _VANISHED, 0.0)):
            levels = [sign * log for log in self._logs]
            since = levels[levels.index(min(levels)) :] if levels else []
            if len(since) < _FEWEST_BLOCKS:
                self._reported.pop(verb, None)
                continue
            rises = sum(after > before for before, after in pairwise(since)) / (len(since) - 1)
            growth = since[-1] - max(since[0], self._reported.get(verb, -math.inf))
            if growth < math.log(factor) or rises < rising:
                continue
            self._reported[verb] = since[-1]
            return Alarm(
                f"gradient-norm-{verb}",
                f"the gradient norm {verb}: {math.exp(sign * since[0]):.3g} some "
                f"{_BLOCK * self._every * len(since):,.0f} steps ago, "
                f"{math.exp(self._logs[-1]):.3g} now; look at the learning rate, weight decay and normalisation, and "
                "for activations or a loss that grow or die",
            )
        return None

    def _spike(self, norm: float, items: float, steps_ago: int) -> list[Spike]:
        """The candidate that this norm is, if any, with this rank's items."""
        usual = median(self._usual) if len(self._usual) >= self._before_a_spike else math.inf
        if norm <= _FACTOR * usual:
            return []
        sigma = noise_sigma([math.log(each) for each in self._usual])
        unusual = math.log(norm / usual) / max(sigma, _LEAST_SIGMA)
        return [Spike(steps_ago, norm, usual, unusual, items)] if unusual > _UNUSUAL else []


def _numbers(new: Sequence[tuple[Any, Any]]) -> tuple[list[float], list[float]]:
    """Norms and items on the host: one device sync."""
    import torch

    if not new:
        return [], []
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm, _ in new]
    columns = [torch.as_tensor(its).reshape(()) for its in (*norms, *(items for _, items in new))]
    device = next((its.device for its in columns if its.device.type != "cpu"), torch.device("cpu"))
    numbers = torch.stack([its.to(device, torch.float32, non_blocking=True) for its in columns]).tolist()
    return numbers[: len(new)], numbers[len(new) :]


#: Steps in a block of the drift, blocks kept, fewest that show one.
_BLOCK, _BLOCKS, _FEWEST_BLOCKS = 100, 500, 5
#: Ratios that count, and the share of blocks that lie above the one before as a norm grows steadily.
_GROWN, _VANISHED, _RISING = 30.0, 1e4, 0.8
#: Smallest norm that has a logarithm of its own.
_LEAST_NORM = 1e-30
#: Steps in a row that are always; ratio of norm to max_norm that is far.
_ALWAYS, _FAR_CLIPPED = 1000, 5.0
#: Norms that define a usual one, and the fewest of which some are not finite.
_WINDOW, _ENOUGH = 100, 30
#: Least distance of a spike from the usual, in deviations of the noise, and as a ratio. At 9, log norms that follow
#: Student's distribution of 5 degrees gave 5 spikes in 60,000 simulated steps, normal ones none.
_UNUSUAL, _FACTOR = 9.0, 3.0
#: Most steps of a reading that may be spikes; share of the usual items that is reported.
_CANDIDATES, _FEW = 8, 0.9
#: Least deviation of log norms that a window is assumed to have.
_LEAST_SIGMA = 0.02
