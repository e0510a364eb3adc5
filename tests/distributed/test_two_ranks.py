"""The promise on two real gloo ranks under torchrun: unequal items, and a rank with none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.two_ranks import LEFT_OUT, SPLITS, WITHOUT_ITEMS
from tests.numerics.heads import HEADS

ROOT = Path(__file__).parents[2]
#: Of a head of the zoo the everyday tests run this; the other cuts are marked "zoo".
EVERYDAY = ((1, 4),)


def every_case() -> Iterator[Any]:
    """Every head and cut, and some of them with a rank that has no item, as parameters."""
    for name, head in HEADS.items():
        for split in SPLITS if name not in LEFT_OUT else ():
            marks = [pytest.mark.zoo] if head.in_zoo and split not in EVERYDAY else []
            yield pytest.param(f"{name} {split[0]}x{split[1]}", marks=marks)
    for name in WITHOUT_ITEMS:
        yield f"{name} 1x4 without items"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The rows of the cases that were selected, by one start of torchrun."""
    asking = [item for item in request.session.items if item.path == request.path]
    output = tmp_path_factory.mktemp("two_ranks") / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", "tests.distributed.two_ranks"]
    command += [str(output), *(item.callspec.params["case"] for item in asking)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["case"]: row for row in json.loads(output.read_text())}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*every_case()])
def test_two_ranks_take_the_full_batch_step(case: str, rows: Any) -> None:
    check(rows[case])


def check(row: dict[str, Any]) -> None:
    for path in {"apply", "trainer"} & row.keys():
        assert "raised" not in row[path], row
        assert row[path]["gradient"] <= row["tolerance"], row
        assert row[path]["loss"] <= max(row["tolerance"], 1e-6), row
        assert row[path]["norm"] <= row["tolerance"], row
    assert row["ranks_agree"] and row.get("same_bits", True), row
    if row["stock_wrong"] and "stock" in row:
        assert "raised" in row["stock"] or row["stock"]["gradient"] > 1e-3, row
