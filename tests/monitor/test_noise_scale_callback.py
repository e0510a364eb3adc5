"""The gradient noise scale in a Trainer's log: as a loop measures it, and left out where it cannot be measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_accum_fix import GlobalBatchTrainer
from hf_accum_fix.monitor import MonitorsCallback, NoiseScale, NoiseScaleCallback
from tests.monitor.test_callbacks import logged, trainer


def weighed(inputs: Any) -> torch.Tensor:
    """The items of a causal model's loss: labels after the shift."""
    return (inputs["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.0], ids=["clipped", "not clipped"])
def test_the_trainer_logs_what_a_loop_measures(
    max_grad_norm: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = trainer(
        tmp_path, GlobalBatchTrainer, learning_rate=0.0, max_steps=6, logging_steps=6, gradient_accumulation_steps=2,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    its.add_callback(NoiseScaleCallback(its, every=1, items=weighed))
    batches: list[dict[str, torch.Tensor]] = []
    step = its.training_step

    def recorded(model: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        batches.append({name: value.clone() for name, value in inputs.items()})
        return step(model, inputs, *others)

    its.training_step = recorded  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="hf_accum_fix.monitor"):
        its.train()
    (row,) = logged(its)
    if not hasattr(TrainerCallback, "on_pre_optimizer_step"):
        assert "does not announce the optimizer's step" in caplog.text and "hf_accum_fix/noise_scale_items" not in row
        return
    model = its.model
    noise = NoiseScale(model, every=1)
    for window in range(6):
        model.zero_grad()
        cut = batches[2 * window : 2 * window + 2]
        total = sum(int(weighed(batch)) for batch in cut)
        for batch in cut:
            labels = batch["labels"][:, 1:]
            logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
            (torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / total).backward()
            noise.micro_batch(weighed(batch))
        noise.step()
    expected = noise.read()
    assert row["hf_accum_fix/noise_scale_items"] == pytest.approx(expected.scale, rel=1e-3)
    assert row["hf_accum_fix/step_gain"] == pytest.approx(expected.gain, rel=1e-3)
    assert its.training_step is recorded and "clip_grad_norm_" not in vars(its.accelerator)


def test_one_callback_has_it_where_it_is_asked_for(tmp_path: Path) -> None:
    its = trainer(tmp_path, GlobalBatchTrainer, learning_rate=0.0, max_steps=6, logging_steps=6)
    its.add_callback(MonitorsCallback(its, noise_scale_every=1))
    its.train()
    assert "hf_accum_fix/noise_scale_items" in logged(its)[0]
    assert "hf_accum_fix/items_per_step" in logged(its)[0]


def test_samples_dealt_by_length_are_not_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    its = trainer(tmp_path, max_steps=2, logging_steps=2)
    its.add_callback(NoiseScaleCallback(its, every=1, dealt=True))
    with caplog.at_level(logging.WARNING, logger="hf_accum_fix.monitor"):
        its.train()
    assert "hf_accum_fix/noise_scale_items" not in logged(its)[0]
    assert sum("not watched by NoiseScaleCallback" in record.message for record in caplog.records) == 1
