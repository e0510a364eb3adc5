"""Warm-up, plateau, leak: in simulated memory with its noises, and in the memory of this process."""

from __future__ import annotations

import math
import mmap

import numpy
import pytest
import torch

from hf_accum_fix.monitor.memory import MIB, MemoryMonitor, RankMemory, Trend, TrendKind, trend

KIB = 1024.0


def warmed_up(steps: int) -> numpy.ndarray:
    """2 GiB, reached over the first ten steps."""
    return 2048 * MIB * (0.5 + 0.5 * numpy.minimum(1, numpy.arange(steps) / 10))


def peaks(draw: numpy.random.Generator, steps: int) -> numpy.ndarray:
    return MIB * (draw.normal(size=steps) + (draw.random(steps) < 0.05) * draw.exponential(200, size=steps))


def hanging_together(draw: numpy.random.Generator, steps: int) -> numpy.ndarray:
    noise = 2 * MIB * draw.normal(size=steps)
    for place in range(1, steps):
        noise[place] += 0.9 * noise[place - 1]
    return noise


def fragmenting(draw: numpy.random.Generator, steps: int) -> numpy.ndarray:
    """Steps up that grow rare, as a heap that settles."""
    return numpy.cumsum((draw.random(steps) < 1 / (5 + numpy.arange(steps))) * draw.exponential(10 * MIB, size=steps))


def collected(draw: numpy.random.Generator, steps: int) -> numpy.ndarray:
    """A garbage collector's saw."""
    return 0.3 * MIB * (numpy.arange(steps) % 211)


NOISES = {
    "none": lambda draw, steps: numpy.zeros(steps),
    "peaks": peaks,
    "hanging together": hanging_together,
    "fragmenting": fragmenting,
    "collected": collected,
    "ragged batches": lambda draw, steps: 50 * MIB * draw.integers(0, 2, size=steps),
    "an evaluation": lambda draw, steps: 100 * MIB * (numpy.arange(steps) > steps // 3),
}


def monitored(
    sizes: numpy.ndarray, every: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[MemoryMonitor, list[tuple[RankMemory, ...]], list[str]]:
    """A monitor that was shown these sizes step by step, its readings and its alarms."""
    monitor = MemoryMonitor(device=torch.device("cpu"), capacity=80 * 2.0**30)
    now = {"place": 0}
    monkeypatch.setattr(monitor, "_now", lambda: (float(sizes[now["place"]]),) * 3)
    readings, alarms = [], []
    for place in range(len(sizes)):
        now["place"] = place
        monitor.sample()
        if (place + 1) % every == 0:
            readings.append(monitor.read())
            alarm = monitor.judge(readings[-1])
            alarms += [] if alarm is None else [alarm.message]
    return monitor, readings, alarms


@pytest.mark.parametrize("noise", NOISES)
def test_a_long_healthy_run_alarms_at_most_once_in_a_thousand_logs(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = numpy.random.default_rng(len(noise))
    sizes = warmed_up(10_000) + NOISES[noise](draw, 10_000)
    _, readings, alarms = monitored(sizes, 50, monkeypatch)
    assert len(alarms) == 0, alarms[:1]
    kinds = [reading[0].trend.kind for reading in readings]
    assert TrendKind.PLATEAU in kinds
    assert kinds.count(TrendKind.GROWS) <= 0.05 * len(kinds)


@pytest.mark.parametrize("noise", ["none", "peaks", "hanging together", "fragmenting"])
@pytest.mark.parametrize("leak", [200 * KIB, 600 * KIB])
def test_a_leak_of_a_few_hundred_kib_a_step_is_found(leak: float, noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = numpy.random.default_rng(3)
    sizes = warmed_up(600) + NOISES[noise](draw, 600) + leak * numpy.arange(600)
    _, readings, alarms = monitored(sizes, 10, monkeypatch)
    its = readings[-1][0]
    assert its.trend.kind is TrendKind.GROWS
    assert its.trend.low <= leak * 1.02 and its.trend.high >= leak * 0.98
    assert its.trend.slope == pytest.approx(leak, rel=0.25)
    assert its.steps_until_full == pytest.approx((its.capacity - its.used) / its.trend.slope)
    assert alarms and alarms[0].startswith("rank 0: memory grows")
    assert "MiB/step" in alarms[0] and "steps until 80.00 GiB are full" in alarms[0]


def test_the_warm_up_is_set_aside_and_the_plateau_said() -> None:
    steps = list(map(float, range(1, 301)))
    sizes = (warmed_up(300) + MIB * 0.1 * numpy.random.default_rng(0).normal(size=300)).tolist()
    its = trend(steps, sizes)
    assert its.kind is TrendKind.PLATEAU and 9 <= its.since <= 12
    assert its.level == pytest.approx(2048 * MIB, rel=1e-3)
    assert "plateau at 2.00 GiB since step" in str(RankMemory(sizes[-1], 0, 0, 0, its))


def test_too_few_steps_are_said_to_be() -> None:
    its = trend([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert its.kind is TrendKind.TOO_FEW_STEPS
    assert "too few steps: plateau or leak is undecided before step 30" in str(RankMemory(3 * MIB, 0, 0, 0, its))


def test_samples_are_thinned_and_the_decision_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = warmed_up(10_000) + 300 * KIB * numpy.arange(10_000)
    monitor, readings, _ = monitored(sizes, 5_000, monkeypatch)
    assert len(monitor._sizes) + len(monitor._before) <= 2048
    assert readings[-1][0].trend.slope == pytest.approx(300 * KIB)


def held(size: int) -> mmap.mmap:
    """Memory of this process, touched, that no allocator had."""
    memory = mmap.mmap(-1, size)
    memory.write(b"x" * size)
    return memory


@pytest.mark.parametrize("leak", [0, 400 * 1024], ids=["healthy", "leak"])
def test_the_resident_set_of_this_process(leak: int) -> None:
    monitor = MemoryMonitor(device=torch.device("cpu"))
    warm_up = [held(8 * 1024 * 1024)]
    kept = []
    for _ in range(300):
        if leak:
            kept.append(held(leak))
        monitor.sample()
    reading = monitor.read()
    its = reading[0]
    assert its.used > 8 * MIB and its.peak >= its.used and its.capacity > its.used
    alarm = monitor.judge(reading)
    if leak:
        assert its.trend.kind is TrendKind.GROWS and its.trend.slope == pytest.approx(leak, rel=0.1)
        assert alarm is not None
    else:
        assert its.trend.kind is not TrendKind.GROWS and alarm is None
    for memory in (*kept, *warm_up):
        memory.close()


def test_the_rank_that_is_full_first_is_named() -> None:
    grows = Trend(TrendKind.GROWS, 300, 10, MIB, MIB, 0.9 * MIB, 1.1 * MIB)
    slow = Trend(TrendKind.GROWS, 300, 10, MIB, 0.1 * MIB, 0.05 * MIB, 0.2 * MIB)
    flat = Trend(TrendKind.PLATEAU, 300, 10, MIB, 0.0, 0.0, 0.0)
    ranks = tuple(RankMemory(2 * MIB, 0, 0, 100 * MIB, its) for its in (flat, slow, grows, slow))
    alarm = MemoryMonitor(device=torch.device("cpu")).judge(ranks)
    assert alarm is not None and alarm.kind == "memory-grows-2" and "98 steps until" in alarm.message
    assert math.isinf(ranks[0].steps_until_full)


def test_cuda_memory_is_read_from_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        asked.append(device)
        return {"allocated_bytes": {"all": {"current": 5, "peak": 9}}, "reserved_bytes": {"all": {"current": 7}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monitor = MemoryMonitor(device=torch.device("cuda", 0), capacity=100)
    monitor.sample()
    its = monitor.read()[0]
    assert (its.used, its.reserved, its.peak, its.capacity) == (5, 7, 9, 100)
    assert asked == [torch.device("cuda", 0)] * 2
