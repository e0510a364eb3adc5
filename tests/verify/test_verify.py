"""The verdicts of verify() on heads whose error is known, on the installed release, on one rank and on two."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

import hf_accum_fix
from hf_accum_fix import verify
from hf_accum_fix.errors import OptionsError
from hf_accum_fix.testing import assert_invariant, invariant
from hf_accum_fix.trainer import GlobalBatchTrainer
from hf_accum_fix.verification.report import Kind, SplitResult, VerificationReport
from tests.numerics.heads import HEADS, before, llama_config
from tests.numerics.parity import training_arguments
from tests.ranks import on_ranks
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

    head = HEADS["bert-mlm"]
    trainer = trainer_of(head, tmp_path)
    trainer.data_collator = masks
    report = verify(trainer, splits=[1, 2])
    assert report.verdict_of("apply()").kind is Kind.EXACT and report.verdict_of("stock").kind is Kind.OFF
    assert any("collator is random" in note for note in report.notes)


@CURRENT
def test_arguments_that_mean_nothing(tmp_path: Path) -> None:
    trainer = small(Regression(), tmp_path, points(8))
    for how in ({"windows": 0}, {"splits": []}, {"splits": [(1, 3)]}, {"splits": ["2"]}, {"reference": "half"}):
        with pytest.raises(OptionsError, match="; expected "):
            verify(trainer, **how)  # type: ignore[arg-type]
    for split in (9, (4, 1), (0, 8)):
        with pytest.raises(OptionsError, match="8 samples"):
            verify(trainer, splits=[split])
    for given in (None, Trainer, "trainer"):
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


@CURRENT
def test_the_example_of_the_page_runs_as_it_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("my_library")
    library.MyTrainer = Trainer
    library.cpu_arguments = lambda per_device_train_batch_size, gradient_accumulation_steps: training_arguments(
        tmp_path, per_device_train_batch_size, gradient_accumulation_steps
    )
    library.tiny_model = lambda: LlamaForCausalLM(llama_config(vocab_size=99))
    monkeypatch.setitem(sys.modules, "my_library", library)
    page = (Path(hf_accum_fix.__file__).parent / "verification" / "README.md").read_text()
    (example,) = (each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "invariant)" in each)
    names: dict[str, Any] = {}
    exec(example, names)
    ran = []

    def invariant(*given: Any, **how: Any) -> Any:
        ran.append(assert_invariant(*given, **how))
        return ran[-1]

    with hf_accum_fix.apply(quiet=True):
        names["test_accumulation_changes_nothing"](invariant)
    assert {each.split for each in ran[0].results} == {"1 x 4", "2 x 2", "4 x 1"}


# --- on two gloo ranks ------------------------------------------------------------------------------------------------

GLOO = {"ddp_backend": "gloo", "per_device": 2, "accumulate": 2}


def reports_of(output: Path) -> dict[str, Any]:
    """On each rank."""
    found = {name: verify(trainer_of(name, output, **GLOO), [1, 4], with_apply=True).to_dict() for name in STOCK}
    trainer = trainer_of("llama", output, **GLOO)
    trainer.model_wrapped = trainer.model
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    verify(trainer, [2])
    same = all((one == other).all() for one, other in zip(before, trainer.model.parameters(), strict=True))
    trainer.train()
    found["trained"] = {"same": bool(same), "loss": trainer.state.log_history[0]["loss"]}
    return found


#: What is said of stock at 1 x 4.
STOCK = {
    "llama": "exact",
    "bert-classes": "G x W times",
    "bert-mlm": "G x W times, and the mean of micro-batch means",
    "mixtral": "aux loss times G x W",
}


@CURRENT
@pytest.mark.thorough
def test_two_ranks_read_the_same_and_errors_of_the_world_size_show(tmp_path: Path) -> None:
    reports, second = on_ranks(reports_of, tmp_path, group=False)
    assert reports == second
    for name, words in STOCK.items():
        report = reports[name]
        assert report["world_size"] == 2 and report["samples"] == (8,)
        (stock,) = (each for each in report["results"] if (each["mode"], each["per_device"]) == ("stock", 1))
        assert stock["steps"] == 4 and stock["verdict"]["words"].endswith(words)
        fixed = [each for each in report["results"] if each["mode"] == "apply()"]
        assert len(fixed) == 2 and all(each["verdict"]["kind"] == "exact" and each["error"] < 1e-6 for each in fixed)
    # The training that follows is undisturbed.
    assert reports["trained"]["same"] and reports["trained"]["loss"] > 0
