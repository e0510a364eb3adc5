"""One rank of two fails, or has less than the other: an error on both within seconds, and nobody waits."""

from __future__ import annotations

import faulthandler
import json
import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import RAISING, STEPS, InForward, nan, trainer
from tests.logged import logged
from tests.numerics.parity import pass_over_imports
from tests.ranks import on_ranks
from tests.torchrun import torchrun

#: What the rank at fault must say, and the other one; with the kind of the error.
SAYING = {
    "labels-missing-at-first": ("ContractError", "expected a tensor 'labels'", "RankError", "rank 1: ContractError"),
    "labels-missing-everywhere": ("RankError", "rank 1: 3 micro-batches with no labels") * 2,
    "labels-missing-after-others": ("ContractError", "a tensor 'labels'", "RankError", "rank 1: ContractError"),
    "labels-missing-later": ("KeyError", "labels", "RankError", "rank 1: KeyError: 'labels'"),
    "collator-raises-at-first": ("ValueError", "cannot be read", "RankError", "rank 1: ValueError: this sample"),
    "collator-raises-later": ("ValueError", "cannot be read", "RankError", "rank 1: ValueError: this sample"),
    "iterator-ends": ("UnevenRanksError", "rank 0 has 3, rank 1 has 0") * 2,
}
#: What stock trains, and so is trained as there, and what a warning has to say of it.
GOING_ON = {"contracts-differ": "rank 0: is the mean.*rank 1: is a sum"}


#: Seconds after which a rank that waits says where, and ends.
PATIENCE = 60


def said_on_rank() -> dict[str, Any]:
    """What this rank says in every scenario."""
    said: dict[str, Any] = {}
    folder = Path(tempfile.gettempdir()) / "faults"
    for name, make in RAISING.items():
        pass_over_imports()
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        began = time.monotonic()
        with logged() as warned:
            try:
                make(folder).train()
                said[name] = {"raised": "", "message": ""}
            except Exception as error:
                said[name] = {"raised": type(error).__name__, "message": str(error)}
        said[name]["warned"] = " ".join(warned)
        said[name]["seconds"] = time.monotonic() - began
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    made = trainer(folder, model=InForward(nan))
    made.train()
    finite = all(bool(parameter.isfinite().all()) for parameter in made.model.parameters())
    said["nan"] = {"steps": made.state.global_step, "finite": finite}
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """By rank."""
    return on_ranks(said_on_rank)


@pytest.mark.parametrize("name", GOING_ON)
def test_what_stock_trains_is_trained_and_said(name: str, said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert not rank[name]["raised"], rank[name]
        assert re.search(GOING_ON[name], rank[name]["warned"]), rank[name]
        # A nan of one rank is the global batch's on both.
        assert rank["nan"] == {"steps": STEPS, "finite": False}


@pytest.mark.parametrize("name", SAYING)
def test_a_fault_on_one_rank_is_an_error_on_both(name: str, said: list[dict[str, Any]]) -> None:
    first, second = (rank[name] for rank in said)
    kind, words, other_kind, other_words = SAYING[name]
    assert second["raised"] == kind and re.search(words, second["message"]), second
    assert first["raised"] == other_kind and re.search(other_words, first["message"]), first
    assert max(first["seconds"], second["seconds"]) < 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parameters at the end of a run to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = torchrun("tests.faults.scenarios", folder, "nothing")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["kill", "terminate"])
def test_a_run_that_is_cut_goes_on_from_its_last_checkpoint(fault: str, undisturbed: Path, tmp_path: Path) -> None:
    cut = torchrun("tests.faults.scenarios", tmp_path, fault, timeout=90)
    assert cut.returncode != 0
    assert not (tmp_path / "end.json").exists()
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-1", "checkpoint-2"]
    resumed = torchrun("tests.faults.scenarios", tmp_path, "resume")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    found, wanted = (json.loads((folder / "end.json").read_text()) for folder in (tmp_path, undisturbed))
    # To the last bit.
    assert found == wanted


#: Bytes that one file may have: enough for environment.json, and for two of the four lines of results.jsonl.
ROOM = 1300
SWEEP = ["--head", "bert", "--steps", "12", "--total-batch", "8", "--splits", "4x1,2x2", "--modes", "stock,apply"]


def sweep(output: Path, room: int) -> subprocess.CompletedProcess[str]:
    """The finished sweep on two ranks; ``room`` limits the size of each file [bytes]."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return torchrun("recipes/llava_sweep.py", *SWEEP, "--output", output, preexec_fn=limit)


@pytest.mark.thorough
def test_a_full_disk_loses_nothing_of_the_sweep(tmp_path: Path) -> None:
    full = sweep(tmp_path / "out", room=ROOM)
    assert full.returncode != 0
    assert "[rank0]: OSError: [Errno 27] File too large" in full.stderr
    # The line that did not fit is the last.
    *kept, _ = (tmp_path / "out" / "results.jsonl").read_text().split("\n")
    assert kept and all(map(json.loads, kept))
