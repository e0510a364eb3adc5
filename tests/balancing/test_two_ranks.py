"""Dealt windows on two real gloo ranks: samples move between ranks, and nothing else changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

import hf_accum_fix
from hf_accum_fix.engines.engine import waits_every_micro_batch
from hf_accum_fix.errors import AccumFixError
from tests.backends.trajectory import sharding_on
from tests.balancing.trainings import BALANCE, dealt, train
from tests.data.runs import Run
from tests.numerics.heads import HEADS, before
from tests.numerics.parity import pass_over_imports, reference_step, take_step
from tests.ranks import on_ranks, selected

pytestmark = pytest.mark.timeout(900)

HEADS_RUN = (
    *("llama", "llama-smoothing", "bert-mlm", "bert-classes", "t5", "llava", "no-kwargs", "drops-kwargs"),
    *("uses-tensor", "uses-int", "func-with-mean", "func-with-number", "wav2vec2-ctc-sum", "mean-of-sample-means"),
    "mixtral",
)
SPLIT = (2, 2)
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop last": {"dataloader_drop_last": True},
    "stream": {"stream": True, "accelerator_config": {"dispatch_batches": False}},
    "split batches": {"accelerator_config": {"split_batches": True}, "rows": 4},
}
#: Own means, so that stock would be wrong; and a loss that divides by the number.
OF_TRAJECTORIES = (("bert-mlm", "plain"), ("bert-mlm", "split batches"), ("llama", "stream"), ("llama", "drop last"))


def one_step(name: str, folder: Path) -> dict[str, Any]:
    head, (rows, steps) = HEADS[name], SPLIT
    pieces = dealt(head, steps, 2, rows)
    assert len({*map(len, pieces)}) > 1
    reference = reference_step(head, pieces)
    with hf_accum_fix.apply(balance_windows=BALANCE):
        step = take_step(head, head.samples, rows, steps, "stock", folder, ddp_backend="gloo")
    return {"error": step.error(reference), "loss": abs(step.loss / reference.loss - 1)}


def beside(found: Run, as_they_come: Run) -> dict[str, Any]:
    same = found.windows == as_they_come.windows
    row = {"error": found.error(as_they_come.change), "same samples": same, "windows": len(found.windows)}
    return {**row, "padded": padded(found) / padded(as_they_come)}


def trajectory(name: str, kind: str, folder: Path) -> dict[str, Any]:
    more = {"head": name, "world_size": 2, "ddp_backend": "gloo", **TRAJECTORIES[kind]}
    return beside(*(train(folder, balance=balance, **more) for balance in (True, False)))


def resumed(folder: Path, saved: int, **more: Any) -> dict[str, Any]:
    """An uncut run, and one that goes on from its checkpoint."""
    more = {"head": "bert-mlm", "world_size": 2, "ddp_backend": "gloo", **more}
    uncut = train(folder / f"uncut-{saved}", save_strategy="steps", save_steps=saved, **more)
    dist.barrier()
    found = train(folder / f"cut-{saved}", checkpoint=folder / f"uncut-{saved}" / f"checkpoint-{saved}", **more)
    return {
        "error": found.error(uncut.change),
        "same samples": found.windows == uncut.windows[saved:],
        "windows": len(found.windows),
    }


def sharded(folder: Path) -> dict[str, Any]:
    """Under FSDP2, whose ranks wait for one another in every micro-batch."""
    more: dict[str, Any] = {"head": "llama", "world_size": 2, "ddp_backend": "gloo", "prepare": sharding_on}
    more |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    runs = []
    for balance in (False, True):
        AcceleratorState._reset_state()
        runs.append(train(folder, balance=balance, **more))
    found = runs[1].trainer
    wrapped, lockstep = type(found.model_wrapped).__name__, waits_every_micro_batch(found.accelerator)
    return {**beside(runs[1], runs[0]), "wrapped": wrapped, "in lockstep": lockstep}


def padded(run: Run) -> int:
    """Padded tokens of the slower rank, over the windows."""
    most = torch.tensor(sum(rows * width for rows, width in run.shapes))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def refusal(folder: Path) -> dict[str, Any]:
    with pytest.raises(AccumFixError) as refused:
        train(folder, balance=True, world_size=2, stream=True, ddp_backend="gloo")
    return {"raised": str(refused.value)}


def cases(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is run, by the name of its row."""
    found: dict[str, Callable[[], dict[str, Any]]] = {"dispatched stream": lambda: refusal(folder)}
    for name in HEADS_RUN:
        found[name] = lambda name=name: one_step(name, folder)
    for name, kind in OF_TRAJECTORIES:
        found[f"{name}, {kind}"] = lambda name=name, kind=kind: trajectory(name, kind, folder)
    found["resumed at 7"] = lambda: resumed(folder, 7, balance=True)
    if not before("5.17"):
        own = {"train_sampling_strategy": "batch_rebalance", "head": "llama", "balance": False}
        found["batch_rebalance resumed"] = lambda: resumed(folder / "own", 4, **own)
        found["batch_rebalance resumed, stock"] = lambda: resumed(folder / "stock", 4, patched=False, **own)
        # The last one: it changes what accelerate takes this machine for.
        found["fsdp2"] = lambda: sharded(folder)
    return found


def rows_of(chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """On each rank: by case."""
    if before("5.0"):
        # Older releases make their masks in the default dtype, which the least float64 does not fit into.
        torch.set_default_dtype(torch.float64)
    # Releases before 4.48 read their checkpoints as torch before 2.6 wrote them.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    rows = {}
    for name, run in cases(Path(folders[0])).items():
        if name in chosen:
            pass_over_imports()
            rows[name] = run()
    return rows


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By case, of the cases that were selected."""
    return on_ranks(rows_of, selected(request), timeout=900)[0]


#: In CI, beside whole trajectories: one of each way that a loss is reduced.
SHOWN = ("llama", "bert-classes", "no-kwargs", "func-with-mean", "wav2vec2-ctc-sum", "mixtral")


def of(*cases: str) -> pytest.MarkDecorator:
    rare = (case for case in HEADS_RUN if case not in SHOWN)
    thorough = {*rare, "bert-mlm, split batches", "llama, drop last"}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=[pytest.mark.thorough] * (case in thorough)) for case in cases]
    )


@of(*HEADS_RUN)
def test_two_ranks_take_the_full_batch_step(case: str, rows: Any) -> None:
    row, tolerance = rows[case], HEADS[case].tolerance
    assert row["error"] <= tolerance and row["loss"] <= max(tolerance, 1e-6), row


@of(*(f"{name}, {kind}" for name, kind in OF_TRAJECTORIES))
def test_the_trajectory_is_that_of_the_windows_as_they_come(case: str, rows: Any) -> None:
    row = rows[case]
    assert row["error"] <= (1e-5 if case.startswith("llama") else 1e-11), row
    assert row["same samples"] and row["windows"] >= 6, row
    assert row["padded"] < 0.9, row


@of("resumed at 7")
def test_cut_in_the_third_epoch_and_resumed_it_is_the_same(case: str, rows: Any) -> None:
    # Its first windows are corrected in any case, and round elsewhere.
    assert rows[case]["error"] <= 1e-15
    assert rows[case]["same samples"] and rows[case]["windows"] == 9 - 7


@pytest.mark.skipif(before("5.17"), reason="batch_rebalance came with 5.17")
@of("batch_rebalance resumed, stock", "batch_rebalance resumed")
def test_batch_rebalance_resumes_in_its_own_order(case: str, rows: Any) -> None:
    """Stock takes the first epoch's order for the resumed one."""
    assert (rows[case]["error"] > 0.01) if case.endswith("stock") else (rows[case]["error"] == 0.0)


@pytest.mark.skipif(before("5.17"), reason="older releases shard on a GPU alone")
@of("fsdp2")
def test_sharded_it_is_dealt_slot_by_slot(case: str, rows: Any) -> None:
    row = rows[case]
    assert row["wrapped"].startswith("FSDP") and row["in lockstep"], row
    assert row["error"] <= 1e-5 and row["same samples"] and row["windows"] == 9 and row["padded"] < 1, row


@of("dispatched stream")
def test_a_dispatched_stream_is_refused_on_every_rank(case: str, rows: Any) -> None:
    assert "dispatch_batches=False" in rows[case]["raised"]
