"""Every test here has the mark `attacks`: CI runs them, the everyday suite does not."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not any(item.iter_markers("slow")) and not any(item.iter_markers("releases")):
            item.add_marker(pytest.mark.attacks)
