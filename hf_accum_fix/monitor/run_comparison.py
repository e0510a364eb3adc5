"""Whether two runs differ by more than noise. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median

from hf_accum_fix.monitor.robust import (
    SIGMA_PER_MAD,
    blocks,
    median_and_sigma,
    noise_of_means,
    noise_sigma,
    normal_of_student,
)
from hf_accum_fix.monitor.run_summary import ENOUGH, Summary, all_positive, scaled

#: Logs per degree of freedom of the noise: the median absolute deviation of second differences uses them inefficiently
#: (simulated: 8 to 1,000 logs).
_LOGS_PER_DEGREE = 5
#: Chance of a false difference between two runs of the same curve.
_FALSE_DIFFERENCE = 1e-4
#: A lasting ratio of two losses that counts for any correlation of the noise: at least this far from 1, and so
#: many times its own deviation.
_PLAIN_FACTOR, _PLAIN_TIMES = 1.25, 5.0
#: Ratio of every one of a few logs that is a difference, and largest over smallest ratio of two runs of one cause.
_OF_FEW_LOGS, _ROUGHLY_THE_SAME = 1.8, 1.6
#: What a factor may leave unexplained: the mean of micro-batch means is off by up to a third in the published sweep.
_LEAST_REST, _MOST_REST, _LEAST_FACTOR = 0.85, 1.7, 1.8
#: Settings by which a loss may not have been divided.
_SETTINGS = {
    "accumulation steps": ("accumulation",),
    "ranks": ("ranks",),
    "accumulation steps times ranks": ("accumulation", "ranks"),
}
#: The factor over a third of the steps.
_PLAIN_FACTOR_OF_A_THIRD = 2.0


@dataclass(frozen=True)
class Comparison:
    """Two runs' losses over the steps that both logged.

    Attributes:
        run: one of them.
        other: the run it is compared with.
        steps: how many steps both logged.
        ratio: median of the losses' ratio.
        steady: whether that ratio is the same throughout, within 5 %.
        worst: largest difference, of all steps or of a tenth of them, in its standard errors; nan for too few steps.
        at: step in the middle of these.
        differ: whether that is more than noise makes.
        furthest: the median ratio, of all or of a tenth of the steps, that is furthest from it.
        norms: ratio of the median gradient norms; nan where one run logged none.
        cause: which of the runs' own accumulation steps and ranks explain the ratio, in words; empty: none, or unknown.
        not_finite: first step at which one run's loss is not finite and the other's is; nan: none.
    """

    run: str
    other: str
    steps: int
    ratio: float
    steady: bool
    worst: float
    at: float
    differ: bool
    furthest: float = math.nan
    norms: float = math.nan
    not_finite: float = math.nan
    cause: str = ""


def compare(one: Summary, other: Summary) -> Comparison:
    """Whether two loss curves differ by more than their noise.

    Logarithms are compared where all losses are positive, since noise shrinks with the loss. The steps that both logged
    are looked at as a whole and in up to ten blocks. A mean difference of n steps has the standard error
    ``sqrt((s1^2 + s2^2) / n)``, s the `noise_of_means` over all steps, over the block and its neighbours, or that of
    the second differences of the blocks, whichever is most. The largest difference in these errors decides; that it
    is the largest of several is reckoned with (Bonferroni), and so is that the noise is an estimate (Student).

    Noise that both runs share (the same samples in the same order) makes the verdict more cautious; noise that is
    correlated from log to log makes it less so, where there are only tens of logs.
    """
    mine, theirs = (dict(zip(each.loss.steps, each.loss.values, strict=True)) for each in (one, other))
    steps = sorted(mine.keys() & theirs.keys())
    curves = [[losses[step] for step in steps] for losses in (mine, theirs)]
    ratios = [a / b for a, b in zip(*curves, strict=True) if b]
    ratio, spread = median_and_sigma(ratios) if ratios else (math.nan, math.nan)
    parts = blocks(len(steps), min(10, max(len(steps) // 4, 1)))
    ratios_by_part = [median(ratios[part.start : part.stop]) for part in blocks(len(ratios), len(parts))]
    steady = len(ratios) >= ENOUGH and spread < 0.1 * abs(ratio) and _same_throughout(ratios_by_part)
    broken = {*one.not_finite} & {*other.loss.steps} | {*other.not_finite} & {*one.loss.steps}
    result = Comparison(
        one.run, other.run, len(steps), ratio, steady, math.nan, math.nan, False,
        norms=one.gradients.median / other.gradients.median if one.gradients and other.gradients else math.nan,
        not_finite=min(broken, default=math.nan),
    )  # fmt: skip
    if (
        len(ratios) == len(steps) > 1
        and min(ratios) > 0
        and max(ratios_by_part) < _ROUGHLY_THE_SAME * min(ratios_by_part)
    ):
        result = replace(result, cause=_cause(ratio, one, other))
    if len(steps) < ENOUGH:
        far = len(ratios) > 1 and (min(ratios) > _OF_FEW_LOGS or 0 < max(ratios) < 1 / _OF_FEW_LOGS)
        if not far or not (result.cause or _same_throughout(ratios)):
            return result
        return replace(result, worst=math.copysign(math.inf, ratio - 1), at=steps[0], differ=True, steady=True)
    as_factor = all(map(all_positive, curves))
    if as_factor:
        curves = [scaled(curve) for curve in curves]
    differences = [a - b for a, b in zip(*curves, strict=True)]
    means = [fmean(differences[place] for place in part) for part in parts]
    curved = [after - 2 * here + before for before, here, after in zip(means, means[1:], means[2:], strict=False)]
    # A second difference of independent means has six times the variance of one.
    between = SIGMA_PER_MAD * median(map(abs, curved)) / math.sqrt(6.0) if curved else 0.0
    noise = _noise_of_both(curves, range(len(steps)))
    error = max(noise / math.sqrt(len(steps)), between / math.sqrt(len(parts)))
    found = [(_in_errors(fmean(differences), error), len(steps) // 2)]
    for part, mean in zip(parts, means, strict=True):
        around = range(max(part.start - len(part), 0), min(part.stop + len(part), len(steps)))
        local = max(noise, _noise_of_both(curves, around))
        found.append((_in_errors(mean, max(local / math.sqrt(len(part)), between)), part[len(part) // 2]))
    worst, place = max(found, key=lambda each: abs(each[0]))
    worst = normal_of_student(worst, len(steps) / _LOGS_PER_DEGREE)
    threshold = NormalDist().inv_cdf(1 - _FALSE_DIFFERENCE / (2 * len(found)))
    deviation = median_and_sigma(differences)[1]
    plain = steady and abs(fmean(differences)) > max(math.log(_PLAIN_FACTOR), _PLAIN_TIMES * deviation)
    step_to_step = noise_sigma(differences)
    for third in blocks(len(steps), 3) if as_factor else []:
        its = [differences[place] for place in third]
        deviation = max(median_and_sigma(its)[1], step_to_step)
        plain |= abs(fmean(its)) > max(math.log(_PLAIN_FACTOR_OF_A_THIRD), _PLAIN_TIMES * deviation)
    return replace(
        result, worst=worst, at=steps[place], differ=abs(worst) > threshold or plain,
        furthest=max(ratios_by_part, key=lambda its: abs(its - ratio)),
    )  # fmt: skip


def _cause(ratio: float, one: Summary, other: Summary) -> str:
    """The settings of the two runs that come nearest to the ratio of their losses; empty where none comes near."""
    larger, smaller = (one, other) if ratio > 1 else (other, one)
    whole = max(ratio, 1 / ratio)
    found = []
    for name, keys in _SETTINGS.items():
        if all(key in its.settings for key in keys for its in (larger, smaller)):
            its, others = (math.prod(of.settings[key] for key in keys) for of in (larger, smaller))
            found.append((its / others, f"their {name}, {its} and {others}, are {its / others:.4g} times apart"))
            found.append((float(its), f"{larger.run} has {its} {name}"))
    near = [each for each in found if each[0] > _LEAST_FACTOR and _LEAST_REST < whole / each[0] < _MOST_REST]
    if not near:
        return ""
    times, words = min(near, key=lambda each: abs(math.log(whole / each[0])))
    rest = whole / times
    left = f"; {rest:.2f} times are left, as where micro-batches of unequal size count alike" if rest > 1.05 else ""
    return f"{words}, as if the loss were not divided by them{left}"


def _same_throughout(ratios: Sequence[float]) -> bool:
    return max(map(abs, ratios)) < 1.2 * min(map(abs, ratios))


def _noise_of_both(curves: Sequence[Sequence[float]], places: range) -> float:
    return math.hypot(*(noise_of_means([curve[place] for place in places]) for curve in curves))


def _in_errors(difference: float, error: float) -> float:
    if error:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0
