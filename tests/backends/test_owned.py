"""Trainers that compute the loss themselves: ranks that see different losses run as many forwards to observe it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrun import found_by


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_rank_that_begins_without_a_target_keeps_a_sharded_model_in_step(tmp_path: Path) -> None:
    found = found_by("tests.backends.owned", tmp_path / "rows.json", "ddp", "fsdp2-launched", timeout=120)
    rows = {(row["case"], row["kind"]): row for row in found}
    for backend in ("ddp", "fsdp2-launched"):
        for kind in ("ByNumber", "OwnMean", "BySteps"):
            row = rows[backend, kind]
            assert row["exact"] and row["error"] <= 1e-6, row
