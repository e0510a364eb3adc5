"""TRL's preference trainers, exact where the last micro-batch is short; GRPO and RLOO, left as TRL means them.

Each computes a loss by itself and takes no item count. DPO, KTO and Reward return the mean over the samples of a
micro-batch, of which upstream takes the mean: over full micro-batches that is the full batch's step, and 0.15 to 0.22
off it where the last one is short. GRPO, RLOO, Distillation and OnlineDPO sample their answers: their inputs are made
too late to be observed, so that they are stock's, and said.
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
from hf_accum_fix.overrides.training import EXACT_WINDOWS
from tests.clients.preference import PREFERENCES, TWO_MEANS, preference_step
from tests.logged import Said
from tests.numerics.heads import FLOAT32_LOSS
from tests.numerics.parity import Step

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WHOLE = (8, 1)
WITH_SHORT_MICRO_BATCH = (3, 3)


def at(*splits: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("split", splits, ids=lambda split: "x".join(map(str, split)))


MEANS = [name for name, kind in PREFERENCES.items() if not kind.sampled]
splits = at(WHOLE, (2, 4))


def assert_left_alone(step: Step, stock: Step) -> None:
    assert all(torch.equal(step.change[key], stock.change[key]) for key in stock.change)
    timing = ("runtime", "per_second", "step_time")
    for mine, upstream in zip(step.trainer.state.log_history, stock.trainer.state.log_history, strict=True):
        assert {key: value for key, value in mine.items() if not key.endswith((*timing, EXACT_WINDOWS))} == {
            key: value for key, value in upstream.items() if not key.endswith(timing)
        }


@splits
@pytest.mark.parametrize("name", [name for name, kind in PREFERENCES.items() if kind.sampled])
def test_what_samples_its_answers_is_stocks_and_said(
    name: str, split: tuple[int, int], tmp_path: Path, said: Said
) -> None:
    kind = PREFERENCES[name]
    stock = preference_step(kind, "stock", *split, tmp_path)
    assert_left_alone(preference_step(kind, "apply", *split, tmp_path), stock)
    assert not observations.recorded()[-1]["exact"]
    assert len(said()) == (split != WHOLE)


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


@at((1, 8), WITH_SHORT_MICRO_BATCH)
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
        pytest.raises(UnsupportedSetupError, match="no module of which is known, or found, to make its vectors"),
    ):
        preference_step(by_kl, "stock", 2, 4, tmp_path)
