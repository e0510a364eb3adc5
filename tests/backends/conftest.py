"""The rows of a file's cases, made by one start of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun import found_by


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By case, of the cases that were selected; the file's ``RUN_BY`` is the module, and the seconds it may take."""
    module, seconds = request.module.RUN_BY
    output = tmp_path_factory.mktemp("rows") / "rows.json"
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    return {row["case"]: row for row in found_by(module, output, *cases, timeout=seconds)}
