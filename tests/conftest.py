"""What every test gets: its worker, a check that it left Trainer as it found it, a short garbage collection."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what their module made, such as two ranks that were started, run on one worker."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        if any(definitions[-1].scope == "module" for definitions in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def _trainer_attributes() -> dict[str, object] | None:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return None if trainer is None else dict(vars(trainer))
