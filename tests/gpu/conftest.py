"""The device of a test. A test that asks for it has the mark `gpu`, which neither the everyday suite nor CI runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

#: Set to 1, every test runs on the CPU what it can.
STAND_IN = "HF_ACCUM_FIX_GPU_STAND_IN"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> Iterator[str]:
    """ "cuda", or "cpu" as its stand-in; convolutions in float32, as everything else."""
    if os.environ.get(STAND_IN) == "1":
        yield "cpu"
    elif not torch.cuda.is_available():
        pytest.skip(f"needs a GPU, and torch.cuda.is_available() is False; {STAND_IN}=1 runs on the CPU what it can")
    else:
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        yield "cuda"
        torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def cuda(device: str, request: pytest.FixtureRequest) -> str:
    """For what no CPU can stand in for; the test's docstring says why."""
    if device != "cuda":
        pytest.skip(f"needs CUDA itself: {request.function.__doc__}")
    return device
