"""The load-balancing loss under each convention: "exact" is the full batch's for every cut, on one rank and on two.

What a run says once: a loss that stays a mean, routing that moved between the passes, logits without a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_accum_fix import accumulation_windows
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.router.load_balancing import FUNCTION, LENDER, Call
from hf_accum_fix.window.state import ATTEMPTS
from tests.faults.test_looking_fails import PlantedError, faulty
from tests.logged import Said
from tests.numerics.heads import HEADS, Head
from tests.numerics.parity import contract_of
from tests.ranks import on_ranks
from tests.router import conventions
from tests.router.conventions import COEFFICIENT, FAMILIES, LIBRARY, TWIN, InFloat64, auxiliary, flat, step, twin
from tests.router.test_router_loss import by_layer

MIXTRAL = FAMILIES["Mixtral"]
EIGHT = replace(MIXTRAL, samples=MIXTRAL.samples[:8])
#: Before a release: families whose code is another's.
ALIKE = ("OLMoE", "GraniteMoE", "Qwen2-MoE")
CUTS = [
    *(("Mixtral", 1), ("Mixtral", 16)),
    *(pytest.param(each, 4, marks=[pytest.mark.thorough] * (each in ALIKE)) for each in FAMILIES),
]


@pytest.mark.parametrize(("family", "size"), CUTS)
def test_exact_is_the_full_batch_for_every_cut(family: str, size: int) -> None:
    head = FAMILIES[family]
    with InFloat64():
        wanted, value = twin(head)
        found = auxiliary(head, "exact", size)
    assert found.error(wanted) <= TWIN
    assert found.value == pytest.approx(value, rel=TWIN)
    router = found.step.trainer.__dict__[SESSION].router
    assert router.moved is not None and float(router.moved) == 0.0
    assert router.form.weight == pytest.approx(COEFFICIENT, rel=1e-4)


def test_stock_and_the_mean_are_wrong_first() -> None:
    """By as much as the loss is large, while its value hides it; stock G times, too."""
    head, size = MIXTRAL, 8
    with InFloat64():
        wanted, value = twin(head)
        found = {name: auxiliary(head, name, size) for name in ("stock", "mean")}
    assert found["stock"].error(wanted) > 0.9 * (len(head.samples) / size - 1)
    assert found["mean"].error(wanted) > 0.3
    assert found["mean"].value == pytest.approx(value, rel=0.03)


def test_the_library_itself_agrees_to_the_rounding_of_its_sums() -> None:
    """In the types it trains in; the auxiliary part comes from two steps, with its coefficient and without."""
    head = MIXTRAL
    wanted = conventions.full_batch(head)
    with_it, without = (flat(step(head, "exact", 4, each).change) for each in (COEFFICIENT, 0.0))
    assert conventions.Auxiliary(with_it - without, 0.0, None).error(wanted) <= LIBRARY  # type: ignore[arg-type]


def test_patch_and_subclass_are_the_same() -> None:
    head = MIXTRAL
    patched, subclass = (step(head, name, 4, COEFFICIENT) for name in ("exact", "trainer"))
    assert all(torch.equal(patched.change[name], subclass.change[name]) for name in patched.change)
    assert patched.loss == subclass.loss


@pytest.mark.parametrize(("family", "size"), [("Mixtral", 4), ("Mixtral", 16), ("Qwen3-MoE, declared false", 1)])
def test_a_loop_of_ones_own_has_it_too(family: str, size: int) -> None:
    head = FAMILIES[family]
    with InFloat64():
        wanted, value = twin(head)
        found = auxiliary(head, "loop", size)
    assert found.error(wanted) <= TWIN and found.value == pytest.approx(value, rel=TWIN)


def test_an_own_loss_function_may_add_the_models_own() -> None:
    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return COEFFICIENT * outputs["aux_loss"]

    head = replace(MIXTRAL, trainer={"compute_loss_func": func})
    with InFloat64():
        wanted, _ = twin(head)
        found = flat(step(head, "exact", 4, COEFFICIENT).change)
    assert float((found - wanted).norm() / wanted.norm()) <= TWIN


def forwards(size: int, coefficient: float) -> int:
    """Forwards of one step after the first, in which the loss is observed."""
    head, found = MIXTRAL, []
    # The loss is observed in the windows before.
    for steps in (ATTEMPTS, ATTEMPTS + 1):
        run = list[int]()

        def build(run: list[int] = run) -> torch.nn.Module:
            model = conventions.with_coefficient(head, coefficient).build()
            model.register_forward_pre_hook(lambda *_: run.append(1))
            return model

        whole = replace(head, build=build, samples=[*head.samples[:8]] * steps)
        step(whole, "exact", size, coefficient, accumulate=8 // size, steps=steps)
        found.append(len(run))
    return found[1] - found[0]


def test_the_pass_that_counts_is_run_only_where_it_is_needed() -> None:
    assert [forwards(4, COEFFICIENT), forwards(4, 0.0), forwards(8, COEFFICIENT)] == [4, 2, 1]


def test_a_compiled_model_is_stood_in_for_outside_of_its_graph() -> None:
    compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    with_it, without = (flat(step(EIGHT, "exact", 4, each, **compiled).change) for each in (COEFFICIENT, 0.0))
    wanted = conventions.full_batch(EIGHT)
    assert float((with_it - without - wanted).norm() / wanted.norm()) <= LIBRARY


def test_in_bfloat16_both_passes_route_alike() -> None:
    """Two experts may come as near as its eight bits tell; the gradient agrees to its rounding."""
    head = MIXTRAL
    head = replace(head, build=lambda: MIXTRAL.build().float(), samples=head.samples[:16])
    with_it, without = (step(head, "exact", 4, each, bf16=True) for each in (COEFFICIENT, 0.0))
    moved = with_it.trainer.__dict__[SESSION].router.moved
    assert moved is not None and float(moved) == 0.0
    wanted = conventions.full_batch(head)
    found = flat(with_it.change) - flat(without.change)
    assert float((found - wanted).norm() / wanted.norm()) <= 0.1


# --- what a run says once ---------------------------------------------------------------------------------------------


def test_a_form_that_is_not_recognised_stays_on_mean(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(LENDER), FUNCTION, by_layer)
    twice = replace(EIGHT, samples=[*EIGHT.samples, *EIGHT.samples])
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

    return replace(EIGHT, build=build)


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

    step(replace(EIGHT, build=build), "exact", 2, COEFFICIENT)
    assert len(said("a router's: set use_reentrant=False")) == 1


def test_a_loop_needs_a_convention_there_is() -> None:
    with pytest.raises(OptionsError, match="'mean', 'exact'"):
        accumulation_windows([], steps=2, router_loss="best")


# --- on two gloo ranks: the counts of both ride in the one collective of a step ---------------------------------------


def errors() -> dict[str, tuple[float, float]]:
    """By convention: the relative error to the float64 twin of the router's part, and its value over the twin's."""
    with InFloat64():
        wanted, value = twin(MIXTRAL)
        found = {
            name: auxiliary(MIXTRAL, name, 8, 2, ddp_backend="gloo") for name in ("stock", "mean", "exact", "loop")
        }
    return {name: (each.error(wanted), each.value / value) for name, each in found.items()}


def raised_by_failing(fails_at: int) -> str:
    """What each rank raises as the second one fails in a forward of the pass that counts."""
    head, rank, forwards = MIXTRAL, dist.get_rank(), 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += not torch.is_grad_enabled()
        if rank == 1 and forwards == fails_at:
            raise ValueError("out of luck")

    def build() -> nn.Module:
        model = head.build()
        model.register_forward_pre_hook(fail)
        return model

    samples = [*head.samples[:16], *head.samples[:16]]
    failing = replace(head, build=build, samples=samples)
    try:
        step(failing, "exact", 4, COEFFICIENT, ranks=2, accumulate=2, steps=2, ddp_backend="gloo")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def faulty_in_forward() -> Iterator[None]:
    """Counting fails inside the forwards that count, which are without gradient."""
    kept = Call.tally

    def tally(call: Call, given: str) -> Any:
        if not torch.is_grad_enabled():
            raise PlantedError("on purpose")
        return kept(call, given)

    Call.tally = tally  # type: ignore[method-assign]
    try:
        yield
    finally:
        Call.tally = kept  # type: ignore[method-assign]


FAULTS = {
    "recognising": lambda: faulty("router.router_loss", "RouterLoss.recognise_among"),
    "in a forward": faulty_in_forward,
    "counting": lambda: faulty("router.router_loss", "RouterLoss.count"),
    "before any forward": lambda: faulty("overrides.session", "Session.run_counting"),
}


def trained_with_faults() -> list[str]:
    """What is wrong on this rank as counting has a fault of ours on both, or on the second alone."""
    rank, wrong = dist.get_rank(), list[str]()
    given: dict[str, Any] = {"ranks": 2, "accumulate": 2, "ddp_backend": "gloo"}
    short = replace(MIXTRAL, samples=MIXTRAL.samples[:16])
    stock = flat(step(short, "stock", 4, COEFFICIENT, **given).change)
    for name, where in product(FAULTS, ("both", "second")):
        with FAULTS[name]() if where == "both" or rank == 1 else nullcontext():
            ours = step(short, "exact", 4, COEFFICIENT, **given)
        session = ours.trainer.__dict__[SESSION]
        wrong += [f"{name} on {where}: no stock"] * (not torch.equal(flat(ours.change), stock))
        told = session.state.aside and not session.state.exact and "trouble" in session.warned
        wrong += [f"{name} on {where}: {session.warned}"] * (not told)
    return wrong


def on_both() -> tuple[dict[str, tuple[float, float]], list[str], list[str]]:
    """Errors, what is raised as the second rank fails in recognising and in counting, and what faults of ours do."""
    return errors(), [raised_by_failing(forward) for forward in (2, 5)], trained_with_faults()


def test_both_ranks_have_the_full_batchs_and_stop_together_and_a_fault_of_ours_is_stocks() -> None:
    (found, *first), (_, *second) = on_ranks(on_both, timeout=270, patience=30)
    for ours in ("exact", "loop"):
        assert found[ours][0] <= TWIN and abs(found[ours][1] - 1) <= TWIN, found
    assert min(found["stock"][0], found["mean"][0]) > 1e-2, found
    for told, raised in zip(first[0], second[0], strict=True):
        assert raised == "ValueError: out of luck"
        assert told.startswith("RankError: rank 0 stops, because of rank 1: ValueError: out of luck;")
    assert first[1] == second[1] == []
