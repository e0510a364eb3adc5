"""A disk that fills up under the sweep's results: what was written stays, nobody waits, and the run can go on."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest

from tests.torchrun import torchrun

#: Bytes that one file may have: enough for environment.json, and for two of the four lines of results.jsonl.
ROOM = 1300
SWEEP = ["--head", "bert", "--steps", "12", "--total-batch", "8", "--splits", "4x1,2x2", "--modes", "stock,apply"]


def sweep(output: Path, *more: str, room: int | None = None) -> subprocess.CompletedProcess[str]:
    """The finished sweep on two ranks; ``room`` limits the size of each file [bytes]."""

    def limit() -> None:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return torchrun("recipes/llava_sweep.py", *SWEEP, "--output", output, *more, preexec_fn=limit)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_the_sweep_goes_on(tmp_path: Path) -> None:
    full = sweep(tmp_path / "out", room=ROOM)
    assert full.returncode != 0
    assert "[rank0]: OSError: [Errno 27] File too large; rank 0 ends, and what results.jsonl held" in full.stderr
    kept = (tmp_path / "out" / "results.jsonl").read_text()
    assert len([json.loads(line) for line in kept.splitlines()]) == 2
    gone_on = sweep(tmp_path / "out", "--resume")
    assert gone_on.returncode == 0, gone_on.stderr[-4000:]
    rows = (tmp_path / "out" / "results.jsonl").read_text()
    assert rows.startswith(kept) and len(rows.splitlines()) == 4
