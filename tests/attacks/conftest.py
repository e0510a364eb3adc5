"""Every test here has the mark `attacks`, which CI runs and the everyday suite does not; but for those with another."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        others = any(item.get_closest_marker(each) for each in ("slow", "releases", "property"))
        if HERE in item.path.parents and not others:
            item.add_marker(pytest.mark.attacks)
