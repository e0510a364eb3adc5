"""The two rules on two real gloo ranks, and ranks that observe a loss which rounds apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.conclude import Setting
from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.reading import LossRun
from tests.losses.verdicts import Verdict
from tests.numerics.heads.head import collate
from tests.numerics.heads.samples import text
from tests.torchrun import found_by
from tests.trainers.runs import FLOOR
from tests.trainers.two_ranks import EXACT, ROWS, VERDICTS

#: Stock trains these on: the ranks have different tasks, and nothing is wrong with that.
NOT_TO_BE_REFUSED = ("other-keys-on-each-rank", "other-tasks-on-each-rank")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By one start of torchrun."""
    output = tmp_path_factory.mktemp("two_ranks") / "rows.json"
    return {row["case"]: row for row in found_by("tests.trainers.two_ranks", output)}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Losses that are read from their graphs."""
    output = tmp_path_factory.mktemp("two_ranks") / "read.json"
    return {row["case"]: row for row in found_by("tests.trainers.two_ranks", output, "read")}


@pytest.mark.parametrize("case", ROWS)
def test_two_ranks_are_never_further_off_than_stock(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    row = rows[case]
    if row["refused"] and not case.startswith(NOT_TO_BE_REFUSED):
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


@pytest.mark.parametrize("case", VERDICTS)
def test_a_loss_is_read_on_two_ranks(case: str, read: Mapping[str, Mapping[str, Any]]) -> None:
    row, verdict = read[case], VERDICTS[case]
    assert "raised" not in row, row["raised"]
    right = row["apply"] <= FLOOR
    assert right or row["apply"] <= row["stock"] * 1.05
    assert right or not row["exact"]
    if verdict in (Verdict.EXACT, Verdict.GRADIENT):
        assert right
    if verdict is Verdict.EXACT:
        assert row["exact"] and not row["warned"]
    if verdict in (Verdict.EITHER, Verdict.INEXACT):
        assert right or row["warned"]
    assert verdict is not Verdict.INEXACT or not row["exact"]


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
    setting = Setting(hands_number=True, custom=True)
    return observe(LossRun(call, nn.Linear(1, 1), torch.device("cpu")), window, setting)


@pytest.mark.parametrize("rounding", [0.0, 1.2e-7, -1.2e-7, 1e-6])
def test_ranks_whose_losses_round_apart_observe_the_same(rounding: float) -> None:
    """22.1141815 on one rank and 22.1141796 on the other are one loss in float32."""
    here, there = _observed(0.0), _observed(rounding)
    agreed = agree([here, there])
    assert agreed.items is not None and agreed.items.shift
    assert there.items == here.items
