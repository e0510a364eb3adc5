"""The host waits for the device nowhere after the first window: not in the Trainer, not in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.waits import BY_NUMBER, CASES, WINDOWS, WaitError, by_loop, by_trainer
from tests.numerics.heads import HEADS
from tests.numerics.heads.own import UsesTensor


class Reads(UsesTensor):
    """Reads a number in every forward."""

    def forward(self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        float(self.head.bias.detach().sum())
        return super().forward(input_ids, labels, num_items_in_batch, **kwargs)


class Copies(UsesTensor):
    """Puts a number on the device in every forward."""

    def forward(self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        torch.tensor(1.0, device=input_ids.device)
        return super().forward(input_ids, labels, num_items_in_batch, **kwargs)


def no_waits(device: str, output: Path) -> None:
    """Every case by stock, by the patch and by a loop; a head that does wait is seen."""
    for name, dtype, options in CASES:

        def made(name: str = name, dtype: torch.dtype = dtype) -> nn.Module:
            return HEADS[name].build().to(dtype)

        assert by_trainer(made(), None, device, output) == WINDOWS
        assert by_trainer(made(), options, device, output) == WINDOWS
        assert by_loop(made(), options, device) == WINDOWS
    for waiting in (Reads(), Copies()):
        with pytest.raises((WaitError, RuntimeError), match=r"waits for the device|synchronizing CUDA operation"):
            by_trainer(waiting, {"contract": BY_NUMBER}, device, output)


@pytest.mark.slow
def test_on_the_device_without_numbers(tmp_path: Path) -> None:
    """On "meta", which takes the paths of a GPU."""
    no_waits("meta", tmp_path)


def test_by_the_sync_debug_mode(cuda: str, tmp_path: Path) -> None:
    """torch tells of a wait for CUDA alone; "meta" stands in for it in the test above."""
    no_waits(cuda, tmp_path)
