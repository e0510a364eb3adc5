"""A step or loop that goes around the wrapped step: refused before the first optimizer step, even in a run of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix import ContractError, GlobalBatchTrainer, SeamError
from tests.logged import Said
from tests.numerics.heads import HEADS
from tests.numerics.parity import trainable, trainer_of

HEAD = HEADS["drops-kwargs"]


def step_of_accelerate(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    model.train()
    loss = self.compute_loss(model, inputs)
    self.accelerator.backward(loss)
    return loss.detach()


def step_of_torch(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach()


def step_of_torch_that_goes_on(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """As GLiClass's: whatever is raised in a step is caught there."""
    try:
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()
    except Exception:
        model.zero_grad()
        return torch.zeros(())


def skipped(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return torch.zeros(())


def on_the_instance(step: Callable[..., Any], trainer: Any) -> None:
    trainer.training_step = MethodType(step, trainer)


def on_the_subclass(step: Callable[..., Any], trainer: Any) -> None:
    trainer.__class__ = type("Own", (type(trainer),), {"training_step": step})


def as_a_loop(step: Callable[..., Any], trainer: Any) -> None:
    """A loop of one's own under the wrapped train(), which fetches no window."""

    def loop(self: Any, *args: Any, **kwargs: Any) -> str:
        self.create_optimizer_and_scheduler(1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        batches = list(self.get_train_dataloader())
        for inputs in batches[:4]:
            step(self, self.model, inputs)
        self.optimizer.step()
        return "trained"

    trainer._inner_training_loop = MethodType(loop, trainer)


PLACES = {"instance": on_the_instance, "subclass": on_the_subclass}
STEPS = {"accelerate": step_of_accelerate, "torch": step_of_torch, "goes-on": step_of_torch_that_goes_on}


def made(folder: Path, by: str, accumulate: int = 4) -> Any:
    kind = GlobalBatchTrainer if by == "class" else Trainer
    return trainer_of(HEAD, folder, kind, accumulate=accumulate)


def patched(by: str) -> Any:
    return hf_accum_fix.apply(quiet=True) if by == "apply" else nullcontext()


def changed(before: dict[str, Any], model: Any) -> bool:
    return any(not torch.equal(before[name], value) for name, value in trainable(model).items())


@pytest.mark.parametrize("by", ["apply", "class"])
@pytest.mark.parametrize(("step", "warmup"), [*((step, 0) for step in STEPS), ("accelerate", 2)])
def test_gradients_of_a_loop_are_refused_before_they_are_used(step: str, warmup: int, by: str, tmp_path: Path) -> None:
    """At a rate of 0, too: what makes an optimizer's states steps on zeros."""
    with patched(by):
        trainer = made(tmp_path, by)
        trainer.args.warmup_steps, trainer.args.lr_scheduler_type = warmup, "constant_with_warmup"
        as_a_loop(STEPS[step], trainer)
        before = trainable(trainer.model)
        with pytest.raises(SeamError, match=r"super\(\)\.training_step"):
            trainer.train()
    assert not changed(before, trainer.model) and not _global_optimizer_pre_hooks


@pytest.mark.parametrize("by", ["apply", "class"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_never_calls_the_bases_is_stocks_and_said(
    place: str, step: str, by: str, tmp_path: Path, said: Said
) -> None:
    stock = made(tmp_path, "apply")
    PLACES[place](STEPS[step], stock)
    stock.train()
    with patched(by):
        trainer = made(tmp_path, by)
        PLACES[place](STEPS[step], trainer)
        trainer.train()
        (run,) = hf_accum_fix.report().to_dict()["runs"]
    assert not changed(trainable(stock.model), trainer.model) and not _global_optimizer_pre_hooks
    assert len(said("its training_step never calls the Trainer's")) == 1 and run["exact"] is False


@pytest.mark.parametrize("by", ["apply", "class"])
def test_an_error_of_ours_that_a_step_catches_is_raised_by_the_optimizer(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise ContractError("refused in the midst of a step")

    def step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        try:
            return type(self).__mro__[1].training_step(self, model, inputs, num_items_in_batch)
        except Exception:
            return torch.zeros(())

    with patched(by):
        trainer = made(tmp_path, by)
        on_the_subclass(step, trainer)
        before = trainable(trainer.model)
        monkeypatch.setattr("hf_accum_fix.window.window.weigh", refuses)
        with pytest.raises(ContractError, match="in the midst"):
            trainer.train()
    assert not changed(before, trainer.model)


@pytest.mark.parametrize("step", [*STEPS, "left out"])
def test_one_micro_batch_and_those_that_are_left_out_are_not_refused(step: str, tmp_path: Path) -> None:
    """At G = 1 on one rank there is nothing to fix."""
    with patched("apply"):
        trainer = made(tmp_path, "apply", accumulate=1 if step in STEPS else 4)
        on_the_subclass(STEPS.get(step, skipped), trainer)
        before = trainable(trainer.model)
        trainer.train()
    assert trainer.state.global_step == 1 and changed(before, trainer.model) == (step in STEPS)
