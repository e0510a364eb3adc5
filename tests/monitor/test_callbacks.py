"""The callback on one process: what reaches the trackers, what is told of it, and that the Trainer is left alone."""

from __future__ import annotations

import copy
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_accum_fix
from hf_accum_fix import GlobalBatchTrainer
from hf_accum_fix.monitor.callbacks import MonitorsCallback

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


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
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6,
        "logging_steps": 3, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return kind(
        model or LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2)),
        TrainingArguments(**{**settings, **arguments}),
        train_dataset=samples(count),
    )


def logged(its: Trainer) -> list[dict[str, float]]:
    return [row for row in its.state.log_history if "loss" in row]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """What the monitors have said: older releases log warnings of their own."""
    caplog.set_level(logging.INFO, logger="hf_accum_fix.monitor")

    def lines(level: int = logging.WARNING) -> list[str]:
        mine = (each for each in caplog.records if each.name == "hf_accum_fix.monitor" and each.levelno >= level)
        return [each.getMessage() for each in mine]

    return lines


@pytest.mark.parametrize("kind", [Trainer, GlobalBatchTrainer])
def test_the_logged_loss_is_the_mean_over_the_tokens_of_the_interval(
    kind: type[Trainer], tmp_path: Path, told: Any
) -> None:
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
    assert 0 < row["hf_accum_fix/loss_standard_error"] < 1 and "hf_accum_fix/loss_repeats_the_trainers" not in row
    assert row["hf_accum_fix/loss_of_a_guess"] == pytest.approx(math.log(32)) and not told()
    assert logged(its)[-1]["hf_accum_fix/noise_scale_items"] > 0


def classified(folder: Path, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    """A classifier that takes no item count, trained with all monitors."""
    config = BertConfig(**TINY, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    its = trainer(folder, kind, BertForSequenceClassification(config), gradient_accumulation_steps=4, **arguments)
    rows = samples(96)
    its.train_dataset = [{**row, "labels": torch.tensor(place % 2)} for place, row in enumerate(rows)]
    its.add_callback(MonitorsCallback(its))
    its.train()
    return its


@pytest.mark.parametrize("kind", [Trainer, GlobalBatchTrainer])
def test_the_mean_over_the_items_is_the_truth_of_a_classifier(kind: type[Trainer], tmp_path: Path, told: Any) -> None:
    its = classified(tmp_path, kind, learning_rate=0.0, max_steps=6, logging_steps=6)
    (row,) = logged(its)
    with torch.no_grad():
        batch = {key: torch.stack([each[key] for each in its.train_dataset]) for key in ("input_ids", "labels")}
        assert row["hf_accum_fix/loss"] == pytest.approx(float(its.model(**batch).loss), rel=1e-5)
    if row["loss"] > 2 * row["hf_accum_fix/loss"]:
        assert any("trainer-loss-scaled" in line and "4 times" in line for line in told())
        counters = {key: value for key, value in row.items() if key.endswith("_alarms")}
        assert counters == {"hf_accum_fix/all_alarms": 1, "hf_accum_fix/trainer_loss_scaled_alarms": 1}
    else:
        assert not told()


def test_a_loss_that_cannot_be_checked_is_said_to_repeat_the_trainer_s(tmp_path: Path) -> None:
    its = classified(tmp_path, label_smoothing_factor=0.1, max_steps=2, logging_steps=1)
    assert [row["hf_accum_fix/loss_repeats_the_trainers"] for row in logged(its)] == [1.0, 1.0]


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


def test_a_nan_reaches_the_log_where_the_trainer_logs_zero_and_may_end_the_run(tmp_path: Path, told: Any) -> None:
    its = trainer(tmp_path, logging_steps=2, logging_nan_inf_filter=True)
    its.add_callback(MonitorsCallback(its, on_alarm="stop"))
    with torch.no_grad():
        its.model.lm_head.weight.fill_(math.nan)
    its.train()
    row = logged(its)[0]
    assert math.isnan(row["hf_accum_fix/loss"]) and row["loss"] == 0.0
    assert any("loss-not-finite" in line for line in told()) and its.state.global_step < 6


class Sharded:
    """Two ranks whose model is sharded, as far as the monitors see it; the other one is like this one."""

    rank, size = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor[0], tensor[0]])


class FlatParameter(nn.Parameter):
    """As FSDP1's."""


def test_every_callback_goes_with_a_sharded_model(tmp_path: Path, told: Any) -> None:
    its = trainer(tmp_path, max_steps=2, logging_steps=1)

    class Shard(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            its.model.lm_head.weight = FlatParameter(its.model.lm_head.weight.detach().clone())

    its.add_callback(Shard())
    its.add_callback(MonitorsCallback(its, Sharded()))
    its.train()
    assert len(logged(its)) == 2
    said = [line for line in told(logging.INFO) if "not watched" in line]
    assert len(said) == 2 and any("sharded" in line for line in said)
