"""TRL's SFTTrainer under each convention: it divides its router loss itself, and borrows Mixtral's for every family."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig

import hf_accum_fix
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.verification.report import Kind
from tests.clients.sft import StockSFT, Way, sft_step, tokens
from tests.clients.words import tokenizer
from tests.numerics.parity import Step, training_arguments
from tests.ranks import on_ranks
from tests.router.conventions import COEFFICIENT, FAMILIES, TWIN, InFloat64, flat, twin, with_coefficient

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FAMILY = "Qwen3-MoE"
TWO_RANK_SIZES = (1, 8)


def sft(convention: str, per_device: int, coefficient: float, ranks: int = 1, **config: Any) -> Step:
    """One step of SFTTrainer, stock or by the patch under a convention."""
    head = FAMILIES[FAMILY]
    way = Way(with_coefficient(head, coefficient), tokens(head.samples), config)
    accumulate = len(head.samples) // per_device // ranks
    options: Mapping[str, Any] = {"ddp_backend": "gloo"} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as output:
        if convention == "stock":
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)
        with hf_accum_fix.apply(router_loss=convention):
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)


def sft_error(convention: str, per_device: int, ranks: int = 1, **config: Any) -> tuple[float, Step]:
    """Relative error of the auxiliary gradient, told by two steps, and the step with the coefficient."""
    with InFloat64():
        wanted, _ = twin(FAMILIES[FAMILY])
        with_it = sft(convention, per_device, COEFFICIENT, ranks, **config)
        found = flat(with_it.change) - flat(sft("stock", per_device, 0.0, ranks, **config).change)
    return float((found - wanted).norm() / wanted.norm()), with_it


def errors_of() -> dict[str, float]:
    """On each rank: the errors of the auxiliary gradient."""
    return {
        f"{convention} {size}": sft_error(convention, size, ranks=2)[0]
        for convention in ("mean", "window", "exact")
        for size in TWO_RANK_SIZES
    }


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
def test_two_ranks() -> None:
    errors = on_ranks(errors_of, timeout=800)[0]
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
