"""The callbacks on one process: what reaches the trackers, what it costs, and that the Trainer is left alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_accum_fix
from hf_accum_fix import GlobalBatchTrainer
from hf_accum_fix.monitor.callbacks import MonitorsCallback
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter
from hf_accum_fix.monitor.rank_gradients import RankGradients


def samples(count: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(1, 32, (12,), generator=draw)
        labels = ids.clone()
        labels[: int(torch.randint(0, 11, (), generator=draw))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer(
    folder: Path, kind: type[Trainer] = Trainer, model: nn.Module | None = None, count: int = 48, **arguments: Any
) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6,
        "logging_steps": 3, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return kind(
        model or LlamaForCausalLM(config), TrainingArguments(**{**settings, **arguments}), train_dataset=samples(count)
    )


def logged(its: Trainer) -> list[dict[str, float]]:
    return [row for row in its.state.log_history if "loss" in row]


@pytest.mark.parametrize("kind", [Trainer, GlobalBatchTrainer])
def test_the_logged_loss_is_the_mean_over_the_tokens_of_the_interval(kind: type[Trainer], tmp_path: Path) -> None:
    """Without learning every step's loss can be had again: by hand, over all tokens of the interval at once."""
    its = trainer(tmp_path, kind, learning_rate=0.0)
    its.add_callback(MonitorsCallback(its, noise_scale_every=1))
    batches: list[dict[str, Tensor]] = []

    step = its.training_step

    def recorded(model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        batches.append(copy.deepcopy(dict(inputs)))
        return step(model, inputs, *others)

    its.training_step = recorded  # type: ignore[method-assign]
    its.train()
    row = logged(its)[0]
    total = items = 0.0
    with torch.no_grad():
        for batch in batches[:6]:
            logits = its.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
            labels = batch["labels"][:, 1:]
            total += float(nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum"))
            items += float((labels != -100).sum())
    assert row["hf_accum_fix/loss"] == pytest.approx(total / items, rel=1e-5)
    assert row["loss"] != pytest.approx(total / items, rel=1e-5)
    assert 0 < row["hf_accum_fix/loss_standard_error"] < 1
    assert logged(its)[-1]["hf_accum_fix/noise_scale_items"] > 0


class Regression(nn.Module):
    """Takes no item count: its micro-batches are means, whatever is handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.line(points).squeeze(-1) - labels).pow(2).mean()}


def test_a_head_without_item_count_is_weighed_by_its_own_items(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    dataset = [{"points": torch.randn(3, generator=draw), "labels": torch.randn((), generator=draw)} for _ in range(16)]
    its = trainer(tmp_path, model=Regression(), learning_rate=0.0, max_steps=2, logging_steps=2)
    its.train_dataset = dataset
    its.add_callback(MonitorsCallback(its))
    its.train()
    with torch.no_grad():
        points, labels = (torch.stack([sample[key] for sample in dataset]) for key in ("points", "labels"))
        expected = float(its.model(points, labels)["loss"])
    assert logged(its)[0]["hf_accum_fix/loss"] == pytest.approx(expected, rel=1e-5)


def test_what_is_called_at_every_step_never_looks_at_a_number() -> None:
    """On the meta device no tensor has a value: whoever reads one fails."""
    loss, items, norm = (torch.zeros((), device="meta") for _ in range(3))
    meter, norms, gradients = LossMeter(), GradientNorm(max_norm=1.0), RankGradients()
    for _ in range(3):
        meter.update(loss, items)
        meter.update(loss, 5)
        meter.update(loss, items, summed=True)
        norms.update(norm)
        gradients.add(torch.zeros(4, device="meta"))
        gradients.end_of_step()
    for read in (meter.read, norms.read, gradients.read):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            read()


def test_a_callback_that_comes_in_the_midst_of_a_run_listens_from_the_next_on(tmp_path: Path) -> None:
    its = trainer(tmp_path)
    late = MonitorsCallback(its)

    class Adds(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and late not in its.callback_handler.callbacks:
                its.add_callback(late)

    its.add_callback(Adds())
    its.train()
    assert not any(name.startswith("hf_accum_fix/") for row in its.state.log_history for name in row)
    its.train()
    assert "hf_accum_fix/loss" in logged(its)[-1] and "log" not in vars(its)


@pytest.mark.parametrize("patched", [False, True])
def test_a_run_that_failed_does_not_count_twice(patched: bool, tmp_path: Path) -> None:
    """Nor not at all: the patch takes its own `log` away after an exception, and with it whatever stands on that."""
    its = trainer(tmp_path)
    its.add_callback(MonitorsCallback(its))
    step = its.compute_loss
    its.compute_loss = lambda *args, **kwargs: (_ for _ in ()).throw(KeyError("planted"))  # type: ignore
    with hf_accum_fix.apply(quiet=True) if patched else nullcontext():
        with pytest.raises(KeyError, match="planted"):
            its.train()
        its.compute_loss = step  # type: ignore[method-assign]
        its.train()
    row = logged(its)[0]
    assert row["hf_accum_fix/loss"] == pytest.approx(row["loss"], rel=0.01)
    assert "log" not in vars(its)
