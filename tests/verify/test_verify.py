"""The verdicts of verify() on heads whose error is known, on the installed release, and the state that it restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_accum_fix
from hf_accum_fix import observations, verify
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.testing import assert_invariant, invariant
from hf_accum_fix.trainer import GlobalBatchTrainer
from hf_accum_fix.verification.report import Kind, SplitResult, VerificationReport
from tests.numerics.heads import before
from tests.verify.trainers import Regression, points, small, trainer_of

#: The cut 1 x 8, stock: the words and the defects; None: exact.
AFFECTED: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "llama": None,
    "llava": None,
    "bert-classes": ("G times", ("classic-head-drops-item-count",)),
    "mixtral": ("aux loss times G", ("router-loss-times-steps",)),
}
if before("5.6"):  # measured on 5.4.0
    AFFECTED = {"llama": ("1/G", ("gradient-divided-twice",)), "llava": ("1/G", ("gradient-divided-twice",))}
if before("5.0"):  # measured on 4.49.0
    AFFECTED = {
        "llama": None,
        "llava": ("G times, and the mean of micro-batch means", ("llava-mean-loss", "mean-of-micro-batch-means")),
    }


@pytest.fixture(autouse=True)
def default_dtype() -> Any:
    """Releases before 5.0 make their masks in the default dtype, which the least float64 does not fit into."""
    if before("5.0"):
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def result(report: VerificationReport, mode: str, cut: tuple[int, int]) -> SplitResult:
    return next(each for each in report.of(mode) if (each.per_device, each.steps) == cut)


@pytest.mark.parametrize("name", AFFECTED)
def test_stock_is_explained_and_apply_is_exact(name: str, tmp_path: Path) -> None:
    report = verify(trainer_of(name, tmp_path))
    stock, wanted = result(report, "stock", (1, 8)), AFFECTED[name]
    assert {each.split for each in report.of("stock")} == {"2 x 4", "8 x 1", "1 x 8", "3 x 4 (3 of 4)"}
    if wanted is None:
        assert report.verdict.kind is Kind.EXACT and stock.error is not None and stock.error < 1e-6
    else:
        assert report.verdict.kind is Kind.OFF and stock.error is not None and stock.error > 0.1
        assert stock.verdict.words.endswith(f": {wanted[0]}") and stock.defects == wanted[1]
    fixed = report.of("apply()")
    assert [each.verdict.kind for each in fixed] == [Kind.EXACT] * 4
    assert all(each.error is not None and each.error < 1e-6 for each in fixed)
    assert all(("convention" in each.verdict.words) == (name == "mixtral") for each in fixed)


@pytest.mark.skipif(not before("5.6") or before("5.0"), reason="5.4.0 is the release whose log is right")
def test_a_wrong_gradient_under_a_right_log(tmp_path: Path) -> None:
    stock = result(verify(trainer_of("llama", tmp_path)), "stock", (1, 8))
    assert stock.norm_ratio == pytest.approx(1 / 8, rel=1e-6) and stock.loss_ratio == pytest.approx(1, rel=1e-6)


CURRENT = pytest.mark.skipif(before("5.23"), reason="what the newest release does; the parts are tested on others too")


@CURRENT
@pytest.mark.parametrize("name", ["bert-mlm", "mixtral"])
def test_in_half_precision_the_floor_is_that_of_the_autocast(name: str, tmp_path: Path) -> None:
    """Of bfloat16's 8 bits a rounding is 4e-3; a model in float32 without autocast has 6e-8."""
    trainer = trainer_of(name, tmp_path, bf16=True)
    trainer.model.float()
    report = verify(trainer, splits=[1, 4])
    assert 5e-4 < report.floor < 1e-2 and report.verdict_of("apply()").kind is Kind.EXACT
    assert report.verdict_of("stock").kind is (Kind.EXACT if name == "llama" else Kind.OFF)


@CURRENT
def test_the_patch_that_is_on_is_what_is_judged(tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        patched = verify(trainer_of("bert-classes", tmp_path), splits=[1])
        assert hf_accum_fix.report().state == "applied"
    assert patched.active == "apply()" and patched.verdict.kind is Kind.EXACT
    assert patched.verdict_of("stock").kind is Kind.OFF
    subclass = verify(trainer_of("bert-classes", tmp_path, cls=GlobalBatchTrainer), splits=[1])
    assert subclass.active == "apply()" and subclass.verdict.kind is Kind.EXACT
    assert subclass.verdict_of("stock").kind is Kind.OFF


@CURRENT
def test_every_window_is_one_global_batch(tmp_path: Path) -> None:
    trainer = trainer_of("llama", tmp_path, per_device=2, accumulate=2)
    report = verify(trainer, splits=[1, 2], windows=2, with_apply=False)
    assert [each.window for each in report.results] == [0, 0, 1, 1]
    assert report.samples == (4, 4) and report.verdict.kind is Kind.EXACT


@CURRENT
def test_a_collator_that_masks_at_random(tmp_path: Path) -> None:
    def masks(samples: list[Any]) -> dict[str, Any]:
        batch = head.batch(samples)
        kept = torch.rand(batch["labels"].shape) < 0.5
        kept[:, 0] = True
        kept &= batch["attention_mask"].bool()
        return {**batch, "labels": torch.where(kept, batch["input_ids"], -100)}

    from tests.numerics.heads import HEADS

    head = HEADS["bert-mlm"]
    trainer = trainer_of(head, tmp_path)
    trainer.data_collator = masks
    report = verify(trainer, splits=[1, 2])
    assert report.verdict_of("apply()").kind is Kind.EXACT and report.verdict_of("stock").kind is Kind.OFF
    assert any("collator is random" in note for note in report.notes)


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.called = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.called += 1

    on_step_begin = on_step_end = on_epoch_begin = on_evaluate = on_train_begin


@CURRENT
@pytest.mark.parametrize("cls", [None, GlobalBatchTrainer], ids=["stock", "subclass"])
def test_a_run_after_it_is_bit_for_bit_the_run_without_it(cls: type | None, tmp_path: Path) -> None:
    """Dropout, BatchNorm, a shuffled order, AdamW and a schedule: everything that could remember."""

    def run(verified: bool) -> tuple[dict[str, Any], list[Any], Counting]:
        torch.manual_seed(11)
        given = {"max_steps": 3, "learning_rate": 1e-2, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
        model = Regression(batch_norm=True, dropout=0.3)
        extra = {"cls": cls} if cls else {}
        trainer = small(model, tmp_path, points(20), **given, **extra)
        trainer.eval_dataset = points(5)
        counting = Counting()
        trainer.add_callback(counting)
        if verified:
            model(torch.ones(2, 4), torch.zeros(2))["loss"].backward()
            arguments, gradient = repr(trainer.args), model.last.weight.grad
            buffer, state = model.norm.running_mean, torch.get_rng_state()
            verify(trainer)
            assert repr(trainer.args) == arguments and model.last.weight.grad is gradient
            assert model.norm.running_mean is buffer and torch.equal(torch.get_rng_state(), state)
            assert model.dropout.p == 0.3 and counting.called == 0 and trainer.optimizer is None
            assert trainer.state.global_step == 0 and not list(tmp_path.iterdir())
        else:
            model(torch.ones(2, 4), torch.zeros(2))["loss"].backward()
        trainer.train()
        clock = ("runtime", "second")
        history = trainer.state.log_history
        log = [[entry[key] for key in entry if not any(word in key for word in clock)] for entry in history]
        return model.state_dict(), log, counting

    runs = len(observations.recorded())
    plain, log, _ = run(False)
    added = len(observations.recorded()) - runs
    other, same, counting = run(True)
    assert all(torch.equal(plain[key], other[key]) for key in plain) and log == same
    assert counting.called > 0 and len(observations.recorded()) - runs == 2 * added


@CURRENT
def test_everything_comes_back_after_an_error(tmp_path: Path) -> None:
    class Fails(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            self.seen = getattr(self, "seen", 0) + len(x)
            if self.seen > 40:
                raise KeyError("a fault of the model's own")
            return super().forward(x, labels)

    model = Fails(dropout=0.2)
    trainer = small(model, tmp_path, points(8))
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="own"):
        verify(trainer)
    assert model.dropout.p == 0.2 and not hasattr(model, "seen") and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@CURRENT
@pytest.mark.parametrize(
    "how", [{"windows": 0}, {"splits": []}, {"splits": [(1, 3)]}, {"splits": ["2"]}, {"reference": "half"}], ids=str
)
def test_arguments_that_mean_nothing(how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="; expected "):
        verify(small(Regression(), tmp_path, points(8)), **how)


@pytest.mark.parametrize("given", [None, Trainer, "trainer"], ids=str)
def test_what_is_no_trainer(given: Any) -> None:
    with pytest.raises(OptionsError, match=r"expected a built transformers\.Trainer; pass "):
        verify(given)


__all__ = ["invariant"]


@CURRENT
def test_a_wrong_trainer_fails_with_the_report(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"off, relative error .*: G times"):
        assert_invariant(trainer_of("bert-classes", tmp_path))
    with hf_accum_fix.apply():
        assert {each.mode for each in assert_invariant(trainer_of("bert-classes", tmp_path)).results} == {"apply()"}


@CURRENT
def test_the_fixture_takes_a_patch_back(invariant: Any, tmp_path: Path) -> None:
    hf_accum_fix.apply()
    assert invariant(trainer_of("bert-classes", tmp_path), splits=[1]).active == "apply()"
