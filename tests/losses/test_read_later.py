"""Where reading would wait for the device a window is read with the log; here on the CPU, which is told not to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainingArguments

import hf_accum_fix
from hf_accum_fix import observations
from hf_accum_fix.core import window
from hf_accum_fix.core.state import ATTEMPTS
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.overrides.training import EXACT_WINDOWS
from tests.trainers.runs import Ordered

LEFT_OUT, CLASSES, STEPS, LOGGED, BEFORE = 7, 20, 20, 10, 4


class LeavesOut(nn.Module):
    """Leaves the targets of one class out of its loss, by itself."""

    weight: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.classes(self.embedding(input_ids)).flatten(0, 1).double()
        targets = labels.masked_fill(labels == LEFT_OUT, -100).flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(logits, targets, self.weight)}
        return {"loss": F.cross_entropy(logits, targets, self.weight, reduction="sum") / num_items_in_batch}


class Weighted(LeavesOut):
    """Divides by the weights of its targets, which no rule reads off the inputs."""

    weight = torch.linspace(0.2, 1.0, CLASSES, dtype=torch.float64)


def _sample(place: int, steps: int) -> dict[str, Tensor]:
    ids = torch.randint(LEFT_OUT + 1, CLASSES, (6,))
    labels = ids.clone()
    if place >= BEFORE * steps * 2:
        labels[3 : 4 + place % 2] = LEFT_OUT
    return {"input_ids": ids, "labels": labels}


def _arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=steps,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


def _trained(
    model: nn.Module, args: TrainingArguments, data: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[int]]:
    """A trainer, and the steps whose gradients were corrected."""
    monkeypatch.setattr(Session, "readable", property(lambda _: False))
    corrected: list[int] = []
    monkeypatch.setattr(window, "scale_gradients", lambda *_: corrected.append(trainer.state.global_step + 1))
    observations.clear()
    with hf_accum_fix.apply(quiet=True):
        trainer = Ordered(model, args, train_dataset=data)
        trainer.train()
    return trainer, corrected


@pytest.mark.parametrize("steps", [1, 2])
def test_counts_that_differ_are_read_with_the_log_and_corrected_from_there(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    args = _arguments(tmp_path, steps, logging_steps=LOGGED, max_steps=STEPS, learning_rate=0.0)
    data: Any = [_sample(place, steps) for place in range(2 * STEPS * steps)]
    trainer, corrected = _trained(LeavesOut(), args, data, monkeypatch)
    # The first windows are corrected unread. The log is of a step that has been taken, so that the next window is the
    # first of the others that can be corrected. The mean of the only micro-batch is right as it is.
    assert corrected == ([*range(1, ATTEMPTS + 1), *range(LOGGED + 1, STEPS + 1)] if steps > 1 else [])
    logged = [row.get(EXACT_WINDOWS) for row in trainer.state.log_history if "loss" in row]
    assert logged == ([None] * 2 if steps == 1 else [BEFORE, STEPS - (LOGGED - BEFORE)])
    assert observations.recorded()[-1]["inexact_windows"] == (LOGGED - BEFORE if steps > 1 else 0)


def test_a_loss_whose_items_no_rule_counts_is_corrected_from_the_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    data: Any = [_sample(0, 2) for _ in range(12)]
    _, corrected = _trained(Weighted(), _arguments(tmp_path, 2, max_steps=3), data, monkeypatch)
    assert corrected == [1, 2, 3]
