"""float16 parameters under torch's own loss scaler for CPUs, in a loop; accelerate runs float16 on a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from hf_accum_fix import accumulation_windows
from tests.precision.gradients import Gradient, Keep, batch, error, left_on, llama, reference, samples
from tests.precision.test_gradients import NOISE

ROWS = samples(64)


class Scaler(torch.amp.GradScaler):
    """Unscales float16 gradients, as ``ShardedGradScaler`` of FSDP does; torch's own refuses them."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


def trained(steps: int, accumulate_in: str, scale: float, *, epochs: int = 1) -> tuple[list[Gradient], float]:
    """The gradient of every step that was not skipped, and the scale at the end."""
    model = llama().half().train()
    optimizer, scaler = Keep(model), Scaler("cpu", init_scale=scale, growth_interval=1000)
    size = len(ROWS) // steps
    loader = [batch(ROWS[start : start + size]) for start in range(0, len(ROWS), size)]
    windows = accumulation_windows(loader, steps=steps, accumulate_in=accumulate_in)
    for _ in range(epochs):
        for window in windows:
            for each in window:
                with window.micro_batch(model):
                    scaler.scale(window.loss(model, each)).backward()
            assert not left_on(model) and not windows._host.gradient._sums
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1e30)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return optimizer.seen, scaler.get_scale()


def test_a_scaled_sum_is_that_of_one_micro_batch() -> None:
    wanted = reference(llama().half(), ROWS)
    floor, wide, compensated, stock = (
        error(trained(steps, mode, 2.0**10)[0][0], wanted)
        for steps, mode in ((1, "parameter"), (64, "float32"), (64, "compensated"), (64, "parameter"))
    )
    assert max(wide, compensated) <= NOISE * floor < stock, (wide, compensated, floor, stock)


@pytest.mark.parametrize("accumulate_in", ["float32", "compensated"])
def test_a_window_that_overflows_is_skipped_and_leaves_nothing_to_the_next(accumulate_in: str) -> None:
    (kept,), scale = trained(16, accumulate_in, 2.0**21, epochs=2)
    (wanted,), _ = trained(16, accumulate_in, 2.0**20)
    assert scale == 2.0**20
    assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
