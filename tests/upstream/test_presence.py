"""Names of transformers and accelerate that we use: if one is missing, a SeamError names it, or a feature is off."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainerState

import hf_accum_fix
from hf_accum_fix import GlobalBatchTrainer, SeamError, accumulation_windows, verify
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.upstream import seams
from hf_accum_fix.upstream.presence import missing_from_classes, require_accelerator
from hf_accum_fix.upstream.seams import ATTRIBUTES, PROCESSES, SEAMS, TESTED_RANGES, VERIFY, Attribute
from tests.numerics.parity import training_arguments

PACKAGE = Path(hf_accum_fix.__file__).parent
HERE = [row for row in ATTRIBUTES if row.is_in(Version(import_module(row.target.partition(".")[0]).__version__))]
REFUSED = [row for row in HERE if not row.off]
OFF = [row for row in HERE if row.off]
LOADERS = (seams.BATCH_SHARD, seams.STREAM_SHARD, seams.DISPATCHER)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(labels * self.weight, torch.zeros_like(labels))}


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    args = training_arguments(tmp_path, 1, 2, max_steps=1)
    return Trainer(model=Mean(), args=args, train_dataset=[{"labels": torch.tensor(float(n))} for n in range(1, 5)])


def holder_of(row: Attribute) -> Any:
    module, _, owner = row.target.partition(":")
    found = import_module(module)
    return getattr(found, owner) if owner else found


def defining(holder: Any, name: str) -> Any:
    """The module, the class or the base of it that holds a name."""
    return next(each for each in getattr(holder, "__mro__", (holder,)) if name in vars(each))


def objects(trainer: Any) -> dict[str, Any]:
    """What a training has of each class."""
    batches = BatchSamplerShard(BatchSampler(range(4), 1, False), 1, 0)
    stream = IterableDatasetShard(range(4))
    return {
        seams.TRAINER: trainer,
        seams.ARGUMENTS: trainer.args,
        seams.STATE: trainer.state,
        seams.ACCELERATOR: trainer.accelerator,
        PROCESSES: trainer.accelerator.state,
        seams.BATCH_SHARD: (batches, DataLoaderShard(range(4), batch_sampler=batches)),
        seams.STREAM_SHARD: (stream, DataLoaderShard(stream)),
        seams.DISPATCHER: (loader := DataLoaderDispatcher(range(4), batch_size=1), loader),
    }


@pytest.mark.parametrize("row", [row for row in REFUSED if row.seen == "class"], ids=str)
def test_apply_refuses_what_a_class_lacks(row: Attribute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(defining(holder_of(row), row.name), row.name)
    package = row.target.partition(".")[0]
    use = f"uses it to {row.used_for}; use {package} {row.since or TESTED_RANGES[package][0]} to "
    with pytest.raises(SeamError, match=rf"without {row}; expected it: hf-accum-fix {use}"):
        hf_accum_fix.apply()
    assert hf_accum_fix.active_handle() is None


@pytest.mark.parametrize("row", [row for row in REFUSED if row.seen == "object"], ids=str)
def test_training_refuses_what_an_object_lacks(row: Attribute, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = objects(trainer)[row.target]
    with hf_accum_fix.apply(), pytest.raises(SeamError, match=f"without {row}; "):
        if row.target in LOADERS:
            of_class = row.name not in vars(held[0])
            monkeypatch.delattr(defining(type(held[0]), row.name) if of_class else held[0], row.name)
            WithoutDuplicates(held[1], False, print)
        else:
            where = vars(held).get("_shared_state", vars(held)) if row.target == PROCESSES else vars(held)
            monkeypatch.delitem(where, row.name)
            trainer.train()
    assert getattr(trainer, "state", TrainerState()).global_step == 0


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "static_graph"])
def test_an_engine_that_hooks_the_backward_needs_a_torch_that_shows_shapes(
    engine: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = trainer.accelerator
    live.deepspeed_engine_wrapped = None
    if engine == "static_graph":
        live.ddp_handler = DistributedDataParallelKwargs(static_graph=True)
    else:
        monkeypatch.setattr(type(live), "distributed_type", DistributedType[engine])
        monkeypatch.setattr(type(live.state), "deepspeed_plugin", None, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.5.0")
    require_accelerator(live)
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.raises(SeamError, match=rf"got torch 2\.4\.1 under {engine}; expected .* install torch>=2\.5"):
        require_accelerator(live)


def test_the_subclass_and_the_loop_refuse_the_same(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Accelerator, "no_sync")
    trainer.__class__ = GlobalBatchTrainer
    for start in (trainer.train, lambda: accumulation_windows([], trainer.accelerator)):
        with pytest.raises(SeamError, match=r"without Accelerator\.no_sync; "):
            start()


@pytest.mark.parametrize("row", [row for row in OFF if row.off != VERIFY], ids=str)
def test_training_continues_and_warns_what_is_off(
    row: Attribute, trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename(row, trainer, monkeypatch)
    with hf_accum_fix.apply():
        trainer.train()
    assert trainer.state.global_step == 1
    warned = [message for message in caplog.messages if f"{row.off} is off" in message]
    assert len(warned) == 1 and f"without {row}; expected it: hf-accum-fix uses it to {row.used_for}" in warned[0]


@pytest.mark.parametrize("row", [row for row in OFF if row.off == VERIFY], ids=str)
def test_verify_has_no_verdict(row: Attribute, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rename(row, trainer, monkeypatch)
    assert f"without {row}; " in " ".join(verify(trainer).to_text().split())


def rename(row: Attribute, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a release of another name for an attribute, which its own methods use."""
    holder, other = holder_of(row), f"{row.name}_renamed"
    for kind in (holder, Trainer):
        for function in map(inspect.unwrap, filter(callable, vars(kind).values())):
            if isinstance(function, FunctionType):
                monkeypatch.setattr(function, "__code__", _renamed(function.__code__, row.name, other))
    for held in (holder, objects(trainer)[row.target]):
        if row.name in vars(held):
            monkeypatch.setattr(held, other, vars(held)[row.name], raising=False)
            monkeypatch.delattr(held, row.name)


def _renamed(code: CodeType, name: str, other: str) -> CodeType:
    inner = tuple(_renamed(each, name, other) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=inner, co_names=tuple(other if each == name else each for each in code.co_names))


def test_the_installed_releases_lack_nothing(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert missing_from_classes() == ()
    with hf_accum_fix.apply():
        trainer.train()
    assert not [message for message in caplog.messages if " is off" in message]


def test_every_name_is_a_row() -> None:
    rows = {row.name for row in ATTRIBUTES} | {seam.name for seam in SEAMS}
    assert {name for name in _names() if name not in rows} == set()


def _names() -> Iterator[str]:
    """What the package imports from them, or reads, calls and overrides of a trainer and its parts."""
    holders = ("trainer", "trainer.args", "args", "trainer.state", "trainer.accelerator", "accelerator")
    for path in PACKAGE.rglob("*.py"):
        if "monitor" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("transformers", "accelerate")):
                yield from {each.name for each in node.names} - {"Trainer", "Seq2SeqTrainer"}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).removeprefix("self.").lstrip("_") in holders:
                yield from {node.attr} - {"__name__", "global_batch_options"}
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "overridden"):
                holder, name = node.args[:2]
                if ast.unparse(holder).removeprefix("self.").lstrip("_") in holders and isinstance(name, ast.Constant):
                    yield name.value
