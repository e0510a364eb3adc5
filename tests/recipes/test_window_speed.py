"""The recipe on a tiny model: the same windows, less padding, a table that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(280)
@pytest.mark.slow
def test_table_lines_and_picture(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / "window_speed.py"), "--size", "tiny", "--rounds", "1"]
    command += ["--windows", "1", "--batch", "4", "--steps", "4", "--modes", "stock,balanced", "--texts", "docstrings"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-3000:]
    stock, balanced = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert balanced["padded_over_real"] < stock["padded_over_real"]
    assert 0 < balanced["gradient"] < 1e-5
    assert balanced["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert "| balanced |" in (tmp_path / "table.md").read_text() and (tmp_path / "window_speed.png").exists()


def test_an_unknown_mode_is_refused() -> None:
    command = [sys.executable, str(ROOT / "recipes" / "window_speed.py"), "--modes", "stock,faster"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "got modes ['faster']" in done.stderr
