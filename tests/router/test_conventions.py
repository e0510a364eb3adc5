"""The load-balancing loss under each convention on one rank: "exact" is the full batch's for every cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.window.state import ATTEMPTS
from tests.router import conventions
from tests.router.conventions import COEFFICIENT, FAMILIES, LIBRARY, TWIN, InFloat64, auxiliary, flat, step, twin

MIXTRAL = "Mixtral"
#: Families whose code is another's, and sizes of a micro-batch: before a release. The everyday tests run Mixtral.
ALIKE = ("OLMoE", "GraniteMoE", "Qwen2-MoE")


def every_cut() -> Iterator[Any]:
    """Every family and size of a micro-batch, as parameters."""
    for family in FAMILIES:
        for size in conventions.SIZES:
            everyday = family == MIXTRAL and size in (4, 16)
            slow = size == 4 if family not in (MIXTRAL, *ALIKE) else family == MIXTRAL and size == 1
            marks = [] if everyday else [pytest.mark.slow if slow else pytest.mark.thorough]
            yield pytest.param(family, size, marks=marks, id=f"{family}-{size}")


@pytest.mark.parametrize(("family", "size"), [*every_cut()])
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
    head, size = FAMILIES[MIXTRAL], 8
    with InFloat64():
        wanted, value = twin(head)
        found = {name: auxiliary(head, name, size) for name in ("stock", "mean")}
    assert found["stock"].error(wanted) > 0.9 * (len(head.samples) / size - 1)
    assert found["mean"].error(wanted) > 0.3
    assert found["mean"].value == pytest.approx(value, rel=0.03)


def test_the_library_itself_agrees_to_the_rounding_of_its_sums() -> None:
    """In the types it trains in; the auxiliary part comes from two steps, with its coefficient and without."""
    head = FAMILIES[MIXTRAL]
    wanted = conventions.full_batch(head)
    with_it, without = (flat(step(head, "exact", 4, each).change) for each in (COEFFICIENT, 0.0))
    assert conventions.Auxiliary(with_it - without, 0.0, None).error(wanted) <= LIBRARY  # type: ignore[arg-type]


def test_patch_and_subclass_are_the_same() -> None:
    head = FAMILIES[MIXTRAL]
    patched, subclass = (step(head, name, 4, COEFFICIENT) for name in ("exact", "trainer"))
    assert all(torch.equal(patched.change[name], subclass.change[name]) for name in patched.change)
    assert patched.loss == subclass.loss


@pytest.mark.parametrize("family", [MIXTRAL, "Qwen3-MoE, declared false"])
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.slow) if size != 4 else 4 for size in (1, 4, 16)]
)
def test_a_loop_of_ones_own_has_it_too(family: str, size: int) -> None:
    head = FAMILIES[family]
    with InFloat64():
        wanted, value = twin(head)
        found = auxiliary(head, "loop", size)
    assert found.error(wanted) <= TWIN and found.value == pytest.approx(value, rel=TWIN)


def test_an_own_loss_function_may_add_the_models_own() -> None:
    def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return COEFFICIENT * outputs["aux_loss"]

    head = replace(FAMILIES[MIXTRAL], trainer={"compute_loss_func": func})
    with InFloat64():
        wanted, _ = twin(head)
        found = flat(step(head, "exact", 4, COEFFICIENT).change)
    assert float((found - wanted).norm() / wanted.norm()) <= TWIN


def forwards(size: int, coefficient: float) -> int:
    """Forwards of one step after the first, in which the loss is observed."""
    head, found = FAMILIES[MIXTRAL], []
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


@pytest.mark.slow
def test_the_pass_that_counts_is_run_only_where_it_is_needed() -> None:
    assert [forwards(4, COEFFICIENT), forwards(4, 0.0), forwards(8, COEFFICIENT)] == [4, 2, 1]


@pytest.mark.slow
def test_a_compiled_model_is_stood_in_for_outside_of_its_graph() -> None:
    head = replace(FAMILIES[MIXTRAL], samples=FAMILIES[MIXTRAL].samples[:8])
    compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    with_it, without = (flat(step(head, "exact", 4, each, **compiled).change) for each in (COEFFICIENT, 0.0))
    wanted = conventions.full_batch(head)
    assert float((with_it - without - wanted).norm() / wanted.norm()) <= LIBRARY


def test_in_bfloat16_both_passes_route_alike() -> None:
    """Two experts may come as near as its eight bits tell; the gradient agrees to its rounding."""
    head = FAMILIES[MIXTRAL]
    head = replace(head, build=lambda: FAMILIES[MIXTRAL].build().float(), samples=head.samples[:16])
    with_it, without = (step(head, "exact", 4, each, bf16=True) for each in (COEFFICIENT, 0.0))
    moved = with_it.trainer.__dict__[SESSION].router.moved
    assert moved is not None and float(moved) == 0.0
    wanted = conventions.full_batch(head)
    found = flat(with_it.change) - flat(without.change)
    assert float((found - wanted).norm() / wanted.norm()) <= 0.1
