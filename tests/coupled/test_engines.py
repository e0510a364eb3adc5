"""Coupled losses through the engines that shard, a loss scaler, and an interrupted run."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from hf_accum_fix.errors import UnsupportedSetupError
from tests.backends.rows import BACKENDS, Backend
from tests.backends.trajectory import Trajectory, trained_on
from tests.coupled.models import MODELS, Towers
from tests.numerics.parity import StockRecorder, applied, moved, relative, step_along, trainable, training_arguments
from tests.ranks import on_ranks

#: Of one step, whose gradient is a sum of 8 x 8 products in another order.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6}
#: SigLIP, whose temperature is no scalar, which FSDP does not take; the towers' layers are its units.
ROWS = [
    *("ddp", "fsdp1-argument", "fsdp2-argument", "fsdp2-argument-offloaded"),
    *(f"deepspeed-zero-{stage}" for stage in range(4)),
]
SHOWN = ("ddp", "fsdp2-argument", "deepspeed-zero-3")


def marks_of(row: str) -> list[pytest.MarkDecorator]:
    return [BACKENDS[row].mark, *(() if row in SHOWN else [pytest.mark.thorough])]


def _backend(row: str, unit: str) -> Backend:
    """A row whose units are modules of one class."""
    backend = BACKENDS[row]
    if "fsdp_config" not in backend.arguments:
        return backend
    # By a model's own list, accelerate may shard an embedding within a unit twice, and ends (FSDP2).
    units = {**backend.arguments["fsdp_config"], "transformer_layer_cls_to_wrap": unit}
    return dataclasses.replace(backend, arguments={**backend.arguments, "fsdp_config": units})


def _on_a_rank(row: str, folder: str) -> list[Trajectory]:
    """By the patch, and by stock."""
    backend, case = _backend(row, "SiglipEncoderLayer"), MODELS["SigLIP"]
    samples = [
        {key: each.to(backend.dtype) if each.is_floating_point() else each for key, each in sample.items()}
        for sample in case.samples
    ]
    found = []
    for path in ("apply", "stock"):
        with applied(path, coupled_loss="exact"):
            trained = trained_on(
                backend,
                lambda: case.build(backend.dtype),
                partial(training_arguments, Path(folder), 2, 2, max_grad_norm=1e30),
                partial(StockRecorder, train_dataset=samples, data_collator=case.batch),
            )
        found.append(trained)
    return found


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks_of(row)) for row in ROWS])
def test_shards(row: str, tmp_path: Path) -> None:
    case, backend = MODELS["SigLIP"], BACKENDS[row]
    reference = step_along(model := case.build(), case.full(model))
    for ours, stock in on_ranks(_on_a_rank, row, str(tmp_path)):
        assert relative(stock.change, reference.change) > 0.05
        assert relative(ours.change, reference.change) < TOLERANCES[backend.dtype]
        assert ours.losses in ([], [pytest.approx(reference.loss, rel=1e-6)])
        assert ours.norms in ([], [pytest.approx(reference.norm, rel=1e-5)])


class _Gathers(Towers):
    """As open_clip's loss gathers vectors over ranks: ``how``, its local_loss and its gather_with_grad."""

    how = (False, True)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        (is_local, with_grad), own, rank = self.how, self.vectors(x, y), dist.get_rank()
        every = []
        for each in own:
            parts = [*all_gather(each)] if with_grad else [torch.zeros_like(each) for _ in range(2)]
            if not with_grad:
                dist.all_gather(parts, each)
                parts[rank] = parts[rank] if is_local else each
            every.append(torch.cat(parts))
        one, other = own if is_local else every
        right = torch.arange(len(one)) + is_local * rank * len(one)
        pairs = [one @ every[1].T, other @ every[0].T]
        return {"loss": sum(F.cross_entropy(logits * self.temperature.exp(), right) for logits in pairs)}  # type: ignore[dict-item]


class _Columns(Towers):
    """One encoder gets all columns in one forward, column by column."""

    def vectors(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one, other = self.one(torch.cat([x, F.pad(y, (0, 1))])).chunk(2)
        return F.normalize(one, dim=-1), F.normalize(other, dim=-1)


HOW = [(False, True), (True, True), (False, False), (True, False)]


def _own(
    make: type[Towers], row: str, convention: str, named: tuple[str, ...], folder: str, cut: tuple[int, int] = (2, 2)
) -> Any:
    """How far a rank's parameters have moved, or what it says, and whether it has a gradient."""
    case = MODELS["InfoNCE of one's own"]
    torch.manual_seed(0)
    model = make().double()
    model.temperature = nn.Parameter(model.temperature.detach()[None])
    with applied("apply" if convention else "stock", coupled_loss=convention, coupled=named):
        try:
            return trained_on(
                _backend(row, "Sequential"),
                lambda: model,
                partial(training_arguments, Path(folder), *cut, max_grad_norm=1e30),
                partial(StockRecorder, train_dataset=list(case.samples), data_collator=case.batch),
            ).change
        except UnsupportedSetupError as error:
            return str(error), model.temperature.grad is not None


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) for row in ("ddp", "fsdp2-argument")])
def test_a_loss_that_gathers_over_ranks_itself_is_refused(row: str, tmp_path: Path) -> None:
    for why, has_gradient in on_ranks(_own, _Gathers, row, "exact", ("one", "other"), str(tmp_path), patience=60):
        assert "runs a collective itself" in why and "coupled_loss='rank'" in why and not has_gradient


def _ways(folder: str) -> list[list[Any]]:
    """By each of `HOW`: one micro-batch a rank, those of a window, and refused."""
    found = []
    for _Gathers.how in HOW:
        ways = (("", (4, 1)), ("rank", (2, 2)), ("rank", (1, 4)), ("exact", (2, 2)))
        found.append([_own(_Gathers, "ddp", convention, (), folder, cut) for convention, cut in ways])
    return found


@pytest.mark.slow
def test_open_clips_losses_are_exact_with_each_ranks_window(tmp_path: Path) -> None:
    """As with one micro-batch a rank: without gradient through what was gathered that is not the global batch's."""
    case = MODELS["InfoNCE of one's own"]
    reference = step_along(model := case.build(), case.full(model)).change
    for (_, with_grad), (stock, *ours, (why, _)) in zip(
        HOW, on_ranks(_ways, str(tmp_path), patience=60)[0], strict=True
    ):
        assert all(relative(each, stock) < 1e-12 for each in ours) and "runs a collective itself" in why
        stock["temperature"] = stock["temperature"][0]
        assert (relative(stock, reference) < 1e-12) == with_grad


@pytest.mark.slow
def test_shards_are_tried(tmp_path: Path) -> None:
    """By loss and vectors: their gradient is the engine's."""
    for why, has_gradient in on_ranks(_own, _Columns, "fsdp2-argument", "exact", ("one",), str(tmp_path), patience=60):
        assert "in another order" in why and not has_gradient


def test_a_loss_scaler() -> None:
    """Before the optimizer steps it divides by what it has multiplied the loss with."""
    case = MODELS["supervised contrastive"]
    reference = step_along(model := case.build(), case.full(model))
    before = trainable(model := case.build())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in case.loop(model, case.batches(2), 4, scaler.scale):
        scaler.step(optimizer)
    assert relative(moved(model, before), reference.change) < 1e-12


def _run(folder: Path, dropout: float, **given: Any) -> tuple[nn.Module, list[float]]:
    """Three windows of four samples, again and again over the eight."""
    case = MODELS["InfoNCE of one's own, found"]
    torch.manual_seed(0)
    model = Towers(dropout=dropout).double()
    checkpoint = given.pop("checkpoint", None)
    with applied("apply", coupled_loss="exact"):
        arguments = {"max_steps": 3, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 1, **given}
        args = training_arguments(folder, 2, 2, **arguments)
        trainer = StockRecorder(model=model, args=args, train_dataset=list(case.samples), data_collator=case.batch)
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model, [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_goes_on_from_a_checkpoint(dropout: float, tmp_path: Path) -> None:
    """In the middle of an epoch; its cut is searched anew."""
    uncut, losses = _run(tmp_path / "uncut", dropout)
    resumed, others = _run(tmp_path / "cut", dropout, checkpoint=str(tmp_path / "uncut" / "checkpoint-1"))
    assert len(losses) == 3 and others == losses
    assert relative(trainable(resumed), trainable(uncut)) == 0.0
