"""Warm-up, plateau, leak: in the audit's curves of memory, and in the memory of this process."""

from __future__ import annotations

import math
import mmap
import sys
from pathlib import Path

import numpy
import pytest
import torch

from hf_accum_fix.monitor.memory import MIB, MemoryMonitor, RankMemory, Trend, TrendKind

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from monitor_audit import GIB, HEALTHY_MEMORY, LEAKS, after, level, memory_alarms

#: Neither the seeds of the thresholds nor the audit's.
SEED = 9205
#: Steps after a leak begins by which it is told, of those that are not 500 at most.
BY = {"0.01 % a step from the start": 1500, "2 MiB a step from step 1,000": 600, "500 MiB every 2,000 steps": 6500}
BY |= {"40 MiB a step, 6 GiB free": 120, "400 MiB a step from step 6,000": 120}
MAY_ALARM = ("saw", "stages", "walk", "linear", "stairs")


@pytest.mark.parametrize("name", HEALTHY_MEMORY)
def test_memory_that_grows_and_rests_is_no_leak(name: str) -> None:
    draw = numpy.random.default_rng(SEED)
    found = memory_alarms(level(draw, 6000) + HEALTHY_MEMORY[name](draw, 6000), 80 * GIB)
    assert len(found) <= any(word in name for word in MAY_ALARM)


@pytest.mark.parametrize("name", [name for name, (start, _) in LEAKS.items() if start <= 20_000])
def test_a_leak_is_told_at_any_age_and_before_memory_is_full(name: str) -> None:
    (start, curve), by = LEAKS[name], BY.get(name, 500)
    draw, capacity = numpy.random.default_rng(SEED), (10 if "6 GiB" in name else 80) * GIB
    found = memory_alarms(level(draw, start + by) + curve(draw, start + by), capacity, start)
    assert found, name


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
    assert (its.trend.kind is TrendKind.GROWS) == (alarm is not None) == bool(leak)
    assert not leak or its.trend.slope == pytest.approx(leak, rel=0.1)
    for memory in kept:
        memory.close()


def test_the_rank_that_is_full_first_is_named() -> None:
    grows = Trend(TrendKind.GROWS, 300, 10, MIB, MIB)
    slow = Trend(TrendKind.GROWS, 300, 10, MIB, 0.1 * MIB)
    flat = Trend(TrendKind.PLATEAU, 300, 10, MIB, 0.0)
    ranks = tuple(RankMemory(2 * MIB, 100 * MIB, its) for its in (flat, slow, grows, slow))
    alarm = MemoryMonitor(device=torch.device("cpu")).judge(ranks)
    assert alarm is not None and alarm.kind == "memory-grows-2" and "98 steps until" in alarm.message
    assert math.isinf(ranks[0].steps_until_full)


def test_on_cuda_the_memory_of_tensors_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 + device.index)
    monitor = MemoryMonitor(device=torch.device("cuda", 0), capacity=100)
    monitor.sample()
    its = monitor.read()[0]
    assert (its.used, its.capacity) == (5, 100)
