"""How the overrides behave inside real training: other people's subclasses, failures, restarts, several trainers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import hf_accum_fix
from hf_accum_fix.counting.items import Items
from hf_accum_fix.errors import ContractError, SeamError, UnsupportedSetupError
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.options import Options
from hf_accum_fix.overrides import training
from hf_accum_fix.trainer import GlobalBatchMixin, GlobalBatchTrainer
from hf_accum_fix.upstream.defects import is_present
from tests.logged import Said
from tests.numerics.heads import HEADS, DropsKwargs, TokenModel, bert, shifted_cross_entropy
from tests.numerics.heads.samples import without_targets
from tests.numerics.parity import (
    Recorder,
    Step,
    StockRecorder,
    cut,
    reference_step,
    take_step,
    trainable,
    trainer_of,
)
from tests.numerics.parity import training_arguments as arguments
from tests.trainings import above

DROPS, MLM = HEADS["drops-kwargs"], HEADS["bert-mlm"]


# --- other people's compute_loss --------------------------------------------------------------------------------


#: Calls super with the number.
CallsSuper = above(lambda loss, *_: loss)


class SaysSo(StockRecorder):
    """Divides its own mean by the window, without the number, as TRL's GRPOTrainer does."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        logits = model(input_ids=inputs["input_ids"], labels=inputs["labels"])["logits"]
        return shifted_cross_entropy(logits, inputs["labels"]) / self.current_gradient_accumulation_steps


def test_a_loss_that_is_said_to_be_scaled_is_divided_no_further(tmp_path: Path, said: Said) -> None:
    stock = take_step(DROPS, DROPS.samples, 2, 4, "stock", tmp_path, trainer_class=SaysSo)
    step = take_step(DROPS, DROPS.samples, 2, 4, "apply", tmp_path, trainer_class=SaysSo)
    assert all(torch.equal(step.change[key], stock.change[key]) for key in stock.change)
    assert step.loss == stock.loss
    assert not step.trainer.__dict__["_hf_accum_fix_session"].contract.exact
    assert len(said("stays as the trainer scales it")) == 1


def test_a_mixin_that_would_bypass_a_trainer_is_refused() -> None:
    with pytest.raises(SeamError, match="expected the mixin last"):
        type("Wrong", (GlobalBatchMixin, CallsSuper), {})


# --- windows that tell nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("uses-tensor", "no-kwargs"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "mean-of-sample-means")),
    ],
)
def test_windows_without_a_target_settle_nothing(name: str, tmp_path: Path) -> None:
    """Four blank windows first, more than there are attempts: all exact zeros, and then the loss is observed."""
    head = HEADS[name]
    no_mask = [{k: v for k, v in sample.items() if k != "attention_mask"} for sample in head.samples]
    samples = no_mask if name == "uses-tensor" else list(head.samples)
    data = [*(without_targets(samples) * 4), *samples]
    step = take_step(head, data, 2, 4, "apply", tmp_path, steps=5, learning_rate=0.0)
    norms = next(c.norms for c in step.trainer.callback_handler.callbacks if hasattr(c, "norms"))
    reference = reference_step(head, cut(samples, 2))
    if not head.router:
        assert norms[:4] == [0.0] * 4
    assert norms[4] == pytest.approx(reference.norm, rel=head.tolerance)
    assert all(torch.isfinite(loss) for loss in step.trainer.returned)
    assert float(sum(step.trainer.returned[-4:])) == pytest.approx(reference.loss, rel=1e-6)


# --- noise in the forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "kind"), [("mean", Reduction.MEAN), ("sum", Reduction.SUM)])
def test_masked_spans_of_speech_do_not_hide_the_reduction(reduction: str, kind: Reduction, tmp_path: Path) -> None:
    head = HEADS[f"wav2vec2-ctc-{reduction}"]

    def build() -> Any:
        model = head.build()
        model.config.apply_spec_augment, model.config.mask_time_prob, model.config.mask_time_length = True, 0.3, 2
        model.wav2vec2.masked_spec_embed = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
        return model

    step = take_step(dataclasses.replace(head, build=build), head.samples, 2, 4, "trainer", tmp_path)
    assert step.trainer.__dict__["_hf_accum_fix_session"].contract.reduction is kind


# --- what is passed on ------------------------------------------------------------------------------------------


def test_a_division_by_accelerate_is_neutralised(tmp_path: Path) -> None:
    """5.2.0 to 5.5.3 hand accelerate the steps once more, so that the gradient is 1/G under a right log."""

    class Divides(Recorder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.accelerator.gradient_state.plugin_kwargs["num_steps"] = 4

    head = HEADS["uses-tensor"]
    # Stock counts a label at position 0, which the loss drops.
    samples = [{**sample, "labels": torch.cat([torch.tensor([-100]), sample["labels"][1:]])} for sample in head.samples]
    reference = reference_step(head, cut(samples, 2))
    stock = take_step(head, samples, 2, 4, "stock", tmp_path, trainer_class=type("S", (Divides, Trainer), {}))
    assert stock.error(reference) == pytest.approx(0.75, rel=1e-3)
    assert stock.loss == pytest.approx(reference.loss, rel=1e-6)
    ours = take_step(head, samples, 2, 4, "apply", tmp_path, trainer_class=type("O", (Divides, Trainer), {}))
    assert ours.error(reference) <= 1e-12


def test_the_switch_leaves_the_subclass_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = take_step(DROPS, DROPS.samples, 2, 4, "stock", tmp_path)
    monkeypatch.setenv("HF_ACCUM_FIX", "0")
    off = take_step(DROPS, DROPS.samples, 2, 4, "trainer", tmp_path)
    assert off.loss == stock.loss and off.norm == stock.norm


# --- observing --------------------------------------------------------------------------------------------------


def test_observing_leaves_no_trace(tmp_path: Path) -> None:
    """With dropout and BatchNorm-like buffers at work, a run that observes is the run that was given the contract."""

    def trained(options: Options) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = bert("BertForMaskedLM")()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        model.register_buffer("steps", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, _: (module.steps.add_(1), None)[1])
        cls = type("Given", (GlobalBatchTrainer,), {"global_batch_options": options})
        trainer_of(MLM, tmp_path, cls, model=model, samples=list(MLM.samples) * 2, max_steps=2, seed=3).train()
        return {**trainable(model), "steps": model.steps}

    given = LossContract(Reduction.MEAN, Items(("labels",)))
    observed, known = trained(Options()), trained(Options(contract=given))
    assert all(torch.equal(observed[name], known[name]) for name in known)


def test_a_forward_that_fails_is_said_and_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(TokenModel):
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            raise RuntimeError("no such kernel")

    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer, model=Fails())
    with caplog.at_level("ERROR", logger="hf_accum_fix"), pytest.raises(RuntimeError, match="no such kernel"):
        trainer.train()
    assert "pass the contract: contract=LossContract(...)" in caplog.text


def test_a_model_without_a_loss_is_named(tmp_path: Path) -> None:
    class NoLoss(TokenModel):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            return {"logits": self.logits(input_ids)}

    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer, model=NoLoss())
    with pytest.raises(ContractError, match="without a loss"):
        trainer.train()


def test_the_number_does_not_recompile_a_compiled_model(tmp_path: Path) -> None:
    compiled = 0

    def counting(graph: Any, example_inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    class Even(HEADS["uses-tensor"].build().__class__):  # type: ignore[misc]
        pass

    samples = [
        {"input_ids": torch.arange(4, 12), "labels": torch.where(torch.arange(8) < i % 6, -100, 5)} for i in range(24)
    ]
    torch._dynamo.reset()
    model = torch.compile(Even(), backend=counting)
    args = arguments(tmp_path, max_steps=3)
    GlobalBatchTrainer(model=model, args=args, train_dataset=samples, data_collator=DROPS.batch).train()
    assert compiled == 1


# --- what cannot be right is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trainer: setattr(trainer.args, "_n_gpu", 2), "accelerate launch"),
        (lambda trainer: setattr(trainer, "use_apex", True), "apex"),
    ],
    ids=["data-parallel", "apex"],
)
def test_what_cannot_be_right_is_refused_before_anything_runs(change: Any, words: str, tmp_path: Path) -> None:
    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer)
    change(trainer)
    with pytest.raises(UnsupportedSetupError, match=words):
        trainer.train()


def test_a_release_that_does_not_reduce_the_last_micro_batch_is_refused_on_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "is_present", lambda name, _: is_present(name, "4.46.2"))
    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer)
    training.check_setup(trainer)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(UnsupportedSetupError, match=r"install 4\.46\.3"):
        training.check_setup(trainer)


@pytest.mark.parametrize(
    ("what", "held", "options"),
    [
        ("compute_loss_func", {"compute_loss_func": shifted_cross_entropy}, {}),
        ("balance_windows", {}, {"balance_windows": True}),
        ("drop_duplicates", {}, {"drop_duplicates": True}),
        ("coupled_loss", {}, {"coupled_loss": "rank"}),
    ],
)
def test_what_needs_whole_samples_is_refused_where_they_are_cut(
    what: str, held: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hf_accum_fix.apply(**options):
        trainer = trainer_of(DROPS, tmp_path, Trainer)
        monkeypatch.setattr(trainer, "get_sp_size", lambda: 2, raising=False)
        vars(trainer).update(held)
        with pytest.raises(UnsupportedSetupError, match=rf"got {what} with samples that are cut.*sp_size=2"):
            trainer.train()


def test_a_step_by_hand_outside_of_training_is_stock_and_said_to_be(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer)
    batch = DROPS.batch(DROPS.samples[:2])
    with torch.no_grad():
        wanted = float(trainer.model(**batch)["loss"])
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    for _ in range(2):
        assert float(trainer.training_step(trainer.model, dict(batch))) == pytest.approx(wanted)
    assert len(said("training_step outside of train(): this step is stock's")) == 1
    monkeypatch.setenv("HF_ACCUM_FIX", "0")
    switched_off = trainer_of(DROPS, tmp_path, GlobalBatchTrainer)
    switched_off.current_gradient_accumulation_steps = 1
    switched_off.training_step(switched_off.model, dict(batch))
    assert len(said("outside of train()")) == 1


# --- restarts, several trainers, launchers ----------------------------------------------------------------------


def test_a_failing_step_leaves_trainer_and_accelerator_as_they_were(tmp_path: Path) -> None:
    class FailsLater(DropsKwargs):
        def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                raise ValueError("later")
            return super().forward(input_ids, labels)

    trainer = trainer_of(DROPS, tmp_path, GlobalBatchTrainer, model=FailsLater())
    with pytest.raises(ValueError, match="later"):
        trainer.train()
    assert "compute_loss" not in vars(trainer) and "backward" not in vars(trainer.accelerator)


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (LossContract(Reduction.NUMBER, Items(("labels",))), "gets no num_items_in_batch"),
        (LossContract(Reduction.MEAN, Items(("label",))), "counts by 'label', .*; expected one of .*'labels'"),
        (LossContract(Reduction.SUM, Items(mix=((2.0, Items(("boxes",))),))), "counts by 'boxes'"),
        ("is a sum", "expected one of Reduction"),
    ],
)
def test_a_contract_given_by_hand_is_checked(contract: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        contract = LossContract(contract) if isinstance(contract, str) else contract
        cls = type("Given", (GlobalBatchTrainer,), {"global_batch_options": Options(contract=contract)})
        head = HEADS["declares-false"]
        trainer_of(head, tmp_path, cls).train()


def test_two_trainers_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The second one trains whole inside a callback of the first."""
    alone = take_step(DROPS, DROPS.samples, 2, 4, "apply", tmp_path)
    inner: list[Step] = []

    class Nested(StockRecorder):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if not inner:
                inner.append(take_step(MLM, MLM.samples, 1, 8, "apply", tmp_path))
            return super().training_step(*args, **kwargs)

    outer = take_step(DROPS, DROPS.samples, 2, 4, "apply", tmp_path, trainer_class=Nested)
    assert all(torch.equal(outer.change[name], alone.change[name]) for name in alone.change)
    assert inner[0].error(reference_step(MLM, cut(MLM.samples, 1))) <= 1e-12


def test_the_steps_that_were_set_are_reported_where_the_first_window_is_short(tmp_path: Path) -> None:
    with hf_accum_fix.apply(quiet=True):
        trainer_of(HEADS["llama"], tmp_path, Trainer, samples=HEADS["llama"].samples[:6], max_steps=1).train()
    [run] = hf_accum_fix.report().to_dict()["runs"]
    assert run["accumulation_steps"] == 4 and run["exact"]
