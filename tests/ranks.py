"""Run a function on several gloo ranks, each a fresh process, without a launcher.

What a user starts with torchrun is tested with it, by `tests.torchrun`.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cli.processes import ROOT, environment

T = TypeVar("T")
#: Seconds that the other ranks have to fail as well, once one has failed; and that a rank may take to begin.
GRACE, START = 5.0, 60.0


class RankFailedError(RuntimeError):
    """A rank has raised, or has not ended in time; the message ends with what it wrote to stderr."""


def on_ranks(
    function: Callable[..., T], *arguments: Any, ranks: int = 2, timeout: float = 280, patience: float | None = None,
    group: bool = True,
) -> list[T]:  # fmt: skip
    """What ``function(*arguments)`` returns on each rank.

    Args:
        function: of a module, since every rank imports it by name.
        arguments: are pickled, as is the result.
        ranks: how many.
        timeout: of a rank, from when it has begun; one that waits for ever then says where [s].
        patience: of a collective [s]; None: gloo's own.
        group: whether the process group is there when the function begins; it may make it itself by `join`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, arguments, timeout, patience, group)))
        started = [_start(rank, ranks, store.port, folder) for rank in range(ranks)]
        try:
            failed = _wait(started, START + timeout)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed:
            # The one that failed because of another's end says so, too.
            said = {rank: (folder / f"stderr{rank}").read_text(errors="replace")[-4000:] for rank in failed}
            raise RankFailedError("\n\n".join(f"rank {rank} failed:\n{text}" for rank, text in said.items()))
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(ranks)]


def join(patience: float | None = None) -> None:
    """Make the process group."""
    given = {} if patience is None else {"timeout": datetime.timedelta(seconds=patience)}
    dist.init_process_group("gloo", **given)


def selected(request: pytest.FixtureRequest) -> list[Any]:
    """The ``case`` of every test of a module that will run and has one."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params["case"] for call in calls if call is not None and "case" in call.params]


def row_of_each(
    request: pytest.FixtureRequest, row: Callable[[str], T], seconds: float = 100, **given: Any
) -> dict[str, T]:
    """By case, of those that are `selected`: what ``row(case)`` returns on the first rank, each within ``seconds``."""
    cases = selected(request)
    return dict(zip(cases, on_ranks(_each, row, cases, seconds, **given)[0], strict=True))


def _each(row: Callable[[str], T], cases: Sequence[str], seconds: float) -> list[T]:
    found = []
    for case in cases:
        # A rank that waits for ever says where.
        faulthandler.dump_traceback_later(seconds, exit=True)
        found.append(row(case))
    return found


def same_on_all_ranks(change: Mapping[str, Tensor]) -> bool:
    """Whether every rank has made the same change."""
    digest = torch.stack([each.sum() for each in change.values()])
    first = digest.clone()
    dist.broadcast(first, src=0)
    agree = torch.tensor(float(torch.equal(digest, first)))
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)


def _start(rank: int, ranks: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    # The last two let every rank be a client of this process's store, as under torchrun's agent.
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    texts = {"OMP_NUM_THREADS": "1", **{key: str(value) for key, value in variables.items()}}
    with (folder / f"stderr{rank}").open("wb") as said:
        command = [sys.executable, "-m", "tests.ranks", str(folder)]
        env = environment(ROOT, **texts)
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)


def _wait(started: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """The ranks that have failed, or are not done in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        if None not in codes:
            break
        if any(codes):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    codes = [process.poll() for process in started]
    failed = [rank for rank, code in enumerate(codes) if code]
    return failed or [rank for rank, code in enumerate(codes) if code is None]


def _run(folder: Path) -> None:
    """On a rank."""
    function, arguments, timeout, patience, group = pickle.loads((folder / "call").read_bytes())
    faulthandler.dump_traceback_later(timeout, exit=True)
    torch.set_num_threads(1)
    if group:
        join(patience)
    result = function(*arguments)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    # Tearing gloo down may wait for ever: its thread frees the barrier's tensors under the lock this one holds.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
