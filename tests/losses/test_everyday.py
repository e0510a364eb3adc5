"""A loss as a library or tutorial writes it takes the full batch's step at every split, and nothing is said."""

from __future__ import annotations

import pytest

from tests.losses.clamps import KEPT, corn, retina_net, ssd
from tests.losses.everyday import CUTS, EVERYDAY
from tests.losses.verdicts import by_trainer
from tests.trainings import Case, Cut

#: The first of the splits every day.
CELLS = [
    pytest.param(case, cut, id=f"{case.name}-{cut[0]}x{cut[1]}", marks=[] if cut == CUTS[0] else pytest.mark.slow)
    for case in EVERYDAY
    for cut in CUTS
]


@pytest.mark.parametrize(("case", "cut"), CELLS)
def test_exact_and_nothing_is_said(case: Case, cut: Cut) -> None:
    ours = by_trainer(case, cut, "apply")
    assert ours.worst <= 1e-9 and ours.log_error <= 1e-4
    assert ours.exact and not ours.said


def test_eighty_losses_have_a_library_s_name() -> None:
    assert len({*(case.name for case in EVERYDAY), *KEPT, corn, ssd, retina_net}) >= 80


@pytest.mark.slow
def test_stock_is_wrong_for_many_of_them() -> None:
    """The others are means over samples, of which all micro-batches have as many."""
    assert sum(by_trainer(case, CUTS[0], "stock").worst > 1e-3 for case in EVERYDAY) >= 20
