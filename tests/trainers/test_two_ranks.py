"""The two rules on two real gloo ranks, and ranks that observe a loss which rounds apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.learning.agreement import agree
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.learning.look import LossRun, Setting
from hf_accum_fix.learning.observe import observe
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text
from tests.numerics.parity import pass_over_imports
from tests.ranks import on_ranks
from tests.trainers import custom as wild
from tests.trainers import terms
from tests.trainers.runs import FLOOR, Case, Cut, Run, full_batch, run

#: Eight samples a step: of a micro-batch x micro-batches on each of two ranks.
CUTS: tuple[Cut, ...] = ((1, 4),)


WILD = ("swift-classes", "swift-mlm-by-super", "swift-dpo", "divides-the-base", "sum-over-the-number")
CASES = [
    *(Case(c.name, c.head, c.trainer, c.loss, c.given, c.arguments, cuts=CUTS) for c in wild.CASES if c.name in WILD),
    *(Case(c.name, c.head, c.trainer, cuts=((4, 1), (2, 2))) for c in wild.OWN_STEPS),
    *(Case(c.name, c.head, c.trainer, c.loss, cuts=CUTS) for c in (*terms.EXACT, *terms.SAID)),
]
#: That of these every one is exact, is held as well.
EXACT = {case.name for case in terms.EXACT}
ROWS = [f"{case.name} {cut[0]}x{cut[1]}" for case in CASES for cut in case.cuts]
#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 20


def rows_of() -> dict[str, dict[str, Any]]:
    """On each rank: what became of each of `CASES`."""
    rows = {}
    for case in CASES:
        steps = 2 if case.trainer in (wild.OwnStep, wild.OwnStepDividedTwice) else 1
        wanted = full_batch(case, steps)
        for cut in case.cuts:
            pass_over_imports()
            stock, patched = (
                run(case, cut, path, steps=steps, ddp_backend="gloo", ddp_find_unused_parameters=True)
                for path in ("stock", "apply")
            )
            rows[f"{case.name} {cut[0]}x{cut[1]}"] = {"stock": stock.error(wanted), **_told(patched, wanted)}
    return rows


def _told(patched: Run, wanted: dict[str, Tensor]) -> dict[str, Any]:
    if patched.raised is not None:
        told = f"{type(patched.raised).__name__}: {patched.raised}"
        return {"refused": patched.refused, "raised": told, "exact": False}
    warned = bool(patched.warned)
    return {"refused": False, "apply": patched.error(wanted), "exact": bool(patched.exact), "warned": warned}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return on_ranks(rows_of, patience=PATIENCE)[0]


@pytest.mark.parametrize("case", ROWS)
def test_two_ranks_are_never_further_off_than_stock(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    row = rows[case]
    if row["refused"]:
        return
    assert "raised" not in row, row["raised"]
    assert row["apply"] <= row["stock"] * (1 + 1e-6) + FLOOR


@pytest.mark.parametrize("case", ROWS)
def test_what_is_called_exact_on_two_ranks_is_exact(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    row = rows[case]
    assert not row["exact"] or row["apply"] <= FLOOR


@pytest.mark.parametrize("case", [row for row in ROWS if row.split()[0] in EXACT])
def test_terms_are_exact_on_two_ranks(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    assert rows[case]["apply"] <= FLOOR
    assert rows[case]["exact"]


def _observed(rounding: float) -> LossContract:
    """Of a trainer's own sum over the number, whose last digits move with labels that it does not use."""

    scale = nn.Parameter(torch.ones(()))

    def call(inputs: Mapping[str, Any], number: Tensor | None) -> Tensor:
        assert number is not None
        labels = inputs["labels"][:, 1:]
        value = scale * inputs["input_ids"][:, 1:].float().sqrt()
        summed = (value * (labels != -100)).sum()
        if bool((inputs["labels"][:, 0] != -100).any()):
            summed = summed * (1 + rounding)
        return summed / number

    window = [collate(text()[start : start + 2]) for start in range(0, 8, 2)]
    setting = Setting(handed="all", custom=True)
    return observe(LossRun(call, nn.Linear(1, 1), torch.device("cpu")), window, setting)


@pytest.mark.parametrize("rounding", [0.0, 1.2e-7, -1.2e-7, 1e-6])
def test_ranks_whose_losses_round_apart_observe_the_same(rounding: float) -> None:
    """22.1141815 on one rank and 22.1141796 on the other are one loss in float32."""
    here, there = _observed(0.0), _observed(rounding)
    agreed = agree([here, there])
    assert agreed.items is not None and agreed.items.shift
    assert there.items == here.items
