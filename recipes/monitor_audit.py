"""Simulated runs for `convergence_monitor.py --audit`: how often the monitors cry wolf, and how late they find a fault.

Every monitor gets the numbers that it would have measured in the trainings of `simulated_runs.py`, and in curves of
memory and time. `hf_accum_fix.monitor.thresholds` says on which seeds its numbers were chosen: not on these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import shared
import torch
from numpy import ndarray
from simulated_runs import HEALTHY, PLANTED, Scenario, logs

from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss_over_time import LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.memory import MemoryMonitor
from hf_accum_fix.monitor.pace import Pace, PaceReading
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.rank_loss import RankLoss

MONITORS = ("rank_loss", "rank_gradients", "gradient_norm", "loss_over_time")
#: Logs and kinds of a run's alarms, by monitor; of the three that judge the loss over time, together.
Judged = dict[str, list[tuple[int, str]]]


def judged(scenario: Scenario, runs: int, count: int, seed: int) -> list[Judged]:
    """Each run's alarms."""
    found: list[Judged] = [{name: [] for name in MONITORS} for _ in range(runs)]
    watching = [
        (RankLoss(), RankGradients(), GradientNorm(scenario.clip), (LossTrend(), LossOscillation(), LossStall()))
        for _ in range(runs)
    ]
    for log, of_runs in enumerate(logs(scenario, runs, count, seed), start=1):
        for its, (loss, gradients, norms, trends), read in zip(found, watching, of_runs, strict=True):
            for norm, items in read.norms:
                norms.update(norm, items)
            alarms = [("rank_loss", loss.judge(read.loss)), ("rank_gradients", gradients.judge(read.gradients))]
            alarms.append(("gradient_norm", norms.judge(norms.read())))
            alarms += [("loss_over_time", trend.add(read.loss.mean, read.rate, read.epoch)) for trend in trends]
            for name, alarm in alarms:
                its[name] += [(log, alarm.kind)] if alarm is not None and not alarm.observation else []
    return found


def rank_false_alarms(runs: int = 8, count: int = 500, seed: int = 9101) -> Iterator[dict[str, Any]]:
    """For each healthy case: alarms of each monitor in 1,000 logs."""
    for name, scenario in HEALTHY.items():
        its = judged(scenario, runs, count, seed)
        found = {name: 1000 / runs / count * sum(len(each[name]) for each in its) for name in MONITORS}
        yield {"healthy run": name, **found}


def rank_firsts(scenario: Scenario, runs: int, count: int, seed: int) -> list[tuple[int, str]]:
    """Logs from the fault to its first alarm, and its kind, of the runs that found it."""
    since = scenario.since
    firsts = [min((each for each in its["rank_loss"] + its["rank_gradients"] if each[0] > since), default=None)
              for its in judged(scenario, runs, since + count, seed)]  # fmt: skip
    return [(log - since, kind) for log, kind in filter(None, firsts)]


def rank_delays(runs: int = 16, count: int = 110, seed: int = 9102) -> Iterator[dict[str, Any]]:
    """Each fault of a rank: runs in which any monitor found it, the median and the last delay in logs."""
    for name, scenario in PLANTED.items():
        found = [delay for delay, _ in rank_firsts(scenario, runs, count, seed)]
        last = {"median": median(found), "last": max(found)} if found else {"median": None, "last": None}
        yield {"planted fault": name, "found": f"{len(found)}/{runs}", **last}


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
    "saw of 5,000 steps": lambda draw, steps: 0.5 * MIB * (numpy.arange(steps) % 5000),
    "linear warm-up of 300 steps": lambda draw, steps: 4 * MIB * numpy.minimum(numpy.arange(steps), 300),
    "stairs that end": lambda draw, steps: 100 * MIB * numpy.minimum(numpy.arange(steps) // 500, 4),
    "20 stages of other sizes": lambda draw, steps: numpy.repeat(400 * MIB * draw.random(20), -(-steps // 20))[:steps],
    "a walk": lambda draw, steps: MIB * numpy.cumsum(draw.normal(size=steps)),
}
LEAKS: dict[str, tuple[int, Callable[[Draw, int], ndarray]]] = {
    "0.1 % a step from the start": (0, after(0, 4 * MIB)),
    "0.01 % a step from the start": (0, after(0, 0.4 * MIB)),
    "2 MiB a step from step 1,000": (1000, after(1000, 2 * MIB)),
    "2 MiB a step from step 3,000": (3000, after(3000, 2 * MIB)),
    "20 MiB a step from step 3,000": (3000, after(3000, 20 * MIB)),
    **{
        f"1 MiB a step from step {start:,}": (start, after(start, MIB))
        for start in (1000, 5000, 20_000, 50_000, 100_000, 200_000)
    },
    "20 MiB a step from step 100,000": (100_000, after(100_000, 20 * MIB)),
    "400 MiB a step from step 6,000": (6000, after(6000, 400 * MIB)),
    "500 MiB every 2,000 steps": (0, lambda draw, steps: 500 * MIB * (numpy.arange(steps) // 2000)),
    "40 MiB a step, 6 GiB free": (0, after(0, 40 * MIB)),
}


def memory_alarms(sizes: ndarray, capacity: float, since: int = 0) -> list[int]:
    """Steps, from one on, at whose logs a MemoryMonitor with these sizes raises an alarm."""
    shown = {"size": 0.0}

    class Shown(MemoryMonitor):
        def _now(self) -> float:
            return shown["size"]

    monitor, found = Shown(device=torch.device("cpu"), capacity=capacity), []
    for step, size in enumerate(sizes.tolist(), start=1):
        shown["size"] = size
        monitor.sample()
        if step % MEMORY_LOG == 0 and step > since and monitor.judge(monitor.read()) is not None:
            found.append(step)
    return found


def memory_false_alarms(steps: int = 20_000, seed: int = 23) -> Iterator[dict[str, Any]]:
    """Each healthy curve: alarms in 1,000 logs."""
    for name, curve in HEALTHY_MEMORY.items():
        draw = numpy.random.default_rng(seed)
        alarms = memory_alarms(level(draw, steps) + curve(draw, steps), 80 * GIB)
        yield {"healthy memory": name, "alarms": 1000 * MEMORY_LOG / steps * len(alarms)}


def leak_delays(runs: int = 3, length: int = 6000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Each leak: runs that found it, median step of the first alarm, memory lost by then, step at which it is full."""
    for name, (start, curve) in LEAKS.items():
        steps = start + length
        firsts, lost, full = [], [], steps
        for run in range(runs):
            draw = numpy.random.default_rng(seed + run)
            extra = curve(draw, steps)
            capacity = 4 * GIB + 6 * GIB if "6 GiB" in name else 80 * GIB
            sizes = level(draw, steps) + extra
            full = int(numpy.argmax(sizes > capacity)) or steps
            alarms = memory_alarms(sizes[:full], capacity, start)
            firsts += alarms[:1]
            lost += [extra[alarm - 1] / GIB for alarm in alarms[:1]]
        found = {"step": median(firsts) if firsts else None, "GiB lost": median(lost) if lost else None}
        yield {"leak": name, "found": f"{len(firsts)}/{runs}", **found, "full at": full if full < steps else None}


# ---- time ------------------------------------------------------------------------------------------------------------

USUAL, PACE_LOG = 0.1, 10
#: Seconds that each rank takes before the reduction: [steps, ranks].
Times = Callable[[Draw, int, int], ndarray]


def persisting(steps_alike: int, heavy: bool) -> Times:
    """The length of a rank's batches persists for so many steps in the mean; of 1 to 16 samples, or heavy-tailed."""

    def times(draw: Draw, steps: int, ranks: int) -> ndarray:
        drawn = numpy.exp(0.3 * draw.standard_t(3, size=(steps, ranks)))
        drawn = drawn if heavy else draw.integers(1, 17, size=(steps, ranks)) / 8
        new = draw.random((steps, ranks)) < 1 / steps_alike
        new[0] = True
        last = numpy.maximum.accumulate(numpy.where(new, numpy.arange(steps)[:, None], 0), axis=0)
        return USUAL * numpy.take_along_axis(drawn, last, 0) * draw.lognormal(0, 0.05, size=(steps, ranks))

    return times


def skewed(draw: Draw, steps: int, ranks: int) -> ndarray:
    return USUAL * draw.lognormal(0, 0.3, size=(steps, ranks))


HEALTHY_PACE: dict[str, Times] = {
    "skewed": skewed,
    "ragged": lambda draw, *size: USUAL * draw.integers(1, 17, size=size) / 8,
    "heavy-tailed": lambda draw, *size: USUAL * numpy.exp(0.3 * draw.standard_t(2, size=size).clip(-8, 8)),
    "12 ms of work of rank 0": lambda draw, *size: skewed(draw, *size) + 0.012 * (numpy.arange(size[1]) == 0),
    "ragged, persists for 5 steps": persisting(5, False),
    "ragged, persists for 20 steps": persisting(20, False),
    "heavy-tailed, persists for 20 steps": persisting(20, True),
}
#: Seconds by which the last rank is later, by step.
LAGS: dict[str, Callable[[ndarray], ndarray]] = {
    "half a step": lambda step: numpy.full(len(step), USUAL),
    "3 steps in two of three logs": lambda step: 3 * USUAL * (step // PACE_LOG % 3 < 2),
    "5 steps at every third step": lambda step: 5 * USUAL * (step % 3 == 0),
    "3 steps in every second log": lambda step: 3 * USUAL * (step // PACE_LOG % 2 == 0),
}


def pace_alarms(times: ndarray, lag: ndarray | None = None) -> list[tuple[int, str]]:
    """Logs and kinds of the alarms of `Pace`, where rank 0 saves for 5 s before each log."""
    times = times.copy()
    if lag is not None:
        times[:, -1] += lag
    times[PACE_LOG - 1 :: PACE_LOG, 0] += 5.0
    pace, found = Pace(torch.nn.Identity()), []
    for log, own in enumerate(times.reshape(-1, PACE_LOG, times.shape[1]), start=1):
        kept = numpy.sort(own, axis=0)[: PACE_LOG * 8 // 10].mean(0)
        # A step ends with the last backward, after the wait for the slowest.
        reading = PaceReading(tuple(kept.tolist()), float(numpy.median(own.max(1))) + USUAL, PACE_LOG)
        alarm = pace.judge(reading)
        found += [] if alarm is None else [(log, alarm.kind)]
    return found


def pace_false_alarms(runs: int = 8, logs: int = 500, seed: int = 9103) -> Iterator[dict[str, Any]]:
    """Each healthy case: alarms in 1,000 logs, by number of ranks."""
    for name, times in HEALTHY_PACE.items():
        draw = numpy.random.default_rng(seed)
        counts = {f"{ranks} ranks": sum(len(pace_alarms(times(draw, logs * PACE_LOG, ranks))) for _ in range(runs))
                  for ranks in (2, 4, 16)}  # fmt: skip
        yield {"healthy pace": name, **{ranks: 1000 / runs / logs * count for ranks, count in counts.items()}}


def lag_delays(runs: int = 8, logs: int = 80, seed: int = 9104) -> Iterator[dict[str, Any]]:
    """Each lag: the last log at which any of the runs named the rank, by number of ranks; None where one did not."""
    steps = numpy.arange(logs * PACE_LOG)
    for name, lag in LAGS.items():
        last: dict[str, int | None] = {}
        for ranks in (2, 4, 16):
            draw = numpy.random.default_rng(seed)
            runs_ = [pace_alarms(skewed(draw, len(steps), ranks), lag(steps)) for _ in range(runs)]
            firsts = [[log for log, kind in found if kind == f"rank-lags-{ranks - 1}"] for found in runs_]
            last[f"{ranks} ranks"] = max(each[0] for each in firsts) if all(firsts) else None
        yield {"lag of the last rank": name, **last}


# ---- all of it -----------------------------------------------------------------------------------------------------


def audit(folder: Path, *, quick: bool = False) -> Iterator[str]:
    """Every table; all of it goes to audit.json in the folder. A quick one shows that it runs, and no rate."""
    tables: dict[str, Iterator[dict[str, Any]]] = {
        "False alarms in 1,000 logs of 10 steps": rank_false_alarms(*(1, 10) if quick else ()),
        "Faults of a rank: runs that found it, median and last delay in logs": rank_delays(*(1, 32) if quick else ()),
        "False alarms of Pace in 1,000 logs": pace_false_alarms(*(1, 20) if quick else ()),
        "Lags: log by which the last of 8 runs names the rank": lag_delays(*(1, 20) if quick else ()),
        "False alarms in 1,000 logs of 20 steps, 80 GiB": memory_false_alarms(*(200,) if quick else ()),
        "Leaks: first alarm (median), memory lost by then": leak_delays(*(1, 200) if quick else ()),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for title, rows in tables.items():
        yield title
        found[title] = list(rows)
        head = [name.replace("_", " ") for name in found[title][0]]
        yield shared.markdown(head, [list(map(in_words, row.values())) for row in found[title]])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(found, indent=1) + "\n")


def in_words(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
