"""Memory that really is full: of a process that may take 400 MiB more, where the whole batch needs over 800."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from hf_accum_fix.learning.look import out_of_memory
from tests.cli.processes import python
from tests.numerics.heads import before

KNOWN = ("HIP out of memory.", "std::bad_alloc", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")


def one_curve(device: str, mib: int) -> None:
    """The whole batch in one micro-batch ends; in pieces, and by "auto", it takes the steps of a cut that fits."""
    done = python("-m", "tests.pieces.full_machine", device, str(mib), OMP_NUM_THREADS="1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert "memory" in found["whole"]["error"].lower(), found
    for option in ("split", "auto"):
        assert found[option]["cap"]["fails"], found
        # In float32.
        assert found[option]["losses"] == pytest.approx(found["fits"]["losses"], rel=1e-5)
        assert found[option]["off"] <= 1e-5, found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process so")
@pytest.mark.skipif(before("5.0.0"), reason="the memory is torch's, in any release")
def test_a_host_that_is_full() -> None:
    one_curve("cpu", 400)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_is_full() -> None:
    one_curve("cuda", 600)


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="allocate") as of_torch:
        torch.empty(10**15)
    for error in (of_torch.value, MemoryError(), torch.cuda.OutOfMemoryError(), *map(RuntimeError, KNOWN)):
        assert out_of_memory(error)
    assert not out_of_memory(RuntimeError("a view of non-contiguous memory"))
