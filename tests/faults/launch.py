"""torchrun, two ranks of a module of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(module: str, *arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The finished launcher; one that is not done by ``timeout`` [s] is killed and raises."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
