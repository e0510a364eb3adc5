"""TRL's SFTTrainer: its own loss, its fused head, its collators; every cut takes the full batch's step.

It never calls ``super().compute_loss`` and divides by the number it is handed, so it is right by itself wherever the
Trainer hands it one; for a head that declares ``accepts_loss_kwargs = False`` the Trainer does not.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accum_fix
from hf_accum_fix import observations
from tests.clients.sft import SPLITS, WAYS, Way, indices, sft_reference, sft_step, tokens
from tests.logged import Said
from tests.numerics.heads import FLOAT32_LOSS
from tests.numerics.parity import Step, cut, reference_step
from tests.ranks import on_ranks, same_on_all_ranks
from tests.router.conventions import COEFFICIENT, FAMILIES, TWIN, InFloat64, flat, twin, with_coefficient

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

EVERYDAY = (2, 4)
splits = pytest.mark.parametrize(
    "split",
    [pytest.param(each, marks=() if each in (EVERYDAY, (1, 8)) else pytest.mark.thorough) for each in SPLITS],
    ids=lambda split: "x".join(map(str, split)),
)


def assert_same(step: Step, reference: Step) -> None:
    """TRL's log-probabilities are float32, so everything agrees to its rounding."""
    assert step.error(reference) <= FLOAT32_LOSS
    assert step.loss == pytest.approx(reference.loss, rel=FLOAT32_LOSS)
    assert step.norm == pytest.approx(reference.norm, rel=FLOAT32_LOSS)


@splits
@pytest.mark.parametrize("name", WAYS)
def test_every_cut_takes_the_full_batch_step(name: str, split: tuple[int, int], tmp_path: Path, said: Said) -> None:
    way = WAYS[name]
    step = sft_step(way, "apply", *split, tmp_path)
    reference = sft_reference(way, step.trainer, split[0])
    assert_same(step, reference)
    (run,) = observations.recorded()
    # A head that declares that it takes no number is passed none, by stock neither.
    assert run["exact"] and run["reduction"] == ("mean" if way.stock_wrong else "number")
    assert not said()
    if split == EVERYDAY:
        stock = sft_step(way, "stock", *split, tmp_path)
        assert (stock.error(reference) > 0.4) == way.stock_wrong
        # The log hides it.
        assert stock.loss == pytest.approx(reference.loss, rel=1e-2)
        subclass = sft_step(way, "trainer", *split, tmp_path)
        assert all(torch.equal(step.change[key], subclass.change[key]) for key in step.change)
        assert step.loss == subclass.loss and step.norm == subclass.norm


def test_a_window_without_a_target_settles_nothing(tmp_path: Path) -> None:
    """Its loss is the router's alone, which does not move with the number; the next window tells."""
    head = WAYS["mixture of experts"].head
    blank = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in head.samples]
    head = dataclasses.replace(head, samples=[*blank, *head.samples])
    as_given = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    way = Way(head, indices(head.samples), as_given, own_collator=True)

    def norms(path: str) -> list[float]:
        log = sft_step(way, path, 2, 4, tmp_path, max_steps=2, learning_rate=0.0).trainer.state.log_history
        return [entry["grad_norm"] for entry in log if "grad_norm" in entry]

    wanted = [reference_step(head, cut(half, 2)).norm for half in (head.samples[:8], head.samples[8:])]
    assert wanted[0] != pytest.approx(wanted[1])
    assert norms("apply") == pytest.approx(wanted, rel=FLOAT32_LOSS)


def test_what_training_runs_is_observed_and_leaves_no_trace_in_the_log(tmp_path: Path) -> None:
    """The fused head, without a cache and with the collator's own inputs: no attention mask, lengths that are ints."""
    way, calls = WAYS["padding-free"], []

    def noted(path: str) -> Any:
        calls.clear()
        build = way.head.build

        def watched() -> torch.nn.Module:
            model = build()
            model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
            return model

        head = dataclasses.replace(way.head, build=watched)
        trainer = sft_step(dataclasses.replace(way, head=head), path, 4, 2, tmp_path).trainer
        return trainer.state.log_history[0]

    stock = noted("stock")
    in_training = [call.keys() for call in calls]
    fixed = noted("apply")
    assert [call.keys() for call in calls] == [in_training[0]] * (len(calls) - len(in_training)) + in_training
    for call in calls:
        assert call["fused_lm_head"] is True and call["use_cache"] is False
        assert isinstance(call["max_length_q"], int) and "attention_mask" not in call
    # Entropy, token accuracy and the number of tokens are kept on the trainer: what was observed is not among them.
    assert {key: fixed[key] for key in ("entropy", "mean_token_accuracy", "num_tokens")} == {
        key: stock[key] for key in ("entropy", "mean_token_accuracy", "num_tokens")
    }


WAYS_ON_TWO_RANKS = (
    "padding-free",
    "micro-batches without a target",
    "mixture of experts, declared false",
)


def rows_of() -> list[dict[str, Any]]:
    """On each rank: SFTTrainer beside the float64 full batch."""
    rows = []
    for name, split in product(WAYS_ON_TWO_RANKS, [(2, 2)]):
        row: dict[str, Any] = {"way": name, "split": split}
        for path in ("apply", "trainer", "stock") if split == (2, 2) else ("apply",):
            step = sft_step(WAYS[name], path, *split, Path(tempfile.gettempdir()) / "sft", ddp_backend="gloo")
            row[path] = step.errors(sft_reference(WAYS[name], step.trainer, split[0]))
            if path == "apply":
                row["ranks_agree"] = same_on_all_ranks(step.change)
        rows.append(row)
    return rows


@pytest.mark.timeout(600)
def test_two_ranks_take_the_full_batch_step() -> None:
    rows = on_ranks(rows_of, timeout=500)[0]
    for row in rows:
        for path in row.keys() & {"apply", "trainer"}:
            assert max(row[path].values()) <= FLOAT32_LOSS, row
        if "stock" in row:
            assert (row["stock"]["gradient"] > 0.1) == WAYS[row["way"]].stock_wrong, row
        assert row["ranks_agree"], row


# --- tRL's SFTTrainer under each convention: it divides its router loss itself, and borrows Mixtral's for every -----


FAMILY = "Qwen3-MoE"


def sft(convention: str, per_device: int, coefficient: float, ranks: int = 1, **config: Any) -> Step:
    """One step of SFTTrainer, stock or by the patch under a convention."""
    head = FAMILIES[FAMILY]
    way = Way(with_coefficient(head, coefficient), tokens(head.samples), config)
    accumulate = len(head.samples) // per_device // ranks
    options: Mapping[str, Any] = {"ddp_backend": "gloo"} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as output:
        if convention == "stock":
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)
        with hf_accum_fix.apply(router_loss=convention):
            return sft_step(way, "stock", per_device, accumulate, Path(output), **options)


def sft_error(convention: str, per_device: int, ranks: int = 1, **config: Any) -> tuple[float, Step]:
    """Relative error of the auxiliary gradient, told by two steps, and the step with the coefficient."""
    with InFloat64():
        wanted, _ = twin(FAMILIES[FAMILY])
        with_it = sft(convention, per_device, COEFFICIENT, ranks, **config)
        found = flat(with_it.change) - flat(sft("stock", per_device, 0.0, ranks, **config).change)
    return float((found - wanted).norm() / wanted.norm()), with_it


sizes = pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == 4 else pytest.mark.slow) for size in (1, 4)]
)


@sizes
@pytest.mark.parametrize("config", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
def test_exact_is_the_full_batch(config: dict[str, Any], size: int) -> None:
    error, step = sft_error("exact", size, **config)
    assert error <= TWIN
    # What TRL logs is the mean of its micro-batches, and so the full batch's as well.
    with InFloat64():
        value = twin(FAMILIES[FAMILY])[1] / COEFFICIENT
    assert step.trainer.state.log_history[0]["aux_loss"] == pytest.approx(value, rel=1e-9)
