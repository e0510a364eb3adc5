"""The loss from log to log: divergence, swings, a stall, too large a first loss, an accuracy that stalls.

A loss that swings or stalls may be a fault or intended: a restart, a curriculum, a slow fine-tune. If the learning rate
shows which, that decides; else it is reported as an observation (`Alarm`). Imports no torch: `watch` judges logs by the
same classes.
"""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.robust import error_of_mean, noise_sigma, slope_of_means, theil_sen


class LossTrend:
    """Detect a loss that is lost again.

    Means of 30 logs are compared: twice the best, halfway back to the first, up from the 30 logs before or above the
    first, and its later half no lower than its earlier: data that are new, or harder, are learned. No log of the mean
    is near the best. Where logs are correlated, a mean of 30 is one of few: it has to be above the best by five errors,
    as stretches of 30 logs show them (all but the largest, which may hold the jump). Reported once; again where the
    loss has doubled since, or has recovered in between.
    """

    def __init__(self) -> None:
        self._logs = deque[float](maxlen=2 * at.LOGS)
        self._count, self._errors = 0, list[float]()
        self._first, self._best, self._diverged = math.nan, math.inf, math.inf

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        """The alarm or observation that a logged loss completes, if any. Every rank judges alike.

        Args:
            loss: the mean over the items.
            rate: learning rate now; nan where it is not known.
            epoch: epochs so far, with fractions; nan where they are not known.
        """
        if not math.isfinite(loss):
            return None  # RankLoss reports it.
        self._first = loss if math.isnan(self._first) else self._first
        self._logs.append(loss)
        last, earlier = [*self._logs][-at.LOGS :], [*self._logs][: -at.LOGS]
        if len(last) < at.LOGS:
            return None
        now = fmean(last)
        self._best = best = min(self._best, now)
        self._count += 1
        if self._count % at.LOGS == 1 and min(last) > 0:
            self._errors.append(error_of_mean([math.log(its) for its in last]))
        if now < at.BACK * best:
            self._diverged = math.inf
        learns = fmean(last[at.LOGS // 2 :]) < fmean(last[: at.LOGS // 2])
        if learns or now / 2 < self._diverged < math.inf or best <= 0 or min(last) < at.BACK * best:
            return None
        errors = sorted(self._errors)[:-1]
        wanders = math.exp(at.WANDERS * math.sqrt(2 * fmean(its**2 for its in errors))) if errors else 1.0
        far = now > max(max(at.FAR_OVER_BEST, wanders) * best, (self._first + best) / 2)
        jumped = len(earlier) == at.LOGS and now > at.JUMP * fmean(earlier)
        if not far or not (jumped or now > self._first):
            return None
        self._diverged = now
        return Alarm(
            "loss-diverges",
            f"the loss diverges: {now:.4g} over the last {at.LOGS} logs, {best:.4g} at its best, {self._first:.4g} in "
            "the first log; look at the learning rate (a longer warm-up, a lower peak), the data since then and the "
            "gradient norms before it rose",
        )


class LossOscillation:
    """Detect a swing by 12 % and more, of one period of 3 to 16 logs, by the 96th log.

    In two looks at 64 logs each, of the log losses without their linear trend and under Hann's window, one frequency
    and its neighbours hold 60 % of the power, which noise hardly does twice, correlated or not. Told once as long as it
    lasts: an alarm where the learning rate is known not to restart, nothing where it restarts, an observation where it
    is not known, and where the period is known to be one epoch, as of data in one order.

    Source: Fisher 1929, "Tests of significance in harmonic analysis".
    """

    def __init__(self) -> None:
        self._logs = deque[tuple[float, float, float]](maxlen=at.LOOK)
        self._count, self._before, self._reported = 0, 0, False

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        if not 0 < loss < math.inf:
            self._logs.clear()  # RankLoss reports a loss that is not finite; the others may swing around zero.
            return None
        self._logs.append((math.log(loss), rate, epoch))
        self._count += 1
        if self._count % at.EVERY_LOOK or len(self._logs) < at.LOOK:
            return None
        losses, rates, epochs = zip(*self._logs, strict=True)
        found, swing = _dominant(losses)
        before, self._before = self._before, found
        if not found or abs(found - before) > 1:
            self._reported = self._reported and bool(found)
            return None
        restarts = _restarts(rates)
        if self._reported or restarts > 1:
            return None
        self._reported = True
        steady, of_epoch = restarts == 0, abs((epochs[-1] - epochs[0]) / found - 1) < at.OF_EPOCH
        return Alarm(
            "loss-oscillates",
            f"the loss swings by +- {math.sqrt(2) * swing:.0%} with a period of {at.LOOK / found:.3g} logs"
            f"{', which is one epoch' * of_epoch}; look at the learning rate (lower, or its restarts), the order of "
            "the data (shuffled in every epoch) and the momentum",
            observation=of_epoch or not steady,
        )


def _restarts(rates: Sequence[float]) -> float:
    """How often a learning rate rises after it has fallen or stood; nan where it is not known."""
    if not all(map(math.isfinite, rates)):
        return math.nan
    rising = [after > at.RISE * before for before, after in pairwise(rates)]
    return sum(now and not earlier for earlier, now in pairwise(rising))


def _dominant(values: Sequence[float]) -> tuple[int, float]:
    """Periods of the dominant swing in these values, 0 where there is none, and the deviation from the trend."""
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    mean = fmean(values)
    slope = sum(x * y for x, y in zip(places, values, strict=True)) / sum(x * x for x in places)
    rest = [y - mean - slope * x for x, y in zip(places, values, strict=True)]
    swing = pstdev(rest)
    if swing < at.SWING:
        return 0, swing
    windowed = [y * (1 - math.cos(2 * math.pi * (i + 0.5) / count)) for i, y in enumerate(rest)]
    power = [
        abs(sum(y * cmath.exp(-2j * math.pi * k * i / count) for i, y in enumerate(windowed))) ** 2
        for k in range(count // 2 + 1)
    ]
    top = max(range(at.FEWEST_PERIODS, len(power)), key=lambda k: power[k])
    return (top if sum(power[top - 1 : top + 2]) > at.SHARE * sum(power) else 0), swing


class LossStall:
    """Judge once, at the 300th log, whether the loss has fallen since the first.

    It has where the line through all logs (Theil and Sen, 99.9 %) falls for sure, or by 5 %; where the first five logs
    lie above the rest, by 2 % and three standard errors; or where a tenth of the logs lie 20 % below them. Losses that
    may be negative are not judged: no level of theirs means that nothing is learned. An observation, because a slow
    fine-tune and a task that is understood late look the same; an alarm where the learning rate was zero throughout.
    """

    def __init__(self) -> None:
        self._logs: list[float] = []
        self._highest_rate = -math.inf

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        if math.isnan(loss) or len(self._logs) >= at.JUDGED:
            return None
        self._logs.append(loss)
        self._highest_rate = math.nan if math.isnan(rate) else max(self._highest_rate, rate)
        if len(self._logs) < at.JUDGED or not all(0 < its < math.inf for its in self._logs):
            return None
        slope = slope_of_means(range(at.JUDGED), self._logs, at.SLOPES, 0.999)
        mean, first = fmean(self._logs), fmean(self._logs[: at.FIRST])
        error = noise_sigma(self._logs) / math.sqrt(at.FIRST)
        fell_at_once = first - mean > max(at.ABOVE * mean, at.ERRORS * error)
        lowest = min(fmean(self._logs[place : place + at.LOGS]) for place in range(0, at.JUDGED, at.LOGS))
        falls = slope.high < 0 or -slope.value * at.JUDGED > at.LEARNED * mean
        if falls or fell_at_once or lowest < (1 - at.FAR_BELOW) * first:
            return None
        return Alarm(
            "loss-stalls",
            f"the loss is where it began: {first:.4g} in the first {at.FIRST} logs, {mean:.4g} in the mean of "
            f"{at.JUDGED}; look at frozen parameters, labels, and the learning rate, at most {self._highest_rate:.3g}",
            observation=self._highest_rate != 0,
        )


class FirstLoss:
    """Compare the first loss of a run with a guess's: nothing divided it, labels are off, or the start is bad."""

    def __init__(self) -> None:
        self._judged = False

    def add(self, loss: float, guess: float) -> Alarm | None:
        """The alarm that the first loss calls for, if any. Every rank judges alike, without communication.

        Args:
            loss: the mean over the items.
            guess: ln(classes) or ln(vocabulary); nan where there are no classes, or they are not known yet.
        """
        if self._judged or math.isnan(loss) or not guess > 0:
            return None
        self._judged = True
        if not math.isfinite(loss) or loss <= at.OVER_A_GUESS * guess:
            return None  # RankLoss reports a loss that is not finite.
        return Alarm(
            "first-loss-above-a-guess",
            f"the first loss, {loss:.4g}, is {loss / guess:.2g} times the loss of a guess, ln({math.exp(guess):.0f}) = "
            f"{guess:.3g}: a mean that is not divided by the accumulation steps looks like this, see `hf-accum-fix "
            "doctor`; else look at the labels, the tokenizer and the initialisation",
        )


class AccuracyTrend:
    """Detect an accuracy that has stood from the first of eight evaluations or more, while the loss lost 30 %.

    An accuracy that is near 1 is no alarm, nor is one that has risen.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._accuracies: list[float] = []
        self._reported = False

    def judge(self, loss: float, accuracy: float) -> Alarm | None:
        """The alarm that this evaluation completes, if any: reported once.

        Args:
            loss: of the training since the last evaluation, the mean over its items.
            accuracy: between 0 and 1, the same on every rank.
        """
        if math.isfinite(loss) and math.isfinite(accuracy):
            self._losses.append(loss)
            self._accuracies.append(accuracy)
        losses, accuracies = self._losses, self._accuracies
        if self._reported or len(accuracies) < at.EVALUATIONS or losses[0] <= 0:
            return None
        slope = theil_sen(range(len(accuracies)), accuracies)
        gain = slope.value * (len(accuracies) - 1)
        risen = slope.low > 0 or max(gain, accuracies[-1] - accuracies[0]) > at.GAIN
        if fmean(losses[-len(losses) // 4 :]) >= at.FALLEN * losses[0] or risen or fmean(accuracies) >= at.HIGH:
            return None
        self._reported = True
        return Alarm(
            "accuracy-stands",
            f"the loss falls from {losses[0]:.4g} to {losses[-1]:.4g} while the accuracy stalls: {accuracies[0]:.4g} "
            f"to {accuracies[-1]:.4g} in {len(accuracies)} evaluations; look at what the loss counts (masked labels, "
            "padding), at the metric and its labels, and for data that are memorised",
        )
