"""The mechanism by itself: the identity, what is recognised, and a loop of one's own. No Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_accum_fix.counting.items import ZeroWeightBatch
from hf_accum_fix.router.load_balancing import FUNCTION, LENDER, tally
from hf_accum_fix.router.router_loss import Convention, Form, RouterLoss
from tests.numerics.heads import HEADS, Batch, Head
from tests.router.conventions import FAMILIES, TWIN, InFloat64, balance, domains

CPU = torch.device("cpu")
MIXTRAL = FAMILIES["Mixtral"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 2**20))
def test_the_plain_mean_of_the_shares_is_the_whole(tokens: list[int], top_k: int, seed: int) -> None:
    """However the tokens are dealt into micro-batches: value and gradient."""
    g = torch.Generator().manual_seed(seed)
    logits = [torch.randn(sum(tokens), 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)]
    mask = torch.randint(0, 2, (1, sum(tokens)), generator=g)
    mask[0, 0] = 1
    whole = balance(logits, top_k, mask)
    cuts = zip(*(each.split(tokens) for each in (*logits, mask[0])), strict=True)
    tallies = [tally(gates, top_k, row[None]) for *gates, row in cuts]
    numbers = torch.stack([each.numbers() for each in tallies]).sum(dim=0)
    parts = [each.loss(numbers[:-1] / numbers[-1], numbers[-1] / len(tallies)) for each in tallies]
    mean = torch.stack(parts).mean()
    assert float(mean.detach()) == pytest.approx(float(whole.detach()), rel=TWIN)
    for one, other in zip(torch.autograd.grad(mean, logits), torch.autograd.grad(whole, logits), strict=True):
        assert float((one - other).norm()) <= TWIN * max(float(other.norm()), 1e-3)


def loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda inputs: model(**inputs)["loss"]


def pieces(head: Head, per_device: int) -> list[Batch]:
    return [head.batch(head.samples[at : at + per_device]) for at in range(0, len(head.samples), per_device)]


def looped(model: nn.Module, window: Sequence[Batch], convention: str) -> tuple[list[Tensor], RouterLoss]:
    """Gradient of the router's loss alone, by the loop that the module describes, on one rank."""
    router = RouterLoss(Convention(convention))
    if convention != "mean":
        router.form = router.recognise(loss_of(model), window[0], model)
        router.settle(router.count(loss_of(model), window, model, CPU, 1), len(window), 1)
    model.zero_grad()
    for index, inputs in enumerate(window):
        with router.micro_batch(index):
            outputs = model(**inputs)
        (sum(outputs[key] for key in outputs if key.endswith("aux_loss")) / len(window)).backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()], router


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    one, other = (torch.cat([each.flatten() for each in grads]) for grads in (found, wanted))
    return float((one - other).norm() / other.norm())


def test_a_micro_batch_without_weight_changes_nothing() -> None:
    """A rank without a sample of its own left runs one that counts nothing; the others then weigh more."""
    model = MIXTRAL.build().train()
    window = pieces(MIXTRAL, 16)
    repeated = [window[0], ZeroWeightBatch(window[0]), window[1], ZeroWeightBatch(window[1])]
    with InFloat64():
        whole, _ = looped(model, pieces(MIXTRAL, 32), "mean")
        found, router = looped(model, repeated, "exact")
        mean, _ = looped(model, window, "mean")
    assert apart(found, whole) <= TWIN < 0.1 < apart(mean, whole)
    assert router.in_force is Convention.EXACT and float(router.shares[0].sum()) == pytest.approx(2, rel=1e-12)


def test_an_encoder_and_a_decoder_are_two_pools() -> None:
    """NLLB since 5.0: each has a loss of its own, the decoder's without a mask, so that its rows are of one width."""
    samples = [{**each, "labels": torch.full((7,), 5 + index)} for index, each in enumerate(domains(8))]
    head = replace(HEADS["NllbMoeForConditionalGeneration"], samples=samples)
    model = head.build().train()
    with InFloat64():
        whole, _ = looped(model, pieces(head, 8), "mean")
        found, router = looped(model, pieces(head, 2), "exact")
        stock, _ = looped(model, pieces(head, 2), "mean")
    assert router.form is not None and len(router.form.pools) == 2
    assert apart(found, whole) <= TWIN
    assert apart(stock, whole) > 0.1


def dropping_out() -> nn.Module:
    model = MIXTRAL.build().train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    return model


def test_both_passes_draw_alike_and_the_first_leaves_nothing() -> None:
    model = dropping_out()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    router = RouterLoss(Convention.EXACT)
    window = pieces(MIXTRAL, 8)
    router.form = router.recognise(loss_of(model), window[0], model)
    router.settle(router.count(loss_of(model), window, model, CPU, 1), 4, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
    assert all(each.grad is None for each in model.parameters())
    for index, inputs in enumerate(window):
        with router.micro_batch(index):
            loss_of(model)(inputs).backward()
    assert float(router.moved) == 0.0  # type: ignore[arg-type]
    torch.manual_seed(8)
    with router.micro_batch(0):
        loss_of(model)(window[0])
    assert float(router.moved) > 0.0  # type: ignore[arg-type]


@pytest.fixture
def modeling() -> Any:
    return sys.modules[LENDER]


def test_the_identical_function_comes_back(modeling: Any) -> None:
    model = MIXTRAL.build().train()
    original = vars(modeling)[FUNCTION]
    seen = []

    def forward(inputs: Batch) -> Tensor:
        seen.append(vars(modeling)[FUNCTION])
        if len(seen) == 4:
            raise ValueError("in the midst of it")
        return loss_of(model)(inputs)

    router = RouterLoss(Convention.EXACT)
    window = pieces(MIXTRAL, 16)
    router.form = router.recognise(forward, window[0], model)
    with pytest.raises(ValueError, match="midst"):
        router.count(forward, window, model, CPU, 1)
    assert vars(modeling)[FUNCTION] is original
    # One stand-in for all of them: a compiled model is not compiled anew.
    assert original not in seen and len({id(each) for each in seen}) == 1


def recognised(model: nn.Module, inputs: Batch) -> Form:
    return RouterLoss(Convention.EXACT).recognise(loss_of(model), inputs, model)


def squares(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Tensor:
    """Squared shares: like the library's near balance, and not linear in the probabilities."""
    found = tally(gate_logits, top_k, attention_mask)
    return num_experts * (found.probabilities / found.tokens).pow(2).sum() * top_k


def of_probabilities(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Tensor:
    """DBRX in some releases of 4.5x."""
    found = tally(gate_logits, top_k, attention_mask, "probabilities")
    return found.loss(found.counts / found.tokens, found.tokens)


def by_layer(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Tensor:
    """A mean over layers, each balanced by itself."""
    found = [tally([gate], top_k, attention_mask) for gate in gate_logits]
    return torch.stack([each.loss(each.counts / each.tokens, each.tokens) for each in found]).mean()


@pytest.mark.parametrize(("function", "told"), [(squares, False), (by_layer, False), (of_probabilities, True)])
def test_a_form_is_told_by_what_it_does(
    function: Any, told: bool, modeling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MIXTRAL.build().train()
    inputs = pieces(MIXTRAL, 4)[0]
    form = recognised(model, inputs)
    assert form.recognised and form.pools[0].given == "logits"
    monkeypatch.setattr(modeling, FUNCTION, function)
    form = recognised(model, inputs)
    assert form.recognised == told and bool(form.refusal) != told
    assert not told or form.pools[0].given == "probabilities"
