"""The callbacks on one process: what reaches the trackers, what it costs, and that the Trainer is left alone."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_accum_fix
from hf_accum_fix import GlobalBatchTrainer
from hf_accum_fix.monitor.callbacks import MonitorsCallback
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter
from hf_accum_fix.monitor.rank_gradients import RankGradients
from hf_accum_fix.monitor.ranks import fingerprint


def samples(count: int = 48) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(1, 32, (12,), generator=draw)
        labels = ids.clone()
        labels[: int(torch.randint(0, 11, (), generator=draw))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer(folder: Path, kind: type[Trainer] = Trainer, model: nn.Module | None = None, **arguments: Any) -> Trainer:
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
        model or LlamaForCausalLM(config), TrainingArguments(**{**settings, **arguments}), train_dataset=samples()
    )


def logged(its: Trainer) -> list[dict[str, float]]:
    return [row for row in its.state.log_history if "loss" in row]


def test_a_real_event_file_holds_every_number_under_its_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    its = trainer(tmp_path, report_to=["tensorboard"], save_strategy="steps", save_steps=6)
    its.add_callback(MonitorsCallback(its))
    its.train()
    (file,) = tmp_path.rglob("*tfevents*")
    events = EventAccumulator(str(file))
    events.Reload()
    rows = logged(its)
    assert [row["step"] for row in rows] == [3, 6]
    names = {key for key in rows[-1] if key.startswith("hf_accum_fix/")}
    assert {"hf_accum_fix/loss", "hf_accum_fix/gradient_norm_median", "hf_accum_fix/memory_mib"} <= names
    for name in names:
        found = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert saved["log_history"][-1]["hf_accum_fix/loss"] == rows[-1]["hf_accum_fix/loss"]


@pytest.mark.parametrize("kind", [Trainer, GlobalBatchTrainer])
def test_the_logged_loss_is_the_mean_over_the_tokens_of_the_interval(kind: type[Trainer], tmp_path: Path) -> None:
    """Without learning every step's loss can be had again: by hand, over all tokens of the interval at once."""
    its = trainer(tmp_path, kind, learning_rate=0.0)
    its.add_callback(MonitorsCallback(its))
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


class Operations(TorchDispatchMode):
    """Counts torch operations, and those that read a tensor's value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.syncs += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


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


class Alike:
    """Two ranks, of which this is one; the other holds the same, but has none of these names."""

    rank, size = 0, 2

    def __init__(self, *without: str) -> None:
        self.sums, self._without = 0, torch.tensor([fingerprint(name) for name in without], dtype=torch.int64)

    def sum(self, table: Tensor) -> Tensor:
        self.sums += 1
        its = table[0]
        if its.dtype == torch.int64:
            its = torch.where(torch.isin(its, self._without), 0, its)
        return torch.stack([table[0], its])


class Summed(TrainerCallback):
    """Notes the sums so far at every log."""

    def __init__(self, ranks: Alike) -> None:
        self.ranks, self.sums = ranks, [0]

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.sums += [self.ranks.sums] * ("loss" in logs)


def test_a_log_of_all_monitors_is_one_sum(tmp_path: Path) -> None:
    """Once a training the ranks agree on what all of them can watch."""
    its = trainer(tmp_path, logging_steps=2, gradient_accumulation_steps=1)
    ranks = Alike()
    noted = Summed(ranks)
    its.add_callback(MonitorsCallback(its, ranks))
    its.add_callback(noted)
    its.train()
    # At first what all can watch, whether any has BatchNorm, and the log itself.
    assert [after - before for before, after in pairwise(noted.sums)] == [3, 1, 1]


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


def test_the_noise_scale_is_logged_where_it_is_asked_for(tmp_path: Path) -> None:
    its = trainer(tmp_path, GlobalBatchTrainer, learning_rate=0.0, max_steps=6, logging_steps=6)
    its.add_callback(MonitorsCallback(its, noise_scale_every=1))
    its.train()
    assert logged(its)[0]["hf_accum_fix/noise_scale_items"] > 0
