"""The loss from log to log: divergence, jumps, swings, a stall, too large a first loss, an accuracy that stalls.

    trend, alarms = LossTrend(), Alarms()
    ...
    alarms.say(trend.judge(meter.read(), rate))      # meter: a LossMeter, read at every log; rate: the learning rate

A loss that jumps, swings or stalls may be a fault or intended: a restart, a second stage, a curriculum, a slow
fine-tune. If the learning rate shows which, that decides; else it is reported as an observation (`Alarm`). Imports
no torch: `watch` judges logs by the same classes.
"""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.robust import error_of_mean, noise_sigma, slope_of_means, theil_sen

if TYPE_CHECKING:
    from hf_accum_fix.monitor.loss import LossReading


class OfLoss:
    """Base: judged by a `LossMeter`'s reading, or by a logged loss."""

    def judge(self, reading: LossReading, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        """The alarm or observation that this reading completes, if any. Every rank judges alike, without communication.

        Args:
            reading: of a `LossMeter`.
            rate: learning rate now; nan where it is not known.
            epoch: epochs so far, with fractions; nan where they are not known.
        """
        return self.add(reading.mean, rate, epoch)

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        """The same of a loss that is a number."""
        raise NotImplementedError


#: Logs in a mean: hard stretches of data pass sooner. Ratio to the mean before, or to the best, that is a jump; to the
#: best that is divergence; to the best of every log in the mean; of two learning rates that is a rise. Errors of a mean
#: that the loss wanders by itself.
_LOGS, _JUMP, _FAR, _BACK, _RISE, _WANDERS = 30, 1.5, 2.0, 1.2, 1.05, 5.0


class LossTrend(OfLoss):
    """Detect a loss that is lost again (alarm), or has jumped and stays there (observation).

    Means of 30 logs are compared. It has jumped where it is 1.5 times the 30 logs before. It diverges where it has
    jumped to twice its best and at least halfway back to the first log, or is above that, and its later half is no
    lower than its earlier: data that are new, or harder, are learned. No log of the mean is near the best, so that no
    spikes and no hard stretches of data count. Where logs are correlated, as with difficulty that persists for some, a
    mean of 30 is one of few: it has to be above the best by five errors, as stretches of 30 logs show them (all but the
    largest, which may hold the jump). Told once; again where the loss has doubled since, or has recovered in between.
    """

    def __init__(self) -> None:
        self._logs = deque[tuple[float, float]](maxlen=2 * _LOGS)
        self._count, self._errors = 0, list[float]()
        self._first, self._best, self._jumped, self._diverged = math.nan, math.inf, math.inf, math.inf

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        if not math.isfinite(loss):
            return None  # RankLoss reports it.
        self._logs.append((loss, rate))
        if math.isnan(self._first):
            self._first = loss
        logs = [its for its, _ in self._logs]
        last, earlier = logs[-_LOGS:], logs[:-_LOGS]
        if len(last) < _LOGS:
            return None
        now = fmean(last)
        self._best = best = min(self._best, now)
        self._count += 1
        if self._count % _LOGS == 1 and min(last) > 0:
            self._errors.append(error_of_mean([math.log(its) for its in last]))
        if now < _BACK * best:
            self._jumped = self._diverged = math.inf
        if not now > _JUMP * best > 0 or min(last) < _BACK * best:
            return None
        levels = f"{now:.4g} over the last {_LOGS} logs, {best:.4g} at its best, {self._first:.4g} in the first log"
        learns = fmean(last[_LOGS // 2 :]) < fmean(last[: _LOGS // 2])
        jumped = len(earlier) == _LOGS and now > _JUMP * fmean(earlier)
        errors = sorted(self._errors)[:-1]
        wanders = math.exp(_WANDERS * math.sqrt(2 * fmean(its**2 for its in errors))) if errors else 1.0
        far = now > max(_FAR * best, wanders * best, (self._first + best) / 2) and (jumped or now > self._first)
        if far and not learns and not now / 2 < self._diverged < math.inf:
            self._jumped = self._diverged = now
            return Alarm(
                "loss-diverges",
                f"the loss diverges: {levels}; look at the learning rate (a longer warm-up, a lower peak), the data "
                "since then and the gradient norms before it rose",
            )
        if not jumped or now / 2 < self._jumped < math.inf:
            return None
        self._jumped = now
        rates = [its for _, its in self._logs]
        before, after = fmean(rates[:_LOGS]), max(rates[_LOGS:])
        rose = f"; the learning rate rose from {before:.3g} to {after:.3g}" if after > _RISE * before else ""
        return Alarm(
            "loss-jumped",
            f"the loss has jumped, and stays there: {levels}{rose}; a new stage, harder data and a restart look like "
            "this, and so do a learning rate that is too high, broken data and a checkpoint that was not loaded",
            observation=True,
        )


#: Logs looked at; logs from one look to the next; fewest periods in them, and so the longest; logs that a slow swing's
#: look averages.
_LOOK, _EVERY, _FEWEST, _SWIFT, _SLOW = 64, 32, 5, 13, 4
#: Share of the power that one frequency and its two neighbours have; relative deviation of the loss that counts; of a
#: period from an epoch that are the same.
_SHARE, _SWING, _OF_EPOCH = 0.6, 0.07, 0.1


class LossOscillation(OfLoss):
    """Detect a swing by 12 % and more, of one period of 3 to 16 logs by the 96th log, of 17 to 60 by the 384th.

    In two looks at 64 logs (at 64 means of 4) each, of the log losses without their linear trend and under Hann's
    window, one frequency and its neighbours hold 60 % of the power, which noise hardly does twice, correlated or not.
    Told once as long as it lasts: an alarm where the learning rate is known not to restart, nothing where it restarts,
    an observation where it is not known, and where the period is known to be one epoch, as of data in one order.

    Source: Fisher 1929, "Tests of significance in harmonic analysis".
    """

    def __init__(self) -> None:
        self._looks = (_Look(1), _Look(_SLOW))

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        found = [look.add(loss, rate, epoch) for look in self._looks]
        return next((alarm for alarm in found if alarm is not None), None)


class _Look:
    """A swing among 64 means of so many logs."""

    def __init__(self, every: int) -> None:
        self._mean = every
        self._part: list[float] = []
        self._logs = deque[float](maxlen=_LOOK)
        self._schedule = deque[tuple[float, float]](maxlen=_LOOK * every)
        self._count, self._before, self._reported = 0, 0, False

    def add(self, loss: float, rate: float, epoch: float) -> Alarm | None:
        if not 0 < loss < math.inf:
            self._logs.clear()  # RankLoss reports a loss that is not finite; the others may swing around zero.
            return None
        self._part.append(math.log(loss))
        self._schedule.append((rate, epoch))
        if len(self._part) < self._mean:
            return None
        self._logs.append(fmean(self._part))
        self._part.clear()
        self._count += 1
        if self._count % _EVERY or len(self._logs) < _LOOK:
            return None
        found, swing = _dominant(list(self._logs))
        # A swift swing is the first look's.
        found = found if self._mean == 1 or self._mean * _LOOK > _SWIFT * found else 0
        before, self._before = self._before, found
        if not found or abs(found - before) > 1:
            self._reported = self._reported and bool(found)
            return None
        rates, epochs = zip(*self._schedule, strict=True)
        restarts = _restarts(rates)
        if self._reported or restarts > 1:
            return None
        self._reported = True
        steady, of_epoch = restarts == 0, abs((epochs[-1] - epochs[0]) / found - 1) < _OF_EPOCH
        known = f"{', which is one epoch' * of_epoch}{', and the learning rate does not restart' * steady}"
        return Alarm(
            "loss-oscillates",
            f"the loss swings by +- {math.sqrt(2) * swing:.0%} with a period of {self._mean * _LOOK / found:.3g} logs"
            f"{known}; look at the learning rate (lower{', or its restarts' * (not steady)}), the order of the data "
            "(shuffled in every epoch) and the momentum",
            observation=of_epoch or not steady,
        )


def _restarts(rates: Sequence[float]) -> float:
    """How often a learning rate rises after it has fallen or stood; nan where it is not known."""
    if not all(map(math.isfinite, rates)):
        return math.nan
    rising = [after > _RISE * before for before, after in pairwise(rates)]
    return sum(now and not earlier for earlier, now in pairwise(rising))


def _dominant(values: Sequence[float]) -> tuple[int, float]:
    """Periods of the dominant swing in these values, 0 where there is none, and the deviation from the trend."""
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    mean = fmean(values)
    slope = sum(x * y for x, y in zip(places, values, strict=True)) / sum(x * x for x in places)
    rest = [y - mean - slope * x for x, y in zip(places, values, strict=True)]
    swing = pstdev(rest)
    if swing < _SWING:
        return 0, swing
    windowed = [y * (1 - math.cos(2 * math.pi * (i + 0.5) / count)) for i, y in enumerate(rest)]
    power = [
        abs(sum(y * cmath.exp(-2j * math.pi * k * i / count) for i, y in enumerate(windowed))) ** 2
        for k in range(count // 2 + 1)
    ]
    at = max(range(_FEWEST, len(power)), key=lambda k: power[k])
    return (at if sum(power[at - 1 : at + 2]) > _SHARE * sum(power) else 0), swing


#: Logs until the judgement, blocks of them that a slope is taken over, logs that are the beginning, and the end.
_JUDGED, _BLOCKS, _FIRST, _LAST = 300, 60, 5, 30
#: Fall of the loss, as a share, that is learning; of the first logs above the rest, and in their standard errors; of a
#: tenth of the logs below the first.
_LEARNED, _ABOVE, _ERRORS, _FAR_BELOW = 0.05, 0.02, 3.0, 0.2


class LossStall(OfLoss):
    """Judge once, at the 300th log, whether the loss has fallen since the first.

    It has where the line through all logs (Theil and Sen, 99.9 %) falls for sure, or by 5 %; where the first five logs
    lie above the rest, by 2 % and three standard errors; or where a tenth of the logs lie 20 % below them. Losses that
    may be negative are not judged: no level of theirs means that nothing is learned. An observation, because a slow
    fine-tune and a task that is understood late look the same; an alarm where the learning rate was zero throughout.
    """

    def __init__(self) -> None:
        self._logs: list[float] = []
        self._rates: list[float] = []

    def add(self, loss: float, rate: float = math.nan, epoch: float = math.nan) -> Alarm | None:
        if math.isnan(loss) or len(self._logs) >= _JUDGED:
            return None
        self._logs.append(loss)
        self._rates.append(rate)
        if len(self._logs) < _JUDGED or not all(0 < its < math.inf for its in self._logs):
            return None
        slope = slope_of_means(range(_JUDGED), self._logs, _BLOCKS, 0.999)
        mean, first = fmean(self._logs), fmean(self._logs[:_FIRST])
        error = noise_sigma(self._logs) / math.sqrt(_FIRST)
        fell_at_once = first - mean > max(_ABOVE * mean, _ERRORS * error)
        lowest = min(fmean(self._logs[place : place + _LAST]) for place in range(0, _JUDGED, _LAST))
        falls = slope.high < 0 or -slope.value * _JUDGED > _LEARNED * mean
        if falls or fell_at_once or lowest < (1 - _FAR_BELOW) * first:
            return None
        stalls = (
            f"the loss is where it began: {first:.4g} in the first {_FIRST} logs, "
            f"{fmean(self._logs[-_LAST:]):.4g} in the last {_LAST} of {_JUDGED}"
        )
        if max(self._rates) == 0:
            return Alarm("loss-stalls", f"{stalls}; the learning rate is 0: look at its schedule")
        return Alarm(
            "loss-stalls",
            f"{stalls}; expected of a slow fine-tune and of a task that is learned late; else look at the learning "
            "rate, at parameters that are frozen or not held by the optimizer, and at the labels",
            observation=True,
        )


#: Ratio of a first loss to a guess's that is too large.
_OVER_A_GUESS = 1.5


class FirstLoss:
    """Compare the first loss of a run with a guess's: nothing divided it, labels are off, or the start is bad."""

    def __init__(self) -> None:
        self._judged = False

    def judge(self, reading: LossReading, guess: float) -> Alarm | None:
        """The alarm that the first reading calls for, if any. Every rank judges alike, without communication.

        Args:
            reading: of a `LossMeter`.
            guess: ln(classes) or ln(vocabulary); nan where there are no classes, or they are not known yet.
        """
        return self.add(reading.mean, guess)

    def add(self, loss: float, guess: float) -> Alarm | None:
        """The same of a loss that is a number."""
        if self._judged or math.isnan(loss) or not guess > 0:
            return None
        self._judged = True
        if not math.isfinite(loss) or loss <= _OVER_A_GUESS * guess:
            return None  # RankLoss reports a loss that is not finite.
        return Alarm(
            "first-loss-above-a-guess",
            f"the first loss, {loss:.4g}, is {loss / guess:.2g} times the loss of a guess, ln({math.exp(guess):.0f}) = "
            f"{guess:.3g}: a mean that is not divided by the accumulation steps looks like this, see `hf-accum-fix "
            "doctor`; else look at the labels, the tokenizer and the initialisation",
        )


#: Fewest evaluations; share of the first loss that a loss has fallen to; gain in accuracy that is one; near 1.
_ENOUGH, _FALLEN, _GAIN, _HIGH = 8, 0.7, 0.02, 0.95


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
        if self._reported or len(accuracies) < _ENOUGH or losses[0] <= 0:
            return None
        slope = theil_sen(range(len(accuracies)), accuracies)
        gain = slope.value * (len(accuracies) - 1)
        risen = slope.low > 0 or max(gain, accuracies[-1] - accuracies[0]) > _GAIN
        if fmean(losses[-len(losses) // 4 :]) >= _FALLEN * losses[0] or risen or fmean(accuracies) >= _HIGH:
            return None
        self._reported = True
        return Alarm(
            "accuracy-stands",
            f"the loss falls from {losses[0]:.4g} to {losses[-1]:.4g} while the accuracy stalls: {accuracies[0]:.4g} "
            f"to {accuracies[-1]:.4g} in {len(accuracies)} evaluations; look at what the loss counts (masked labels, "
            "padding), at the metric and its labels, and for data that are memorised",
        )
