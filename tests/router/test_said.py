"""What a run says once: a loss that stays a mean, routing that moved between the passes, logits without a graph."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from hf_accum_fix import accumulation_windows
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.router.load_balancing import FUNCTION, LENDER
from tests.logged import Said
from tests.numerics.heads import HEADS, Head
from tests.numerics.parity import contract_of
from tests.router.conventions import COEFFICIENT, FAMILIES, step
from tests.router.test_router_loss import by_layer

MIXTRAL = replace(FAMILIES["Mixtral"], samples=FAMILIES["Mixtral"].samples[:8])


def test_a_form_that_is_not_recognised_stays_on_mean(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(LENDER), FUNCTION, by_layer)
    twice = replace(MIXTRAL, samples=[*MIXTRAL.samples, *MIXTRAL.samples])
    mean = step(twice, "mean", 2, COEFFICIENT, accumulate=4, steps=2, learning_rate=1e-3)
    assert not said()
    exact = step(twice, "exact", 2, COEFFICIENT, accumulate=4, steps=2, learning_rate=1e-3)
    assert all(torch.equal(mean.change[name], exact.change[name]) for name in mean.change)
    (line,) = said()
    assert "stays the mean over micro-batches and ranks" in line and "is not E sum F Q" in line


@pytest.mark.parametrize("name", ["SwitchTransformersForConditionalGeneration", "BambaForCausalLM"])
def test_families_of_another_form_stay_on_mean(name: str, said: Said) -> None:
    """Switch's is a mean over samples; Bamba's is a z-loss, linear, and in no output."""
    head = replace(HEADS[name], router=0.0)
    mean, exact = (step(head, convention, 4, 0.3) for convention in ("mean", "exact"))
    assert all(torch.equal(mean.change[name], exact.change[name]) for name in mean.change)
    assert len(said("stays the mean over micro-batches and ranks")) == contract_of(exact).has_router_loss


def noisy() -> Head:
    """With kernels that differ without gradient: the second pass is not the first."""

    def differs(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
        return output if torch.is_grad_enabled() else output + noise

    def build() -> nn.Module:
        model = MIXTRAL.build()
        model.get_input_embeddings().register_forward_hook(differs)  # type: ignore[operator]
        return model

    return replace(MIXTRAL, build=build)


def test_routing_that_moved_is_reported_once_with_its_size(said: Said) -> None:
    head = noisy()
    head = replace(head, samples=[*head.samples, *head.samples])
    taken = step(head, "exact", 2, COEFFICIENT, accumulate=4, steps=2, learning_rate=1e-3)
    (line,) = said("routing differed")
    moved = float(taken.trainer.__dict__[SESSION].router.moved)
    assert 0.0 < moved < 1.0 and "of a micro-batch's routing differed between the counting pass" in line
    assert float(line.split(": ")[1].split(" ")[0]) <= moved * 1.1


def test_logits_without_a_graph_are_said(said: Said) -> None:
    def build() -> nn.Module:
        model = MIXTRAL.build()
        for module in model.modules():
            if type(module).__name__ == "MixtralTopKRouter":
                module.register_forward_hook(lambda module, args, output: (output[0].detach(), *output[1:]))
        return model

    step(replace(MIXTRAL, build=build), "exact", 2, COEFFICIENT)
    assert len(said("a router's: set use_reentrant=False")) == 1


def test_a_loop_needs_a_convention_there_is() -> None:
    with pytest.raises(OptionsError, match="'mean', 'exact'"):
        accumulation_windows([], steps=2, router_loss="best")
