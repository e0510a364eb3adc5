"""TRL's preference trainers, exact where the last micro-batch is short; GRPO and RLOO, left as TRL means them.

Each computes a loss by itself and takes no item count. DPO, KTO and Reward return the mean over the samples of a
micro-batch, of which upstream takes the mean: over full micro-batches that is the full batch's step, and 0.15 to 0.22
off it where the last one is short. GRPO, RLOO and Distillation sample their answers in whole groups, and say whether
they divide by the window themselves; their inputs are made too late to be observed, so that they are looked at as they
train. OnlineDPO's step makes its inputs as well, says nothing, and stock trains it at G times.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trl

if not hasattr(trl, "DistillationTrainer"):
    pytest.skip("trainers of a newer trl (ms-swift's environment has an older)", allow_module_level=True)

import hf_accum_fix
from hf_accum_fix import observations
from hf_accum_fix.errors import UnsupportedSetupError
from tests.clients.preference import LLAMA, PREFERENCES, TWO_MEANS, preference_step
from tests.clients.preference_on_two_ranks import ALIKE, BY_TOKENS, rows_of_all
from tests.clients.preference_on_two_ranks import SPLITS as TWO_RANK_SPLITS
from tests.logged import Said
from tests.numerics.heads import FLOAT32_LOSS
from tests.numerics.parity import Step
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WHOLE = (8, 1)
WITH_SHORT_MICRO_BATCH = (3, 3)


def at(*splits: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("split", splits, ids=lambda split: "x".join(map(str, split)))


MEANS = [name for name, kind in PREFERENCES.items() if not kind.sampled]
splits = at(WHOLE, (4, 2), (2, 4), (1, 8))


def assert_left_alone(step: Step, stock: Step) -> None:
    assert all(torch.equal(step.change[key], stock.change[key]) for key in stock.change)
    timing = ("runtime", "per_second", "step_time")
    for mine, upstream in zip(step.trainer.state.log_history, stock.trainer.state.log_history, strict=True):
        assert mine.keys() == upstream.keys()
        assert {key: value for key, value in mine.items() if not key.endswith(timing)} == {
            key: value for key, value in upstream.items() if not key.endswith(timing)
        }


@splits
@pytest.mark.parametrize("name", [name for name, kind in PREFERENCES.items() if kind.sampled and not kind.stock_wrong])
def test_left_as_it_is_without_a_warning_and_not_called_exact(
    name: str, split: tuple[int, int], tmp_path: Path, said: Said
) -> None:
    kind = PREFERENCES[name]
    stock = preference_step(kind, "stock", *split, tmp_path)
    assert stock.error(preference_step(kind, "stock", *WHOLE, tmp_path)) <= FLOAT32_LOSS
    assert_left_alone(preference_step(kind, "apply", *split, tmp_path), stock)
    assert_left_alone(preference_step(kind, "trainer", *split, tmp_path), stock)
    assert len(observations.recorded()) == 2
    for run in observations.recorded():
        assert run["reduction"] == "plain" and not run["exact"]
    assert not said()


@splits
def test_tokens_of_a_micro_batch_weigh_as_those_of_the_whole(
    split: tuple[int, int], tmp_path: Path, said: Said
) -> None:
    """GRPO's "bnpo", the mean over the tokens of a micro-batch: 0.06 to 0.14 off in stock."""
    kind = PREFERENCES["GRPO by tokens of a micro-batch"]
    whole, stock = (preference_step(kind, "stock", *each, tmp_path) for each in (WHOLE, split))
    assert (stock.error(whole) > 0.01) is (split != WHOLE)
    for path in ("apply", "trainer"):
        ours = preference_step(kind, path, *split, tmp_path)
        assert ours.error(whole) <= FLOAT32_LOSS
        assert ours.loss == pytest.approx(whole.loss, rel=1e-5)
    assert not said()


@pytest.mark.timeout(400)
def test_two_ranks_weigh_the_tokens_of_both() -> None:
    """The mean over every token of both ranks; a trainer whose micro-batches are alike is left bit for bit."""
    rows = on_ranks(rows_of_all, timeout=380)[0]
    assert [tuple(row["split"]) for row in rows if row["trainer"] == BY_TOKENS] == list(TWO_RANK_SPLITS)
    for row in rows:
        if row["trainer"] in ALIKE:
            assert row["same bits"], row
            continue
        mine, other = row["tokens"]
        assert sum(mine) != sum(other), row
        assert row["stock"]["gradient"] > 0.02, row
        assert row["apply"]["gradient"] <= FLOAT32_LOSS and row["apply"]["loss"] <= 1e-6, row
        assert not row["apply"]["warned"], row


@splits
def test_a_step_that_samples_its_answers_gets_the_mean_over_micro_batches(
    split: tuple[int, int], tmp_path: Path, said: Said
) -> None:
    """The same answers are sampled, so that stock's own step is G times ours."""
    kind = PREFERENCES["OnlineDPO"]
    stock, ours = (preference_step(kind, path, *split, tmp_path) for path in ("stock", "apply"))
    assert stock.times(ours) == pytest.approx(split[1], rel=1e-6)
    scaled = replace(ours, change={name: change * split[1] for name, change in ours.change.items()})
    assert stock.error(scaled) <= FLOAT32_LOSS
    warned = said()
    assert len(warned) == (split != WHOLE)


@splits
@pytest.mark.parametrize("name", MEANS)
def test_full_micro_batches_take_stocks_step(name: str, split: tuple[int, int], tmp_path: Path) -> None:
    kind = PREFERENCES[name]
    stock = preference_step(kind, "stock", *split, tmp_path)
    assert_left_alone(preference_step(kind, "apply", *split, tmp_path), stock)


@pytest.mark.parametrize("path", ["apply", "trainer"])
@pytest.mark.parametrize("name", MEANS)
def test_a_short_micro_batch_weighs_as_its_samples(name: str, path: str, tmp_path: Path, said: Said) -> None:
    """Three, three and two samples."""
    kind = PREFERENCES[name]
    whole = preference_step(kind, "stock", *WHOLE, tmp_path)
    assert preference_step(kind, "stock", *WITH_SHORT_MICRO_BATCH, tmp_path).error(whole) > 0.1
    ours = preference_step(kind, path, *WITH_SHORT_MICRO_BATCH, tmp_path)
    assert ours.error(whole) <= FLOAT32_LOSS
    assert ours.loss == pytest.approx(whole.loss, rel=1e-6)
    assert observations.recorded()[-1]["exact"]
    assert not said()


def test_a_policy_that_is_still_its_reference_shows_what_it_averages_over(tmp_path: Path) -> None:
    """Every pair's loss is log 2 then, by whatever it is weighed; the gradient is not alike."""
    kind = replace(PREFERENCES["DPO"], given=lambda: {"ref_model": LLAMA()})
    whole = preference_step(kind, "stock", *WHOLE, tmp_path)
    assert preference_step(kind, "stock", *WITH_SHORT_MICRO_BATCH, tmp_path).error(whole) > 0.1
    assert preference_step(kind, "apply", *WITH_SHORT_MICRO_BATCH, tmp_path).error(whole) <= FLOAT32_LOSS


@pytest.mark.parametrize("name", MEANS)
def test_a_short_last_window_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    """Windows of three micro-batches and of one, all of them full."""
    kind, two = PREFERENCES[name], {"max_steps": 2, "learning_rate": 1e-2}
    stock = preference_step(kind, "stock", 2, 3, tmp_path, **two)
    assert_left_alone(preference_step(kind, "apply", 2, 3, tmp_path, **two), stock)


@at((2, 4), (1, 8), WITH_SHORT_MICRO_BATCH)
@pytest.mark.parametrize("name", TWO_MEANS)
def test_a_mean_over_pairs_and_one_over_tokens(name: str, split: tuple[int, int], tmp_path: Path, said: Said) -> None:
    """Rows come in pairs, or in threes (TPO)."""
    kind = TWO_MEANS[name]
    whole, stock = (preference_step(kind, "stock", *each, tmp_path) for each in (WHOLE, split))
    assert stock.error(whole) > 0.05
    ours = preference_step(kind, "apply", *split, tmp_path)
    warned = said()
    assert ours.error(whole) <= FLOAT32_LOSS and not warned


def test_a_kl_over_the_window_is_refused_by_name(tmp_path: Path) -> None:
    """KTO's, a mean without gradient over the samples of a micro-batch, which no module returns."""
    by_kl = replace(PREFERENCES["KTO"], arguments={"loss_type": "kto"})
    with (
        hf_accum_fix.apply(coupled_loss="exact"),
        pytest.raises(UnsupportedSetupError, match="no module of which returns one vector per sample"),
    ):
        preference_step(by_kl, "stock", 2, 4, tmp_path)
