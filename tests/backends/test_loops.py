"""Hand-written loops on backends that shard, two gloo ranks: three windows beside plain SGD over the global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.rows import BACKENDS
from tests.backends.test_backends import tolerance_of

RUN_BY = ("tests.backends.loops", 600)
#: One head takes the number, one returns its own mean and drops it, one does not take it.
CASES = (
    "fsdp1-launched llama",
    "fsdp1-launched bert",
    "fsdp1-launched no-kwargs",
    "fsdp1-launched-offloaded llama",
    "fsdp1-bf16 llama",
    "fsdp2-launched llama",
    "fsdp2-launched bert",
    "fsdp2-launched-offloaded llama",
    "fsdp2-bf16 llama",
    "deepspeed-zero-0 llama",
    "deepspeed-zero-1 llama",
    "deepspeed-zero-1 bert",
    "deepspeed-zero-2 llama",
    "deepspeed-zero-2 bert",
    "deepspeed-zero-2 no-kwargs",
    "deepspeed-zero-3 llama",
    "deepspeed-zero-3 bert",
    "deepspeed-zero-3-bf16 llama",
)


#: Those that show nothing new of the others.
THOROUGH = {
    *(
        "fsdp1-launched no-kwargs",
        "fsdp1-launched-offloaded llama",
        "fsdp2-launched-offloaded llama",
        "fsdp2-bf16 llama",
    ),
    *("deepspeed-zero-1 llama", "deepspeed-zero-1 bert", "deepspeed-zero-2 no-kwargs", "deepspeed-zero-2 bert"),
}


def marked(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.thorough if case in THOROUGH else BACKENDS[case.split()[0]].mark)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_every_window_is_the_step_of_the_global_batch(case: str, rows: Any) -> None:
    runs, backend = rows[case]["runs"], BACKENDS[case.split()[0]]
    assert not [run for run in runs if "raised" in run], case
    ours = [run for run in runs if not run["stock"]]
    assert len(ours) == 3
    for run in ours:
        # Clipping in float32 rounds more than the order of the samples does.
        tolerance = max(tolerance_of(backend, run), 2e-6 if backend.dtype is torch.float32 else 0.0)
        assert run["change"] <= tolerance, run
        assert run["norm"] <= tolerance, run
        assert run["loss"] <= max(tolerance, 1e-6), run
        if run["max_norm"] > 1:
            assert run["exact"] <= 2 * tolerance + 1e-5, run
    (stock,) = (run for run in runs if run["stock"])
    assert stock["exact"] > 0.1, stock


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked("fsdp2-launched uneven"), marked("deepspeed-zero-2 uneven")])
def test_ranks_that_would_wait_in_the_middle_of_a_window_are_told(case: str, rows: Any) -> None:
    for ranks in rows[case]["uneven"]:
        for raised in ranks:
            assert raised.startswith("got unequal numbers of micro-batches in this window"), ranks


@pytest.mark.timeout(660)
@pytest.mark.parametrize("case", [marked("deepspeed-zero-1 unequal")])
def test_ranks_that_meet_once_a_window_may_have_unequal_numbers(case: str, rows: Any) -> None:
    assert rows[case]["unequal"] <= 1e-6
