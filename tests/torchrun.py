"""Ranks under torchrun: how a script or a module is started on them, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.cli.processes import ROOT, environment


def launcher(ranks: int = 2) -> tuple[str, ...]:
    """What stands between Python and a script, or ``-m`` and a module; every start has a port of its own."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))


def torchrun(
    program: str | Path,
    *arguments: str | Path,
    ranks: int = 2,
    timeout: float = 280,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The finished launcher of a script (``.py``) or a module; one that is not done by ``timeout`` [s] raises."""
    named = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    command = [sys.executable, *launcher(ranks), *named, *map(str, arguments)]
    given: dict[str, Any] = {"cwd": ROOT, "env": environment(ROOT), "timeout": timeout, "preexec_fn": preexec_fn}
    return subprocess.run(command, capture_output=True, text=True, check=False, **given)


def leave() -> NoReturn:
    """End this rank with all others."""
    dist.barrier()
    # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
    sys.stdout.flush()
    os._exit(0)
