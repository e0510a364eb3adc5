"""The zoo: how many classes it holds and of which lists, and that what is left out is left out for the reason given."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.cli.processes import python
from tests.numerics.heads import HEADS, LEFT_OUT, Origin
from tests.numerics.heads.left_out import NOT_DECOMPOSABLE, NOT_RUN, ONE_FORMER_HEAD, LeftOut
from tests.numerics.parity import contract_of, cut, reference_step, take_step
from tests.numerics.zoo_table import TABLE

ROOT = Path(__file__).parents[2]
#: What the issue counts: classes that drop the count, add a router loss, or declare False.
LISTS = (Origin.DROPS, Origin.ROUTER, Origin.DECLARES_FALSE)
WITHOUT_PACKAGE = [case for case in NOT_RUN if not case.needs or importlib.util.find_spec(case.needs) is None]


def named(case: LeftOut) -> str:
    return case.head.model


def test_the_zoo_holds_at_least_eighty_classes_of_the_lists() -> None:
    classes = {origin: {h.model for h in HEADS.values() if h.origin is origin and h.exact} for origin in LISTS}
    assert all(classes.values())
    assert len(set().union(*classes.values())) >= 80


def test_the_documents_count_the_heads() -> None:
    exact, heads = [head for head in HEADS.values() if head.exact], len(HEADS)
    classes = len({head.model for head in exact if head.model})
    assert f"| {len(exact)} of the {heads} heads in the tests" in (ROOT / "README.md").read_text()
    page = " ".join((ROOT / "hf_accum_fix/learning/README.md").read_text().split())
    assert f"{heads} heads ({len(exact)} exact, the others called what they are; of {classes} classes" in page
    assert f"{len(LEFT_OUT)} classes that were tried and left out" in page


def test_what_is_left_out_is_not_in_the_zoo() -> None:
    assert len(LEFT_OUT) >= 20 and all(LEFT_OUT.values())
    assert not {head.model for head in HEADS.values() if head.exact} & LEFT_OUT.keys()
    assert {head.model for head in HEADS.values() if head.model and not head.exact} <= {
        *LEFT_OUT,
        # With its BatchNorm frozen it is in the zoo, in training mode it is not exact.
        "SegformerForSemanticSegmentation",
    }


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if at < 3 else pytest.mark.slow) for at, each in enumerate(NOT_DECOMPOSABLE)],
    ids=named,
)
def test_what_is_no_mean_over_items_is_recognised(case: LeftOut, tmp_path: Path) -> None:
    step = take_step(case.head, case.head.samples, 4, 2, "trainer", tmp_path)
    contract = contract_of(step)
    assert not (contract.is_weighed or contract.exact)


@pytest.mark.slow
def test_stock_cannot_log_a_loss_with_an_axis(tmp_path: Path) -> None:
    assert ONE_FORMER_HEAD.model in LEFT_OUT
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        take_step(ONE_FORMER_HEAD, ONE_FORMER_HEAD.samples, 4, 2, "stock", tmp_path)


@pytest.mark.slow
def test_points_drawn_at_random_are_no_term_of_the_contract(tmp_path: Path) -> None:
    """In the zoo every mask has the same points in every cut, as dropout is off; drawn, it has the same contract."""
    head = HEADS["Mask2FormerForUniversalSegmentation"]
    drawn = replace(head, build=lambda: undrawn(head.build()))
    found = [contract_of(take_step(each, head.samples, 2, 4, "trainer", tmp_path)) for each in (head, drawn)]
    assert found[0] == found[1] and found[0].exact


def undrawn(model: nn.Module) -> nn.Module:
    """A model without the forward that draws alike."""
    del model.__dict__["forward"]
    return model


@pytest.mark.parametrize("case", WITHOUT_PACKAGE, ids=named)
def test_what_cannot_be_run_ends_as_is_said(case: LeftOut) -> None:
    assert case.error is not None
    with pytest.raises(case.error, match=case.words):
        reference_step(case.head, cut(case.head.samples, 8))


def test_the_table_names_every_head() -> None:
    table = TABLE.read_text()
    for head in HEADS.values():
        if head.model and head.exact:
            assert f"| {head.model} | {'' if head.name == head.model else head.name} |" in table, head.name
    for name in LEFT_OUT:
        assert f"| {name} |" in table, name


def test_no_class_is_looked_up_at_import() -> None:
    """A release may lack it."""
    program = (
        "import sys, tests.numerics.heads; print([m for m in sys.modules if '.modeling_' in m and '.models.' in m])"
    )
    assert python("-c", program).stdout.strip() == "[]"
