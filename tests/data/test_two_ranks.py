"""Epochs that do not fill two gloo ranks: accelerate's repeated samples are reported, and left out on request."""

from __future__ import annotations

import logging
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_accum_fix
from tests.data.runs import by_length, head_of, once_each, reference, samples_of, train
from tests.logged import logged
from tests.numerics.heads import HEADS
from tests.numerics.parity import pass_over_imports, relative
from tests.ranks import on_ranks

EPOCHS = 2


def sized(**accelerator: Any) -> dict[str, Any]:
    return {"num_train_epochs": EPOCHS, "max_steps": -1, "accelerator_config": accelerator or None}


def streamed(steps: int, **accelerator: Any) -> dict[str, Any]:
    return {"stream": True, "max_steps": EPOCHS * steps, "accelerator_config": accelerator or None}


#: name: head, samples, per device, G, further arguments. Rounds of micro-batches hold 2 x per device samples.
CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "a micro-batch of repeated samples alone": ("bert-mlm", 9, 2, 2, sized()),
    "the same, a causal head": ("llama", 9, 2, 2, sized()),
    "the same, counted in samples": ("bert-classes", 9, 2, 2, sized()),
    "one repeated row": ("bert-mlm", 11, 2, 2, sized()),
    "one sample for two ranks": ("bert-mlm", 1, 2, 1, sized()),
    "nothing to repeat": ("bert-mlm", 8, 2, 2, sized()),
    "drop_last": ("bert-mlm", 9, 2, 2, {**sized(), "dataloader_drop_last": True}),
    "split_batches": ("bert-mlm", 9, 4, 2, sized(split_batches=True)),
    "dispatch_batches": ("bert-mlm", 9, 2, 2, sized(dispatch_batches=True)),
    "group_by_length": ("bert-mlm", 9, 2, 2, {**sized(), **by_length()}),
    "stream": ("bert-mlm", 9, 2, 2, streamed(2, dispatch_batches=False)),
    "dispatched stream": ("bert-mlm", 9, 2, 2, streamed(2)),
}


def run(case: str, output: Path) -> dict[str, Any]:
    name, count, per_device, accumulate, arguments = CASES[case]
    samples = samples_of(name, count)
    hf_accum_fix.observations.clear()
    logging.getLogger("hf_accum_fix").setLevel(logging.INFO)

    def trained(path: str, drop: bool = False) -> Any:
        pass_over_imports()
        given = {"per_device": per_device, "accumulate": accumulate, "options": {"drop_duplicates": drop}, **arguments}
        return train(head_of(name), samples, path, output, ddp_backend="gloo", **given)

    with logged(logging.INFO) as warned:
        stock, plain = trained("stock"), trained("apply")
    with logged(logging.INFO) as told:
        dropped, subclass = trained("apply", drop=True), trained("trainer", drop=True)
    per_epoch = len(dropped.windows) // EPOCHS
    epochs = [dropped.windows[:per_epoch], dropped.windows[per_epoch:]]
    wanted, losses = reference(name, samples, dropped.windows)
    counted_twice, _ = reference(name, samples, plain.windows)
    return {
        "epochs": epochs,
        "without duplicates": relative(dropped.change, wanted),
        "losses": max(abs(a - b) for a, b in zip(dropped.losses, losses, strict=True)),
        "same bits": all(torch.equal(dropped.change[key], subclass.change[key]) for key in dropped.change),
        "with duplicates": relative(plain.change, counted_twice),
        "plain beside exact": relative(plain.change, wanted),
        "stock beside exact": relative(stock.change, wanted),
        "same order": [once_each(plain.windows[:per_epoch]), epochs[0]],
        "warned": [message for message in warned if "repeat" in message],
        "reported": [run.get("repeated_samples_dropped") for run in hf_accum_fix.report().to_dict()["runs"]],
        "told": [message for message in told if "repeat" in message],
    }


def resumed(output: Path) -> dict[str, Any]:
    """Cut after the first window of the second epoch, whose last one holds repeated samples."""
    samples = samples_of("bert-mlm", 9)
    given = {**sized(), "save_strategy": "steps", "save_steps": 3, "ddp_backend": "gloo"}
    cut: Any = {"per_device": 2, "accumulate": 2, "options": {"drop_duplicates": True}}
    uncut = train(head_of("bert-mlm"), samples, "apply", output / "uncut", **cut, **given)
    dist.barrier()
    folder = output / "uncut" / "checkpoint-3"
    found = train(head_of("bert-mlm"), samples, "apply", output / "cut", checkpoint=folder, **cut, **given)
    same = all(torch.equal(found.change[key], uncut.change[key]) for key in found.change)
    return {"same bits": same, "windows": [uncut.windows[3:], found.windows]}


def rows_of(folder: Path) -> dict[str, Any]:
    """On each rank: by case."""
    # Releases before 4.48 read their checkpoints as torch before 2.6 wrote them.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    return {**{case: run(case, folder) for case in CASES}, "resumed": resumed(folder)}


#: Repeated samples of a last round, over both ranks; a dispatched one is only evened out.
REPEATED = {
    "one repeated row": 1, "nothing to repeat": 0, "drop_last": 0, "dispatch_batches": 1, "dispatched stream": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(rows_of, tmp_path_factory.mktemp("data"))[0]


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_take_the_reference_steps(case: str, found: dict[str, Any]) -> None:
    row, (_, count, per_device, _, arguments) = found[case], CASES[case]
    repeated = REPEATED.get(case, 3)
    tolerance = HEADS[CASES[case][0]].tolerance
    assert row["without duplicates"] <= tolerance and row["same bits"]
    # Logs were rounded to four digits up to 4.57.
    assert row["losses"] <= 6e-5
    # As accelerate deals them, repeated samples counted twice, it is the full batch's step as well.
    assert row["with duplicates"] <= tolerance
    assert len(row["epochs"]) == EPOCHS
    dropped = count % (2 * per_device) if arguments.get("dataloader_drop_last") else 0
    for epoch in row["epochs"]:
        places = list(chain.from_iterable(epoch))
        assert len(places) == len(set(places)) == count - dropped
    # Nothing is dropped but what an epoch has had.
    assert row["same order"][0] == row["same order"][1]
    if repeated and count > 1:
        assert row["plain beside exact"] > 1e-3 and row["stock beside exact"] > 1e-3
    # Once a run: by patch and by subclass.
    assert (len(row["warned"]), len(row["told"])) == ((1, 2) if repeated else (0, 0))
    assert row["reported"] == ([False, True, True] if repeated else [None] * 3)
    assert all(f"repeat {repeated} samples" in message for message in (*row["warned"], *row["told"]))
    assert all("drop_duplicates=True" in message for message in row["warned"])


def test_resumed_in_the_middle_of_an_epoch_they_are_left_out_as_well(found: dict[str, Any]) -> None:
    assert found["resumed"]["same bits"]
    assert found["resumed"]["windows"][0] == found["resumed"]["windows"][1]
