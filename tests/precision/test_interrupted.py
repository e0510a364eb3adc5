"""Trainings that are resumed, reverted, or end within a window: the same trajectory, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

import hf_accum_fix
from hf_accum_fix import UnsupportedSetupError, accumulation_windows
from hf_accum_fix.engines.precision import Arrival, Leaf, WindowGradient
from hf_accum_fix.overrides.session import SESSION
from tests.numerics.parity import Recorder, StockRecorder, training_arguments
from tests.precision.gradients import Bigram, Keep, asking, batch, error, left_on, reference, samples

ROWS = samples(64)


def trainer_of(kind: type, folder: Path, given: Mapping[str, Any] = MappingProxyType({}), **arguments: Any) -> Any:
    """Two windows of 32 micro-batches."""
    return kind(
        **{"model": Bigram().bfloat16(), "train_dataset": ROWS, **given},
        args=training_arguments(folder, 1, 32, **{"max_steps": 2, "learning_rate": 0.5, **arguments}),
        data_collator=batch,
    )


def nothing_is_left(trainer: Any) -> bool:
    gradient = trainer.__dict__[SESSION].delivery.gradient
    return not (left_on(trainer.model) or gradient._sums or gradient._hooks or gradient._leaves)


def test_resumed_it_is_the_run_that_was_not_cut(tmp_path: Path) -> None:
    def trained(name: str, resume: Path | None = None, **given: Any) -> dict[str, torch.Tensor]:
        trainer = trainer_of(asking("float32"), tmp_path / name, **given)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        assert nothing_is_left(trainer)
        return {key: value.clone() for key, value in trainer.model.state_dict().items()}

    uncut = trained("uncut")
    trained("cut", max_steps=1, save_strategy="steps", save_steps=1)
    resumed = trained("resumed", tmp_path / "cut" / "checkpoint-1")
    assert all(torch.equal(uncut[key], resumed[key]) for key in uncut)


class Within(TrainerCallback):
    """Does something after the second micro-batch of the first window."""

    def __init__(self, act: Any) -> None:
        self.act, self.calls = act, 0

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.act()


def test_an_error_within_a_window_leaves_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(asking("float32"), tmp_path, {"callbacks": [Within(lambda: 1 / 0)]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert nothing_is_left(trainer)


class LeavesOut(Recorder):
    """Leaves the last micro-batch of the first window out, or goes on after an error in its midst."""

    entered, place = 0, 31

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.entered += 1
        if self.entered == 32 and self.place == 31:
            return torch.zeros(())
        try:
            return super().training_step(*args, **kwargs)
        except ArithmeticError:
            return torch.zeros(())

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self.entered == self.place + 1:
            raise ArithmeticError
        return super()._prepare_inputs(inputs)  # type: ignore[misc]


@pytest.mark.parametrize("place", [31, 15])
def test_a_micro_batch_that_is_left_out_takes_no_other_with_it(place: int, tmp_path: Path) -> None:
    model = Bigram().bfloat16()
    kept = [*ROWS[:place], *ROWS[place + 1 : 32]]
    items = [sum(len(row["labels"]) for row in rows) for rows in (kept, ROWS[:32])]
    # The denominator was fixed before the window began.
    wanted = {name: each * items[0] / items[1] for name, each in reference(model, kept).items()}
    norm = float(torch.stack([each.norm() for each in wanted.values()]).norm())
    optimizer = Keep(model)
    kind = type("Kind", (LeavesOut, asking("float32")), {"place": place})
    trainer = trainer_of(kind, tmp_path, stepping(optimizer, model), max_grad_norm=norm / 2)
    trainer.train()
    clipped = {name: each / 2 for name, each in wanted.items()}
    assert error(optimizer.seen[0], clipped) < 0.006
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm, rel=0.01)
    assert nothing_is_left(trainer)


class OwnLast(Recorder):
    """Runs the last micro-batch of a window by itself."""

    entered = 0
    reduced: Any = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.entered += 1
        if self.entered % 32:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc,no-any-return]
        loss = model(**inputs)["loss"] / 32
        self.accelerator.backward(loss)  # type: ignore[attr-defined]
        # What ranks would reduce.
        self.reduced = self.reduced or {name: each.grad.double() for name, each in model.named_parameters()}
        return loss.detach()  # type: ignore[no-any-return]


def test_a_last_micro_batch_of_the_trainers_own_finds_the_others_in_grad(tmp_path: Path) -> None:
    rows = [row for row in samples(320) if len(row["labels"]) == 4][:64]
    trainer = trainer_of(type("Kind", (OwnLast, asking("float32")), {}), tmp_path, {"train_dataset": rows})
    wanted = reference(trainer.model, rows[:32])
    trainer.train()
    assert error(trainer.reduced, wanted) < 0.006
    assert nothing_is_left(trainer)


def stepping(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizers": (optimizer, LambdaLR(optimizer, lambda _: 1.0))}


def test_reverted_within_a_window_the_gradient_is_as_torch_adds_it(tmp_path: Path) -> None:
    seen = []
    for accumulate_in in ("parameter", "float32"):
        model = Bigram().bfloat16()
        optimizer = Keep(model)
        handle = hf_accum_fix.apply(accumulate_in=accumulate_in, quiet=True)
        given = {**stepping(optimizer, model), "callbacks": [Within(handle.revert)]}
        trainer = trainer_of(StockRecorder, tmp_path, given, max_grad_norm=0.1)
        trainer.train()
        assert nothing_is_left(trainer) and not handle.active
        seen.append(optimizer.seen[0])
    # Two micro-batches of 32 had been added.
    assert error(seen[1], seen[0]) < 0.006


BATCHES = [batch([row]) for row in samples(4)]


def optimizer_hook(parameter: Any) -> None:
    pytest.fail("it stepped")


def by_hook(parameters: Iterable[nn.Parameter]) -> None:
    """As the Trainer's layerwise GaLore, APOLLO and their like."""
    for each in parameters:
        each.register_post_accumulate_grad_hook(optimizer_hook)


BY_TORCH = partial(_apply_optimizer_in_backward, torch.optim.SGD, optimizer_kwargs={"lr": 1.0})


@pytest.mark.parametrize(("stepping", "named"), [(by_hook, "optimizer_hook"), (BY_TORCH, "SGD")], ids=["hook", "torch"])
def test_optimizers_of_single_parameters(stepping: Any, named: str) -> None:
    model = Bigram().bfloat16()
    stepping(model.parameters())
    before = [each.detach().clone() for each in model.parameters()]
    window = next(iter(accumulation_windows(BATCHES, steps=4, accumulate_in="float32")))
    refused = pytest.raises(UnsupportedSetupError, match=rf"a hook that runs inside the backward \({named}\)")
    with refused, window.micro_batch(model):
        window.loss(model, window.batches[0]).backward()
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("raises", [False, True], ids=["ends-early", "an-error-of-theirs"])
def test_what_fsdp1_has_cut_into_shards_again_is_not_handed_back(raises: bool) -> None:
    """After a micro-batch FSDP1's parameters are shards, which take no gradient of the whole; an error stays theirs."""
    flat = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    gradient = WindowGradient("float32")

    def run(*, first: bool) -> None:
        with gradient.micro_batch(lambda: [Leaf(flat, Arrival.FLAT)], first=first, last=False):
            if not first:
                raise KeyboardInterrupt
            flat.float().sum().backward()  # type: ignore[no-untyped-call]
        flat.data = flat.data[:4]

    run(first=True)
    with pytest.raises(KeyboardInterrupt if raises else UnsupportedSetupError):
        if raises:
            run(first=False)
        else:
            gradient.finish()
    assert not (gradient._sums or gradient._hooks or gradient._leaves)
