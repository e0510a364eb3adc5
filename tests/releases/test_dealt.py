"""Dealt windows on other releases, one rank and two: every release makes its dataloader in a way of its own."""

from __future__ import annotations

import pytest

from tests.releases.test_releases import run_tests_in

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]


#: Heads that every release knows and runs in float64; what is no head's runs as a whole.
EVERYWHERE = "(llama or bert or t5 or no-kwargs or drops-kwargs or declares-false or uses or told) and not empty"
ONE_RANK = ("tests/balancing/test_dealing.py", "tests/balancing/test_trainings.py")


#: Every release makes its dataloader in a way of its own; CI looks at the first and the newest of them.
LATER = [pytest.param(release, marks=pytest.mark.thorough) for release in ("4.46.1", "4.49.0")]


@pytest.mark.parametrize("release", ("4.41.0", *LATER, "5.4.0"))
def test_steps_trajectories_and_resumption(release: str) -> None:
    chosen = f"test_dealing or trajectory or resumed or dispatched or kept or (full_batch_step and {EVERYWHERE})"
    run_tests_in(release, "-k", chosen, *ONE_RANK)


@pytest.mark.parametrize("release", (*LATER, "5.4.0"))
def test_two_ranks(release: str) -> None:
    run_tests_in(release, "tests/balancing/test_two_ranks.py")
