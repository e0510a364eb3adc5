"""The promise on every backend that runs on two gloo ranks: three steps beside plain SGD over the global batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.rows import BACKENDS
from tests.backends.trajectory import (
    CLIPPED,
    HEADS,
    SPLITS,
    UNCLIPPED,
    assert_steps,
    attempted,
    compared,
    references,
    train,
)
from tests.ranks import row_of_each

#: A head that divides by the number, which the installed release gets right, and one that drops it.
BY_NUMBER, MEAN = "llama", "llama-classification"
#: What else a backend sets does not hang on the head, nor on which of these engines it is of.
ENGINES = (
    *("ddp", "ddp-bf16", "fsdp1-launched", "fsdp2-launched", "fsdp2-bf16", "tensor-parallel-counted-apart"),
    *("deepspeed-zero-0", "deepspeed-zero-2", "deepspeed-zero-3", "deepspeed-zero-2-not-told", "deepspeed-zero-3-bf16"),
)
BOTH_HEADS = ("ddp", "tensor-parallel-counted-apart", "deepspeed-zero-2")
#: Streams end in a short window that stock never steps; it is filled up with blanks that no engine sees.
STREAMED = ("ddp", "fsdp2-launched", "deepspeed-zero-0", "deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3")


def every_case() -> Iterator[Any]:
    """Every backend with both heads, and some with a stream, as parameters."""
    for name in BACKENDS:
        yield parameter(name, MEAN)
        yield parameter(name, BY_NUMBER)
        if name in STREAMED:
            yield parameter(name, f"{BY_NUMBER} stream")


def parameter(name: str, what: str) -> Any:
    backend = BACKENDS[name]
    shown = backend.compiles or name in (ENGINES if what == MEAN else BOTH_HEADS)
    return pytest.param(f"{name} {what}", marks=backend.mark if shown else pytest.mark.thorough)


def row(case: str) -> list[dict[str, Any]]:
    """Every training of a case: its errors, or what it raised."""
    name, head_name, *stream = case.split()
    backend, head, folder, runs = BACKENDS[name], HEADS[head_name], Path(tempfile.gettempdir()) / "backends", []
    for max_norm in (CLIPPED, UNCLIPPED):
        exact, wanted, noise = references(head, max_norm, backend)
        for path, split in (
            *(("apply", split) for split in SPLITS),
            *((("trainer", SPLITS[0]), ("stock", SPLITS[0])) if max_norm == UNCLIPPED else ()),
        ):
            found = attempted(train, head, backend, split, path, max_norm, folder, stream=bool(stream))
            run = {"path": path, "split": split, "max_norm": max_norm, "noise": noise}
            runs.append({**run, **(found if isinstance(found, dict) else compared(found, exact, wanted))})
    return runs


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=900)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("case", [*every_case()])
def test_every_step_is_that_of_the_global_batch(case: str, rows: Any) -> None:
    backend, what = BACKENDS[case.split()[0]], case.partition(" ")[2]
    runs = rows[case]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if run["path"] != "stock"]
    assert len(ours) == 5
    assert_steps(ours, backend)
    rounding = 2e-6 if backend.dtype == torch.float64 else 4 * ours[0]["noise"]
    for clipped in (True, False):
        norms = [run["norms"] for run in ours if (run["max_norm"] < 1) == clipped]
        assert all(found == pytest.approx(norms[0], rel=rounding) for found in norms)
    assert all(run["norms"] for run in ours) == backend.reports_norm
    (stock,) = (run for run in runs if run["path"] == "stock")
    assert (stock["exact"] > 0.1) == (what != BY_NUMBER or backend.stock_wrong), stock
