"""One run in numbers and words: its loss, its noise, its gradients, its accuracy and its alarms. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gradient_norm import LOOK_AT, GradientNorm
from hf_accum_fix.monitor.loss_over_time import AccuracyTrend, FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.memory import LOOK_FOR, MIB, Trend, TrendKind, trend
from hf_accum_fix.monitor.robust import Slope, blocks, error_of_mean, median_and_sigma, noise_sigma, slope_of_means
from hf_accum_fix.monitor.series import GUESS, PREFIX, Run, Series, without_sentinels
from hf_accum_fix.monitor.thresholds import STEPS_OF_A_LEAK

#: Fewest logs that show a trend above the noise; most points behind a slope.
_ENOUGH, _POINTS = 8, 60
#: Logged norms that are judged together, and fewest before one that is a spike.
_NORMS_A_READING, _NORMS_BEFORE_A_SPIKE = 20, 10
#: A loss of exactly zero after one above this is no loss: a Trainer logs nan so.
_NOT_ZERO = 0.01
#: A number beyond this is on its way to overflow: its square and its cube can still be computed.
_OVERFLOWS = 1e60
#: Ratio of the last tenth of the losses to the best that is divergence, where it is halfway back to the first.
_OVER_THE_BEST = 1.5
#: Fewest logs that show a leak.
_LOGS_OF_A_LEAK = 16
#: Names that memory (not its peak since the start, which can only grow), an accuracy, and one rank's loss, are logged
#: under.
_MEMORY = re.compile(r"memory_(?:peak_)?(mib|gib)$|^memory/max_(?:active|reserved)\((GiB)\)$")
_ACCURACY = re.compile(r".*(accuracy|_acc|top1|top5)|acc")
_OF_A_RANK = re.compile(rf"(?:{PREFIX})?(?:rank_loss_|loss_rank_?|loss/rank_?)(\d+)")
#: A loss that torchtitan logs; what such a loss may be.
_TITAN = "loss_metrics/global_avg_loss"
_MEAN_OVER_STAGES = (
    "a mean over the stages of a pipeline, of which all but the last report -1, looks like this; read the log of a "
    "rank of the last stage"
)


@dataclass(frozen=True)
class Summary:
    """One run.

    Attributes:
        run: its name.
        loss: the logged losses, without sentinels.
        noise: standard deviation from log to log, as a share of the loss; nan for a short run.
        not_finite: steps whose logged loss is nan, inf or beyond 1e60.
        norm: median of the logged gradient norms; nan where none was logged.
        accuracy: the name that one was logged under; empty: none.
        alarms: by monitor: how many, and the step by which the first was logged.
        findings: alarms and observations of the monitors in these logs.
        rows: a name and a text each: all that is shown of it.
    """

    run: str
    loss: Series
    noise: float
    not_finite: tuple[float, ...]
    norm: float
    accuracy: str
    alarms: Mapping[str, tuple[int, float]]
    findings: tuple[Alarm, ...]
    rows: tuple[tuple[str, str], ...]


def summarise(run: Run) -> Summary:
    """Summary of a run's logs."""
    beyond = sum(_OVERFLOWS < abs(value) < math.inf for value in run.series["loss"].values)
    run = without_overflow(run)
    logged = run.series["loss"]
    _, sentinel = without_sentinels([value for value in logged.values if math.isfinite(value)])
    zeros = _zeros(logged)
    dropped = ({0.0} if zeros else set()) | ({sentinel.value} if sentinel is not None else set())
    loss = logged.where(lambda value: math.isfinite(value) and value not in dropped)
    not_finite = logged.where(lambda value: not math.isfinite(value)).steps
    memory, alarms, (norm, spikes, of_norms) = dict(_memory(run)), dict(_alarms(run)), _norms(run)
    findings = []
    if not_finite:
        overflow = f" ({beyond} of them beyond {_OVERFLOWS:.0e}, on the way to overflow)" if beyond else ""
        words = f"{_losses(not_finite)} not finite{overflow}, the first at step {not_finite[0]:.0f}"
        findings.append(Alarm("loss-not-finite", words))
    if zeros:
        words = f"{_losses(zeros)} exactly 0, the first at step {zeros[0]:.0f}: a Trainer logs nan as 0 "
        findings.append(Alarm("loss-zero", f"{words}(logging_nan_inf_filter), and a batch without targets has no loss"))
    findings += [Alarm("no-loss", str(sentinel))] if sentinel is not None else []
    if not math.isnan(run.goes_on_to):
        words = f"the loss stops at step {logged.steps[-1]:.0f}, and the log goes on to {run.goes_on_to:.0f}"
        look = "look for a loss that is nan and logged as null, or no longer logged"
        findings.append(Alarm("loss-stops", f"{words}; {look}"))
    findings += [*_of_loss(run, loss), *of_norms]
    findings += [
        Alarm("memory-grows", f"{name} {its}; {LOOK_FOR}")
        for name, (its, logs) in memory.items()
        if its.kind is TrendKind.GROWS and logs >= _LOGS_OF_A_LEAK and its.samples >= STEPS_OF_A_LEAK
    ]
    noise, rows = _of_noise(loss)
    rows += [("gradient norm", spikes)] if spikes else []
    rows += [("left out", run.left_out)] if run.left_out else []
    if run.logs_a_point > 1:
        rows.append(("shortened", f"means of {run.logs_a_point} logs each, and the noise is theirs"))
    counted = "; ".join(f"{name}: {count}, first by step {step:.0f}" for name, (count, step) in alarms.items())
    rows += [*_extras(run, memory), ("alarms", counted or "none logged")]
    accuracy = next(iter(_accuracies(run)), "")
    return Summary(run.name, loss, noise, not_finite, norm, accuracy, alarms, tuple(findings), tuple(rows))


def without_overflow(run: Run) -> Run:
    """The run with inf for every number beyond 1e60, with which nothing can be computed."""

    def within(value: float) -> float:
        return math.copysign(math.inf, value) if abs(value) > _OVERFLOWS else value

    return replace(
        run, series={name: Series(its.steps, tuple(map(within, its.values))) for name, its in run.series.items()}
    )


def _zeros(loss: Series) -> list[float]:
    """Steps whose loss is exactly zero though the one before was not near it."""
    found, before = [], math.inf
    for step, value in zip(loss.steps, loss.values, strict=True):
        if value == 0 and before > _NOT_ZERO:
            found.append(step)
        elif value != 0 and math.isfinite(value):
            before = abs(value)
    return found


def _losses(steps: Sequence[float]) -> str:
    return f"{len(steps)} logged loss{'es are' if len(steps) > 1 else ' is'}"


def _of_noise(loss: Series) -> tuple[float, list[tuple[str, str]]]:
    """The noise from log to log as a share of the loss, and rows: first and last loss, trend and noise."""
    if not len(loss):
        return math.nan, [("loss", "none left")]
    positive = min(loss.values) > 0
    # Of logarithms, where there are some, noise is a share already.
    scaled = [math.log(value) for value in loss.values] if positive else loss.values
    tail = loss.values[-max(len(loss) // 10, 1) :]
    last = fmean(tail)
    as_share = 1.0 if positive else abs(last) or math.nan
    noise, error_of_last = noise_sigma(scaled) / as_share, error_of_mean(tail)
    error = "" if math.isnan(error_of_last) else f" +- {error_of_last:.2g}"
    rows = [("loss", f"{loss.values[0]:.4g} at step {loss.steps[0]:.0f}, {last:.4g}{error} last")]
    half = len(loss) // 2
    if len(set(loss.steps[half:])) >= _ENOUGH:
        slope = slope_of_means(loss.steps[half:], loss.values[half:], _POINTS)
        rows.append(("trend", f"{_in_words(slope)} over the second half"))
    rows += [("noise", f"{noise:.1%} of the loss from log to log")] if not math.isnan(noise) else []
    return noise, rows


def _in_words(slope: Slope) -> str:
    """Whether it rises, falls or is flat, per 100 steps."""
    verb = "rises" if slope.low > 0 else "falls" if slope.high < 0 else "flat"
    low, high = slope.low * 100, slope.high * 100
    if verb == "flat":
        return f"flat ({low:+.3g} to {high:+.3g} per 100 steps)"
    low, high = sorted((abs(low), abs(high)))
    return f"{verb} by {abs(slope.value) * 100:.3g} per 100 steps ({low:.3g} to {high:.3g})"


def _of_loss(run: Run, loss: Series) -> Iterator[Alarm]:
    """What the monitors find in the losses, log by log; and in a run too short for them, by its tenths."""
    schedule = (run.series.get(name, Series()) for name in ("learning_rate", "epoch"))
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
    for name in _accuracies(run)[:1]:
        yield from _of_accuracy(run.series[name].where(math.isfinite), loss)
    if len(loss) < _ENOUGH:
        return
    parts = blocks(len(loss), 10)
    means = [fmean(loss.values[part.start : part.stop]) for part in parts]
    best, now = min(means), means[-1]
    wanders = 1 + 4 * noise_sigma([math.log(value) for value in loss.values]) if min(loss.values) > 0 else math.inf
    if not seen & {"loss-diverges", "loss-jumped"} and now > _OVER_THE_BEST * best * wanders > 0:
        words = f"{now:.4g} at the end, {best:.4g} at its best, around step "
        words += f"{loss.steps[parts[means.index(best)].start]:.0f}"
        far = now > (best + loss.values[0]) / 2
        name, verb = ("loss-diverges", "diverges") if far else ("loss-jumped", "ends above its best")
        yield Alarm(name, f"the loss {verb}: {words}", observation=not far)
    if loss.values[0] > 0 and -1 < best < 0:
        yield Alarm("loss-of-stages", f"the loss goes below zero and stays above -1: {_MEAN_OVER_STAGES}")
    elif min(loss.values) > -1 and max(loss.values) < 0:
        words = f"the loss is between -1 and 0 from the start: {_MEAN_OVER_STAGES}; so do losses that may be negative"
        yield Alarm("loss-of-stages", words, observation=_TITAN not in run.series)


def _of_accuracy(accuracy: Series, loss: Series) -> Iterator[Alarm]:
    """Whether an accuracy stalls while the loss falls, by the losses logged since the evaluation before each."""
    judge, percent = AccuracyTrend(), 100.0 if max(accuracy.values, default=0.0) > 1 else 1.0
    for before, step, value in zip((-math.inf, *accuracy.steps), accuracy.steps, accuracy.values, strict=False):
        since = [its for at, its in zip(loss.steps, loss.values, strict=True) if before < at <= step]
        alarm = judge.judge(fmean(since), value / percent) if since else None
        if alarm is not None:
            yield alarm


def _norms(run: Run) -> tuple[float, str, list[Alarm]]:
    """Median and words of the logged norms, and what `GradientNorm` finds in them.

    Spikes are observations: the items of a step are not known.
    """
    series = run.series.get("grad_norm", Series())
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
    where, several = ", ".join(f"{step:.0f}" for step in spikes[:5]), "s" * (len(spikes) != 1)
    if spikes:
        words = f"{len(spikes)} spike{several} of the gradient norm, at step {where}; {LOOK_AT}"
        found["spikes"] = Alarm("gradient-norm-spike", words, observation=True)
    if not usual:
        return math.nan, "", list(found.values())
    centre, mad = median(usual), median_and_sigma(usual)[1] * NormalDist().inv_cdf(0.75)
    words = f"median {centre:.3g}, MAD {mad:.2g}, {len(spikes)} spike{several}"
    return centre, f"{words} (steps {where})" if where else words, list(found.values())


def _memory(run: Run) -> Iterator[tuple[str, tuple[Trend, int]]]:
    """Where memory goes, by the name it was logged under, and in how many logs."""
    for name, series in sorted(run.series.items()):
        unit = _MEMORY.search(name)
        kept = series.where(math.isfinite)
        if unit and len(kept) and "peak" not in name:
            scale = MIB * (1024 if "gib" in (unit[1] or unit[2]).lower() else 1)
            found = trend(kept.steps, [scale * value for value in kept.values], enough=_ENOUGH)
            yield name.removeprefix(PREFIX), (found, len(kept))


def _accuracies(run: Run) -> list[str]:
    """Names of accuracies, evaluation first."""
    found = [
        name for name, its in run.series.items() if _ACCURACY.fullmatch(name) and any(map(math.isfinite, its.values))
    ]
    return sorted(found, key=lambda name: (not name.startswith("eval"), name))


def _extras(run: Run, memory: Mapping[str, tuple[Trend, int]]) -> Iterator[tuple[str, str]]:
    """Accuracy, learning rate, memory and the ranks' losses, if they were logged: a name and a text."""
    for name in (*_accuracies(run)[:1], "learning_rate", *sorted(filter(_MEMORY.search, run.series))):
        series = run.series.get(name, Series()).where(math.isfinite)
        if len(series):
            highest = max(series.values)
            at = series.steps[series.values.index(highest)]
            words = f"{series.values[0]:.4g} at first, {highest:.4g} at step {at:.0f}, {series.values[-1]:.4g} last"
            name = name.removeprefix(PREFIX)
            yield name.replace("_", " "), f"{words}; {memory[name][0]}" if name in memory else words
    of_ranks = {match[1]: run.series[key] for key in run.series if (match := _OF_A_RANK.fullmatch(key))}
    means = {
        rank: fmean(its.values[len(its) // 2 :])
        for rank, series in of_ranks.items()
        if len(its := series.where(math.isfinite))
    }
    if len(means) > 1:
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
