"""The promise on every backend that runs on two gloo ranks: three steps beside plain SGD over the global batches."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import CLIPPED, HEADS, SPLITS, UNCLIPPED, reference, train
from tests.numerics.parity import pass_over_imports
from tests.ranks import row_of_each

#: A head that divides by the number, which the installed release gets right, and one that drops it.
BY_NUMBER, MEAN = "llama", "llama-classification"
#: What else a backend sets does not hang on the head, nor on which of these engines it is of.
ENGINES = (
    *("ddp", "ddp-bf16", "fsdp1-launched", "fsdp1-bf16"),
    *("fsdp2-launched", "fsdp2-bf16", "tensor-parallel", "tensor-parallel-counted-apart"),
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
    backend, head, folder = BACKENDS[name], HEADS[head_name], Path(tempfile.gettempdir()) / "backends"
    runs = []
    for max_norm in (CLIPPED, UNCLIPPED):
        exact, wanted = (reference(head, max_norm, backend, exact=exact) for exact in (True, False))
        noise = reference(head, max_norm, backend, by=1, order=-1).error(wanted)
        for path, split in (
            *(("apply", split) for split in SPLITS),
            *((("trainer", SPLITS[0]), ("stock", SPLITS[0])) if max_norm == UNCLIPPED else ()),
        ):
            pass_over_imports()
            try:
                found = train(head, backend, split, path, max_norm, folder, stream=bool(stream))
            except Exception:
                # Of both ranks alike, or the other one would wait for ever.
                runs.append({"path": path, "split": split, "raised": traceback.format_exc()[-3000:]})
                continue
            run = {"path": path, "split": split, "max_norm": max_norm, "noise": noise, "exact": found.error(exact)}
            runs.append({**run, **found.errors(wanted), "norms": found.norms})
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
    for run in ours:
        tolerance = tolerance_of(backend, run)
        assert run["change"] <= tolerance, run
        assert run["norm"] <= tolerance, run
        assert run["loss"] <= max(tolerance, 1e-6), run
        assert run["exact"] <= 2 * tolerance + 1e-5, run
    for clipped in (True, False):
        norms = [run["norms"] for run in ours if (run["max_norm"] < 1) == clipped]
        assert all(found == pytest.approx(norms[0], rel=2 * tolerance_of(backend, ours[0])) for found in norms)
    assert all(run["norms"] for run in ours) == backend.reports_norm
    (stock,) = (run for run in runs if run["path"] == "stock")
    assert (stock["exact"] > 0.1) == (what != BY_NUMBER or backend.stock_wrong), stock


def tolerance_of(backend: Backend, run: dict[str, Any]) -> float:
    """Twice what the order of the samples does in this precision; in float64 the loss is still made in float32."""
    return 1e-6 if backend.dtype == torch.float64 else 2 * run["noise"]
