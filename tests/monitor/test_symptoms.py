"""One row a symptom and a number of ranks, as the audit simulates them: which alarm, by which log; or none."""

from __future__ import annotations

import math
import mmap
import re
import sys
from pathlib import Path
from statistics import median

import numpy
import pytest
import torch

from hf_accum_fix.monitor.memory import MIB, MemoryMonitor, RankMemory, Trend

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import (
    GIB,
    HEALTHY_MEMORY,
    HEALTHY_PACE,
    LAGS,
    LEAKS,
    MONITORS,
    PACE_LOG,
    after,
    judged,
    level,
    memory_alarms,
    pace_alarms,
    rank_firsts,
    skewed,
)
from simulated_runs import HEALTHY, PLANTED

#: Neither the seeds of the thresholds nor the audit's.
SEED = 9203
#: Of a fault of the last rank the alarm; the log after it by which half of eight runs have it; runs that have it.
BY = {
    "shuffled labels on a rank": ("rank-(loss|gradient)-3", 31, 8),
    "10 % label noise on a rank": ("rank-(loss|gradient)-3", 40, 8),
    "2 % label noise on a rank": ("rank-(loss|gradient)-3", 60, 6),
    "a rank's gradient x2": ("rank-gradient-3", 31, 8),
    "a rank's gradient x1.1": ("rank-gradient-3", 110, 3),
    "a rank's gradient zero": ("rank-gradient-zero-3", 1, 8),
    "a rank's gradient zero, 16 ranks": ("rank-gradient-zero-15", 1, 8),
    "exact duplicates": ("ranks-see-the-same-data", 2, 8),
    "shuffled from log 60": ("rank-(loss|gradient)-3", 30, 8),
    "a quarter shuffled from log 60": ("rank-(loss|gradient)-3", 32, 8),
    "inputs x1.5 from log 60": ("rank-(loss|gradient)-3", 50, 6),
    "gradient x1.5 from log 60": ("rank-gradient-3", 31, 7),
    "gradient zero from log 60": ("rank-gradient-zero-3", 2, 8),
    "loss nan from log 60": ("rank-loss-not-finite-3", 1, 8),
    "duplicates from log 60": ("ranks-see-the-same-data", 3, 8),
} | {
    f"{name}, 2 ranks{f', from log {since}' if since else ''}": ("rank-(loss|gradient)-[01]", by, runs)
    for since in (0, 5, 20)
    for name, by, runs in (
        *(("shuffled labels", 32, 8), ("a quarter shuffled", 32, 8)),
        *(("inputs x1.5", 110, 4), ("gradient x1.5", 45, 7)),
    )
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_rank_that_is_off_is_named(fault: str) -> None:
    kind, by, runs = BY[fault]
    found = rank_firsts(PLANTED[fault], 8, 110 if runs < 8 else by + 10, SEED)
    assert median([log for log, _ in found]) <= by, found
    assert sum(re.fullmatch(kind, its) is not None for _, its in found) >= runs, found


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_at_most_one_false_alarm_in_a_thousand_logs(name: str) -> None:
    runs = judged(HEALTHY[name], 4, 500, SEED + 1)
    for monitor in MONITORS:
        # One in 1,000 is two in these 2,000; a Poisson count of mean two is above five in 2 of 100.
        assert sum(len(run[monitor]) for run in runs) <= 5, monitor


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("name", [*LAGS, *HEALTHY_PACE])
def test_a_rank_that_lags_is_named_and_lengths_that_persist_are_no_lag(name: str, ranks: int) -> None:
    draw, steps = numpy.random.default_rng(SEED), numpy.arange(40 * PACE_LOG)
    if name in LAGS:
        for _ in range(4):
            assert pace_alarms(skewed(draw, len(steps), ranks), LAGS[name](steps))[0] == (30, f"rank-lags-{ranks - 1}")
    else:
        assert sum(len(pace_alarms(HEALTHY_PACE[name](draw, 500 * PACE_LOG, ranks))) for _ in range(2)) <= 1


# --- memory ---------------------------------------------------------------------------------------------------------

#: Steps after a leak begins by which it is told, of those that are not 500 at most.
TOLD_BY = {
    "0.01 % a step from the start": 1500, "2 MiB a step from step 1,000": 600, "500 MiB every 2,000 steps": 6500,
    "40 MiB a step, 6 GiB free": 120, "400 MiB a step from step 6,000": 120,
}  # fmt: skip
MAY_ALARM = ("saw", "stages", "walk", "linear", "stairs")


@pytest.mark.parametrize("name", HEALTHY_MEMORY)
def test_memory_that_grows_and_rests_is_no_leak(name: str) -> None:
    draw = numpy.random.default_rng(SEED + 2)
    found = memory_alarms(level(draw, 6000) + HEALTHY_MEMORY[name](draw, 6000), 80 * GIB)
    assert len(found) <= any(word in name for word in MAY_ALARM)


@pytest.mark.parametrize("name", [name for name, (start, _) in LEAKS.items() if start <= 20_000])
def test_a_leak_is_told_at_any_age_and_before_memory_is_full(name: str) -> None:
    (start, curve), by = LEAKS[name], TOLD_BY.get(name, 500)
    draw, capacity = numpy.random.default_rng(SEED + 2), (10 if "6 GiB" in name else 80) * GIB
    assert memory_alarms(level(draw, start + by) + curve(draw, start + by), capacity, start)


def test_an_alarm_is_told_again_when_half_of_the_room_is_gone() -> None:
    assert 2 <= len(memory_alarms(4 * GIB + after(0, 4 * MIB)(numpy.random.default_rng(0), 2200), 13 * GIB)) <= 6


def held(size: int) -> mmap.mmap:
    """Memory of this process, touched, that no allocator had."""
    memory = mmap.mmap(-1, size)
    memory.write(b"x" * size)
    return memory


@pytest.mark.parametrize("leak", [0, 400 * 1024], ids=["healthy", "leak"])
def test_the_resident_set_of_this_process_without_mapped_files(leak: int, tmp_path: Path) -> None:
    monitor = MemoryMonitor(device=torch.device("cpu"))
    kept = [held(8 * 1024 * 1024)]
    with (tmp_path / "data").open("wb") as file:
        file.truncate(300 * 400 * 1024)
    with (tmp_path / "data").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for step in range(300):
            kept += [held(leak)] if leak else []
            assert sum(mapped[step * 400 * 1024 : (step + 1) * 400 * 1024 : 4096]) == 0
            monitor.sample()
    reading = monitor.read()
    its, alarm = reading[0], monitor.judge(reading)
    assert its.used > 8 * MIB and its.capacity > its.used
    assert (its.trend.kind == "grows") == (alarm is not None) == bool(leak)
    assert not leak or its.trend.slope == pytest.approx(leak, rel=0.1)
    for memory in kept:
        memory.close()


def test_the_rank_that_is_full_first_is_named() -> None:
    fast, slow = (Trend("grows", 300, 10, MIB, pace) for pace in (MIB, 0.1 * MIB))
    flat = Trend("plateau", 300, 10, MIB, 0.0)
    ranks = tuple(RankMemory(2 * MIB, 100 * MIB, its) for its in (flat, slow, fast, slow))
    alarm = MemoryMonitor(device=torch.device("cpu")).judge(ranks)
    assert alarm is not None and alarm.kind == "memory-grows-2" and "98 steps until" in alarm.message
    assert math.isinf(ranks[0].steps_until_full)


def test_on_cuda_the_memory_of_tensors_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 + device.index)
    monitor = MemoryMonitor(device=torch.device("cuda", 0), capacity=100)
    monitor.sample()
    assert (monitor.read()[0].used, monitor.read()[0].capacity) == (5, 100)
