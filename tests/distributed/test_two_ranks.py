"""The promise on two real gloo ranks under torchrun: unequal items, and a rank with none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.two_ranks import LEFT_OUT, SPLITS, WITHOUT_ITEMS
from tests.numerics.heads import HEADS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, tuple[int, int]], dict[str, Any]]:
    """The rows of the heads that were selected; of everything, where a test needs the ranks without items."""
    asking = [item for item in request.session.items if "rows" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] if hasattr(item, "callspec") else "" for item in asking}
    output = tmp_path_factory.mktemp("two_ranks") / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", "tests.distributed.two_ranks"]
    command += [str(output), *([] if "" in names else sorted(names))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(row["case"], tuple(row["split"])): row for row in json.loads(output.read_text())}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}x{split[1]}")
@pytest.mark.parametrize("name", [name for name in HEADS if name not in LEFT_OUT])
def test_two_ranks_take_the_full_batch_step(name: str, split: tuple[int, int], rows: Any) -> None:
    check(rows[name, split])


@pytest.mark.timeout(900)
def test_a_rank_without_items(rows: Any) -> None:
    blank = [row for (case, _), row in rows.items() if "without items" in case]
    assert len(blank) == len(WITHOUT_ITEMS)
    for row in blank:
        check(row)


def check(row: dict[str, Any]) -> None:
    for path in {"apply", "trainer"} & row.keys():
        assert row[path]["gradient"] <= row["tolerance"], row
        assert row[path]["loss"] <= max(row["tolerance"], 1e-6), row
        assert row[path]["norm"] <= row["tolerance"], row
    assert row["ranks_agree"] and row.get("same_bits", True), row
    if row["stock_wrong"] and "stock" in row:
        assert "raised" in row["stock"] or row["stock"]["gradient"] > 1e-3, row
