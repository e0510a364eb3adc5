"""What a clamp is taken for: as windows go on, and where no look has seen one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.reading.values import capture
from hf_accum_fix.window import host
from tests.losses.clamps import by_six, errors, gliner, window
from tests.losses.models import points
from tests.losses.rows import EXACT, INEXACT
from tests.losses.seen import Points, Seen
from tests.losses.verdicts import by_trainer
from tests.numerics.heads import Sample, seeded
from tests.trainings import RATE


def weighted(number: int, weight: float = 1.0) -> list[Sample]:
    return [{**its, "scores": (its["labels"] > 0).double() * weight} for its in window(number)]


def by_weights(s: Seen) -> Tensor:
    total = s.batch["scores"].sum()
    return (errors(s) * s.batch["scores"]).sum() / torch.where(total > 0, total, 1.0)


@pytest.mark.parametrize("cut", [(2, 4), (1, 8)])
def test_weights_that_add_up_to_less_than_1_in_a_window_that_no_look_sees(cut: tuple[int, int]) -> None:
    """A clamp would divide them by 1; `where` does not, and what was taken for a floor is none."""
    windows = [*(weighted(number % 3) for number in range(11)), weighted(2, 1e-3)]
    ours = by_trainer(by_six("fading", INEXACT, by_weights, windows=windows, rate=RATE), cut, "apply")
    assert max(ours.errors[:-1]) <= 1e-9 and ours.errors[-1] > 0.1
    assert not ours.exact and "divides by another function of its count" in ours.said[0][1]


def test_the_counts_below_are_looked_for_where_a_look_has_seen_a_clamp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is a function of torch's runs without the mode once it is settled."""
    entered: list[bool] = []
    monkeypatch.setattr(
        host, "capture", lambda *given, **which: entered.append(which["values"]) or capture(*given, **which)
    )
    mean = by_six("mean", EXACT, lambda s: F.cross_entropy(s.logits, s.batch["labels"].amax(1)))
    for case, values in ((mean, set()), (by_six("clamped", EXACT, gliner), {True})):
        entered.clear()
        trained = by_trainer(case, (2, 4), "apply")
        assert trained.exact and {*entered} == values


def by_samples(s: Seen) -> Tensor:
    return F.cross_entropy(s.logits, s.batch["labels"], reduction="sum") / len(s.logits)


def by_mask(s: Seen) -> Tensor:
    kept = s.batch["labels"] >= 0
    return (F.cross_entropy(s.logits, s.batch["labels"], reduction="none") * kept).sum() / kept.sum()


def logged(mean: Callable[[Seen], Tensor]) -> Callable[[Seen], Tensor]:
    def loss(s: Seen) -> Tensor:
        int((s.logits.argmax(-1) == s.batch["labels"]).sum())
        return mean(s)

    return loss


@pytest.mark.parametrize("misses", [{}, {2: 3, 3: 4}, {0: 0, 1: 7, 3: 1}], ids=str)
@pytest.mark.parametrize("mean", [by_samples, by_mask])
def test_what_is_read_for_a_log_is_no_count(mean: Callable[[Seen], Tensor], misses: dict[int, int]) -> None:
    """A single sample is right, as often as it is one: until one is wrong that no look sees."""
    model = seeded(lambda: Points(out=6))()
    windows = [points(lambda *_: {}, number) for number in range(5)]
    for number, samples in enumerate(windows):
        for index, sample in enumerate(samples):
            sample["labels"] = (model.logits(sample["x"]).argmax() + (misses.get(number) == index)) % 6
    case = by_six("logged", EXACT, logged(mean), windows=windows, rate=1e-4)
    ours = by_trainer(case, (1, 8), "apply")
    assert ours.worst <= 1e-9 and (ours.exact or (mean is by_samples and misses == {2: 3, 3: 4}))
    assert ours.exact is not bool(ours.said)
