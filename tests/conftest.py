"""What every test gets: a check that it left the Trainer class as it found it, and a short garbage collection."""

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


def _trainer_attributes() -> dict[str, object] | None:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return None if trainer is None else dict(vars(trainer))
