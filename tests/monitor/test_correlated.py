"""What the audit found: ranks that wander by design, leaks that start late, steps up, memory that is full soon."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from hf_accum_fix.monitor.memory import MIB, MemoryMonitor, trend

GIB = 2.0**30


def told(sizes: numpy.ndarray, capacity: float = 80 * GIB, since: int = 0) -> list[int]:
    shown = {"size": 0.0}

    class Shown(MemoryMonitor):
        def _now(self) -> tuple[float, float, float]:
            return (shown["size"],) * 3

    monitor, found = Shown(device=torch.device("cpu"), capacity=capacity), []
    for step, size in enumerate(sizes.tolist(), start=1):
        shown["size"] = size
        monitor.sample()
        if step % 50 == 0 and step >= since and monitor.judge(monitor.read()) is not None:
            found.append(step)
    return found


def noisy(steps: int) -> numpy.ndarray:
    return 4 * GIB + MIB * numpy.random.default_rng(0).normal(size=steps)


@pytest.mark.parametrize(
    ("curve", "at_most"),
    [
        (lambda step: 2 * GIB * (1 - numpy.exp(-step / 500)), 0),
        (lambda step: 0.5 * MIB * (step % 1000), 1),
        (lambda step: 300 * MIB * (step > 1000), 0),
        (lambda step: 2000 * MIB * (step % 1000 < 2), 0),
    ],
    ids=["slow warm-up", "saw", "an evaluation that stays", "checkpoints"],
)
def test_memory_that_grows_and_rests_is_no_leak(curve: Callable[[numpy.ndarray], numpy.ndarray], at_most: int) -> None:
    steps = numpy.arange(4000)
    assert len(told(noisy(4000) + curve(steps))) <= at_most


@pytest.mark.parametrize(
    ("start", "curve", "by"),
    [
        (3000, lambda step: 2 * MIB * numpy.maximum(step - 3000, 0), 3600),
        (3000, lambda step: 20 * MIB * numpy.maximum(step - 3000, 0), 3600),
        (0, lambda step: 500 * MIB * (step // 1000), 4000),
    ],
    ids=["2 MiB a step, late", "20 MiB a step, late", "steps up"],
)
def test_a_leak_that_starts_late_or_comes_in_steps_is_found(
    start: int, curve: Callable[[numpy.ndarray], numpy.ndarray], by: int
) -> None:
    found = told(noisy(4000) + curve(numpy.arange(4000)))
    assert found and start < found[0] <= by


def test_a_leak_is_told_before_memory_is_full() -> None:
    sizes = noisy(154) + 40 * MIB * numpy.arange(154)
    assert told(sizes, capacity=10 * GIB)[0] <= 100


def test_an_alarm_is_told_again_when_half_of_the_room_is_gone() -> None:
    sizes = 4 * GIB + 4 * MIB * numpy.arange(2200.0)
    found = told(sizes, capacity=13 * GIB)
    assert 2 <= len(found) <= 6


def test_pages_of_a_file_that_is_read_through_are_not_the_process_s_own(tmp_path: Path) -> None:
    size = 64 * 2**20
    with (tmp_path / "data").open("wb") as file:
        file.truncate(size)
    monitor = MemoryMonitor(device=torch.device("cpu"))
    before = monitor.read()[0].used
    with (tmp_path / "data").open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[place] for place in range(0, size, 4096)) == 0
        assert monitor.read()[0].used < before + 16 * MIB


@pytest.mark.parametrize("start", [1_000, 20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_leak_of_1_mib_a_step_is_told_within_400_steps_at_any_age(start: int) -> None:
    steps = start + 450
    sizes = 4 * GIB + MIB * numpy.random.default_rng(start).normal(size=steps)
    sizes += MIB * numpy.maximum(numpy.arange(steps) - start, 0)
    found = told(sizes, since=start - 500)
    assert found and start < found[0] <= start + 400


def test_memory_that_is_full_soon_is_told_before_it_is() -> None:
    steps = numpy.arange(6150)
    sizes = 20 * GIB + MIB * numpy.random.default_rng(1).normal(size=6150) + 400 * MIB * numpy.maximum(steps - 6000, 0)
    assert 6000 < told(sizes, since=5500)[0] <= 6100


@pytest.mark.parametrize(
    ("kept", "words"),
    [(0.0, "warm-up ended, later steps will not grow: plateau at 8.00 GiB since step 11"), (2.0, "is undecided")],
    ids=["steady", "noisy"],
)
def test_thirty_steps_have_a_first_verdict(kept: float, words: str) -> None:
    sizes = numpy.where(numpy.arange(30) < 10, 3.0, 8.0) * GIB + kept * MIB * numpy.random.default_rng(2).normal(
        size=30
    )
    steps = [float(step) for step in range(1, 31)]
    assert words in str(trend(steps, sizes.tolist()))


def test_a_noisy_plateau_is_one_after_thousands_of_steps() -> None:
    sizes = 4 * GIB + 400 * MIB * numpy.random.default_rng(3).random(12_000)
    monitor = MemoryMonitor(device=torch.device("cpu"), capacity=80 * GIB)
    now = iter(sizes.tolist())
    monitor._now = lambda: (next(now, float(sizes[-1])),) * 3  # type: ignore[method-assign]
    for _ in sizes:
        monitor.sample()
    assert "plateau at" in str(monitor.read()[0])
