"""A run in one look: its loss, its noise, its gradients and its alarms; and whether runs differ by more than noise.

Reads logs; imports no torch.

    runs = read_runs(Path("output"))
    print(report(runs))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist, fmean, median

from hf_accum_fix.monitor.accuracy import in_words, stands
from hf_accum_fix.monitor.guess import OVER_A_GUESS, too_large
from hf_accum_fix.monitor.pipeline import Sentinel, without_sentinels
from hf_accum_fix.monitor.robust import (
    SIGMA_PER_MAD,
    Slope,
    blocks,
    median_and_sigma,
    noise_of_means,
    noise_sigma,
    normal_of_student,
    theil_sen,
)
from hf_accum_fix.monitor.run_logs import GUESS, PREFIX, LogsError, Run, Series

#: Fewest logs that show a trend, or a difference, above the noise.
_ENOUGH = 8
#: Most points behind a slope.
_POINTS = 60
#: A gradient norm is a spike if its logarithm is this many times the noise above the median of so many neighbours on
#: either side, and if it is at least this many times as large.
_SPIKE, _NEIGHBOURS, _SPIKE_TIMES = 9.0, 20, 3.0
#: Logs per degree of freedom of the noise: the median absolute deviation of second differences uses them inefficiently
#: (simulated: 8 to 1,000 logs).
_LOGS_PER_DEGREE = 5
#: Chance of a false difference between two runs of the same curve.
_FALSE_DIFFERENCE = 1e-4
#: Names that memory, and one rank's loss, are logged under.
_MEMORY = re.compile(r"memory_(peak_)?(mib|gib)$|^memory/max_(active|reserved)\(GiB\)$")
_OF_A_RANK = re.compile(rf"(?:{PREFIX})?(?:rank_loss_|loss_rank_?|loss/rank_?)(\d+)")
#: Most letters of a run's name in a picture and a comparison.
_LONGEST_NAME = 60
#: Ratio of the last loss to the best that is divergence.
_OVER_THE_BEST = 1.5
#: A lasting ratio of two losses that counts whatever the correlation of the noise: at least this far from 1, and so
#: many times its own deviation.
_PLAIN_FACTOR, _PLAIN_TIMES = 1.25, 5.0
#: The same over a third of the steps.
_PLAIN_FACTOR_OF_A_THIRD = 2.0


@dataclass(frozen=True)
class GradientNorms:
    """How steady the logged gradient norm was.

    Attributes:
        median: of all.
        mad: median absolute deviation from it.
        spikes: steps of norms far above it.
    """

    median: float
    mad: float
    spikes: tuple[float, ...]


@dataclass(frozen=True)
class Accuracy:
    """How fast an accuracy rose.

    Attributes:
        name: it was logged under.
        first: first value.
        last: last value.
        near_step: step at which nine tenths of the gain were reached.
        slope: over the second half [per step]; None where that is too short.
        stands: that it does while the loss falls, in words; empty where it does not.
    """

    name: str
    first: float
    last: float
    near_step: float
    slope: Slope | None
    stands: str = ""


@dataclass(frozen=True)
class Summary:
    """One run.

    Attributes:
        run: its name.
        loss: the logged losses, without sentinels.
        last: mean of the last tenth of them.
        last_error: standard error of that, from the noise; nan for a short run.
        slope: of the loss over the second half [per step], 95 % interval; None where that is too short.
        noise: standard deviation from log to log, as a share of the loss; nan for a short run.
        not_finite: steps whose logged loss is nan or inf.
        sentinel: the number that was left out as "no loss"; None: none.
        gradients: None where no norm was logged.
        accuracy: None where none was logged.
        alarms: by monitor: how many, and the step by which the first was logged.
        guess: loss of a guess, ln(classes), where the log or the model beside it has it; else nan.
        beside: learning rate, memory and the ranks' losses, in words, where they were logged.
    """

    run: str
    loss: Series
    last: float
    last_error: float
    slope: Slope | None
    noise: float
    not_finite: tuple[float, ...]
    sentinel: Sentinel | None
    gradients: GradientNorms | None
    accuracy: Accuracy | None
    alarms: dict[str, tuple[int, float]]
    guess: float = math.nan
    beside: tuple[tuple[str, str], ...] = ()


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


def summarise(run: Run) -> Summary:
    """What a run's logs say."""
    logged = run.series["loss"]
    _, sentinel = without_sentinels([value for value in logged.values if math.isfinite(value)])
    loss = _where(logged, lambda value: math.isfinite(value) and (sentinel is None or value != sentinel.value))
    tail = loss.values[-max(len(loss) // 10, 1) :]
    last = fmean(tail) if tail else math.nan
    as_share = 1.0 if _all_positive(loss.values) else abs(last)
    return Summary(
        run=run.name,
        loss=loss,
        last=last,
        last_error=noise_of_means(_scaled(loss.values)) / as_share * abs(last) / math.sqrt(max(len(tail), 1)),
        slope=_slope_of_second_half(loss),
        noise=noise_sigma(_scaled(loss.values)) / as_share,
        not_finite=_where(logged, lambda value: not math.isfinite(value)).steps,
        sentinel=sentinel,
        gradients=_gradients(run),
        accuracy=_accuracy(run, loss),
        alarms=dict(_alarms(run)),
        guess=run.series[GUESS].values[0] if GUESS in run.series else math.nan,
        beside=tuple(_beside(run)),
    )


def compare(one: Summary, other: Summary) -> Comparison:
    """Whether two loss curves differ by more than their noise.

    Logarithms are compared where all losses are positive, since noise shrinks with the loss. The steps that both logged
    are looked at as a whole and in up to ten blocks. A mean difference of n steps has the standard error
    ``sqrt((s1^2 + s2^2) / n)``, s a run's `noise_of_means` over all steps, over the block and its neighbours, or what
    the second differences of the blocks say, whichever is most. The largest difference in these errors decides; that it
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
    steady = len(ratios) >= _ENOUGH and spread < 0.1 * abs(ratio) and _same_throughout(ratios_by_part)
    result = Comparison(
        one.run, other.run, len(steps), ratio, steady, math.nan, math.nan, False,
        norms=one.gradients.median / other.gradients.median if one.gradients and other.gradients else math.nan,
        not_finite=_first_not_shared(one, other),
    )  # fmt: skip
    if len(steps) < _ENOUGH:
        return result
    as_factor = all(map(_all_positive, curves))
    if as_factor:
        curves = [_scaled(curve) for curve in curves]
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


def _same_throughout(ratios: Sequence[float]) -> bool:
    return max(map(abs, ratios)) < 1.2 * min(map(abs, ratios))


def _first_not_shared(one: Summary, other: Summary) -> float:
    """The first step at which one loss is not finite and the other's is."""
    apart = [step for step in one.not_finite if step in set(other.loss.steps)]
    apart += [step for step in other.not_finite if step in set(one.loss.steps)]
    return min(apart, default=math.nan)


def findings(its: Summary) -> list[str]:
    """What is wrong with a run; empty where nothing is."""
    loss, found = its.loss, []
    if its.not_finite:
        found.append(f"{len(its.not_finite)} logged losses are not finite, the first at step {its.not_finite[0]:.0f}")
    if its.sentinel is not None:
        found.append(str(its.sentinel))
    if len(loss) and loss.values[0] > OVER_A_GUESS * its.guess:
        found.append(too_large(loss.values[0], its.guess))
    if len(loss) >= _ENOUGH:
        means = [fmean(loss.values[place] for place in part) for part in blocks(len(loss), 10)]
        best = min(means)
        if best > 0 and means[-1] > _OVER_THE_BEST * best and means[-1] - best > 6 * its.noise * best:
            at = loss.steps[blocks(len(loss), 10)[means.index(best)].start]
            found.append(f"the loss diverges: {means[-1]:.4g} at the end, {best:.4g} at its best, around step {at:.0f}")
        if loss.values[0] > 0 and -1 < min(means) < 0:
            found.append(
                "the loss goes below zero and stays above -1: a mean over the stages of a pipeline, of which all but "
                "the last report -1, looks like this; read the log of a rank of the last stage"
            )
    if its.accuracy is not None and its.accuracy.stands:
        found.append(its.accuracy.stands)
    found += [f"{name}: {count} alarms, the first by step {step:.0f}" for name, (count, step) in its.alarms.items()]
    return found


def findings_between(its: Comparison) -> list[str]:
    """What is wrong with one of two runs; empty where nothing is. A difference alone is no finding."""
    found = []
    if not math.isnan(its.not_finite):
        found.append(f"{its.run} against {its.other}: one of the two is not finite from step {its.not_finite:.0f} on")
    whole = max(its.ratio, 1 / its.ratio) if its.ratio and its.ratio > 0 else 1.0
    if its.differ and its.steady and round(whole) >= 2 and abs(whole / round(whole) - 1) < 0.05:
        norms = max(its.norms, 1 / its.norms) if its.norms > 0 else math.nan
        also = "; the gradient norm is off by the same factor" if abs(norms / whole - 1) < 0.1 else ""
        found.append(
            f"{its.run} against {its.other}: {its.ratio:.3g} times the loss throughout, as if it were not divided, or "
            f"divided twice, by {round(whole)} accumulation steps or ranks{also}"
        )
    return found


def all_findings(runs: Sequence[Run], against: str | None = None) -> list[str]:
    """Findings on every run, and on every run compared with the reference run.

    Raises:
        LogsError: as `report`.
    """
    summaries, reference = _held_against(runs, against)
    found = [f"{its.run}: {line}" for its in summaries for line in findings(its)]
    others = [its for place, its in enumerate(summaries) if place != reference]
    return found + [line for its in others for line in findings_between(compare(its, summaries[reference]))]


def report(runs: Sequence[Run], against: str | None = None) -> str:
    """Everything in words: each run, and each compared with the reference run.

    Args:
        runs: that were read.
        against: name of the reference run, in full or shortened; None: the run from which most others differ by no more
            than noise, the first of them.

    Raises:
        LogsError: if there is no such run.
    """
    summaries, reference = _held_against(runs, against)
    told = [_told(its, run.name) for its, run in zip(summaries, runs, strict=True)]
    if len(runs) > 2 and against is None:
        told.append(
            f"{summaries[reference].run}: the others are compared with it, since most agree with it (--against)"
        )
    others = [its for place, its in enumerate(summaries) if place != reference]
    told += [_compared(compare(its, summaries[reference])) for its in others]
    found = all_findings(runs, against)
    count = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "nothing wrong was found"
    told.append("\n".join([count, *(f"  {line}" for line in found)]))
    return "\n\n".join(told)


def _held_against(runs: Sequence[Run], against: str | None) -> tuple[list[Summary], int]:
    """Every run's summary under its short name, and the index of the reference run."""
    names = short_names([run.name for run in runs])
    summaries = [replace(summarise(run), run=name) for run, name in zip(runs, names, strict=True)]
    return summaries, _most_agreed_with(summaries) if against is None else _named(against, names, runs)


def short_names(names: Sequence[str]) -> list[str]:
    """Names of runs without the folders that all have in common, of 60 letters at most, and no two alike."""
    places, labels = zip(*(name.partition(": ")[::2] for name in names), strict=True)
    parts = [place.rstrip("/").split("/") for place in places]
    while min(map(len, parts)) > 1 and len({its[0] for its in parts}) == 1:
        parts = [its[1:] for its in parts]
    found: list[str] = []
    for its, label in zip(parts, labels, strict=True):
        name = short = _cut("/".join(its) + (f": {label}" if label else ""))
        number = 1
        while short in found:
            number += 1
            short = f"{name} ({number})"
        found.append(short)
    return found


def _cut(name: str) -> str:
    kept = _LONGEST_NAME // 2 - 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:kept]}...{name[-kept:]}"


def _most_agreed_with(summaries: Sequence[Summary]) -> int:
    """The place of the run that differs from the fewest others; the first of several."""
    agreed = [0] * len(summaries)
    if len(summaries) > 2:
        for (place, one), (other_place, other) in combinations(enumerate(summaries), 2):
            found = compare(one, other)
            if not (found.differ or math.isnan(found.worst)):
                agreed[place] += 1
                agreed[other_place] += 1
    return agreed.index(max(agreed))


def _named(wanted: str, names: Sequence[str], runs: Sequence[Run]) -> int:
    for place, (name, run) in enumerate(zip(names, runs, strict=True)):
        if wanted in (name, run.name):
            return place
    raise LogsError(f"got {wanted} to hold the others against; expected one of {', '.join(names)}")


def _told(its: Summary, full_name: str) -> str:
    loss = its.loss
    rows = [("loss", "none left")]
    if len(loss):
        rows = [
            ("loss", f"{loss.values[0]:.4g} at step {loss.steps[0]:.0f}, {_with_error(its.last, its.last_error)} last")
        ]
    if its.slope is not None:
        rows.append(("trend", f"{_direction(its.slope)} over the second half"))
    if not math.isnan(its.noise):
        rows.append(("noise", f"{its.noise:.1%} of the loss from log to log"))
    if its.not_finite:
        rows.append(("not finite", f"{len(its.not_finite)} logged losses, first at step {its.not_finite[0]:.0f}"))
    if its.sentinel is not None:
        rows.append(("no loss", str(its.sentinel)))
    if its.accuracy is not None:
        got = its.accuracy
        words = f"{got.name} {got.first:.4g} to {got.last:.4g}, nine tenths of the gain by step {got.near_step:.0f}"
        rows.append(("accuracy", words if got.slope is None else f"{words}; {_direction(got.slope)}"))
    if its.gradients is not None:
        got_norms = its.gradients
        words = f"median {got_norms.median:.3g}, MAD {got_norms.mad:.2g}, {len(got_norms.spikes)} spikes"
        where = ", ".join(f"{step:.0f}" for step in got_norms.spikes[:5])
        rows.append(("gradient norm", f"{words} (steps {where})" if where else words))
    rows += [*its.beside, ("alarms", _counted(its.alarms) or "none logged")]
    width = max(len(name) for name, _ in rows)
    head = f"{its.run}: {len(loss)} logged losses" + (f" ({full_name})" if full_name != its.run else "")
    return "\n".join([head, *(f"  {name:{width}}  {words}" for name, words in rows)])


def _compared(its: Comparison) -> str:
    head = f"{its.run} against {its.other}: "
    if math.isnan(its.worst):
        return f"{head}{its.steps} steps in common, too few to tell a difference from noise"
    factor = f"{its.ratio:.4g} times its loss{' throughout' if its.steady else ' in the median'}"
    broken = "" if math.isnan(its.not_finite) else f"; one of the two is not finite from step {its.not_finite:.0f} on"
    if not its.differ:
        return f"{head}no more than noise ({abs(its.worst):.1f} standard errors at most; {factor}){broken}"
    words = f"{head}more than noise: {abs(its.worst):.1f} standard errors around step {its.at:.0f}; {factor}"
    if not its.steady:
        words += f", {its.furthest:.2g} times at its furthest"
    if its.steady and abs(its.ratio - 1) > 0.2:
        words += "; one factor throughout points at how the loss is scaled or logged, not at what is learned"
    return words + broken


def _where(series: Series, keep: Callable[[float], bool]) -> Series:
    kept = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if keep(value)]
    return Series(tuple(step for step, _ in kept), tuple(value for _, value in kept))


def _slope_of_second_half(series: Series) -> Slope | None:
    """Slope over block means, so that a long run is quick and correlated neighbours count as one."""
    half = len(series) // 2
    steps, values = series.steps[half:], series.values[half:]
    if len(set(steps)) < _ENOUGH:
        return None
    parts = blocks(len(steps), _POINTS)
    return theil_sen(
        [fmean(steps[place] for place in part) for part in parts],
        [fmean(values[place] for place in part) for part in parts],
    )


def _gradients(run: Run) -> GradientNorms | None:
    norms = _where(run.series.get("grad_norm", Series((), ())), lambda norm: math.isfinite(norm) and norm > 0)
    if not len(norms):
        return None
    centre, sigma = median_and_sigma(norms.values)
    logs = [math.log(norm) for norm in norms.values]
    bar = max(_SPIKE * noise_sigma(logs), math.log(_SPIKE_TIMES)) if len(logs) >= _ENOUGH else math.inf
    spikes = []
    for place, log in enumerate(logs):
        around = logs[max(place - _NEIGHBOURS, 0) : place] + logs[place + 1 : place + 1 + _NEIGHBOURS]
        # Norms are usually large in the first logs.
        if len(norms) - place > 1 and place >= _NEIGHBOURS // 2 and around and log > median(around) + bar:
            spikes.append(norms.steps[place])
    return GradientNorms(centre, sigma / SIGMA_PER_MAD, tuple(spikes))


def _accuracy(run: Run, loss: Series) -> Accuracy | None:
    """The accuracy of an evaluation, else of the training."""
    names = sorted(
        (name for name in run.series if name.endswith(("accuracy", "_acc")) or name == "acc"),
        key=lambda name: (not name.startswith("eval"), name),
    )
    if not names:
        return None
    series = _where(run.series[names[0]], math.isfinite)
    if not len(series):
        return None
    first, best = series.values[0], max(series.values)
    near = first + 0.9 * (best - first)
    step = next(step for step, value in zip(series.steps, series.values, strict=True) if value >= near)
    return Accuracy(names[0], first, series.values[-1], step, _slope_of_second_half(series), _stands(series, loss))


def _stands(accuracy: Series, loss: Series) -> str:
    """Whether an accuracy stands while the loss falls, by the losses logged since the evaluation before each."""
    losses, accuracies = [], []
    for before, step, value in zip((-math.inf, *accuracy.steps), accuracy.steps, accuracy.values, strict=False):
        since = [its for at, its in zip(loss.steps, loss.values, strict=True) if before < at <= step]
        if since:
            losses.append(fmean(since))
            accuracies.append(value)
    return in_words(losses, accuracies) if stands(losses, accuracies) else ""


def _beside(run: Run) -> Iterator[tuple[str, str]]:
    """Learning rate, memory and the ranks' losses, where they were logged: a name and what to tell."""
    for name, key in (("learning rate", "learning_rate"), *((name, name) for name in sorted(run.series))):
        series = _where(run.series.get(key, Series((), ())), math.isfinite)
        if len(series) and (key == "learning_rate" or _MEMORY.search(name)):
            highest = max(series.values)
            at = series.steps[series.values.index(highest)]
            first, last = series.values[0], series.values[-1]
            yield name.removeprefix(PREFIX), f"{first:.3g} at first, {highest:.3g} at step {at:.0f}, {last:.3g} last"
    of_ranks = {match[1]: run.series[key] for key in run.series if (match := _OF_A_RANK.fullmatch(key))}
    values = [_where(series, math.isfinite).values for series in of_ranks.values()]
    if len(values) > 1 and all(values):
        means = {rank: fmean(its[len(its) // 2 :]) for rank, its in zip(of_ranks, values, strict=True)}
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        words = f"{means[low]:.4g} on rank {low} to {means[high]:.4g} on rank {high}, means of the second half"
        yield "loss of ranks", words


def _alarms(run: Run) -> list[tuple[str, tuple[int, float]]]:
    """The monitors' own counts, where they were logged."""
    found = []
    for key, series in sorted(run.series.items()):
        name = key.removeprefix(PREFIX).removesuffix("_alarms")
        if key == f"{PREFIX}{name}_alarms" and max(series.values) > 0:
            first = next(step for step, count in zip(series.steps, series.values, strict=True) if count > 0)
            found.append((name.replace("_", " "), (round(min(max(series.values), 1e15)), first)))
    return found


def _all_positive(values: Sequence[float]) -> bool:
    return all(value > 0 for value in values)


def _scaled(values: Sequence[float]) -> list[float]:
    """Logarithms where there are some: noise as a share of the loss."""
    return [math.log(value) for value in values] if _all_positive(values) else list(values)


def _noise_of_both(curves: Sequence[Sequence[float]], places: range) -> float:
    return math.hypot(*(noise_of_means([curve[place] for place in places]) for curve in curves))


def _in_errors(difference: float, error: float) -> float:
    if error:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def _direction(slope: Slope) -> str:
    verb = "rises" if slope.low > 0 else "falls" if slope.high < 0 else "flat"
    low, high = slope.low * 100, slope.high * 100
    if verb == "flat":
        return f"flat ({low:+.3g} to {high:+.3g} per 100 steps)"
    low, high = sorted((abs(low), abs(high)))
    return f"{verb} by {abs(slope.value) * 100:.3g} per 100 steps ({low:.3g} to {high:.3g})"


def _with_error(value: float, error: float) -> str:
    return f"{value:.4g}" if math.isnan(error) else f"{value:.4g} +- {error:.2g}"


def _counted(alarms: dict[str, tuple[int, float]]) -> str:
    return "; ".join(f"{name}: {count}, first by step {step:.0f}" for name, (count, step) in alarms.items())
