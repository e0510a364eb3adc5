"""Micro-batches of several kinds in one training: tasks by turns, each with labels, a loss and items of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_accum_fix
from tests.losses.tasks import (
    ALIKE,
    NAMES,
    PATIENCE,
    TURNS,
    OfLogits,
    Tasks,
    TasksByHand,
    TasksByNumber,
    TasksCoupled,
    TasksWithEvenWeights,
    TasksWithWeights,
    WeighsTasks,
    WithAnOption,
    WithATermMore,
    a_class,
    a_score,
    by_loop,
    by_share,
    full_steps,
    in_common,
    in_turn,
    of_all,
    rows_of,
    verified,
    with_an_option,
)
from tests.numerics.heads import Batch, Sample, seeded
from tests.numerics.heads.head import collate
from tests.numerics.parity import relative, training_arguments
from tests.ranks import on_ranks
from tests.trainers.runs import FLOOR, Ordered
from tests.trainings import Case, Cut, train

#: Two samples of one kind stand together, so that no micro-batch holds both.
CUTS: tuple[Cut, ...] = ((2, 4), (1, 8))
ALL_KINDS = ["abab", "baab", "bbbb", "aaaa", "abbb", "baaa"]


def case(
    name: str,
    model: Any,
    windows: Sequence[Sequence[Sample]],
    trainer: Any = None,
    full: Callable[..., Tensor] = by_share,
) -> Case:
    def loss(of: nn.Module, batch: Batch, step: int) -> Tensor:
        return full(of, windows[step], **({"second": 2.0} if trainer is WeighsTasks else {}))

    given = {} if trainer is None else {"trainer": trainer}
    return Case(name, loss, model, windows, collate=in_common, cuts=CUTS, **given)


def windows_of(other: Callable[[Sample, int], Sample], turns: Sequence[str]) -> list[list[Sample]]:
    return [in_turn(other, pairs, seed) for seed, pairs in enumerate(turns)]


EXACT = [
    *(
        case(f"{model.__name__}-{other.__name__}-{turns[0]}", model, windows_of(other, turns))
        for model in (Tasks, TasksByNumber)
        for other in (a_class, a_score)
        for turns in (ALL_KINDS, ALL_KINDS[::-1], ["aaaa", "aaaa", "aaaa", "aaaa", "aaab", "abab"])
    ),
    case("by-hand", TasksByHand, windows_of(a_score, ALL_KINDS)),
    *(
        case(f"weighs-tasks-{model.__name__}-{other.__name__}", model, windows_of(other, ALL_KINDS), WeighsTasks)
        for model in (Tasks, TasksByNumber)
        for other in (a_class, a_score)
    ),
    case("own-losses", Tasks, windows_of(a_score, ALL_KINDS), OfLogits),
    *(case(name, model, windows, full=full) for name, (model, windows, full) in ALIKE.items()),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("each", EXACT, ids=lambda each: each.name)
def test_every_kind_is_the_mean_over_its_own_items(each: Case, cut: Cut, tmp_path: Path) -> None:
    """Stock weighs tokens by the micro-batch that they are in."""
    stock = train(each, cut, tmp_path)
    with hf_accum_fix.apply():
        patched = train(each, cut, tmp_path)
    assert max(stock.errors) > 1e-3
    assert max(patched.errors) <= FLOOR and patched.exact and not patched.said, patched


@pytest.mark.parametrize("turns", [ALL_KINDS, ["bbbb", "abab"]], ids=["later", "first"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_kind_whose_loss_is_not_exact_is_said(cut: Cut, turns: Sequence[str], tmp_path: Path) -> None:
    coupled = case("coupled", TasksCoupled, windows_of(a_score, turns))
    stock = train(coupled, cut, tmp_path)
    with hf_accum_fix.apply():
        patched = train(coupled, cut, tmp_path)
    assert not patched.silent(FLOOR) and not patched.exact
    if turns[0] == "bbbb":
        # Where nothing else is trained it is stock's.
        assert patched.errors[0] <= 1.000001 * stock.errors[0] + FLOOR


@pytest.mark.parametrize("other", [a_class, a_score])
def test_a_contract_given_by_hand_is_one_kinds(other: Any, tmp_path: Path) -> None:
    """Nothing is observed, so that the other kind's loss is not known."""
    given = hf_accum_fix.LossContract(hf_accum_fix.Reduction.MEAN, hf_accum_fix.Items((NAMES[other],), shift=True))
    tasks = case("by-hand", Tasks, windows_of(other, ["aaaa", "abab", "bbbb"]))
    with hf_accum_fix.apply(contract=given):
        patched = train(tasks, CUTS[0], tmp_path)
    assert patched.errors[0] <= FLOOR
    assert not patched.silent(FLOOR) and not patched.exact


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_beside_another_loss_weights_are_said_and_scale_no_gradient(cut: Cut, tmp_path: Path) -> None:
    """No one number corrects both; a window of one kind is corrected as ever."""
    weights = case("weights", TasksWithWeights, windows_of(a_class, ["aaaa", "abab", "aaaa", "abbb"]))
    stock = train(weights, cut, tmp_path)
    with hf_accum_fix.apply():
        patched = train(weights, cut, tmp_path)
    assert not patched.silent(FLOOR) and not patched.exact
    assert patched.errors[0] <= FLOOR and patched.errors[2] <= FLOOR
    assert max(patched.errors) <= 0.2 < 1 < max(stock.errors)


def test_weights_that_sum_to_their_number_are_said(tmp_path: Path) -> None:
    windows = windows_of(a_class, ["bbbb", "abab"])
    for at, label in zip((2, 3, 6, 7), (0, 0, 1, 1), strict=True):
        windows[1][at]["labels"].fill_(label)
    weights = case("weights", TasksWithEvenWeights, windows)
    with hf_accum_fix.apply():
        patched = train(weights, CUTS[0], tmp_path)
    assert not patched.silent(FLOOR)


def test_the_evaluation_loss_takes_batches_with_an_optional_label(tmp_path: Path) -> None:
    evaluated, build = with_an_option("bbbb", 5), seeded(WithAnOption)
    args = training_arguments(tmp_path, 2, 4, max_steps=1, per_device_eval_batch_size=2, prediction_loss_only=True)
    with hf_accum_fix.apply(eval_loss=True):
        trainer = Ordered(
            build(),
            args,
            in_common,
            train_dataset=with_an_option("aaaa"),
            eval_dataset=evaluated,  # type: ignore[arg-type]
        )
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert found == pytest.approx(float(of_all(trainer.model, evaluated)), rel=FLOOR)


@pytest.mark.parametrize(
    "turns", [("BBaa", "aaaa", "abab"), ("aaBB", "aaaa", "abab"), ("AAbb", "bbbb", "abab")], ids=str
)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_kind_without_a_target_is_said_once_it_shows_one(cut: Cut, turns: Sequence[str], tmp_path: Path) -> None:
    """Until then nothing tells whether it shares the first kind's loss."""
    pooled = case("pooled", Tasks, windows_of(a_class, turns), WeighsTasks)
    with hf_accum_fix.apply():
        patched = train(pooled, cut, tmp_path)
    assert max(patched.errors[1:]) <= FLOOR < patched.errors[0]
    assert not patched.exact and "had no target before window 3" in " ".join(words for _, words in patched.said)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_term_that_some_micro_batches_have_is_said(cut: Cut, tmp_path: Path) -> None:
    """What both kinds share might be one mean over both, or one for each."""
    windows = [with_an_option(pairs, seed) for seed, pairs in enumerate(["abab", "baab"])]
    with hf_accum_fix.apply():
        patched = train(case("a-term-more", WithATermMore, windows), cut, tmp_path)
    assert not patched.exact and "is no single mean" in patched.said[0][1]


def test_verify_proves_the_first_kind() -> None:
    samples = in_turn(a_class, "abab") + in_turn(a_class, "abab", 1)
    report = verified(samples)
    assert "only those with 'labels' (2 axes) were split" in " ".join(report.split())
    assert "too large at your" in report and "apply()  1 " in report
    assert "expected samples of one task" in " ".join(verified(samples, given=samples).split())


def test_verify_on_two_ranks_of_which_one_draws_two_kinds(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """No rank waits for one that was refused."""
    assert "could not tell" in rows["verify"]["verdict"]


def test_the_report_names_every_kind(tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        train(EXACT[0], CUTS[0], tmp_path)
        runs = hf_accum_fix.report().to_dict()["runs"]
    told = runs[-1]["tasks"]
    assert set(told) == {"'labels' (one axis)", "'labels' (2 axes)"}
    assert told["'labels' (one axis)"]["items"] == "'labels' other than -100"


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("other", [a_class, a_score])
@pytest.mark.parametrize("model", [Tasks, TasksByNumber])
def test_loops_train_every_kind_by_its_own_items(model: Any, other: Any, turns: Sequence[str]) -> None:
    windows = windows_of(other, turns)
    cut = [[collate(window[at : at + 2]) for at in range(0, 8, 2)] for window in windows]
    build = seeded(model)
    change, exact, said = by_loop(build(), cut)
    assert relative(change, full_steps(build(), windows)) <= FLOOR and exact and not said


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return on_ranks(rows_of, patience=PATIENCE)[0]


@pytest.mark.parametrize("other", [a_class, a_score])
@pytest.mark.parametrize("model", [Tasks, TasksByNumber])
@pytest.mark.parametrize("name", TURNS)
def test_two_ranks_train_different_kinds_at_once(
    name: str, model: Any, other: Any, rows: Mapping[str, Mapping[str, Any]]
) -> None:
    """On a CPU a kind that appears later, on one rank alone, is observed in the window in which it appears."""
    row = rows[f"{name}-{model.__name__}-{other.__name__}"]
    assert isinstance(row["stock"], str) or row["stock"] > 1e-3
    assert row["apply"] <= FLOOR and row["exact"] and not row["warned"], row
    assert row["loop"] <= FLOOR and row["loop exact"] and not row["loop warned"], row


@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_tell_losses_apart_that_look_alike(name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    row = rows[name]
    assert row["stock"] > 1e-3
    assert row["apply"] <= FLOOR and row["exact"] and not row["warned"], row
    assert row["loop"] <= FLOOR and row["loop exact"] and not row["loop warned"], row
