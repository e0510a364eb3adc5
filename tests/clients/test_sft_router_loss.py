"""TRL's SFTTrainer under each convention: it divides its router loss itself, and borrows Mixtral's for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig

import hf_accum_fix
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.verification.report import Kind
from tests.clients.sft import StockSFT, tokens
from tests.clients.sft_router_loss import FAMILY, TWO_RANK_SIZES, sft, sft_error
from tests.clients.words import tokenizer
from tests.numerics.parity import training_arguments
from tests.router.conventions import COEFFICIENT, FAMILIES, TWIN, InFloat64, twin, with_coefficient
from tests.torchrun import found_by

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

sizes = pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == 4 else pytest.mark.slow) for size in (1, 2, 4, 8, 16)]
)


@sizes
@pytest.mark.parametrize("config", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
def test_exact_is_the_full_batch(config: dict[str, Any], size: int) -> None:
    error, step = sft_error("exact", size, **config)
    assert error <= TWIN
    # What TRL logs is the mean of its micro-batches, and so the full batch's as well.
    with InFloat64():
        value = twin(FAMILIES[FAMILY])[1] / COEFFICIENT
    assert step.trainer.state.log_history[0]["aux_loss"] == pytest.approx(value, rel=1e-9)


@pytest.mark.slow
def test_mean_is_trls_own_and_window_is_neither() -> None:
    stock, mean, window = (sft_error(convention, 4)[0] for convention in ("stock", "mean", "window"))
    assert mean == stock > 0.3
    assert 0.1 < window < stock


def test_without_the_term_nothing_more_is_run() -> None:
    with InFloat64():
        router = sft("exact", 4, 0.0).trainer.__dict__[SESSION].router
    assert not router.form.pools and router.moved is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks(tmp_path: Path) -> None:
    errors = found_by("tests.clients.sft_router_loss", tmp_path / "errors.json", timeout=800)
    for size in TWO_RANK_SIZES:
        assert errors[f"exact {size}"] <= TWIN
        assert min(errors[f"mean {size}"], errors[f"window {size}"]) > 0.05


@pytest.mark.slow
def test_verify_says_exact_under_exact(tmp_path: Path) -> None:
    """The term is no part of the contract of a trainer that adds it itself; what was trained is known all the same."""
    head = with_coefficient(FAMILIES[FAMILY], COEFFICIENT)
    rows = Dataset.from_list(tokens(head.samples[:8]))
    args = training_arguments(tmp_path, 2, 4, kind=SFTConfig, bf16=False, gradient_checkpointing=False)
    trainer = StockSFT(model=head.build(), args=args, train_dataset=rows, processing_class=tokenizer())
    with hf_accum_fix.apply(router_loss="exact"):
        report = hf_accum_fix.verify(trainer, splits=[(1, 8)])
    assert report.verdict.kind is Kind.EXACT and "the router's loss of the whole global batch" in report.verdict.words
    assert not any("no split can equal" in note for note in report.notes)
    (stock,) = report.of("stock")
    assert stock.verdict.kind is Kind.OFF
