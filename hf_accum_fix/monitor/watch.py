"""A run in one look: its loss, its gradients and its alarms; and the ratio of two runs. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.gradient_norm import LOOK_AT, GradientNorm
from hf_accum_fix.monitor.loss_over_time import FirstLoss, LossOscillation, LossStall, LossTrend
from hf_accum_fix.monitor.robust import Slope, blocks, error_of_mean, noise_sigma, slope_of_means
from hf_accum_fix.monitor.series import GUESS, PREFIX, Run, Series, without_sentinels
from hf_accum_fix.monitor.thresholds import A_FACTOR, NOT_ZERO, OVER_THE_BEST, THE_SAME_FACTOR

#: Fewest logs that show a trend above the noise; most points behind a slope; logged norms judged together.
_ENOUGH, _POINTS, _NORMS_A_READING = 8, 60, 20


@dataclass(frozen=True)
class Summary:
    """One run."""

    run: str  # its name
    loss: Series  # the logged losses that are some: finite, and no -1 or 0 that stands for none
    norm: float  # median of the logged gradient norms; nan where none was logged
    findings: tuple[Alarm, ...]  # alarms and observations of the monitors in these logs
    rows: tuple[tuple[str, str], ...]  # a name and a text each: all that is shown of it


def summarise(run: Run) -> Summary:
    """Summary of a run's logs."""
    logged = run.series["loss"]
    zeros, before = list[float](), math.inf
    for step, value in zip(logged.steps, logged.values, strict=True):
        if value == 0 and before > NOT_ZERO:
            zeros.append(step)
        elif value != 0 and math.isfinite(value):
            before = abs(value)
    finite = logged.where(math.isfinite)
    sentinels = without_sentinels(finite.values)[1]
    loss = finite.where(lambda value: not (zeros and value == 0) and not (sentinels and value == -1))
    broken = logged.where(lambda value: not math.isfinite(value)).steps
    findings = []
    if broken:
        words = f"{len(broken)} logged losses are not finite or beyond 1e60, the first at step {broken[0]:.0f}"
        findings.append(Alarm("loss-not-finite", words))
    if zeros:
        words = f"{len(zeros)} logged losses are exactly 0, the first at step {zeros[0]:.0f}: a Trainer logs nan as 0 "
        findings.append(Alarm("loss-zero", f"{words}(logging_nan_inf_filter), and a batch without targets has no loss"))
    if sentinels:
        words = f"{sentinels} of {len(finite)} losses are -1: a rank without a loss (a pipeline stage before the last) "
        findings.append(Alarm("no-loss", f"{words}logs that; read the log of a rank of the last stage"))
    norm, spikes, of_norms = _norms(run)
    findings += [*_of_loss(run, loss), *of_norms]
    rows = [("loss", _in_words(loss)), *([("gradient norm", spikes)] if spikes else [])]
    rows += [("left out", run.left_out)] if run.left_out else []
    return Summary(run.name, loss, norm, (*findings, *_alarms(run)), tuple(rows))


def _in_words(loss: Series) -> str:
    """First and last loss, with the error of the last, and the trend."""
    if not len(loss):
        return "none left"
    tail = loss.values[-max(len(loss) // 10, 1) :]
    words = f"{loss.values[0]:.4g} at step {loss.steps[0]:.0f}, {fmean(tail):.4g} last"
    words += f" (+- {error_of_mean(tail):.2g})" if len(tail) > 1 else ""
    half = len(loss) // 2
    if len(loss) - half < _ENOUGH:
        return words
    its: Slope = slope_of_means(loss.steps[half:], loss.values[half:], _POINTS)
    verb = "rises" if its.low > 0 else "falls" if its.high < 0 else "flat"
    return f"{words}; {verb} over the second half ({100 * its.low:+.3g} to {100 * its.high:+.3g} per 100 steps)"


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
    if len(loss) < _ENOUGH:
        return
    means = [fmean(loss.values[part.start : part.stop]) for part in blocks(len(loss), 10)]
    best, now = min(means), means[-1]
    wanders = 1 + 4 * noise_sigma([math.log(value) for value in loss.values]) if min(loss.values) > 0 else math.inf
    if now > max(OVER_THE_BEST * best * wanders, (best + loss.values[0]) / 2) and not seen & {"loss-diverges"}:
        yield Alarm("loss-diverges", f"the loss diverges: {now:.4g} in its last tenth, {best:.4g} in its best")
    if loss.values[0] > 0 and -1 < best < 0:
        words = "the loss goes below zero and stays above -1: a mean over the stages of a pipeline, of which all but "
        yield Alarm("loss-of-stages", f"{words}the last report -1, looks like this; read the log of the last stage")


def _norms(run: Run) -> tuple[float, str, list[Alarm]]:
    """Median and words of the logged norms, and what `GradientNorm` finds in them.

    Spikes are observations: the items of a step are not known.
    """
    series = run.series.get("grad_norm", Series())
    norms, found, spikes = GradientNorm(), dict[str, Alarm](), list[str]()
    for part in blocks(len(series), len(series) // _NORMS_A_READING + 1):
        reading = norms.reading([norms.add([series.values[place] for place in part], [math.nan] * len(part))])
        if reading.spikes:
            spikes.append(f"{series.steps[part[-1] - int(reading.steps_ago)]:.0f}")
        alarm = norms.judge(replace(reading, spikes=0))
        if alarm is not None:
            found.setdefault(
                alarm.kind, replace(alarm, message=f"by step {series.steps[part[-1]]:.0f}, {alarm.message}")
            )
    if spikes:
        words = f"the gradient norm spikes, at step {', '.join(spikes[:5])}; {LOOK_AT}"
        found["spikes"] = Alarm("gradient-norm-spike", words, observation=True)
    usual = series.where(lambda norm: math.isfinite(norm) and norm > 0).values
    centre = median(usual) if usual else math.nan
    return centre, f"median {centre:.3g}" if usual else "", list(found.values())


def _alarms(run: Run) -> Iterator[Alarm]:
    """The monitors' own counts, where they were logged."""
    for key, series in sorted(run.series.items()):
        name = key.removeprefix(PREFIX)
        if name.endswith("_alarms") and name != key and (name != "all_alarms") and max(series.values) > 0:
            first = next(step for step, count in zip(series.steps, series.values, strict=True) if count > 0)
            yield Alarm(name, f"{name.replace('_', ' ')}: {max(series.values):.0f}, the first by step {first:.0f}")


@dataclass(frozen=True)
class Findings:
    """The report on some runs."""

    words: str  # all of it
    findings: tuple[str, ...]  # what is wrong with any of them
    undecided: tuple[str, ...]  # what could not be read or compared

    @property
    def exit_code(self) -> int:
        """1: something is wrong; 3: else, something is undecided; 0: neither."""
        return 1 if self.findings else 3 if self.undecided else 0


def ratio(one: Summary, other: Summary) -> tuple[str, bool | None]:
    """The ratio of one run's losses to another's at equal steps, in words; and whether it is one factor throughout.

    None: no step is in both. One factor, 1.8 or more, is made by how a loss is scaled, not by what is learned.
    """
    mine, theirs = (dict(zip(each.loss.steps, each.loss.values, strict=True)) for each in (one, other))
    found = sorted(mine[step] / theirs[step] for step in mine.keys() & theirs.keys() if theirs[step])
    if not found:
        return f"{one.run} against {other.run}: no steps in common", None
    low, middle, high = found[len(found) // 10], median(found), found[-1 - len(found) // 10]
    words = (
        f"{one.run} against {other.run}: {middle:.4g} times its loss ({low:.3g} to {high:.3g}) at {len(found)} steps"
    )
    norms = one.norm / other.norm
    words += "" if math.isnan(norms) else f", {norms:.4g} times its gradient norm"
    if low > 0 and max(middle, 1 / middle) > A_FACTOR and high < THE_SAME_FACTOR * low:
        return f"{words}: one factor throughout; look at how the loss is scaled (accumulation steps, ranks)", True
    return words, False


def look(runs: Sequence[Run], unread: Sequence[str] = ()) -> Findings:
    """Each run in words, and compared with the first; and what is wrong with any, with which the words end.

    Args:
        runs: that were read.
        unread: what could not be read, in words.
    """
    summaries = [summarise(run) for run in runs]
    ratios = [ratio(its, summaries[0]) for its in summaries[1:]]
    alarms = [(alarm.observation, f"{its.run}: {alarm.message}") for its in summaries for alarm in its.findings]
    found = [words for observation, words in alarms if not observation]
    found += [words for words, is_factor in ratios if is_factor]
    undecided = [f"could not read: {line}" for line in unread]
    undecided += [f"could not compare: {words}" for words, is_factor in ratios if is_factor is None]
    lines = list[str]()
    for its in summaries:
        lines += [f"{its.run}: {len(its.loss)} logged losses", *(f"  {name:15} {words}" for name, words in its.rows)]
    lines += [words for words, _ in ratios]
    observed = [words for observation, words in alarms if observation]
    lines += ["observed, which may be intended:", *(f"  {words}" for words in observed)] if observed else []
    lines += [f"{len(found)} findings" if found else "nothing wrong was found", *(f"  {words}" for words in found)]
    return Findings("\n".join([*lines, *undecided]), tuple(found), tuple(undecided))
