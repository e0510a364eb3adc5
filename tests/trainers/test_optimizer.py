"""The optimizer is asked: whose parameters it steps, and when; what changes them otherwise takes "exact" away."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import hf_accum_fix
from hf_accum_fix import accumulation_windows
from hf_accum_fix.engines import delivered
from hf_accum_fix.verification.report import Kind
from tests.backends.trajectory import HEADS
from tests.logged import Said
from tests.numerics.parity import applied, trainer_of
from tests.trainers.runs import Ordered

HEAD = HEADS["llama"]
#: Of the model: an optimizer, or None for the Trainer's own.
Make = Callable[[nn.Module], Optimizer | None]


def own(model: nn.Module) -> Optimizer:
    return SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def nothing(*_: Any) -> None:
    """No preparation."""


@dataclass(frozen=True, eq=False)
class Shape:
    """A training of some windows.

    Attributes:
        optimizer: of the model.
        prepare: the model and its trainer, before it trains.
        trainer: its class.
        callbacks: that it has.
        words: of the warning, which has to come once; empty: none may come.
        looped: in a loop it is the same.
        prepared: of the model, before the optimizer is made.
    """

    optimizer: Make = own
    prepare: Callable[[Any], object] = nothing
    trainer: type = Ordered
    callbacks: tuple[Callable[[], TrainerCallback], ...] = ()
    words: str = ""
    looped: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prepared: Callable[[nn.Module], object] = nothing


# --- optimizers that do not step the model ----------------------------------------------------------------------------


def without(model: nn.Module, *names: str) -> Optimizer:
    return SGD([each for name, each in model.named_parameters() if not any(one in name for one in names)], lr=0.1)


def before_resizing(model: Any) -> Optimizer:
    made = own(model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return made


class Unfreezes(TrainerCallback):
    """As gradual unfreezing does, and nobody adds what it unfreezes to the optimizer."""

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        for name, each in model.named_parameters():
            each.requires_grad_("layers.0" not in name)

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        for each in model.parameters():
            each.requires_grad_()


def frozen_at_first(model: nn.Module) -> Optimizer:
    return without(model, "layers.0")


def replaced(trainer: Any) -> None:
    whole = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **kwargs: whole(loss * 0.25, **kwargs)


class StepsInside(Ordered):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        # accelerate's own would step in the last one alone.
        self.optimizer.optimizer.step()
        self.optimizer.optimizer.zero_grad()
        return loss


class MovesWeights(Ordered):
    @torch.no_grad()
    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.enable_grad():
            loss = super().training_step(model, *args, **kwargs)
        model.lm_head.weight.mul_(0.9)
        return loss


WRONG = {
    "another model": Shape(
        lambda model: own(copy.deepcopy(model)), words="none of the model's parameters", looped=True
    ),
    "stale copies": Shape(
        lambda model: SGD([each.detach().clone().requires_grad_() for each in model.parameters()], lr=0.1),
        words="none of the model's parameters",
        looped=True,
    ),
    "without head and embeddings": Shape(
        lambda model: without(model, "lm_head", "embed_tokens"),
        words="no model.embed_tokens.weight, lm_head.weight, which got a gradient",
        looped=True,
    ),
    "before resizing": Shape(before_resizing, words="no lm_head.weight, which got a gradient", looped=True),
    "unfrozen and not added": Shape(
        frozen_at_first, callbacks=(Unfreezes,), words="no model.layers.0.self_attn.q_proj.weight"
    ),
    "steps in every micro-batch": Shape(trainer=StepsInside, words="an optimizer step after micro-batch 1 of the 4"),
    "weights moved": Shape(trainer=MovesWeights, words="weights that change within a window (lm_head.weight)"),
    "backward replaced": Shape(prepare=replaced, words="hands on 0.25 times the loss"),
}


# --- those that do ----------------------------------------------------------------------------------------------------


class Both(Optimizer):
    """A matrix optimizer and another, in one, as Muon's users write it."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for each in parts for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.parts:
            each.step()


def of_parts(model: nn.Module) -> Optimizer:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return Both(SGD(matrices, lr=0.1), AdamW(others, lr=0.01))


class Masters(Optimizer):
    """Steps copies, and writes them back past the version counter, as mixed-precision optimizers do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = [*model.parameters()]
        self.copies = [each.detach().clone().requires_grad_() for each in self.model]
        self.inner = SGD(self.copies, lr=0.1)
        super().__init__(self.inner.param_groups, self.inner.defaults)

    def step(self, closure: Any = None) -> None:
        for one, other in zip(self.copies, self.model, strict=True):
            one.grad = None if other.grad is None else other.grad.to(one)
        self.inner.step()
        for one, other in zip(self.copies, self.model, strict=True):
            other.data.copy_(one.data)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.model:
            each.grad = None


class ScheduleFree(SGD):
    """Trains at other weights than it evaluates at."""

    def train(self) -> None:
        self._swap(1.25)

    def eval(self) -> None:
        self._swap(0.8)

    @torch.no_grad()
    def _swap(self, times: float) -> None:
        for group in self.param_groups:
            if group.get("times") != times:
                group["times"] = times
                for each in group["params"]:
                    each.mul_(times)


class StepsAtTheEnd(Ordered):
    """accelerate's optimizer does nothing in the other micro-batches, and the Trainer finds no gradient then."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Average(TrainerCallback):
    """EMA: swaps the mean in for an evaluation after each step, and out again."""

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.mean = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        kept = [each.detach().clone() for each in model.parameters()]
        for before in (self.mean, kept):
            for one, other in zip(before, model.parameters(), strict=True):
                other.copy_(one)


class Second(TrainerCallback):
    """An optimizer of its own for the embeddings."""

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.optimizer = SGD([model.model.embed_tokens.weight], lr=0.01)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.optimizer.step()


def clamp_in_forward(model: Any) -> None:
    """As ALBEF's and SwAV's forwards do: what is written has no other value than before."""

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        model.model.norm.weight.clamp_(0.9, 1.1)
        model.lm_head.weight.copy_(normalize(model.lm_head.weight))

    model.register_forward_pre_hook(clamp)


def adapted(model: Any) -> None:
    """LoRA, small: frozen weights beside two factors."""
    model.requires_grad_(False)
    layer = model.lm_head
    layer.down, layer.up = (
        nn.Linear(*sizes, bias=False).double() for sizes in ((layer.in_features, 2), (2, layer.out_features))
    )
    layer.register_forward_hook(lambda _, given, found: found + layer.up(layer.down(given[0])))


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


RIGHT = {
    "own": Shape(looped=True),
    "the Trainer's, with a warm-up from zero": Shape(
        lambda model: None, arguments={"warmup_steps": 2, "lr_scheduler_type": "linear"}
    ),
    "of parts": Shape(of_parts, looped=True),
    "masters": Shape(Masters, looped=True),
    "schedule-free": Shape(lambda model: ScheduleFree(model.parameters(), lr=0.1)),
    "EMA": Shape(callbacks=(Average,)),
    "another for the embeddings": Shape(lambda model: without(model, "embed_tokens"), callbacks=(Second,)),
    "stepped at the end": Shape(trainer=StepsAtTheEnd),
    "LoRA": Shape(prepared=adapted, looped=True),
    "tied": Shape(prepared=tie, looped=True),
    "written in the forward": Shape(prepared=clamp_in_forward, looped=True),
}


def trained(shape: Shape, output: Path, cut: tuple[int, int] = (2, 4), steps: int = 3) -> Any:
    """A trainer that has trained."""
    model = HEAD.build()
    shape.prepared(model)
    optimizer = shape.optimizer(model)
    given: dict[str, Any] = {"callbacks": [each() for each in shape.callbacks]}
    if optimizer is not None:
        given["optimizers"] = (optimizer, None)
    trainer = trainer_of(
        HEAD,
        output,
        shape.trainer,
        model=model,
        samples=[*HEAD.samples[:8]] * steps,
        given=given,
        **{"per_device": cut[0], "accumulate": cut[1], "max_steps": steps, "learning_rate": 0.05, **shape.arguments},
    )
    shape.prepare(trainer)
    with applied("apply"):
        trainer.train()
    return trainer


def looped(shape: Shape, steps: int = 3) -> None:
    model = HEAD.build().train()
    shape.prepared(model)
    optimizer = shape.optimizer(model)
    assert optimizer is not None
    loader: Any = DataLoader([*HEAD.samples[:8]] * steps, batch_size=2, collate_fn=HEAD.batch)  # type: ignore[arg-type]
    for window in accumulation_windows(loader, steps=4):
        for batch in window:
            with window.micro_batch(model):
                window.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def last_run() -> Mapping[str, Any]:
    found: Mapping[str, Any] = hf_accum_fix.report().to_dict()["runs"][-1]
    return found


def check_wrong(shape: Shape, said: Said) -> None:
    run = last_run()
    assert not run["exact"] and run["inexact_windows"] >= 2
    assert run["reached_optimizer"].startswith("no, ")
    assert len(said(shape.words)) == 1, said("")
    assert "reached the optimizer: no, " in str(hf_accum_fix.report())


def check_right(said: Said) -> None:
    run = last_run()
    assert run["exact"] and not run["inexact_windows"], said("")
    assert run["reached_optimizer"].startswith("yes, to ")
    assert not said("got ")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_stepped_otherwise_is_named_once(name: str, tmp_path: Path, said: Said) -> None:
    trained(WRONG[name], tmp_path)
    check_wrong(WRONG[name], said)


@pytest.mark.parametrize("name", [name for name, shape in WRONG.items() if shape.looped])
def test_in_a_loop_as_well(name: str, said: Said) -> None:
    looped(WRONG[name])
    check_wrong(WRONG[name], said)


@pytest.mark.parametrize("name", RIGHT)
def test_what_steps_the_parameters_is_not_accused(name: str, tmp_path: Path, said: Said) -> None:
    trained(RIGHT[name], tmp_path)
    check_right(said)


@pytest.mark.parametrize("name", ["of parts", "masters"])
def test_nor_where_nothing_is_split(name: str, tmp_path: Path, said: Said) -> None:
    trained(RIGHT[name], tmp_path, (8, 1))
    check_right(said)


@pytest.mark.parametrize("name", [name for name, shape in RIGHT.items() if shape.looped])
def test_nor_in_a_loop(name: str, said: Said) -> None:
    looped(RIGHT[name])
    check_right(said)


@pytest.mark.parametrize("name", ["another model", "before resizing"])
def test_one_window_is_enough(name: str, tmp_path: Path, said: Said) -> None:
    trained(WRONG[name], tmp_path, steps=1)
    assert not last_run()["exact"] and last_run()["inexact_windows"] == 1 and len(said(WRONG[name].words)) == 1


@pytest.mark.parametrize("part", ["begin", "go_on", "weigh", "stepped", "conclude"])
def test_what_fails_ends_that_check_alone(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(delivered.Steps, part, fails)
    trained(Shape(), tmp_path)
    assert last_run()["exact"] and "is not checked: RuntimeError: on purpose" in last_run()["reached_optimizer"]


# --- inside the backward ----------------------------------------------------------------------------------------------


def stepping_inside(model: nn.Module, *, to_none: bool) -> Optimizer:
    """A step of each parameter as soon as its gradient is there; the Trainer gets an optimizer of nothing."""
    every = {each: SGD([each], lr=0.1) for each in model.parameters()}

    def step(each: Any) -> None:
        every[each].step()
        every[each].zero_grad(set_to_none=to_none)

    for each in every:
        each.register_post_accumulate_grad_hook(step)
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("cut", [(8, 1), (2, 4)], ids=str)
def test_steps_inside_the_backward(cut: tuple[int, int], to_none: bool, tmp_path: Path, said: Said) -> None:
    """With one micro-batch a window they are right; with several each uses one micro-batch's gradient."""
    trained(Shape(partial(stepping_inside, to_none=to_none)), tmp_path, cut)
    run, whole = last_run(), cut[1] == 1
    assert run["exact"] == whole and run["reached_optimizer"] == "not checked: an optimizer steps inside the backward"
    assert [len(said(words)) for words in ("got ", "steps inside the backward")] == [not whole, not whole]
    assert run["inexact_windows"] == (0 if whole else 3)


# --- verify -----------------------------------------------------------------------------------------------------------


def hooked(hook: Callable[[Tensor], Tensor | None], name: str = "") -> Callable[[nn.Module], None]:
    def register(model: nn.Module) -> None:
        for each, parameter in model.named_parameters():
            if name in each:
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    return register


def masked_after(model: Any) -> None:
    def mask(parameter: Any) -> None:
        parameter.grad[::2] = 0

    model.model.embed_tokens.weight.register_post_accumulate_grad_hook(mask)


def new_rows(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:4] = 0
    return gradient


def new_rows_in_place(gradient: Tensor) -> None:
    gradient[:4] *= 0.5


LINEAR: dict[str, Callable[[nn.Module], None]] = {
    "new rows": hooked(new_rows, "embed_tokens"),
    "new rows in place": hooked(new_rows_in_place, "embed_tokens"),
    "every layer": hooked(lambda gradient: gradient * 0.5),
    "centred": hooked(lambda gradient: gradient - gradient.mean(), "layers.0"),
    "rows after": masked_after,
}
OTHERS: dict[str, Callable[[nn.Module], None]] = {
    "clipped": hooked(lambda gradient: gradient * (1e-4 / gradient.norm())),
    "signs": hooked(torch.sign, "layers.0"),
}


def answers(prepared: Callable[[nn.Module], None], tmp_path: Path) -> tuple[bool, bool]:
    """Whether the report calls a training exact, and whether verify does."""
    shape = Shape(prepared=prepared)
    trained(shape, tmp_path / "run", steps=1)
    model = HEAD.build()
    prepared(model)
    trainer = trainer_of(HEAD, tmp_path / "verify", Ordered, model=model, samples=[*HEAD.samples[:8]])
    with applied("apply"):
        return last_run()["exact"], hf_accum_fix.verify(trainer).verdict.kind is Kind.EXACT


def test_rows_that_an_engine_leaves_out_are_found(tmp_path: Path) -> None:
    """The same mask, by a hook of an engine: nobody has asked for it."""

    def prepared(model: Any) -> None:
        masked_after(model)
        [hook] = model.model.embed_tokens.weight._post_accumulate_grad_hooks.values()
        hook.__module__ = "deepspeed.runtime.engine"

    trained(Shape(prepared=prepared), tmp_path)
    assert not last_run()["exact"] and last_run()["reached_optimizer"].startswith("no, ")


@pytest.mark.parametrize("name", LINEAR)
def test_hooks_that_add_up_are_exact(name: str, tmp_path: Path, said: Said) -> None:
    assert answers(LINEAR[name], tmp_path) == (True, True), said("")
    assert not said("gradient hooks")


@pytest.mark.parametrize("name", ["clipped", *(pytest.param(e, marks=pytest.mark.thorough) for e in [*OTHERS][1:])])
def test_hooks_that_do_not_are_not(name: str, tmp_path: Path, said: Said) -> None:
    assert answers(OTHERS[name], tmp_path) == (False, False)
    assert len(said("gradient hooks run in every micro-batch")) == 1


def test_made_up_gradients_leave_no_trace(tmp_path: Path) -> None:
    """A hook that counts, and one that averages, see the training's gradients only."""
    seen, mean = list[float](), torch.zeros((), dtype=torch.float64)

    def note(gradient: Tensor) -> None:
        seen.append(float(gradient.norm()))
        mean.add_(gradient.norm())

    trained(Shape(prepared=hooked(note, "norm.weight")), tmp_path, steps=1)
    assert float(mean) == pytest.approx(sum(seen)) and len(seen) == 4 * 5


def test_verify_runs_a_replaced_backward(tmp_path: Path) -> None:
    trainer = trainer_of(HEAD, tmp_path, Ordered, samples=[*HEAD.samples[:8]])
    replaced(trainer)
    with applied("apply"):
        found = hf_accum_fix.verify(trainer)
    assert found.verdict.kind is Kind.OFF
    assert all(each.error == pytest.approx(0.75) for each in found.results if each.mode == "apply()")
