"""What verify() leaves behind: nothing in attributes, lists, dicts, tensors, generators and the data's order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_accum_fix import observations, verify
from hf_accum_fix.trainer import GlobalBatchTrainer
from hf_accum_fix.verification.report import Kind
from tests.numerics.heads import before
from tests.verify.trainers import Regression, points, small

pytestmark = pytest.mark.filterwarnings("ignore:.*gloo.*")

CURRENT = pytest.mark.skipif(before("5.23"), reason="what the newest release does; the parts are tested on others too")


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


class Draws:
    """A collator with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x, labels = (torch.stack([row[key] for row in rows]) for key in ("x", "labels"))
        return {"x": x + torch.randn(x.shape, generator=self.generator), "labels": labels}


class OwnLoader(Trainer):
    """A dataloader of the user's own, which is the same each time."""

    def get_train_dataloader(self) -> Any:
        given = {"batch_size": 2, "shuffle": True, "collate_fn": self.data_collator}
        loader = torch.utils.data.DataLoader(self.train_dataset, generator=torch.Generator().manual_seed(7), **given)
        return vars(self).setdefault("loader", loader)


class Normalises(Regression):
    """Changes its parameters in its forward: scaled to norm one in place, and one that follows another."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm())
            self.last.bias.data = self.last.bias.data * 0.9
            self.last.weight.data.mul_(0.99)
        return super().forward(x, labels)


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.called = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.called += 1

    on_step_begin = on_step_end = on_epoch_begin = on_evaluate = on_train_begin


#: A trainer, its collator and its model; a shuffled order, AdamW and a schedule: everything that could remember.
MADE: dict[str, dict[str, Any]] = {
    "stock": {"cls": Trainer}, "subclass": {"cls": GlobalBatchTrainer}, "keeping": {"cls": Keeps},
    "a loader of its own": {"cls": OwnLoader}, "a collator that draws": {"data_collator": Draws},
    "a model that changes itself": {"model": Normalises},
}  # fmt: skip


def run(name: str, output: Path, verified: bool) -> tuple[dict[str, Tensor], list[Any], int]:
    """Weights and log after three steps, and runs in the report."""
    torch.manual_seed(11)
    made = {"model": Regression, "data_collator": lambda: None, **MADE[name]}
    given = {"max_steps": 3, "learning_rate": 1e-2, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
    model, counting, recorded = made["model"](batch_norm=True, dropout=0.3), Counting(), len(observations.recorded())
    collator = made["data_collator"]()
    trainer = small(model, output, points(24), cls=made.get("cls", Trainer), data_collator=collator, **given)
    trainer.add_callback(counting)
    model(torch.ones(2, 4), torch.zeros(2))["loss"].backward()
    if verified:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        storages = [each.data_ptr() for each in model.state_dict(keep_vars=True).values()]
        arguments, gradient, state = repr(trainer.args), model.last.weight.grad, torch.get_rng_state()
        verify(trainer, splits=[1, 4])
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert [each.data_ptr() for each in model.state_dict(keep_vars=True).values()] == storages
        assert repr(trainer.args) == arguments and model.last.weight.grad is gradient
        assert torch.equal(torch.get_rng_state(), state) and model.dropout.p == 0.3
        assert counting.called == trainer.state.global_step == 0 and trainer.optimizer is None
        assert not list(output.iterdir())
    trainer.train()
    assert counting.called > 0
    timed = ("runtime", "second")
    log = [{k: entry[k] for k in entry if not any(word in k for word in timed)} for entry in trainer.state.log_history]
    return model.state_dict(), log, len(observations.recorded()) - recorded


@CURRENT
@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_the_training_that_follows_is_bit_for_bit_the_one_without_it(name: str, tmp_path: Path) -> None:
    (plain, *others), (verified, *same) = (run(name, tmp_path, each) for each in (False, True))
    assert all(torch.equal(plain[key], verified[key]) for key in plain) and others == same


class Fails(Regression):
    seen = 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.seen += len(x)
        if self.seen > 40:
            raise KeyError("a fault of the model's own")
        return super().forward(x, labels)


@CURRENT
def test_everything_comes_back_after_an_error(tmp_path: Path) -> None:
    model = Fails(dropout=0.2)
    trainer, state = small(model, tmp_path, points(8)), torch.get_rng_state()
    with pytest.raises(KeyError, match="own"):
        verify(trainer)
    assert model.dropout.p == 0.2 and "seen" not in vars(model) and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
