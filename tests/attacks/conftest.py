"""Every test here has the mark `attacks`, which CI runs and the everyday suite does not; but for those with another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.pair_of_ranks import PairOfRanks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        others = any(item.get_closest_marker(each) for each in ("slow", "releases", "property"))
        if HERE in item.path.parents and not others:
            item.add_marker(pytest.mark.attacks)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairOfRanks]:
    with PairOfRanks(tmp_path_factory.mktemp("pair")) as pair:
        yield pair
