"""What cannot be added in more than 16 bits is refused by name, before an optimizer steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from hf_accum_fix import AccumFixError, OptionsError, UnsupportedSetupError, accumulation_windows
from hf_accum_fix.accumulation.precision import Arrival, Leaf, WindowGradient
from hf_accum_fix.loop import AccumulationWindows
from tests.loop.steps import accelerator
from tests.numerics.parity import training_arguments
from tests.precision.gradients import Bigram, asking, batch, left_on, samples

ROWS = samples(4)
BATCHES = [batch([row]) for row in ROWS]


class Lomo(torch.optim.SGD):
    """Stands in for lomo_optim's, which needs a GPU."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr)

    def fused_backward(self, loss: Any, lr: float) -> None:
        pytest.fail("it stepped")


class AdaLomo(Lomo):
    """The same."""


@pytest.fixture
def lomo(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("lomo_optim")
    module.Lomo, module.AdaLomo = Lomo, AdaLomo
    monkeypatch.setitem(sys.modules, "lomo_optim", module)
    for where in ("accelerate.accelerator", "transformers.trainer_optimizer"):
        monkeypatch.setattr(f"{where}.is_lomo_available", lambda: True)


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_lomo_under_the_trainer(optim: str, lomo: None, tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path, 1, 4, optim=optim)
    trainer = asking("float32")(model=Bigram().bfloat16(), args=arguments, train_dataset=ROWS, data_collator=batch)
    with pytest.raises(UnsupportedSetupError, match="got accumulate_in='float32' and LOMO"):
        trainer.train()
    assert trainer.accelerator.has_lomo_optimizer and not left_on(trainer.model)


def test_lomo_in_a_loop(lomo: None) -> None:
    live, model = accelerator(4), Bigram().bfloat16()
    model, _ = live.prepare(model, Lomo(model, 0.1))
    with pytest.raises(UnsupportedSetupError, match="got accumulate_in='compensated' and LOMO"):
        one_micro_batch(model, accumulation_windows(BATCHES, live, accumulate_in="compensated"))


def one_micro_batch(model: nn.Module, windows: AccumulationWindows) -> None:
    window = next(iter(windows))
    with window.micro_batch(model):
        window.loss(model, window.batches[0]).backward()


def by_hook(parameters: Iterable[nn.Parameter]) -> None:
    """As the Trainer's layerwise GaLore, APOLLO and their like."""
    for each in parameters:
        each.register_post_accumulate_grad_hook(optimizer_hook)


def optimizer_hook(parameter: Any) -> None:
    pytest.fail("it stepped")


def by_torch(parameters: Iterable[nn.Parameter]) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 1.0})


@pytest.mark.parametrize(("stepping", "named"), [(by_hook, "optimizer_hook"), (by_torch, "SGD")])
def test_optimizers_of_single_parameters(stepping: Any, named: str) -> None:
    model = Bigram().bfloat16()
    stepping(model.parameters())
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UnsupportedSetupError, match=rf"a hook that runs inside the backward \({named}\)"):
        one_micro_batch(model, accumulation_windows(BATCHES, steps=4, accumulate_in="float32"))
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


def test_a_sparse_gradient() -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    with (
        pytest.raises(AccumFixError, match="Embedding"),
        WindowGradient("float32").micro_batch(lambda: [Leaf(table.weight)], first=True, last=False),
    ):
        table(torch.tensor([1])).sum().backward()


def test_a_word_that_is_none_of_the_three() -> None:
    with pytest.raises(OptionsError, match="got accumulate_in='double'; expected one of 'parameter'"):
        accumulation_windows([], steps=2, accumulate_in="double")


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
