"""What a monitor may meet in a run that is set up otherwise than it thinks: told or passed over; never its end."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback

from hf_accum_fix import GlobalBatchTrainer
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.batch_norm import check_batch_norm, compare_buffers
from hf_accum_fix.monitor.callbacks import MonitorsCallback
from hf_accum_fix.monitor.gradient_norm import GradientNorm
from hf_accum_fix.monitor.loss import LossMeter, LossReading, Moments
from hf_accum_fix.monitor.rank_gradients import RankGradients, RankGradientsReading
from hf_accum_fix.monitor.rank_loss import RankLoss
from hf_accum_fix.monitor.replicas import Replicas
from tests.monitor.side_by_side import OneOf, side_by_side
from tests.monitor.test_callbacks import logged, trainer


def stage(rank: int, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width + rank), nn.BatchNorm1d(width + rank))


@pytest.mark.parametrize(
    "model",
    [
        lambda rank: stage(rank),
        lambda rank: nn.Sequential(nn.Linear(3, 4), nn.ReLU()) if rank else nn.Sequential(nn.ReLU(), nn.Linear(3, 4)),
        lambda rank: nn.Linear(3, 4).double() if rank else nn.Linear(3, 4),
        lambda rank: nn.Linear(4, 3) if rank else nn.Linear(3, 4),
    ],
    ids=["other sizes", "other names", "other types", "other shapes"],
)
def test_ranks_that_hold_other_tensors_are_told(model: Any) -> None:
    alarms = side_by_side(lambda ranks: Replicas(model(ranks.rank), ranks=ranks).check())
    for alarm in alarms:
        assert alarm is not None and alarm.kind == "replicas-not-alike"
        assert "ranks=" in alarm.message


def test_batch_norm_on_one_stage_leaves_no_rank_waiting_and_statistics_that_differ_are_told_without_ddp() -> None:
    def check(ranks: OneOf) -> list[str]:
        model = stage(0)
        model[1].running_mean.fill_(float(ranks.rank))
        its = model if ranks.rank else nn.Sequential(nn.Linear(3, 4))
        found = [*check_batch_norm(its, per_device_batch=32, ranks=ranks), compare_buffers(model, ranks)]
        return [str(alarm and alarm.kind) for alarm in found]

    assert side_by_side(check) == [["batch-norm-buffers-differ"]] * 2


def test_an_empty_micro_batch_now_and_then_is_no_fault_and_silences_nobody() -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = RankGradients()
    # On every rank it is no rank's fault.
    assert gradients.judge(RankGradientsReading(((0.0,) * 10,) * 4)) is None
    found = []
    for log in range(200):
        norms = torch.exp(0.2 * torch.randn(4, 10, generator=draw))
        norms[torch.rand(4, 10, generator=draw) < 0.05] = 0.0
        norms[2] *= 3.0 if log >= 100 else 1.0
        found.append(gradients.judge(RankGradientsReading(tuple(map(tuple, norms.tolist())))))
    assert not any(found[:100])
    assert any(alarm is not None and alarm.kind == "rank-gradient-2" for alarm in found[100:150])


FULL = Moments(10, 100, 200, 4000, 2000, 1000)
BROKEN = replace(FULL, loss=math.nan)


NOBODY, EVERYBODY = "loss-not-finite", "the loss is not finite on any rank that has one; look at"


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ((BROKEN,), NOBODY, EVERYBODY),
        ((Moments(), Moments(), BROKEN), NOBODY, EVERYBODY),
        ((BROKEN, BROKEN), NOBODY, EVERYBODY),
        ((Moments(), FULL, BROKEN), "rank-loss-not-finite-2", "of rank 2 is not finite, that of rank 1 is; look at"),
        ((FULL, replace(FULL, items=math.nan)), "rank-loss-not-finite-1", "of rank 1 is not finite, that of rank 0 is"),
    ],
    ids=["one", "of three", "both", "not the other", "items"],
)
def test_a_loss_that_is_not_finite_is_told_at_once(ranks: tuple[Moments, ...], kind: str, words: str) -> None:
    alarm = RankLoss().judge(LossReading(ranks))
    assert alarm is not None and alarm.kind == kind and words in alarm.message


def test_a_nan_reaches_the_log_where_the_trainer_logs_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    its = trainer(tmp_path, max_steps=2, logging_steps=2, logging_nan_inf_filter=True)
    its.add_callback(MonitorsCallback(its))
    with torch.no_grad():
        its.model.lm_head.weight.fill_(math.nan)
    with caplog.at_level(logging.WARNING, logger="hf_accum_fix.monitor"):
        its.train()
    (row,) = logged(its)
    assert math.isnan(row["hf_accum_fix/loss"]) and row["loss"] == 0.0
    assert any("loss-not-finite" in record.message for record in caplog.records)


def test_a_loss_of_several_elements_says_what_to_do() -> None:
    with pytest.raises(UnsupportedSetupError, match=r"got a loss of shape \[4\]; expected one number"):
        LossMeter().update(torch.ones(4), 4)


@pytest.mark.parametrize("loss", [0.0, math.log(2)], ids=["zero", "a constant"])
def test_losses_that_never_differ_are_not_shared_data(loss: float) -> None:
    def read(ranks: OneOf) -> list[Any]:
        meter, judge = LossMeter(ranks), RankLoss()
        found = []
        for _ in range(5):
            for _ in range(10):
                meter.update(loss, 16)
            found.append(judge.judge(meter.read()))
        return found

    assert not any(side_by_side(read)[0])


class Sharded:
    """Two ranks whose model is sharded, as far as the monitors see it; the other one is like this one."""

    rank, size = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor[0], tensor[0]])


def test_every_callback_goes_with_a_sharded_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    its = trainer(tmp_path, max_steps=2, logging_steps=1)

    class FlatParameter(nn.Parameter):
        pass

    class Shard(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            weight = its.model.lm_head.weight
            its.model.lm_head.weight = FlatParameter(weight.detach().clone())

    its.add_callback(Shard())
    its.add_callback(MonitorsCallback(its, Sharded()))
    with caplog.at_level(logging.INFO, logger="hf_accum_fix.monitor"):
        its.train()
    assert len(logged(its)) == 2
    said = [record.message for record in caplog.records if "not watched" in record.message]
    assert len(said) == 2 and any("sharded" in line for line in said)


class Partial:
    """A norm that lies in parts on the ranks, as fully_shard's clipping returns it."""

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def full_tensor(self) -> Tensor:
        return torch.tensor(self.norm)


def test_a_norm_in_parts_is_put_together_when_it_is_read() -> None:
    norms = GradientNorm()
    norms.update(Partial(3.0))  # type: ignore[arg-type]
    norms.update(2.0)
    assert norms.read().median == 2.5


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the monitors warned of: older releases log warnings of their own."""
    mine = (record for record in caplog.records if record.name == "hf_accum_fix.monitor")
    return [record.message for record in mine if record.levelno >= logging.WARNING]


def watched(its: Trainer) -> Trainer:
    """Trained with all monitors."""
    its.add_callback(MonitorsCallback(its))
    its.train()
    return its


def classified(folder: Path, kind: type[Trainer], **arguments: Any) -> Trainer:
    its = trainer(folder, kind, classifier(), **{"gradient_accumulation_steps": 4, **arguments})
    draw = torch.Generator().manual_seed(0)
    its.train_dataset = [
        {"input_ids": torch.randint(1, 32, (12,), generator=draw), "labels": torch.tensor(place % 2)}
        for place in range(96)
    ]
    return its


@pytest.mark.parametrize("kind", [Trainer, GlobalBatchTrainer])
def test_the_mean_over_the_items_is_the_truth_of_a_classifier(
    kind: type[Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = watched(classified(tmp_path, kind, learning_rate=0.0, max_steps=3, logging_steps=3))
    (row,) = logged(its)
    assert row["hf_accum_fix/loss"] == pytest.approx(math.log(2), rel=0.1)
    said = ours(caplog)
    if row["loss"] > 2 * row["hf_accum_fix/loss"]:
        assert any("trainer-loss-scaled" in line and "4 times" in line for line in said)
        counters = {key: value for key, value in row.items() if key.endswith("_alarms")}
        assert counters == {"hf_accum_fix/all_alarms": 1, "hf_accum_fix/trainer_loss_scaled_alarms": 1}
    else:
        assert not said


def test_a_loss_that_cannot_be_checked_is_said_to_repeat_the_trainer_s(tmp_path: Path) -> None:
    its = watched(classified(tmp_path, Trainer, label_smoothing_factor=0.1, max_steps=2, logging_steps=1))
    assert [row["hf_accum_fix/loss_repeats_the_trainers"] for row in logged(its)] == [1.0, 1.0]


def test_a_language_model_s_loss_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    its = watched(trainer(tmp_path))
    assert not ours(caplog)
    assert all("hf_accum_fix/loss_repeats_the_trainers" not in row for row in logged(its))
    assert all(row["hf_accum_fix/loss_of_a_guess"] == pytest.approx(math.log(32)) for row in logged(its))
