"""The same training on another machine: checkpoints of four ranks go on with two, three and one, in another cut.

Two epochs of AdamW in float64, the last window of each short: every step has the samples of the uncut training's on
one process, and the parameters end within rounding of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer

from hf_accum_fix.errors import UnsupportedSetupError
from tests.backends import trajectory
from tests.backends.rows import BACKENDS
from tests.backends.trajectory import gathered, sharding_on, variables
from tests.data.runs import NotedTrainer, by_length, head_of, train
from tests.numerics.heads import HEADS, before
from tests.numerics.heads.samples import text
from tests.numerics.parity import applied, pass_over_imports, relative, trainable, training_arguments
from tests.ranks import RankFailedError, on_ranks

pytestmark = pytest.mark.skipif(before("5.0.0"), reason="4.49.0 itself goes on with the checkpoint's batch size")
#: Ranks, samples of a micro-batch, micro-batches of a window, and the step to stop at: always twelve samples.
STAGES = ((4, 3, 1, 2), (2, 3, 2, 5), (3, 2, 2, 6), (1, 4, 3, 8))
#: Of distinct tokens, by which each is recognised.
SAMPLES = text(lengths=[3 + index * 17 % 20 for index in range(40)])
KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "stream": {"stream": True, "accelerator_config": {"dispatch_batches": False}},
    "dispatched stream": {"stream": True, "accelerator_config": {"dispatch_batches": True}},
    "group by length": by_length(),
    "length-balanced": {
        "options": {"balance_windows": True, "drop_duplicates": False},
        "samples": SAMPLES[:36],
    },
    "warm-up": {"warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "whole windows": {"samples": SAMPLES[:36]},
    "lora": {"head": "lora", "samples": [{**each, "labels": each["labels"].clamp(max=2)} for each in SAMPLES]},
}
ADAM: dict[str, Any] = {
    "optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "ddp_backend": "gloo",
}  # fmt: skip
#: In CI.
EVERY = ("shuffled", "stream", "group by length")


def rows(kinds: Sequence[str], per_device: int, accumulate: int, until: int, folder: str, begin: int) -> list[Any]:
    """Each kind from the step it begins at, 0 or a checkpoint's, to its next stop."""
    pass_over_imports()
    return [row(kind, per_device, accumulate, until, Path(folder) / kind, begin) for kind in kinds]


def row(kind: str, per_device: int, accumulate: int, until: int, folder: Path, begin: int) -> dict[str, Any]:
    given = {**KINDS[kind]}
    head, options = head_of(given.pop("head", "llama")), {"drop_duplicates": True, **given.pop("options", {})}
    found = train(
        head, given.pop("samples", SAMPLES), "apply", folder, options=options,
        checkpoint=folder / f"checkpoint-{begin}" if begin else None, per_device=per_device, accumulate=accumulate,
        max_steps=until, **ADAM, **given,
    )  # fmt: skip
    return {"parameters": trainable(found.trainer.model), "windows": [sorted(window) for window in found.windows]}


@pytest.mark.parametrize("kinds", (EVERY, pytest.param(tuple(KINDS), marks=pytest.mark.thorough)), ids=("some", "all"))
def test_one_training_on_four_two_three_and_one_rank(kinds: Sequence[str], tmp_path: Path) -> None:
    [uncut] = on_ranks(rows, kinds, 4, 3, 8, str(tmp_path / "uncut"), 0, ranks=1)
    begin, windows, ends = 0, {kind: list[Any]() for kind in kinds}, dict[str, Any]()
    for ranks, per_device, accumulate, until in STAGES:
        found = on_ranks(rows, kinds, per_device, accumulate, until, str(tmp_path / "cut"), begin, ranks=ranks)[0]
        for kind, its in zip(kinds, found, strict=True):
            windows[kind] += its["windows"]
            ends[kind] = its["parameters"]
        begin = until
    for kind, whole in zip(kinds, uncut, strict=True):
        assert windows[kind] == whole["windows"], kind
        # Of the loss in float32 that the library makes, after eight steps of AdamW.
        assert relative(ends[kind], whole["parameters"]) <= 1e-6, kind


def of_shards(kind: str, per_device: int, accumulate: int, until: int, folder: str, begin: int) -> dict[str, Any]:
    """The parameters after FSDP2 went on with a checkpoint, by a ``FSDP_STATE_DICT_TYPE``; "": without FSDP2."""
    backend, head = BACKENDS["fsdp2-launched" if kind else "ddp"], trajectory.HEADS["llama"]
    with variables({**backend.environment, "FSDP_STATE_DICT_TYPE": kind}), applied("apply", drop_duplicates=True):
        args = training_arguments(Path(folder), per_device, accumulate, max_steps=until, **ADAM)
        if kind:
            sharding_on(args)
        trainer = Trainer(head.build(), args, head.batch, SAMPLES)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{begin}" if begin else None)
        return gathered(trainer.model_wrapped, backend)


@pytest.mark.parametrize("kind", ("SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.thorough)))
def test_shards_go_on_with_fewer_ranks(kind: str, tmp_path: Path) -> None:
    """Loading makes the optimizer's states by a step, which is none of the training."""
    uncut = on_ranks(of_shards, "", 12, 1, 6, str(tmp_path / "uncut"), 0, ranks=1)[0]
    stages = ((2, 3, 2, 3), (1, 4, 3, 6)) if kind.startswith("S") else ((4, 3, 1, 2), (2, 3, 2, 4), (1, 4, 3, 6))
    begin = 0
    for ranks, per_device, accumulate, until in stages:
        found = on_ranks(of_shards, kind, per_device, accumulate, until, str(tmp_path), begin, ranks=ranks)[0]
        begin = until
    assert relative(found, uncut) <= 1e-6


def row_until_killed(folder: str) -> None:
    """Four ranks, of which one dies in its fourth step."""

    class Killed(NotedTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.data.runs.NotedTrainer", Killed)
        row("shuffled", 3, 1, 8, Path(folder), 0)


@pytest.mark.thorough
def test_one_rank_of_four_is_killed_and_three_go_on(tmp_path: Path) -> None:
    [[uncut]] = on_ranks(rows, ["shuffled"], 4, 3, 8, str(tmp_path / "uncut"), 0, ranks=1)
    with pytest.raises(RankFailedError):
        on_ranks(row_until_killed, str(tmp_path / "cut" / "shuffled"), ranks=4)
    found = on_ranks(rows, ["shuffled"], 2, 2, 8, str(tmp_path / "cut"), 3, ranks=3)[0][0]
    assert found["windows"] == uncut["windows"][3:]
    assert relative(found["parameters"], uncut["parameters"]) <= 1e-6


@pytest.mark.parametrize("keep", (False, True))
def test_another_global_batch_is_named(keep: bool, tmp_path: Path, said: Any) -> None:
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(HEADS["llama"], SAMPLES, "apply", tmp_path / "a", per_device=2, accumulate=4, **given)
    assert not said("global batch")
    at = {"per_device": 2, "accumulate": 2, "checkpoint": tmp_path / "a" / "checkpoint-1"}
    options = {"global_batch": "keep"} if keep else {}
    with pytest.raises(UnsupportedSetupError, match="a product of 8") if keep else contextlib.nullcontext():
        train(HEADS["llama"], SAMPLES, "apply", tmp_path / "b", options=options, **at, **given)
    assert keep or said("got a global batch of 4 samples")
    # The same in another cut is not named.
    train(HEADS["llama"], SAMPLES, "apply", tmp_path / "c", options=options, **{**at, "per_device": 4}, **given)
    assert len(said("global batch")) == (0 if keep else 1)
