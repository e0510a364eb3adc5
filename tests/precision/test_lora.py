"""16-bit adapters on a frozen 16-bit model: as exact as any parameter, and nothing is kept for the frozen ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from hf_accum_fix import accumulation_windows
from tests.precision.gradients import batch, by_trainer, error, llama, reference, samples
from tests.precision.test_gradients import NOISE

ROWS = samples(64)


def adapted() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(llama().bfloat16(), config, autocast_adapter_dtype=False)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    return model


def test_adapters_have_the_gradient_of_one_micro_batch(tmp_path: Path) -> None:
    wanted = reference(adapted(), ROWS)
    assert all("lora_" in name for name in wanted)
    floor, stock, wide, compensated = (
        error(by_trainer(adapted(), ROWS, steps, mode, tmp_path).seen[0], wanted)
        for steps, mode in ((1, "stock"), (64, "stock"), (64, "float32"), (64, "compensated"))
    )
    assert max(wide, compensated) <= NOISE * floor < stock, (wide, compensated, floor, stock)


def test_only_they_are_added() -> None:
    model = adapted()
    windows = accumulation_windows([batch([row]) for row in ROWS[:4]], steps=4, accumulate_in="compensated")
    window = next(iter(windows))
    for each in window.batches[:2]:
        with window.micro_batch(model):
            window.loss(model, each).backward()
    assert {*windows._host.gradient._sums} == {each for each in model.parameters() if each.requires_grad}
