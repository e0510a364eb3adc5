"""eval_loss as the mean over the evaluation set's items, by the patch and by the subclass; upstream's shown to move."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import hf_accum_fix
from hf_accum_fix import Items, LossContract, Reduction
from hf_accum_fix.options import Options
from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.logged import Said
from tests.numerics.heads import HEADS, before
from tests.verify.trainers import Regression, points, small, trainer_of


class ItemMean(GlobalBatchTrainer):
    global_batch_options = Options(eval_loss=True)


def evaluated(name: str, output: Path, size: int, **how: Any) -> float:
    samples = HEADS[name].samples[:7]
    trainer = trainer_of(name, output, evaluated=samples, per_device_eval_batch_size=size, **how)
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "func-with-number"])
def test_the_same_for_every_eval_batch_size(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    model = head.build().eval()
    wanted = float(head.reference_loss(model, head.batch(head.samples[:7])).detach())
    with contextlib.suppress(TypeError):  # a compute_loss_func is handed no number in the evaluation of some releases
        assert abs(evaluated(name, tmp_path, 1) / wanted - 1) > 1e-3
    with hf_accum_fix.apply(eval_loss=True):
        patched = [evaluated(name, tmp_path, size) for size in (1, 3, 7)]
    subclass = [evaluated(name, tmp_path, size, cls=ItemMean) for size in (1, 3, 7)]
    assert patched == pytest.approx([wanted] * 3, rel=1e-6) and subclass == patched


def test_a_contract_may_count_another_input_than_labels(tmp_path: Path, said: Said) -> None:
    stock = evaluated("llama", tmp_path, 2)
    contract = LossContract(Reduction.MEAN, Items(("attention_mask",)))
    with hf_accum_fix.apply(eval_loss=True, contract=contract):
        assert evaluated("llama", tmp_path, 2) != stock
    assert not said("eval_loss stays")


LEGACY = {"use_legacy_prediction_loop": True}


@pytest.mark.skipif(not before("5.0"), reason="releases since 5.0 have no legacy loop")
def test_the_legacy_loop_too(tmp_path: Path) -> None:
    with hf_accum_fix.apply(eval_loss=True):
        patched = [evaluated("llama", tmp_path, size, **LEGACY) for size in (1, 3)]
        assert patched == pytest.approx([evaluated("llama", tmp_path, 7)] * 2, rel=1e-6)
    assert [evaluated("llama", tmp_path, size, cls=ItemMean, **LEGACY) for size in (1, 3)] == patched


def test_a_loss_that_has_no_item_mean_is_left_with_a_warning(tmp_path: Path, said: Said) -> None:
    def loss() -> float:
        trainer = small(Regression(batch_norm=True), tmp_path, points(8), per_device_eval_batch_size=3)
        return float(trainer.evaluate(points(8))["eval_loss"])

    stock = loss()
    with hf_accum_fix.apply(eval_loss=True):
        assert loss() == stock
    assert len(said("eval_loss stays the Trainer's average")) == 1
