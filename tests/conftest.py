"""What every test gets: a check that it left the Trainer class as it found it, and a short garbage collection.

Every test of `SLOW` has the mark ``slow``, unless it needs another release.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Folders, and what takes long in others.
SLOW = (
    "losses",
    "patch",
    "random_trainings",
    "trainers",
    "balancing/test_two_ranks.py",
    "cli/test_run_hostile.py",
    "cli/test_verify_hostile.py",
    "data/test_resume.py",
    "data/test_two_ranks.py",
    "faults",
    "monitor/test_two_ranks.py",
    "recipes/test_setup.py",
    "recipes/test_sweep_output.py",
    "verify/test_misled.py",
    "verify/test_two_ranks.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without these, the everyday tests are collected in half the time, by every worker."""
    return True if "not slow" in config.option.markexpr and collection_path in (HERE / each for each in SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {HERE / each for each in SLOW}
    for item in items:
        if slow & {item.path, *item.path.parents} and not item.get_closest_marker("releases"):
            item.add_marker(pytest.mark.slow)


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
