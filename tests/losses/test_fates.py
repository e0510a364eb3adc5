"""What is not exact has one of two fates: its micro-batches are averaged, or it is the stock Trainer's to the bit."""

from __future__ import annotations

import pytest

from tests.losses.cases import CASES, CENTERNET
from tests.losses.fates import SAME, fates
from tests.losses.verdicts import by_trainer
from tests.trainings import Case

#: Which of the two what an attack found worse than stock has got.
FOUND = {
    "fate-centernet-own": "averaged",
    "fate-two-backwards": "stock",
    "fate-quantile-own": "averaged",
    "fate-padding-own": "averaged",
}
#: Windows that are neither, and why.
NEITHER = {
    "found-free-bits-own": "in the third window a floor no longer binds: what was learnt is kept there, and said",
    "15-Sam": "each loss is weighted right; its own step takes the gradient of the first one back",
    "terms-masked-later": "two terms are weighted as predicted: no one number corrects them",
    **dict.fromkeys(
        ("chunks-means", "chunks-model", "public-over-its-first-value", "splits-as-fetched"),
        "what a micro-batch computes is not the reference of its samples",
    ),
}
TRAINED = [case for case in (CENTERNET, *CASES) if case.trainer is not None and case.name not in NEITHER]
#: A few of each kind.
EVERYDAY = {*FOUND, *(case.name for case in TRAINED[:: len(TRAINED) // 12])}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each.name in EVERYDAY else pytest.mark.slow, id=each.name) for each in TRAINED],
)
def test_not_exact_is_the_full_batch_or_averaged_or_stocks(case: Case) -> None:
    """In the last window: one whose terms are new is a mixture, and said."""
    ours, found = by_trainer(case, case.cuts[0], "apply"), fates(case, case.cuts[0])
    assert not found or min(found.values()) <= SAME, found
    if case.name in FOUND:
        assert ours.said[0][0] < 2 and found[FOUND[case.name]] <= SAME
