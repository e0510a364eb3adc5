"""The sweep as a module, and as one process alone starts it."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.recipes import load


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return load("llava_sweep")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "ACCELERATE_USE_CPU", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
