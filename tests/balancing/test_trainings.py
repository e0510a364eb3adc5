"""Dealt windows inside the Trainer: the same gradient, the same samples in every step, the same trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accum_fix
from hf_accum_fix.data.balancing import Dealer
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.options import BalanceOptions, Options
from tests.balancing.trainings import BALANCE, KINDS, dealt, train
from tests.logged import Said
from tests.numerics.heads import HEADS, before
from tests.numerics.parity import ClassRecorder, StockRecorder, contract_of, cut, reference_step, take_step


class DealtClass(ClassRecorder):
    global_batch_options = Options(balance_windows=BALANCE)


class DealtByHand(StockRecorder):
    """A stock Trainer whose windows are dealt, and nothing fixed."""

    def get_train_dataloader(self) -> Any:
        return Dealer(BALANCE, progress=False).around(super().get_train_dataloader(), 4)


#: One of each way that a loss is reduced; the other kinds are marked "zoo".
EVERYDAY = ("llama", "bert-mlm", "bert-classes", "uses-int", "wav2vec2-ctc-sum", "two-terms", "mean-of-sample-means")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.thorough) for name in KINDS]
)
def test_every_kind_of_loss_takes_the_full_batch_step(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    pieces = dealt(head, 4, 1, 2)
    assert sorted(map(len, pieces)) != [2, 2, 2, 2]
    reference = reference_step(head, pieces)
    with hf_accum_fix.apply(balance_windows=BALANCE):
        step = take_step(head, head.samples, 2, 4, "stock", tmp_path)
    assert step.error(reference) <= head.tolerance
    assert step.loss == pytest.approx(reference.loss, rel=max(head.tolerance, 1e-6))
    assert contract_of(step).exact


@pytest.mark.parametrize("name", ["bert-mlm", "no-kwargs", "drops-kwargs"])
def test_dealing_alone_would_be_wrong(name: str, tmp_path: Path) -> None:
    """A head that returns its own mean, dealt by length under the stock Trainer; the subclass fixes it."""
    head = HEADS[name]
    reference = reference_step(head, cut(head.samples, 2))
    assert take_step(head, head.samples, 2, 4, "stock", tmp_path, trainer_class=DealtByHand).error(reference) > 0.1
    assert take_step(head, head.samples, 2, 4, "trainer", tmp_path, trainer_class=DealtClass).error(reference) <= 1e-12


@pytest.mark.parametrize("name", ["root-of-mean", "clip", "segformer-batch-norm"])
def test_a_loss_that_hangs_on_its_micro_batch_is_refused_by_name(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    why = "BatchNorm" if "norm" in name else "would change its loss"
    with hf_accum_fix.apply(balance_windows=BALANCE), pytest.raises(UnsupportedSetupError, match=why):
        take_step(head, [*head.samples, *head.samples], 2, 4, "stock", tmp_path)


def test_off_by_default_and_what_is_given_is_checked() -> None:
    assert Options().balance_windows is False
    assert Options(balance_windows=True) == Options(balance_windows=BalanceOptions())
    wrong = {"balance_windows=1; expected True": Options, "lengths=3; expected a column": BalanceOptions}
    for words, kind in {**wrong, "max_rows_per_micro_batch=0; expected an integer": BalanceOptions}.items():
        name, _, value = words.partition(";")[0].partition("=")
        with pytest.raises(OptionsError, match=f"got {words}"):
            kind(**{name: int(value)})


@pytest.mark.parametrize("head", [pytest.param("llama", marks=pytest.mark.slow), "bert-mlm"])
@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in ({}, {"dataloader_drop_last": True}, {"dataloader_num_workers": 2})
        ),
    ],
    ids=["stream", "plain", "drop last", "workers"],
)
def test_the_trajectory_is_that_of_the_windows_as_they_come(head: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Three epochs of windows of three, three and one micro-batches, the last one short of a sample."""
    as_they_come = train(tmp_path, balance=False, head=head, **more)
    found = train(tmp_path, balance=True, head=head, **more)
    # Nine steps of a loss computed in float32 in llama.
    assert found.error(as_they_come.change) <= (1e-5 if head == "llama" else 1e-11)
    assert found.losses == pytest.approx(as_they_come.losses, rel=1e-5)
    assert found.windows == as_they_come.windows and len(found.windows) >= 6
    assert sum(rows * width for rows, width in found.shapes) < sum(a * b for a, b in as_they_come.shapes)


@pytest.mark.parametrize(
    "saved", [pytest.param(4, marks=pytest.mark.thorough), 5, pytest.param(7, marks=pytest.mark.thorough)]
)
def test_cut_and_resumed_it_is_the_same_trajectory(saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in the second epoch and in the third, counted from one, and before a short last window."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    uncut = train(tmp_path / "uncut", balance=True, save_strategy="steps", save_steps=saved)
    checkpoint = tmp_path / "uncut" / f"checkpoint-{saved}"
    found = train(tmp_path / "cut", balance=True, checkpoint=checkpoint)
    assert found.windows == uncut.windows[saved:]
    assert found.losses == uncut.losses
    # What was loaded is the uncut run's float64 weights, so not a bit may differ.
    assert all(torch.equal(found.change[name], uncut.change[name]) for name in uncut.change)


def test_a_dispatched_stream_is_said_or_refused(tmp_path: Path, said: Said) -> None:
    train(tmp_path, balance=True, stream=True)
    assert len(said("dispatch_batches")) == 1
    with pytest.raises(UnsupportedSetupError, match="dispatches"):
        train(tmp_path, balance=True, stream=True, accelerator_config={"dispatch_batches": True})


@pytest.mark.skipif(before("5.17"), reason="batch_rebalance came with 5.17")
@pytest.mark.parametrize("head", [pytest.param("llama", marks=pytest.mark.slow), "bert-mlm"])
def test_the_trainers_own_dealing_is_left_to_it(head: str, tmp_path: Path, said: Said) -> None:
    """batch_rebalance: the micro-batches are its own, and gradient and log are fixed."""
    own = {"train_sampling_strategy": "batch_rebalance"}
    found = train(tmp_path, balance=True, head=head, **own)
    alone = train(tmp_path, balance=False, head=head, **own)
    stock = train(tmp_path, balance=False, patched=False, head=head, **own)
    assert found.shapes == alone.shapes == stock.shapes
    assert all(torch.equal(found.change[name], alone.change[name]) for name in alone.change)
    assert (stock.error(found.change) > 0.05) == (head == "bert-mlm")
    assert len(said("batch_rebalance' balances the windows")) == 1
