"""A micro-batch that is not finite shows in the log, whatever upstream's filter would have put there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_accum_fix import GlobalBatchTrainer
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


class Arguments(TrainerCallback):
    """What the arguments say of the filter where others read them."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self.seen["begin"] = args.logging_nan_inf_filter

    def on_log(self, args: Any, *_: Any, **__: Any) -> None:
        self.seen["log"] = args.logging_nan_inf_filter


def train(path: str, output: Path, losses: tuple[float, ...] = LOSSES, **arguments: Any) -> Any:
    args = training_arguments(output, 1, 2, **{"max_steps": 6, "learning_rate": 0.0, "logging_steps": 2, **arguments})
    samples = [{"labels": torch.tensor(loss)} for loss in losses]
    arguments_seen = Arguments()
    with applied(path):
        trainer = (GlobalBatchTrainer if path == "trainer" else Trainer)(
            model=Given(), args=args, train_dataset=samples, callbacks=[arguments_seen]
        )
        trainer._get_train_sampler = lambda *_: None  # in order
        result = trainer.train()
    return trainer, result, arguments_seen.seen


def logged(trainer: Any, name: str) -> list[float | None]:
    return [entry.get(name) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("path", ["apply", "trainer"])
def test_a_loss_that_is_not_finite_is_logged_as_it_is(path: str, tmp_path: Path, said: Said) -> None:
    stock, result, _ = train("stock", tmp_path)
    hidden = logged(stock, "loss")
    assert all(loss is not None and math.isfinite(loss) for loss in hidden) and math.isfinite(result.training_loss)
    ours, result, seen = train(path, tmp_path, save_strategy="steps", save_steps=2)
    found = logged(ours, "loss")
    assert math.isnan(found[0]) and found[1] == pytest.approx(6.5) and found[2] == math.inf
    assert not math.isfinite(result.training_loss) and math.isnan(result.metrics["train_loss"])
    assert len(said("is not finite")) == 1
    # Whoever notes the arguments notes what the user gave; a checkpoint does, too.
    assert seen == {"begin": True, "log": True} and ours.args.logging_nan_inf_filter is True
    kept = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert kept.logging_nan_inf_filter is True
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert math.isnan(state["log_history"][0]["loss"])


def test_finite_losses_are_logged_as_ever(tmp_path: Path, said: Said) -> None:
    trainer, result, _ = train("apply", tmp_path, losses=tuple(map(float, range(12))))
    assert logged(trainer, "loss") == pytest.approx([1.5, 5.5, 9.5])
    assert result.training_loss == pytest.approx(5.5)
    assert not said("finite")


def test_without_the_filter_nothing_is_said(tmp_path: Path, said: Said) -> None:
    trainer, _, seen = train("apply", tmp_path, logging_nan_inf_filter=False)
    assert math.isnan(logged(trainer, "loss")[0])
    assert seen == {"begin": False, "log": False} and not said("finite")
