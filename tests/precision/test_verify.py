"""verify() calls a gradient that was added in 16 bits off, however wide the noise of a 16-bit forward is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_accum_fix import Options, verify
from hf_accum_fix.trainer import GlobalBatchTrainer
from hf_accum_fix.verification.report import Kind
from tests.numerics.parity import training_arguments
from tests.precision.gradients import batch, llama, samples


class InFloat32(GlobalBatchTrainer):
    global_batch_options = Options(accumulate_in="float32")


@pytest.mark.slow
def test_the_loss_of_16_bits_is_off_and_float32_is_exact(tmp_path: Path) -> None:
    rows = samples(128)
    verdicts = []
    for kind in (GlobalBatchTrainer, InFloat32):
        trainer = kind(
            model=llama().bfloat16(),
            args=training_arguments(tmp_path, 1, 128),
            train_dataset=rows,
            data_collator=batch,
        )
        report = verify(trainer, splits=[1], with_apply=False)
        (result,) = report.results
        # Within the noise of the forward, times 8: the error alone would have passed.
        assert result.error is not None and result.error < report.tolerance
        verdicts.append(report.verdict)
    rounded, wide = verdicts
    assert rounded.kind is Kind.OFF and "summing micro-batches in bfloat16" in rounded.words, rounded
    assert wide.kind is Kind.EXACT, wide
