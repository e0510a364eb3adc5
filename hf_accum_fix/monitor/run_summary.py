"""One run in numbers: its loss, its noise, its gradients, its accuracy and its alarms. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gradient_norm import LOOK_AT, GradientNorm
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.memory_trend import LOOK_FOR, MIB, Trend, TrendKind, trend
from hf_accum_fix.monitor.pipeline import Sentinel, without_sentinels
from hf_accum_fix.monitor.robust import (
    SIGMA_PER_MAD,
    Slope,
    blocks,
    median_and_sigma,
    noise_of_means,
    noise_sigma,
    slope_of_means,
)
from hf_accum_fix.monitor.series import GUESS, PREFIX, Run, Series

#: Fewest logs that show a trend above the noise.
_ENOUGH = 8
#: Most points behind a slope.
_POINTS = 60
#: Logged norms that are judged together, and fewest before one that is a spike.
_NORMS_A_READING, _NORMS_BEFORE_A_SPIKE = 20, 10
#: A loss of exactly zero after one above this is no loss: a Trainer logs nan so.
_NOT_ZERO = 0.01
#: A number beyond this is on its way to overflow: its square and its cube can still be computed.
_OVERFLOWS = 1e60
#: Ratio of the last tenth of the losses to the best that is divergence, where it is halfway back to the first.
_OVER_THE_BEST = 1.5
#: Fewest logs, and steps, that show a leak.
_LOGS_OF_A_LEAK, _STEPS_OF_A_LEAK = 16, 250
#: Names that memory (not its peak since the start, which can only grow), an accuracy, and one rank's loss, are logged
#: under.
_MEMORY = re.compile(r"memory_(?:peak_)?(mib|gib)$|^memory/max_(?:active|reserved)\((GiB)\)$")
_ACCURACY = re.compile(r".*(accuracy|_acc|top1|top5)|acc")
_OF_A_RANK = re.compile(rf"(?:{PREFIX})?(?:rank_loss_|loss_rank_?|loss/rank_?)(\d+)")


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
class Summary:
    """One run.

    Attributes:
        run: its name.
        loss: the logged losses, without sentinels.
        last: mean of the last tenth of them.
        last_error: standard error of that, from the noise; nan for a short run.
        slope: of the loss over the second half [per step], 95 % interval; None where that is too short.
        noise: standard deviation from log to log, as a share of the loss; nan for a short run.
        not_finite: steps whose logged loss is nan, inf or beyond 1e60.
        sentinel: the number that was left out as "no loss"; None: none.
        gradients: None where no norm was logged.
        accuracy: the name that one was logged under; empty: none.
        alarms: by monitor: how many, and the step by which the first was logged.
        findings: alarms and observations of the monitors in these logs.
        extras: accuracy, learning rate, memory and the ranks' losses as text, if they were logged.
        left_out: as in `Run`.
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
    accuracy: str
    alarms: dict[str, tuple[int, float]]
    findings: tuple[Alarm, ...] = ()
    extras: tuple[tuple[str, str], ...] = ()
    left_out: str = ""


def summarise(run: Run) -> Summary:
    """Summary of a run's logs."""
    overflows = run.series["loss"].where(lambda value: math.isfinite(value) and abs(value) > _OVERFLOWS)
    run = without_overflow(run)
    logged = run.series["loss"]
    _, sentinel = without_sentinels([value for value in logged.values if math.isfinite(value)])
    zeros = _zeros(logged)
    dropped = {0.0} if zeros else set()
    loss = logged.where(lambda value: math.isfinite(value) and value not in dropped)
    loss = loss if sentinel is None else loss.where(lambda value: value != sentinel.value)
    tail = loss.values[-max(len(loss) // 10, 1) :]
    last = fmean(tail) if tail else math.nan
    as_share = 1.0 if _all_positive(loss.values) else abs(last) or math.nan
    not_finite = logged.where(lambda value: not math.isfinite(value)).steps
    memory, (gradients, of_norms) = dict(_memory(run)), _norms(run)
    findings = (
        *_of_missing(not_finite, len(overflows), zeros, sentinel, " or more" * (run.logs_a_point > 1)),
        *_of_end(run),
        *_of_loss(run, loss),
        *of_norms,
        *_of_memory(memory),
    )
    return Summary(
        run=run.name,
        loss=loss,
        last=last,
        last_error=noise_of_means(_scaled(loss.values)) / as_share * abs(last) / math.sqrt(max(len(tail), 1)),
        slope=_slope_of_second_half(loss),
        noise=noise_sigma(_scaled(loss.values)) / as_share,
        not_finite=not_finite,
        sentinel=sentinel,
        gradients=gradients,
        accuracy=next(iter(_accuracies(run)), ""),
        alarms=dict(_alarms(run)),
        findings=findings,
        extras=tuple(_extras(run, memory)),
        left_out=run.left_out,
    )


def without_overflow(run: Run) -> Run:
    """The run with inf for every number beyond 1e60, with which nothing can be computed."""
    odd = [name for name, its in run.series.items() if any(abs(value) > _OVERFLOWS for value in its.values)]
    return replace(run, series={**run.series, **{name: _within_range(run.series[name]) for name in odd}})


def _within_range(series: Series) -> Series:
    values = (math.copysign(math.inf, value) if abs(value) > _OVERFLOWS else value for value in series.values)
    return Series(series.steps, tuple(values))


def _zeros(loss: Series) -> tuple[float, ...]:
    """Steps whose loss is exactly zero though the one before was not near it."""
    found, before = [], math.inf
    for step, value in zip(loss.steps, loss.values, strict=True):
        if value == 0 and before > _NOT_ZERO:
            found.append(step)
        elif value != 0 and math.isfinite(value):
            before = abs(value)
    return tuple(found)


def _of_missing(
    not_finite: Sequence[float], overflows: int, zeros: Sequence[float], sentinel: Sentinel | None, more: str
) -> Iterator[Alarm]:
    if not_finite:
        beyond = f" ({overflows} of them beyond {_OVERFLOWS:.0e}, on the way to overflow)" if overflows else ""
        words = f"{_losses(len(not_finite), more)} not finite{beyond}, the first at step {not_finite[0]:.0f}"
        yield Alarm("loss-not-finite", words)
    if zeros:
        words = f"{_losses(len(zeros), more)} exactly 0, the first at step {zeros[0]:.0f}: a Trainer logs nan "
        yield Alarm("loss-zero", f"{words}as 0 (logging_nan_inf_filter), and a batch without targets has no loss")
    if sentinel is not None:
        yield Alarm("no-loss", str(sentinel))


def _losses(count: int, more: str) -> str:
    return f"{count}{more} logged loss{'es are' if count > 1 else ' is'}"


def _of_end(run: Run) -> Iterator[Alarm]:
    if not math.isnan(run.goes_on_to):
        last = run.series["loss"].steps[-1]
        words = f"the loss stops at step {last:.0f}, and the log goes on to {run.goes_on_to:.0f}"
        yield Alarm("loss-stops", f"{words}; look for a loss that is nan and logged as null, or no longer logged")


def _of_loss(run: Run, loss: Series) -> Iterator[Alarm]:
    """What the monitors find in the losses, log by log; and in a run too short for them, by its tenths."""
    schedule = (run.series.get(name, Series((), ())) for name in ("learning_rate", "epoch"))
    rate_at, epoch_at = (dict(zip(its.steps, its.values, strict=True)) for its in schedule)
    judges, seen = (LossTrend(), LossOscillation(), LossStall()), set()
    for step, value in zip(loss.steps, loss.values, strict=True):
        for judge in judges:
            alarm = judge.add(value, rate_at.get(step, math.nan), epoch_at.get(step, math.nan))
            if alarm is not None:
                seen.add(alarm.kind)
                yield replace(alarm, message=f"by step {step:.0f}, {alarm.message}")
    guess = run.series[GUESS].values[0] if GUESS in run.series else math.nan
    first = FirstLoss().add(loss.values[0], guess) if len(loss) else None
    if first is not None:
        yield first
    names = _accuracies(run)
    if names:
        yield from _of_accuracy(run.series[names[0]].where(math.isfinite), loss)
    if len(loss) < _ENOUGH:
        return
    means = [fmean(loss.values[place] for place in part) for part in blocks(len(loss), 10)]
    best, noise = min(means), noise_sigma(_scaled(loss.values))
    if not seen & {"loss-diverges", "loss-jumped"} and best > 0 and means[-1] > _OVER_THE_BEST * best * (1 + 4 * noise):
        at = loss.steps[blocks(len(loss), 10)[means.index(best)].start]
        words = f"{means[-1]:.4g} at the end, {best:.4g} at its best, around step {at:.0f}"
        far = means[-1] > (best + loss.values[0]) / 2
        name, verb = ("loss-diverges", "diverges") if far else ("loss-jumped", "ends above its best")
        yield Alarm(name, f"the loss {verb}: {words}", observation=not far)
    if loss.values[0] > 0 and -1 < min(means) < 0:
        yield Alarm("loss-of-stages", f"the loss goes below zero and stays above -1: {_MEAN_OVER_STAGES}")
    elif min(loss.values) > -1 and max(loss.values) < 0:
        words = f"the loss is between -1 and 0 from the start: {_MEAN_OVER_STAGES}"
        yield Alarm(
            "loss-of-stages", f"{words}; so do losses that may be negative", observation=_TITAN not in run.series
        )


#: A loss that torchtitan logs; what such a loss may be.
_TITAN = "loss_metrics/global_avg_loss"
_MEAN_OVER_STAGES = (
    "a mean over the stages of a pipeline, of which all but the last report -1, looks like this; read the log of a "
    "rank of the last stage"
)


def _of_accuracy(accuracy: Series, loss: Series) -> Iterator[Alarm]:
    """Whether an accuracy stalls while the loss falls, by the losses logged since the evaluation before each."""
    judge, found = AccuracyTrend(), None
    percent = 100.0 if max(accuracy.values, default=0.0) > 1 else 1.0
    for before, step, value in zip((-math.inf, *accuracy.steps), accuracy.steps, accuracy.values, strict=False):
        since = [its for at, its in zip(loss.steps, loss.values, strict=True) if before < at <= step]
        alarm = judge.judge(fmean(since), value / percent) if since else None
        found = alarm or found
    if found is not None:
        yield found


def _norms(run: Run) -> tuple[GradientNorms | None, list[Alarm]]:
    """What `GradientNorm` finds in the logged norms; spikes are observations: the items of a step are not known."""
    series = run.series.get("grad_norm", Series((), ()))
    usual = series.where(lambda norm: math.isfinite(norm) and norm > 0).values
    every = (series.steps[-1] - series.steps[0]) / (len(series) - 1) if len(series) > 1 else 1.0
    norms, found, spikes = GradientNorm(every=every, before_a_spike=_NORMS_BEFORE_A_SPIKE), dict[str, Alarm](), []
    for part in blocks(len(series), len(series) // _NORMS_A_READING + 1):
        norms.add([series.values[place] for place in part], [math.nan] * len(part))
        reading = norms.reading()
        spikes += sorted(series.steps[part[-1] - its.steps_ago] for its in reading.spikes)
        alarm = norms.judge(replace(reading, spikes=()))
        if alarm is not None:
            words = f"by step {series.steps[part[-1]]:.0f}, {alarm.message}"
            found.setdefault(alarm.kind, replace(alarm, message=words))
    if spikes:
        where = ", ".join(f"{step:.0f}" for step in spikes[:5])
        words = f"{len(spikes)} spike{'s' * (len(spikes) > 1)} of the gradient norm, at step {where}; {LOOK_AT}"
        found["spikes"] = Alarm("gradient-norm-spike", words, observation=True)
    if not usual:
        return None, list(found.values())
    centre, sigma = median_and_sigma(usual)
    return GradientNorms(centre, sigma / SIGMA_PER_MAD, tuple(spikes)), list(found.values())


def _memory(run: Run) -> Iterator[tuple[str, tuple[Trend, int]]]:
    """Where memory goes, by the name it was logged under, and in how many logs."""
    for name, series in sorted(run.series.items()):
        unit = _MEMORY.search(name)
        kept = series.where(math.isfinite)
        if unit and len(kept) and "peak" not in name:
            scale = MIB * (1024 if "gib" in (unit[1] or unit[2]).lower() else 1)
            found = trend(kept.steps, [scale * value for value in kept.values], enough=_ENOUGH)
            yield name.removeprefix(PREFIX), (found, len(kept))


def _of_memory(memory: Mapping[str, tuple[Trend, int]]) -> Iterator[Alarm]:
    for name, (its, logs) in memory.items():
        if its.kind is TrendKind.GROWS and logs >= _LOGS_OF_A_LEAK and its.samples >= _STEPS_OF_A_LEAK:
            yield Alarm("memory-grows", f"{name} {its}; {LOOK_FOR}")


def _slope_of_second_half(series: Series) -> Slope | None:
    half = len(series) // 2
    steps, values = series.steps[half:], series.values[half:]
    return slope_of_means(steps, values, _POINTS) if len(set(steps)) >= _ENOUGH else None


def _accuracies(run: Run) -> list[str]:
    """Names of accuracies, evaluation first."""
    found = [
        name for name, its in run.series.items() if _ACCURACY.fullmatch(name) and any(map(math.isfinite, its.values))
    ]
    return sorted(found, key=lambda name: (not name.startswith("eval"), name))


def in_words(slope: Slope) -> str:
    """Whether it rises, falls or is flat, per 100 steps."""
    verb = "rises" if slope.low > 0 else "falls" if slope.high < 0 else "flat"
    low, high = slope.low * 100, slope.high * 100
    if verb == "flat":
        return f"flat ({low:+.3g} to {high:+.3g} per 100 steps)"
    low, high = sorted((abs(low), abs(high)))
    return f"{verb} by {abs(slope.value) * 100:.3g} per 100 steps ({low:.3g} to {high:.3g})"


def _extras(run: Run, memory: Mapping[str, tuple[Trend, int]]) -> Iterator[tuple[str, str]]:
    """Accuracy, learning rate, memory and the ranks' losses, if they were logged: a name and a text."""
    for name in (*_accuracies(run)[:1], "learning_rate", *sorted(filter(_MEMORY.search, run.series))):
        series = run.series.get(name, Series((), ())).where(math.isfinite)
        if len(series):
            highest = max(series.values)
            at = series.steps[series.values.index(highest)]
            words = f"{series.values[0]:.4g} at first, {highest:.4g} at step {at:.0f}, {series.values[-1]:.4g} last"
            name = name.removeprefix(PREFIX)
            yield name.replace("_", " "), f"{words}; {memory[name][0]}" if name in memory else words
    of_ranks = {match[1]: run.series[key] for key in run.series if (match := _OF_A_RANK.fullmatch(key))}
    values = [series.where(math.isfinite).values for series in of_ranks.values()]
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
    # The sum of the others, which say more.
    return [its for its in found if its[0] != "all" or len(found) == 1]


def _all_positive(values: Sequence[float]) -> bool:
    """Whether every value has a logarithm."""
    return all(value > 0 for value in values)


def _scaled(values: Sequence[float]) -> list[float]:
    """Logarithms where there are some: noise as a share of the loss."""
    return [math.log(value) for value in values] if _all_positive(values) else list(values)
