"""What a loss is told by its graph: the full batch's gradient, or said in time that it is not; see `Verdict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.losses.cases import ATTACKS
from tests.losses.verdicts import WHOLE, Attack, Cut, by_loop, by_trainer


def cells(attacks: Sequence[Attack]) -> Any:
    found = [(attack, cut) for attack in attacks for cut in attack.cuts]
    ids = [f"{attack.name}-{'+'.join(map(str, cut))}" for attack, cut in found]
    return pytest.mark.parametrize(("attack", "cut"), found, ids=ids)


#: Two thousand trainings; six are not met yet: tests/README.md says which.
pytestmark = pytest.mark.thorough

TRAINED = [attack for attack in ATTACKS if attack.trainer is not None]
LOOPED = [attack for attack in ATTACKS if attack.looped or attack.trainer is None]


@cells(TRAINED)
def test_by_the_trainer(attack: Attack, cut: Cut) -> None:
    ours = by_trainer(attack, cut, "apply")
    faults = ours.faults(attack, by_trainer(attack, cut, "stock"), cut)
    assert not faults, ours


@cells(LOOPED)
def test_by_a_loop(attack: Attack, cut: Cut) -> None:
    ours = by_loop(attack, cut, "apply")
    faults = ours.faults(attack, by_loop(attack, cut, "stock"), cut)
    assert not faults, ours


@pytest.mark.parametrize("attack", [each for each in TRAINED if each.whole], ids=lambda attack: attack.name)
def test_the_reference_is_stock_uncut(attack: Attack) -> None:
    stock = by_trainer(attack, WHOLE, "stock")
    assert stock.worst <= attack.floor
    assert stock.log_error <= 2e-5


@cells(TRAINED)
def test_stock_is_wrong_where_it_is_said(attack: Attack, cut: Cut) -> None:
    """So that no attack passes because nothing can go wrong."""
    stock = by_trainer(attack, cut, "stock")
    assert (stock.worst <= attack.floor) is (cut in attack.right)
    assert cut in attack.right or stock.worst > 1e-5
