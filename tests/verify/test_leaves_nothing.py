"""What verify() leaves behind: nothing in attributes, lists, dicts, tensors, generators and the data's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_accum_fix import verify
from hf_accum_fix.verification.report import Kind
from tests.verify.trainers import Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")


class Keeps(Trainer):
    """Changes in every loss what a trainer keeps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(1)
        self.teacher = Regression(batch_norm=True).requires_grad_(False)
        self.prompts = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.loose = [nn.Parameter(torch.ones(2))]
        self.mean = torch.zeros(3)
        self.running = {"mean": torch.zeros(6), "var": torch.ones(6)}
        self.meter: Any = Meter()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.teacher(inputs["x"])
            for mine, other in zip(self.teacher.parameters(), model.parameters(), strict=False):
                mine.add_(other.flatten()[0])
            self.prompts[0].mul_(2)
            self.loose[0].data = self.loose[0].data * 3
            self.mean += 1
            nn.functional.batch_norm(torch.randn(5, 6), self.running["mean"], self.running["var"], training=True)
        self.meter.held.tensors[0].add_(1)
        self.meter.total += 1
        self.meter.last["loss"] = 1.0
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


class Meter:
    def __init__(self) -> None:
        self.total, self.last, self.held = 0, dict[str, float](), SimpleNamespace(tensors=[torch.zeros(2)])


def test_it_leaves_nothing_anywhere(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, points(8), cls=Keeps)
    before = {name: value.clone() for name, value in trainer.teacher.state_dict().items()}
    report = verify(trainer, splits=[2])
    assert report.verdict_of("apply()").kind is Kind.EXACT, report
    assert all(torch.equal(value, before[name]) for name, value in trainer.teacher.state_dict().items())
    assert all(each.grad is None for each in trainer.teacher.parameters())
    assert trainer.prompts[0].tolist() == [1.0] * 3 and trainer.loose[0].tolist() == [1.0] * 2
    assert trainer.mean.tolist() == [0.0] * 3
    assert trainer.running["mean"].tolist() == [0.0] * 6 and trainer.running["var"].tolist() == [1.0] * 6
    assert trainer.meter.total == 0 and trainer.meter.last == {} and trainer.meter.held.tensors[0].tolist() == [0.0] * 2


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Draws:
    """A collator with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x, labels = (torch.stack([row[key] for row in rows]) for key in ("x", "labels"))
        return {"x": x + torch.randn(x.shape, generator=self.generator), "labels": labels}


class Normalises(Regression):
    """Changes its parameters in its forward: scaled to norm one in place, and one that follows another."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm())
            self.last.bias.data = self.last.bias.data * 0.9
            self.last.weight.data.mul_(0.99)
        return super().forward(x, labels)


def plain(output: Path) -> Any:
    return small(Regression(), output, points(24), max_steps=3)


def with_collator(output: Path) -> Any:
    trainer = plain(output)
    trainer.data_collator = Draws()
    return trainer


def with_loader(output: Path) -> Any:
    """A dataloader of the user's own, which is the same each time."""
    trainer = plain(output)
    generator = torch.Generator().manual_seed(7)
    loader = torch.utils.data.DataLoader(
        points(24), batch_size=2, shuffle=True, generator=generator, collate_fn=trainer.data_collator
    )
    trainer.get_train_dataloader = lambda: loader
    return trainer


def changing(output: Path) -> Any:
    return small(Normalises(), output, points(24), max_steps=3)


def keeping(output: Path) -> Any:
    return small(Regression(), output, points(24), cls=Keeps, max_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("made", [with_collator, with_loader, changing, keeping], ids=lambda made: made.__name__)
def test_the_training_that_follows_is_the_one_without_it(made: Callable[[Path], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = losses(made(tmp_path))
    torch.manual_seed(0)
    trainer = made(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    storages = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    verify(trainer)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == storages
    assert losses(trainer) == wanted
