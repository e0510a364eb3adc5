"""What a training has to come to whose loss is to be read from its graph."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from enum import Enum
from pathlib import Path

from tests import trainings
from tests.numerics.parity import applied
from tests.trainings import Case, Cut, Training, sizes

WHOLE, HALVES, PAIRS, SINGLES, UNEVEN = (8, 1), (4, 2), (2, 4), (1, 8), (3, 1, 2, 2)

#: Relative error of a parameter change that rounding leaves where the library has float32.
FLOAT32 = 1e-6
#: So close to stock's error is not worse, and is stock's.
AS_STOCK, STOCKS = 1.05, 1.000001
#: Large enough that a loss moves, and so small that stock's parameters are all but ours, window by window.
RATE = 1e-3


class Verdict(Enum):
    """What a training has to come to.

    EXACT: the full batch's gradient and log, called exact, and no warning.
    GRADIENT: the full batch's gradient, whatever is said; its log too if it is called exact, else no worse than stock.
    EITHER: the full batch's gradient; or a warning in time, never worse than stock, not called exact.
    INEXACT: a warning in time, never worse than stock, not called exact.
    NAMED: right or no worse than stock, not called exact, and one warning that names the number.
    AVERAGED: the reference, which is the mean over micro-batches; a warning, not called exact.
    STOCK: stock's, a warning, not called exact.
    """

    EXACT = "exact"
    GRADIENT = "gradient"
    EITHER = "either"
    INEXACT = "inexact"
    NAMED = "named"
    AVERAGED = "averaged"
    STOCK = "stock"


def faults(ours: Training, case: Case, stock: Training, cut: Cut) -> list[str]:
    """What is against a case's verdict, in words; empty where all is well."""
    verdict, floor, wrong = case.verdict, case.tolerance, wrong_windows(ours, case.tolerance)
    first = min((window for window, _ in ours.said), default=len(ours.errors))
    found = []
    if wrong and ours.exact:
        found.append(f"called exact, and off by {ours.worst:.1e}")
    found += [
        f"window {window} is off by {mine:.1e}, stock by {theirs:.1e}"
        for window, (mine, theirs) in enumerate(zip(ours.windows, stock.windows, strict=True))
        if mine > (STOCKS if verdict is Verdict.STOCK else AS_STOCK) * theirs + floor or math.isnan(mine)
    ]
    if verdict in (Verdict.EXACT, Verdict.GRADIENT, Verdict.AVERAGED) and wrong:
        found.append(f"off by {ours.worst:.1e}")
    if verdict in (Verdict.EXACT, Verdict.GRADIENT) and not _log_is_right(ours, stock):
        found.append(f"logs {[*ours.logged]} for {[*ours.losses]}")
    if verdict is Verdict.EXACT:
        # Of a loss that is declared nothing is reported.
        found += ["not called exact"] * (ours.exact is not True and case.trainer is not None)
        found += [f"said without need: {words}" for _, words in ours.said]
    if verdict in (Verdict.EITHER, Verdict.INEXACT):
        found += [f"window {window} is off by {ours.errors[window]:.1e}, unsaid" for window in wrong if window < first]
    if verdict in (Verdict.INEXACT, Verdict.NAMED, Verdict.AVERAGED, Verdict.STOCK):
        found += ["called exact"] * bool(ours.exact)
        found += ["nothing said"] * (not ours.said)
    if verdict is Verdict.NAMED:
        names = [words for _, words in ours.said if names_steps(words, len(sizes(cut)))]
        found += [f"{len(names)} warnings name the number"] * (len(names) != 1)
    return found


def _log_is_right(ours: Training, stock: Training) -> bool:
    if any("the log averages it over micro-batches" in words for _, words in ours.said):
        # What has no gradient has no node that shows what it is a mean over.
        return True
    return ours.log_error <= 2e-5 or (ours.exact is not True and ours.log_error <= AS_STOCK * stock.log_error)


def wrong_windows(training: Training, floor: float) -> list[int]:
    return [window for window, error in enumerate(training.windows) if not error <= floor]


def names_steps(words: str, steps: int) -> bool:
    """Whether 1/G is named in one way or another; "G=4" alone names no constant."""
    words = re.sub(r"\bG\s*=\s*\d+", "", words)
    return re.search(rf"(?<![\d.]){steps}(?![\d.]*\d)|{re.escape(f'{1 / steps:g}')}", words) is not None


@functools.cache
def by_trainer(case: Case, cut: Cut, path: str) -> Training:
    """By the case's trainer: "stock", or "apply"."""
    with tempfile.TemporaryDirectory() as output, applied(path, **case.options):
        return trainings.train(case, cut, Path(output))


@functools.cache
def by_loop(case: Case, cut: Cut, path: str) -> Training:
    """The model's own loss, or the loop's, by a loop; "stock" divides by G."""
    return trainings.loop(case, cut, trainings.ours if path == "apply" else trainings.by_hand)
