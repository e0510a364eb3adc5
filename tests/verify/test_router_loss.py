"""The convention of a router's loss in force is named; under "exact" a mixture of experts is called exact, too."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_accum_fix
from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.router.conventions import FAMILIES
from tests.verify.trainers import trainer_of

SAMPLES = FAMILIES["Mixtral"].samples[:8]
WORDS = {
    "mean": "the router's loss the mean over micro-batches and ranks, by convention",
    "window": "the router's loss by the running counts of the window, by convention",
    "exact": "the router's loss of the whole global batch",
}


@pytest.mark.parametrize(
    "convention", [each if each == "exact" else pytest.param(each, marks=pytest.mark.slow) for each in WORDS]
)
def test_the_convention_in_force_is_named(convention: str, tmp_path: Path) -> None:
    with hf_accum_fix.apply(router_loss=convention):
        report = verify(trainer_of("mixtral", tmp_path, samples=SAMPLES), splits=[(2, 4), (1, 8)])
    assert report.verdict.kind is Kind.EXACT and WORDS[convention] in report.verdict.words
    assert ("convention" in report.verdict.words) == (convention != "exact")
    assert all(each.error is not None and each.error < 1e-6 for each in report.of("apply()"))
    stock = report.of("stock")
    assert all(each.verdict.kind is Kind.OFF and "aux loss times G" in each.verdict.words for each in stock)
