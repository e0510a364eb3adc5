"""Every part of the random trainings once, with the simplest of the other kind: exact, or said."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

from tests.losses.verdicts import HALVES, PAIRS, RATE, SINGLES, UNEVEN, Verdict
from tests.random_trainings.compositions import Composition
from tests.random_trainings.parts import HEADS, OVERRIDES, Head
from tests.trainings import Case

#: What stock trains right however it is cut: what is by its number, without another term; and sums.
RIGHT_IN_STOCK = {
    "number", "number-of-classes", "number-by-hand", "number-in-float32", "number-and-kind-detached", "own-number",
    "own-number-by-hand", "func-number", "outputs-loss", "super-and-teacher-by-number", "sum", "sum-of-classes",
    "smoothing",
}  # fmt: skip
#: All others are exact. No sum of means, or a hidden one; a window whose terms are new.
_INEXACT = """
    without-nan in-batch-negatives flooded root-of-tokens reentrant reentrant-kind fused fused-kind queue centre
    over-average tasks class-by-class where-labelled-unlabelled-ragged own-reentrant super-and-teacher-alternating
    *-stop-gradient *-reversed *-greatest *-product *-flooded *-log *-later
"""
#: Something is said beside the right gradient: of a part without one, or of a sum, or as the loss is zero at first.
_GRADIENT = "sum sum-of-classes ratio *-detached *zero-first where-labelled-ragged-unlabelled"
#: A division by the steps.
_STOCK = "super-by-steps models-own-by-steps own-by-steps models-own-where-number"
#: The same by a number that was kept; and weights that may fit another count.
_OTHERS = {Verdict.NAMED: "*-kept-steps", Verdict.EITHER: "weights-by-hand-of-classes"}
VERDICTS = {Verdict.INEXACT: _INEXACT, Verdict.GRADIENT: _GRADIENT, Verdict.STOCK: _STOCK, **_OTHERS}


def verdict(name: str) -> Verdict:
    fits = [each for each, names in VERDICTS.items() if any(fnmatch(name, pattern) for pattern in names.split())]
    return fits[0] if fits else Verdict.EXACT


def wrong_uncut(head: Head, override: str) -> bool:
    """Where stock is off even in one micro-batch: in what it counts, and in the shift of what it smooths."""
    by_number = head.by_number or override in ("own-number", "own-number-by-hand", "func-number")
    counts_otherwise = override.startswith("masked") or head.ignore != -100
    return by_number and counts_otherwise


def alone(head: Head, override: str = "none", data: tuple[str, ...] = ()) -> Case:
    """A head by itself, also in a loop; or an override of it."""
    name = "-".join([head.name if override == "none" else override, *data])
    windows = max(head.windows, OVERRIDES[override].windows, 2)
    # A half is 1/G where a window has two micro-batches.
    halves = name in ("half", "super-half", "own-half", "own-self-taught")
    # Which of two losses a column picks is not seen in single samples.
    cuts = (HALVES if halves else PAIRS if name == "tasks" else SINGLES, UNEVEN)
    case = Composition(head.name, override, data=data or ("ragged",) * windows, seed=3).case()
    return replace(
        case, name=f"alone-{name}", verdict=verdict(name), rate=RATE, cuts=cuts,
        arguments=OVERRIDES[override].arguments, looped=override == "none",
        alone=("learnt",) * (head.learns or OVERRIDES[override].learns), whole=not wrong_uncut(head, override),
        right=cuts if name in RIGHT_IN_STOCK else (),
    )  # fmt: skip


#: Overrides of a head that divides by the number, where that shows more.
BY_NUMBER = {"super-without-number", "outputs-loss", *(name for name, each in OVERRIDES.items() if each.number)}
CASES = [
    *(alone(head) for head in HEADS.values()),
    *(alone(HEADS["number" if name in BY_NUMBER else "mean"], name) for name in OVERRIDES if name != "none"),
    # The first window, or a later one, has no target at all.
    *(alone(HEADS["where-labelled"], data=data) for data in (("unlabelled", "ragged"), ("ragged", "unlabelled"))),
]
