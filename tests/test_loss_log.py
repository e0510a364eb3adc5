"""A loss that is not finite is warned of once, and logged as upstream logs it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from tests.logged import Said
from tests.numerics.parity import applied, training_arguments

#: Loss of each sample; a micro-batch is one of them, a window two, a log entry two windows.
LOSSES = (1.0, 2.0, 3.0, math.nan, 5.0, 6.0, 7.0, 8.0, math.inf, 1.0, 1.0, 1.0)


class Given(nn.Module):
    """Its loss is the mean of what it is given; its gradient stays finite, so that later losses tell."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.l1_loss(labels, torch.zeros_like(labels)) + 0.0 * self.weight}


def logged(output: Path, path: str, losses: tuple[float, ...] = LOSSES, *, filters: bool) -> list[float]:
    given = {"max_steps": 6, "learning_rate": 0.0, "logging_steps": 2, "logging_nan_inf_filter": filters}
    samples = [{"labels": torch.tensor(loss)} for loss in losses]
    with applied(path):
        trainer = Trainer(model=Given(), args=training_arguments(output, 1, 2, **given), train_dataset=samples)
        trainer._get_train_sampler = lambda *_: None  # in order
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("filters", [True, False])
def test_a_loss_that_is_not_finite_is_said_once(filters: bool, tmp_path: Path, said: Said) -> None:
    stock = logged(tmp_path, "stock", filters=filters)
    assert all(map(math.isfinite, stock)) is filters and not said("is not finite")
    ours = logged(tmp_path, "apply", filters=filters)
    assert list(map(math.isfinite, ours)) == list(map(math.isfinite, stock))
    assert len(said("is not finite")) == 1
