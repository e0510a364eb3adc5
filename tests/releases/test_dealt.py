"""Dealt windows on other releases, one rank and two: the seam is a dataloader, which every release makes its own way."""

from __future__ import annotations

import pytest

from tests.releases.test_releases import run_in

pytestmark = [pytest.mark.releases, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("release", ("4.41.0", "4.46.1", "4.49.0", "5.4.0"))
def test_steps_trajectories_and_resumption(release: str) -> None:
    run_in(release, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/dealing")
