"""One run in numbers: its loss, its noise, its gradients, its accuracy and its alarms. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hf_accum_fix.monitor.accuracy_trend import in_words, stands
from hf_accum_fix.monitor.pipeline import Sentinel, without_sentinels
from hf_accum_fix.monitor.robust import (
    SIGMA_PER_MAD,
    Slope,
    blocks,
    median_and_sigma,
    noise_of_means,
    noise_sigma,
    theil_sen,
)
from hf_accum_fix.monitor.run_logs import GUESS, PREFIX, Run, Series

#: Fewest logs that show a trend, or a difference, above the noise.
ENOUGH = 8
#: Most points behind a slope.
_POINTS = 60
#: A gradient norm is a spike if its logarithm is this many times the noise above the median of so many neighbours on
#: either side, and if it is at least this many times as large.
_SPIKE, _NEIGHBOURS, _SPIKE_TIMES = 9.0, 20, 3.0
#: Names that memory, and one rank's loss, are logged under.
_MEMORY = re.compile(r"memory_(peak_)?(mib|gib)$|^memory/max_(active|reserved)\(GiB\)$")
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


def summarise(run: Run) -> Summary:
    """What a run's logs say."""
    logged = run.series["loss"]
    _, sentinel = without_sentinels([value for value in logged.values if math.isfinite(value)])
    loss = logged.where(lambda value: math.isfinite(value) and (sentinel is None or value != sentinel.value))
    tail = loss.values[-max(len(loss) // 10, 1) :]
    last = fmean(tail) if tail else math.nan
    as_share = 1.0 if all_positive(loss.values) else abs(last)
    return Summary(
        run=run.name,
        loss=loss,
        last=last,
        last_error=noise_of_means(scaled(loss.values)) / as_share * abs(last) / math.sqrt(max(len(tail), 1)),
        slope=_slope_of_second_half(loss),
        noise=noise_sigma(scaled(loss.values)) / as_share,
        not_finite=logged.where(lambda value: not math.isfinite(value)).steps,
        sentinel=sentinel,
        gradients=_gradients(run),
        accuracy=_accuracy(run, loss),
        alarms=dict(_alarms(run)),
        guess=run.series[GUESS].values[0] if GUESS in run.series else math.nan,
        beside=tuple(_beside(run)),
    )


def _slope_of_second_half(series: Series) -> Slope | None:
    """Slope over block means, so that a long run is quick and correlated neighbours count as one."""
    half = len(series) // 2
    steps, values = series.steps[half:], series.values[half:]
    if len(set(steps)) < ENOUGH:
        return None
    parts = blocks(len(steps), _POINTS)
    return theil_sen(
        [fmean(steps[place] for place in part) for part in parts],
        [fmean(values[place] for place in part) for part in parts],
    )


def _gradients(run: Run) -> GradientNorms | None:
    norms = run.series.get("grad_norm", Series((), ())).where(lambda norm: math.isfinite(norm) and norm > 0)
    if not len(norms):
        return None
    centre, sigma = median_and_sigma(norms.values)
    logs = [math.log(norm) for norm in norms.values]
    bar = max(_SPIKE * noise_sigma(logs), math.log(_SPIKE_TIMES)) if len(logs) >= ENOUGH else math.inf
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
    series = run.series[names[0]].where(math.isfinite)
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
        series = run.series.get(key, Series((), ())).where(math.isfinite)
        if len(series) and (key == "learning_rate" or _MEMORY.search(name)):
            highest = max(series.values)
            at = series.steps[series.values.index(highest)]
            first, last = series.values[0], series.values[-1]
            yield name.removeprefix(PREFIX), f"{first:.3g} at first, {highest:.3g} at step {at:.0f}, {last:.3g} last"
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
    return found


def all_positive(values: Sequence[float]) -> bool:
    """Whether every value has a logarithm."""
    return all(value > 0 for value in values)


def scaled(values: Sequence[float]) -> list[float]:
    """Logarithms where there are some: noise as a share of the loss."""
    return [math.log(value) for value in values] if all_positive(values) else list(values)
