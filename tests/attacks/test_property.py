"""Exact to the floor, or said, never silent: the property, over random trainings put together from `parts`.

HF_ACCUM_FIX_EXAMPLES raises the number of trainings, which then differ from run to run and are remembered where they
fail; without it they are the same in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.attacks.compositions import Composition, installed_once, outcome, stock, told
from tests.attacks.pair_of_ranks import PairOfRanks
from tests.attacks.parts import COLLATORS, DATA, HEADS, OVERRIDES, Head

pytestmark = pytest.mark.property

GIVEN = os.environ.get("HF_ACCUM_FIX_EXAMPLES")
EXAMPLES = int(GIVEN or 500)
CUTS = ((2, 4), (4, 2), (1, 8), (3, 3), (8, 1))
CUTS_OF_TWO = ((2, 2), (1, 4), (4, 1), (2, 3))


@st.composite
def compositions(draw: st.DrawFn, ranks: int = 1) -> Composition:
    """Every part may be drawn with every other that it can work with; what comes first is the simplest."""
    head = draw(st.sampled_from(list(HEADS)))
    override = draw(st.sampled_from([name for name, each in OVERRIDES.items() if each.suits(HEADS[head])]))
    size, steps = cut = draw(st.sampled_from(CUTS if ranks == 1 else CUTS_OF_TWO))
    # On several ranks accelerate would repeat samples.
    missing = draw(st.sampled_from([0, 1, size * steps // 2])) if ranks == 1 else 0
    return Composition(
        head,
        override,
        draw(st.sampled_from(list(COLLATORS))),
        tuple(draw(st.lists(st.sampled_from(DATA), min_size=1, max_size=3))),
        cut,
        missing,
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
        ranks,
    )


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        derandomize=GIVEN is None,
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with installed_once():
        yield tmp_path_factory.mktemp("property")


@pytest.mark.timeout(0)
@examples(EXAMPLES)
@given(composition=compositions())
def test_exact_to_the_floor_or_said(composition: Composition, output: Path) -> None:
    found = outcome(composition, output)
    assert not found.faults, told(composition, found)


@pytest.mark.timeout(0)
@examples(max(EXAMPLES // 20, 1))
@given(composition=compositions(ranks=2))
def test_exact_to_the_floor_or_said_on_two_ranks(composition: Composition, pair: PairOfRanks) -> None:
    faults, words = pair.outcome(composition)
    assert not faults, words


PAIRS = [(head, name) for head in HEADS for name, each in OVERRIDES.items() if each.suits(HEADS[head])]


def wrong_uncut(head: Head, override: str) -> bool:
    """Where stock is off even in one micro-batch: in what it counts, and in the shift of what it smooths."""
    by_number = head.by_number or override in ("own-number", "own-number-by-hand", "func-number")
    counts_otherwise = override.startswith("masked") or head.ignore != -100
    return (by_number and counts_otherwise) or (override == "smoothing" and head.level == "next")


@pytest.mark.thorough
@pytest.mark.parametrize(("head", "override"), PAIRS)
def test_the_reference_is_one_micro_batch_of_stock(head: str, override: str, output: Path) -> None:
    """Held against stock without accumulation, so that no reference is of another loss."""
    composition = Composition(head, override, cut=(8, 1))
    found = stock(composition.case(), composition, output)
    if found is None:
        # It multiplies the loss in place, which a root's backward needs.
        assert head == "root"
    else:
        assert (found.errors[0] > 1e-3) is wrong_uncut(HEADS[head], override)
        assert (found.errors[0] <= composition.floor) is not wrong_uncut(HEADS[head], override)
