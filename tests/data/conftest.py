"""What the tests of data share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def old_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 4.48 read their checkpoints as torch before 2.6 wrote them."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
