"""The statistics against scipy and against simulation."""

from __future__ import annotations

import math
from statistics import fmean

import numpy
import pytest
from scipy import stats

from hf_accum_fix.monitor import robust


@pytest.mark.parametrize("rounded", [9, 1, 0], ids=["no ties", "some ties", "many ties"])
def test_theil_sen_and_the_median_absolute_deviation_are_scipys(rounded: int) -> None:
    x = numpy.arange(40.0)
    y = numpy.round(0.05 * x + numpy.random.default_rng(0).normal(size=40), rounded)
    expected, found = stats.theilslopes(y, x, alpha=0.95), robust.theil_sen(x.tolist(), y.tolist(), 0.95)
    wanted = (expected.slope, expected.low_slope, expected.high_slope)
    assert (found.value, found.low, found.high) == pytest.approx(wanted)
    deviation = stats.median_abs_deviation(y, scale="normal")
    assert robust.median_and_sigma(y.tolist()) == pytest.approx((numpy.median(y), deviation))


def test_noise_is_told_from_trend() -> None:
    trend = 2 * numpy.exp(-numpy.arange(2000) / 300)
    noise = 0.05 * numpy.random.default_rng(3).normal(size=2000)
    assert robust.noise_sigma((trend + noise).tolist()) == pytest.approx(0.05, rel=0.1)
    assert robust.noise_sigma(trend.tolist()) < 1e-4
    assert math.isnan(robust.noise_sigma([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_error_of_a_mean_under_autocorrelation(correlation: float) -> None:
    series = numpy.random.default_rng(4).normal(size=20_000)
    for place in range(1, len(series)):
        series[place] += correlation * series[place - 1]
    spread = series.reshape(-1, 100).mean(axis=1).std()
    assert fmean(map(robust.error_of_mean, series.reshape(-1, 100).tolist())) == pytest.approx(spread, rel=0.2)
    assert math.isnan(robust.error_of_mean([1.0]))


@pytest.mark.parametrize("freedom", [1, 3, 10, 100])
def test_students_deviate_as_a_normal_one(freedom: int) -> None:
    for t in (0.2, 1.0, 3.0, 10.0):
        exact, found = stats.norm.isf(stats.t.sf(t, freedom)), robust.normal_of_student(t, freedom)
        assert found == pytest.approx(exact, abs=0.01 if exact < 1.05 else 0.2) and found <= exact + 0.01
        assert robust.normal_of_student(-t, freedom) == -found


def test_blocks_cover_everything_once() -> None:
    for count, parts in ((10, 3), (3, 10), (24, 24), (1, 1)):
        cut = robust.blocks(count, parts)
        assert [place for part in cut for place in part] == list(range(count))
        assert all(cut) and len(cut) == min(count, parts)
