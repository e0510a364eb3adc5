"""torchrun, two ranks of a module of these tests: how they are started, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def torchrun(module: str, *arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The finished launcher; one that is not done by ``timeout`` [s] is killed and raises."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "-m", module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def leave_with(found: Any, output: Path) -> NoReturn:
    """End this rank with all others, once the first has written what was found as JSON."""
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    leave()


def leave() -> NoReturn:
    """End this rank with all others."""
    dist.barrier()
    # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
    sys.stdout.flush()
    os._exit(0)
