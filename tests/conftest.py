"""What every test gets: the Trainer class left as it was, short garbage collections, and a process of its file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_residue() -> Iterator[None]:
    """The attributes of Trainer are the identical objects before and after each test."""
    before = _trainer_attributes()
    yield
    if before is not None:
        after = _trainer_attributes()
        assert after is not None
        changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}
        assert not changed, f"the test left Trainer changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def what_is_imported_is_no_garbage() -> None:
    """Every training collects garbage first; looking through torch and transformers was three quarters of its time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture of their file run in one process, which makes it once; the others in any."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
        if any(each.scope == "module" for found in fixtures for each in found):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def _trainer_attributes() -> dict[str, object] | None:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return None if trainer is None else dict(vars(trainer))
