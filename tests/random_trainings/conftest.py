"""Two ranks for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.random_trainings.pair_of_ranks import PairOfRanks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairOfRanks]:
    with PairOfRanks(tmp_path_factory.mktemp("pair")) as pair:
        yield pair
