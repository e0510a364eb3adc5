"""Simulated runs for `convergence_monitor.py --audit`: how often the monitors cry wolf, and how late they find a fault.

A network of one hidden layer learns overlapping clouds of points on several ranks, ten steps a log, in numpy, several
runs side by side. Every monitor gets the numbers that it would have measured. The settings of
`hf_accum_fix.monitor.deviation` were chosen on seeds 11, 12, 22, 31, 41, 51 and 61; the audit runs on other ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from numpy import ndarray

from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossReading, Moments
from hf_accum_fix.monitor.loss_over_time import LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.rank_gradients import RankGradients, RankGradientsReading
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.run_comparison import compare
from hf_accum_fix.monitor.run_logs import Run, Series
from hf_accum_fix.monitor.run_summary import summarise

POINTS, HIDDEN, CLASSES, BATCH, LOG_EVERY = 16, 24, 5, 16, 10


@dataclass(frozen=True)
class Scenario:
    """One case: a run that is simulated.

    Attributes:
        ranks: how many.
        persists: micro-batches of a rank over which its difficulty stays the same.
        difficulty: deviation of the logarithm of the points' noise, redrawn when it no longer persists.
        ragged: micro-batches of 1 to 16 points.
        heavy_tails: some points far away.
        warm_up: steps over which the learning rate rises.
        clip: norm that gradients are clipped to.
        hard: share of micro-batches that are five times as noisy.
        curriculum: noise grows over the run.
        samples: points of a rank's fixed shard; 0 draws new ones for ever.
        epoch: steps of an epoch, the last of which has 1 or 2 points a rank; 0: none.
        domain: micro-batches over which a rank sees two classes alone; 0: none.
        fault: of the last rank.
        amount: size of the fault.
    """

    ranks: int = 4
    persists: int = 1
    difficulty: float = 0.0
    ragged: bool = False
    heavy_tails: bool = False
    warm_up: int = 0
    clip: float = math.inf
    hard: float = 0.0
    curriculum: bool = False
    samples: int = 0
    epoch: int = 0
    domain: int = 0
    fault: str = ""
    amount: float = 0.0


HEALTHY = {
    "plain, 2 ranks": Scenario(2),
    "plain, 4 ranks": Scenario(4),
    "plain, 16 ranks": Scenario(16),
    "ragged, 2 ranks": Scenario(2, ragged=True),
    "ragged, 4 ranks": Scenario(4, ragged=True),
    "heavy tails": Scenario(4, heavy_tails=True, difficulty=0.3),
    "warm-up": Scenario(4, warm_up=500),
    "clipping": Scenario(4, clip=0.3),
    "hard batches": Scenario(4, hard=0.05),
    "curriculum": Scenario(4, curriculum=True),
    "overfitting": Scenario(4, samples=2000),
    "difficulty persists for 3 micro-batches": Scenario(4, persists=3, difficulty=0.3),
    "for 10, mild": Scenario(4, persists=10, difficulty=0.15),
    "for 20, strong": Scenario(4, persists=20, difficulty=0.4),
    "for 20, strong, 2 ranks": Scenario(2, persists=20, difficulty=0.4),
    "for 20, strong, 16 ranks": Scenario(16, persists=20, difficulty=0.4),
    "for 100, strong": Scenario(4, persists=100, difficulty=0.4),
    "fixed shards, memorised": Scenario(4, samples=24),
    "fixed shards, memorised, 2 ranks": Scenario(2, samples=24),
    "1 to 2 of 16 points at the end of an epoch": Scenario(4, epoch=32),
    "domains that persist for 30": Scenario(4, domain=30),
}
PLANTED = {
    "shuffled labels on a rank": Scenario(fault="labels", amount=1.0),
    "10 % label noise on a rank": Scenario(fault="labels", amount=0.1),
    "2 % label noise on a rank": Scenario(fault="labels", amount=0.02),
    "a rank's gradient x2": Scenario(fault="gradient", amount=2.0),
    "a rank's gradient x1.1": Scenario(fault="gradient", amount=1.1),
    "a rank's gradient zero": Scenario(fault="gradient", amount=0.0),
    "a rank's gradient zero, 16 ranks": Scenario(16, fault="gradient", amount=0.0),
    "exact duplicates": Scenario(fault="duplicates"),
    "shuffled labels, 2 ranks": Scenario(2, fault="labels", amount=1.0),
    "a quarter shuffled, 2 ranks": Scenario(2, fault="labels", amount=0.25),
    "inputs x1.5, 2 ranks": Scenario(2, fault="inputs", amount=1.5),
    "gradient x1.5, 2 ranks": Scenario(2, fault="gradient", amount=1.5),
}


def logs(
    scenario: Scenario, runs: int, count: int, seed: int
) -> Iterator[list[tuple[LossReading, RankGradientsReading, list[tuple[float, float]]]]]:
    """Log after log, for each run: readings of a LossMeter, norms of every rank's gradient, of the mean, with items."""
    its, draw = scenario, numpy.random.default_rng(seed)
    lead = (runs, its.ranks)
    centres = draw.normal(size=(runs, 1, CLASSES, POINTS))
    first = draw.normal(size=(runs, 1, POINTS, HIDDEN)) / math.sqrt(POINTS)
    second = draw.normal(size=(runs, 1, HIDDEN, CLASSES)) / math.sqrt(HIDDEN)
    level = its.difficulty * draw.normal(size=lead)
    domain = draw.integers(CLASSES, size=lead)
    if its.samples:
        shard_labels = draw.integers(CLASSES, size=(*lead, its.samples))
        shard = take(centres, shard_labels) + 1.5 * draw.normal(size=(*lead, its.samples, POINTS))
    for log in range(count):
        table = numpy.zeros((*lead, 3, 3))
        norms, averaged = numpy.zeros((*lead, LOG_EVERY)), numpy.zeros((runs, LOG_EVERY))
        counts = numpy.zeros((runs, LOG_EVERY))
        for place in range(LOG_EVERY):
            step = log * LOG_EVERY + place
            redrawn = draw.random(lead) < 1 / its.persists
            level = numpy.where(redrawn, its.difficulty * draw.normal(size=lead), level)
            scale = 1.5 * numpy.exp(level)
            if its.curriculum:
                scale = scale * (0.5 + step / (count * LOG_EVERY))
            if its.hard:
                scale = scale * numpy.where(draw.random(lead) < its.hard, 5.0, 1.0)
            if its.samples:
                chosen = draw.integers(its.samples, size=(*lead, BATCH))
                labels = numpy.take_along_axis(shard_labels, chosen, -1)
                points = numpy.take_along_axis(shard, chosen[..., None], -2)
            else:
                labels = draw.integers(CLASSES, size=(*lead, BATCH))
                noise = (
                    draw.standard_t(3, size=(*lead, BATCH, POINTS))
                    if its.heavy_tails
                    else draw.normal(size=(*lead, BATCH, POINTS))
                )
                points = take(centres, labels) + scale[..., None, None] * noise
            if its.domain:
                moved = draw.random(lead) < 1 / its.domain
                domain = numpy.where(moved, draw.integers(CLASSES, size=lead), domain)
                labels = (domain[..., None] + draw.integers(2, size=(*lead, BATCH))) % CLASSES
                points = take(centres, labels) + 1.5 * draw.normal(size=(*lead, BATCH, POINTS))
            if its.fault == "duplicates":
                labels[:, -1], points[:, -1] = labels[:, 0], points[:, 0]
            if its.fault == "inputs":
                points[:, -1] *= its.amount
            if its.fault == "labels":
                wrong = draw.random((runs, BATCH)) < its.amount
                labels[:, -1] = numpy.where(wrong, draw.integers(CLASSES, size=(runs, BATCH)), labels[:, -1])
            weights = numpy.ones((*lead, BATCH))
            if its.ragged:
                weights = (numpy.arange(BATCH) < draw.integers(1, BATCH + 1, size=lead)[..., None]).astype(float)
            if its.epoch and step % its.epoch == its.epoch - 1:
                weights = (numpy.arange(BATCH) < draw.integers(1, 3, size=(runs, 1, 1))) * numpy.ones((*lead, 1))
            items = weights.sum(-1)
            counts[:, place] = items.sum(1)
            inner = numpy.tanh(points @ first)
            logits = inner @ second
            logits -= logits.max(-1, keepdims=True)
            likely = numpy.exp(logits)
            likely /= likely.sum(-1, keepdims=True)
            wanted = numpy.eye(CLASSES)[labels]
            loss = (-numpy.log((likely * wanted).sum(-1) + 1e-12) * weights).sum(-1) / items
            back = (likely - wanted) * (weights / items[..., None])[..., None]
            of_second = inner.swapaxes(-1, -2) @ back
            of_first = points.swapaxes(-1, -2) @ ((back @ second.swapaxes(-1, -2)) * (1 - inner**2))
            if its.fault == "gradient":
                of_first[:, -1] *= its.amount
                of_second[:, -1] *= its.amount
            norms[..., place] = numpy.sqrt((of_first**2).sum((-1, -2)) + (of_second**2).sum((-1, -2)))
            mean_first, mean_second = of_first.mean(1, keepdims=True), of_second.mean(1, keepdims=True)
            norm = numpy.sqrt((mean_first**2).sum((1, 2, 3)) + (mean_second**2).sum((1, 2, 3)))
            averaged[:, place] = norm
            rate = 0.2 * min(1.0, (step + 1) / its.warm_up if its.warm_up else 1.0)
            rate = (rate * numpy.minimum(1.0, its.clip / norm))[:, None, None, None]
            first, second = first - rate * mean_first, second - rate * mean_second
            row = numpy.stack([loss * items, items, numpy.ones(lead)], -1)
            table += row[..., :, None] * row[..., None, :]
        yield [
            (LossReading(tuple(moments(of_rank) for of_rank in table[run].tolist())),
             RankGradientsReading(tuple(map(tuple, norms[run].tolist()))),
             list(zip(averaged[run].tolist(), counts[run].tolist(), strict=True)))
            for run in range(runs)
        ]  # fmt: skip


def take(centres: ndarray, labels: ndarray) -> ndarray:
    return numpy.take_along_axis(
        numpy.broadcast_to(centres, (*labels.shape[:2], CLASSES, POINTS)), labels[..., None], -2
    )


def moments(table: list[list[float]]) -> Moments:
    return Moments(table[2][2], table[1][2], table[0][2], table[0][0], table[0][1], table[1][1])


@dataclass
class Judged:
    """Logs of a run's alarms, by monitor; of the three that judge the loss over time, together."""

    rank_loss: list[int]
    rank_gradients: list[int]
    gradient_norm: list[int]
    loss_over_time: list[int]


def judged(scenario: Scenario, runs: int, count: int, seed: int) -> list[Judged]:
    """Each run's alarms."""
    found = [Judged([], [], [], []) for _ in range(runs)]
    watching = [
        (RankLoss(), RankGradients(), GradientNorm(scenario.clip), (LossTrend(), LossOscillation(), LossStall()))
        for _ in range(runs)
    ]
    for log, of_runs in enumerate(logs(scenario, runs, count, seed), start=1):
        for its, (loss, gradients, norms, trends), (reading, of_ranks, averaged) in zip(
            found, watching, of_runs, strict=True
        ):
            its.rank_loss += [log] * (loss.judge(reading) is not None)
            its.rank_gradients += [log] * (gradients.judge(of_ranks) is not None)
            for norm, items in averaged:
                norms.update(norm, items)
            alarms = [trend.judge(reading) for trend in trends]
            its.loss_over_time += [log for alarm in alarms if alarm is not None and not alarm.observation]
            its.gradient_norm += [log] * (norms.judge(norms.read()) is not None)
    return found


MONITORS = ("rank_loss", "rank_gradients", "gradient_norm", "loss_over_time")


def rank_false_alarms(runs: int = 8, count: int = 500, seed: int = 8101) -> Iterator[dict[str, Any]]:
    """For each healthy case: alarms of each monitor in 1,000 logs."""
    for name, scenario in HEALTHY.items():
        its = judged(scenario, runs, count, seed)
        found = {name: 1000 / runs / count * sum(len(getattr(each, name)) for each in its) for name in MONITORS}
        yield {"healthy run": name, **found}


def rank_delays(runs: int = 16, count: int = 80, seed: int = 8102) -> Iterator[dict[str, Any]]:
    """Each fault of a rank: runs in which any monitor found it, and the median delay in logs."""
    for name, scenario in PLANTED.items():
        firsts = [min(each.rank_loss + each.rank_gradients, default=0) for each in judged(scenario, runs, count, seed)]
        found = [first for first in firsts if first]
        yield {"planted fault": name, "found": f"{len(found)}/{runs}", "delay": median(found) if found else None}


# ---- memory ---------------------------------------------------------------------------------------------------------

GIB, MIB = 2.0**30, 2.0**20
STEPS, MEMORY_LOG = 6000, 20
Draw = numpy.random.Generator


def level(draw: Draw, steps: int) -> ndarray:
    """4 GiB after ten steps, and a little noise."""
    return 4 * GIB * numpy.minimum(1, (10 + numpy.arange(steps)) / 20) + MIB * draw.normal(size=steps)


def autoregressive(draw: Draw, steps: int) -> ndarray:
    noise = 4 * MIB * draw.normal(size=steps)
    for place in range(1, steps):
        noise[place] += 0.9 * noise[place - 1]
    return noise


def after(start: int, pace: float) -> Callable[[Draw, int], ndarray]:
    return lambda draw, steps: pace * numpy.maximum(numpy.arange(steps) - start, 0)


HEALTHY_MEMORY: dict[str, Callable[[Draw, int], ndarray]] = {
    "plateau": lambda draw, steps: numpy.zeros(steps),
    "evaluation peaks": lambda draw, steps: 500 * MIB * (numpy.arange(steps) % 500 < 20),
    "checkpoint peaks": lambda draw, steps: 2000 * MIB * (numpy.arange(steps) % 1000 < 2),
    "an evaluation that stays": lambda draw, steps: 300 * MIB * (numpy.arange(steps) > 1000),
    "autoregressive": autoregressive,
    "ragged": lambda draw, steps: 400 * MIB * draw.random(steps),
    "a heap that settles": lambda draw, steps: numpy.cumsum(
        (draw.random(steps) < 1 / (5 + numpy.arange(steps))) * draw.exponential(30 * MIB, size=steps)
    ),
    "warm-up over 2,000 steps": lambda draw, steps: 2 * GIB * (1 - numpy.exp(-numpy.arange(steps) / 500)),
    "saw of 1,000 steps": lambda draw, steps: 0.5 * MIB * (numpy.arange(steps) % 1000),
    "saw of 3,000 steps": lambda draw, steps: 0.5 * MIB * (numpy.arange(steps) % 3000),
}
LEAKS: dict[str, tuple[int, Callable[[Draw, int], ndarray]]] = {
    "0.1 % a step from the start": (0, after(0, 4 * MIB)),
    "0.01 % a step from the start": (0, after(0, 0.4 * MIB)),
    "2 MiB a step from step 1,000": (1000, after(1000, 2 * MIB)),
    "2 MiB a step from step 3,000": (3000, after(3000, 2 * MIB)),
    "20 MiB a step from step 3,000": (3000, after(3000, 20 * MIB)),
    "1 MiB a step from step 20,000": (20_000, after(20_000, MIB)),
    "500 MiB every 2,000 steps": (0, lambda draw, steps: 500 * MIB * (numpy.arange(steps) // 2000)),
    "40 MiB a step, 6 GiB free": (0, after(0, 40 * MIB)),
}


def memory_alarms(sizes: ndarray, capacity: float) -> list[int]:
    """Steps at whose logs a MemoryMonitor with these sizes raises an alarm."""
    shown = {"size": 0.0}

    class Shown(MemoryMonitor):
        def _now(self) -> tuple[float, float, float]:
            return (shown["size"],) * 3

    monitor, found = Shown(device=torch.device("cpu"), capacity=capacity), []
    for step, size in enumerate(sizes.tolist(), start=1):
        shown["size"] = size
        monitor.sample()
        if step % MEMORY_LOG == 0 and monitor.judge(monitor.read()) is not None:
            found.append(step)
    return found


def memory_false_alarms(steps: int = 20_000) -> Iterator[dict[str, Any]]:
    """Each healthy curve: alarms in 1,000 logs."""
    for name, curve in HEALTHY_MEMORY.items():
        draw = numpy.random.default_rng(23)
        alarms = memory_alarms(level(draw, steps) + curve(draw, steps), 80 * GIB)
        yield {"healthy memory": name, "alarms": 1000 * MEMORY_LOG / steps * len(alarms)}


def leak_delays(runs: int = 3, length: int = 6000) -> Iterator[dict[str, Any]]:
    """Each leak: runs that found it, median step of the first alarm, memory lost by then, step at which it is full."""
    for name, (start, curve) in LEAKS.items():
        steps = start + length
        firsts, lost, full = [], [], steps
        for seed in range(runs):
            draw = numpy.random.default_rng(seed)
            extra = curve(draw, steps)
            capacity = 4 * GIB + 6 * GIB if "6 GiB" in name else 80 * GIB
            sizes = level(draw, steps) + extra
            full = int(numpy.argmax(sizes > capacity)) or steps
            alarms = [alarm for alarm in memory_alarms(sizes[:full], capacity) if alarm > start]
            firsts += alarms[:1]
            lost += [extra[alarm - 1] / GIB for alarm in alarms[:1]]
        found = {"step": median(firsts) if firsts else None, "GiB lost": median(lost) if lost else None}
        yield {"leak": name, "found": f"{len(firsts)}/{runs}", **found, "full at": full if full < steps else None}


# ---- two curves, compared ------------------------------------------------------------------------------------------

#: Logs; the factor of the second run over its last third, or throughout; correlation of the noise from log to log.
CURVES: dict[str, tuple[int, float, bool, float]] = {
    "the same, 10 logs": (10, 1.0, False, 0.0),
    "the same, 40 logs": (40, 1.0, False, 0.0),
    "the same, 100 logs": (100, 1.0, False, 0.0),
    "the same, noise correlated, 20 logs": (20, 1.0, False, 0.8),
    "the same, noise correlated, 100 logs": (100, 1.0, False, 0.8),
    "x16, 10 logs": (10, 16.0, False, 0.0),
    "x2, 10 logs": (10, 2.0, False, 0.0),
    "x2, 20 logs": (20, 2.0, False, 0.0),
    "x1.1, 100 logs": (100, 1.1, False, 0.0),
    "x5 in the last third, 20 logs": (20, 5.0, True, 0.0),
    "x5 in the last third, 100 logs": (100, 5.0, True, 0.0),
}


def correlated(draw: Draw, correlation: float, count: int) -> ndarray:
    """Noise of two runs, with deviation 1 and this correlation of neighbours."""
    noise = draw.normal(size=(2, count))
    for place in range(1, count):
        noise[:, place] = correlation * noise[:, place - 1] + math.sqrt(1 - correlation**2) * noise[:, place]
    return noise


def curve_differences(pairs: int = 200) -> Iterator[dict[str, Any]]:
    """For each case of pairs: in how many a difference is found, and in how many it is called one throughout."""
    for name, (count, factor, late, correlation) in CURVES.items():
        draw, found = numpy.random.default_rng(24), []
        place = numpy.arange(count)
        for _ in range(pairs):
            losses = (1 + 3 * numpy.exp(-place / (count / 3))) * numpy.exp(0.03 * correlated(draw, correlation, count))
            losses[1] *= numpy.where(place >= count * 2 // 3, factor, 1.0) if late else factor
            runs = [Run(str(run), {"loss": Series(tuple(map(float, place)), tuple(its))}) for run, its in
                    enumerate(losses.tolist())]  # fmt: skip
            found.append(compare(summarise(runs[1]), summarise(runs[0])))
        shares = {
            "told": sum(its.differ for its in found) / pairs,
            "throughout": sum(its.steady for its in found) / pairs,
        }
        yield {"two curves": name, **shares}


# ---- all of it -----------------------------------------------------------------------------------------------------


def audit(folder: Path, *, quick: bool = False) -> Iterator[str]:
    """Every table, line by line, at most 80 columns; all of it goes to audit.json in the folder.

    Args:
        folder: made where it is missing.
        quick: a few logs of each case, which show that it runs and no rate.
    """
    tables: dict[str, Iterator[dict[str, Any]]] = {
        "False alarms in 1,000 logs of 10 steps": rank_false_alarms(*(1, 10) if quick else ()),
        "Faults of a rank: runs that found it, median delay in logs": rank_delays(*(1, 10) if quick else ()),
        "False alarms in 1,000 logs of 20 steps, 80 GiB": memory_false_alarms(*(200,) if quick else ()),
        "Leaks: first alarm (median), memory lost by then": leak_delays(*(1, 200) if quick else ()),
        "Two curves with 3 % noise: share of pairs": curve_differences(*(5,) if quick else ()),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for title, rows in tables.items():
        yield title
        found[title] = []
        for row in rows:
            name, *numbers = row
            if not found[title]:
                yield f"  {name:39}" + "".join(f" {heading(number):>{width(number)}}" for number in numbers)
            found[title].append(row)
            yield f"  {row[name]:39}" + "".join(f" {in_words(row[number]):>{width(number)}}" for number in numbers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(found, indent=1) + "\n")


def heading(name: str) -> str:
    """The monitor's name in ten letters, so that a line has 80."""
    return (
        name.replace("rank_gradients", "gradients")
        .replace("gradient_norm", "norm")
        .replace("_over_time", "")
        .replace("_", " ")
    )


def width(name: str) -> int:
    return max(len(heading(name)), 7)


def in_words(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
