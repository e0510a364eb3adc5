"""The options and verify() on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import hf_accum_fix
from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.balancing.trainings import BALANCE, dealt
from tests.gpu.steps import FLOAT32_SUMS, FLOORS, RATE, by_trainer, full_batch, in_float32, in_float64
from tests.numerics.heads import HEADS
from tests.numerics.parity import reference_step
from tests.precision import gradients
from tests.precision.test_gradients import NOISE
from tests.router.conventions import COEFFICIENT, FAMILIES, flat, step
from tests.router.conventions import full_batch as router_of_full_batch
from tests.verify.trainers import trainer_of


def test_router_loss_exact(device: str, tmp_path: Path) -> None:
    """What the router's loss adds to a step of 32 samples, 4 at a time; "mean" is off."""
    head = FAMILIES["Mixtral"]
    wanted = router_of_full_batch(in_float64(head))
    floor = _off(router_of_full_batch(in_float32(head, device)).cpu(), wanted)
    how = {"use_cpu": device == "cpu", "learning_rate": RATE}

    def added(convention: str) -> Tensor:
        taken = (step(in_float32(head), convention, 4, each, **how) for each in (COEFFICIENT, 0.0))
        with_it, without = (flat(each.change) for each in taken)
        return (with_it - without) / RATE

    assert _off(added("exact"), wanted) <= max(FLOORS * floor, FLOAT32_SUMS)
    assert _off(added("mean"), wanted) > 0.3


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "wav2vec2-ctc-mean"])
def test_dealt_windows(name: str, device: str, tmp_path: Path) -> None:
    head = HEADS[name]
    pieces = dealt(head, 4, 1, 2)
    assert sorted(map(len, pieces)) != [2, 2, 2, 2]
    wanted = reference_step(in_float64(head), pieces)
    floor = full_batch(head, device, (2, 4)).error(wanted)
    with hf_accum_fix.apply(balance_windows=BALANCE):
        found = by_trainer(head, device, (2, 4), "stock", tmp_path)
    assert found.error(wanted) <= max(FLOORS * floor, FLOAT32_SUMS)


@pytest.mark.parametrize("accumulate_in", ["float32", "compensated"])
def test_accumulate_in(accumulate_in: str, device: str, tmp_path: Path) -> None:
    """Bfloat16 parameters, 64 micro-batches: to the noise of one; in the parameter's own type it is lost."""
    rows = gradients.samples(64)
    wanted = gradients.reference(gradients.llama().bfloat16(), rows)
    floor, found, stock = (
        gradients.error(
            gradients.by_trainer(
                gradients.llama().bfloat16(), rows, steps, mode, tmp_path, use_cpu=device == "cpu"
            ).seen[0],
            wanted,
        )
        for steps, mode in ((1, "parameter"), (64, accumulate_in), (64, "parameter"))
    )
    assert found <= NOISE * floor and found < stock / 1.3, (found, floor, stock)


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_eval_loss(name: str, device: str, tmp_path: Path) -> None:
    """The mean over the items of seven samples, by evaluation batches of 1, 3 and 7."""
    head = in_float32(HEADS[name])
    exactly = in_float64(HEADS[name])
    wanted = float(exactly.reference_loss(exactly.build().eval(), exactly.batch(head.samples[:7])).detach())
    how = {"evaluated": head.samples[:7], "use_cpu": device == "cpu"}
    with hf_accum_fix.apply(eval_loss=True):
        found = [
            float(trainer_of(head, tmp_path, per_device_eval_batch_size=size, **how).evaluate()["eval_loss"])
            for size in (1, 3, 7)
        ]
    assert found == pytest.approx([wanted] * 3, rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_verify(precision: str, device: str, tmp_path: Path) -> None:
    """A BERT classifier: wrong as the release trains it, exact with apply()."""
    how = {"use_cpu": device == "cpu", "bf16": precision == "bfloat16"}
    report = verify(trainer_of(in_float32(HEADS["bert-classes"]), tmp_path, **how))
    assert report.verdict.kind is Kind.OFF and report.verdict_of("apply()").kind is Kind.EXACT, str(report)
