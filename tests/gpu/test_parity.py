"""The promise on a GPU: twelve heads at four cuts, in float32, in bfloat16 and in float16 with a scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.steps import SPLITS, assert_every_cut, by_trainer, exact
from tests.numerics.heads import HEADS
from tests.numerics.parity import StockRecorder

#: One of each way in which a loss is reduced and items are counted; LoRA, convolutions and pictures are among them.
NAMES = (
    *("llama", "llama-smoothing", "lora", "llama-classification", "bert-mlm", "bert-tokens", "bert-answers", "t5"),
    *("llava", "wav2vec2-ctc-mean", "masked-patches", "no-kwargs"),
)
#: A stock step that is off by this much is wrong, not rounded.
WRONG = 0.05


def test_the_stand_in_passes(tmp_path: Path) -> None:
    """What the tests below do, on the CPU, so that they do not rot where there is no GPU."""
    assert_every_cut(HEADS["bert-mlm"], "cpu", tmp_path, splits=SPLITS[-1:])


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str, device: str, tmp_path: Path) -> None:
    head = HEADS[name]
    assert_every_cut(head, device, tmp_path)
    stock = by_trainer(head, device, SPLITS[-1], "stock", tmp_path)
    assert (stock.error(exact(head, SPLITS[-1])) > 1e-3) == head.stock_wrong


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str, device: str, tmp_path: Path) -> None:
    """Autocast, as ``bf16=True`` trains; the parameters stay float32."""
    head = HEADS[name]
    assert_every_cut(head, device, tmp_path, autocast=torch.bfloat16, bf16=True)
    stock = by_trainer(head, device, SPLITS[-1], "stock", tmp_path, bf16=True)
    assert (stock.error(exact(head, SPLITS[-1])) > WRONG) == head.stock_wrong


class Scaled(StockRecorder):
    """Begins with a scale that no gradient here overflows at, since a step that overflows is not taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.accelerator.scaler is not None
        self.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**6)


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "lora", "no-kwargs"])
def test_float16_with_a_scaler(name: str, cuda: str, tmp_path: Path) -> None:
    """accelerate scales the loss on a GPU alone."""
    head = HEADS[name]
    assert_every_cut(head, cuda, tmp_path, autocast=torch.float16, fp16=True, trainer_class=Scaled)
