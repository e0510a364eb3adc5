"""Losses as everyday code writes them, that stock trains: ours trains them too, and says "exact" only of what is.

Each group has the number of its row in the attack that found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.cases import (
    EITHER,
    EXACT,
    GRADIENT,
    INEXACT,
    attack,
    in_both,
    in_func,
    in_model,
    in_own,
    in_super,
    several,
)
from tests.losses.models import bare, fewer, points
from tests.losses.seen import ByNumber, Loss, Mean, Seen, TakingPoints, Texts, full, holding, tokens
from tests.losses.verdicts import PAIRS, SINGLES, Verdict
from tests.numerics.heads import Sample
from tests.numerics.parity import StockRecorder
from tests.trainings import Case, computing


def everywhere(name: str, verdict: Verdict, loss: Loss, **more: Any) -> list[Case]:
    """In a compute_loss, in the model (by the Trainer and by a loop), and in a compute_loss_func."""
    return [each(name, verdict, loss, **more) for each in (in_own, in_model, in_func)]


# --- 1: weights of elements in torch's own losses -------------------------------------------------------------------


def multi_hot(window: int = 0) -> list[Sample]:
    """Four numbers each, four yes-or-no labels, and a weight of each label."""
    return points(
        lambda index, g: {
            "labels": (torch.rand(4, generator=g) > 0.5).double(),
            "label_weights": 0.5 + torch.rand(4, generator=g).double(),
            "row_weights": 0.5 + torch.rand(1, generator=g).double(),
        },
        window,
    )


def yes_or_no(key: str, also: bool = False) -> Loss:
    def loss(s: Seen) -> Tensor:
        found = F.binary_cross_entropy_with_logits(s.logits, s.batch["labels"], weight=s.batch[key])
        return found + F.mse_loss(s.logits.tanh(), s.batch["labels"]) if also else found

    return loss


def of_points(name: str, verdict: Verdict, loss: Loss, windows: Any, **more: Any) -> Case:
    model = holding(loss, TakingPoints, out=4)
    return attack(name, verdict, lambda m, b, _: m(**b)["loss"], model, windows, looped=True, **more)


def by_probability(s: Seen) -> Tensor:
    return F.binary_cross_entropy(s.logits.sigmoid(), s.batch["labels"], weight=s.batch["label_weights"])


ELEMENT_WEIGHTS = [
    of_points("e1-bce-elements", EXACT, yes_or_no("label_weights"), several(2, multi_hot), right=(PAIRS, SINGLES)),
    of_points("e1-bce-rows", EXACT, yes_or_no("row_weights"), several(2, multi_hot), right=(PAIRS, SINGLES)),
    of_points("e1-bce-and-mse", EXACT, yes_or_no("row_weights", True), several(2, multi_hot), right=(PAIRS, SINGLES)),
    of_points("e1-bce-of-probabilities", EXACT, by_probability, several(2, multi_hot), right=(PAIRS, SINGLES)),
]


# --- 2: losses of one element ---------------------------------------------------------------------------------------


def begun(start: Any) -> Loss:
    """``loss = start; loss = loss + a; loss = loss + b``."""
    return lambda s: start(s) + s.tokens


def begun_twice(start: Any) -> Loss:
    return lambda s: start(s) + s.tokens + 0.5 * s.classes


STARTS: Mapping[str, Any] = {
    "zeros-with-gradient": lambda s: torch.zeros(1, requires_grad=True, dtype=torch.float64),
    "zero-with-gradient": lambda s: torch.tensor(0.0, requires_grad=True, dtype=torch.float64),
    "zeros": lambda s: torch.zeros(1, dtype=torch.float64),
    "tensor": lambda s: torch.tensor([0.0], dtype=torch.float64),
    "new-zeros": lambda s: s.logits.new_zeros(1),
    "zeros-1-1": lambda s: torch.zeros(1, 1, dtype=torch.float64),
    "parameter": lambda s: nn.Parameter(torch.zeros(1, dtype=torch.float64)),
}

ONE_ELEMENT = [
    *(case for key, start in STARTS.items() for case in everywhere(f"e2-{key}", EXACT, begun(start))),
    *(case for key, start in STARTS.items() for case in in_both(f"e2-{key}-two", EXACT, begun_twice(start))),
    *everywhere("e2-view", EXACT, lambda s: s.tokens.view(1)),
    *everywhere("e2-unsqueeze", EXACT, lambda s: (s.tokens + 0.5 * s.classes).unsqueeze(0)),
    *everywhere("e2-zeros-mean", EXACT, lambda s: (torch.zeros(1, dtype=torch.float64) + s.tokens).mean()),
    *everywhere(
        "e2-zeros-squeeze", EXACT, lambda s: (torch.zeros(1, dtype=torch.float64) + s.tokens + s.classes).squeeze()
    ),
    in_super("e2-super", EXACT, lambda loss, s: torch.zeros(1, dtype=torch.float64) + loss),
]


# --- 3, 4, 5, 7: numbers that are kept, replaced, or count what a model drops; a second forward for a log -----------


class KeepsSize(StockRecorder):
    """Keeps the size of a micro-batch as it was when the trainer was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bs = self.args.per_device_train_batch_size


def over_kept(also: float) -> type:
    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        s = Seen(outputs["logits"], inputs, bare(model))
        return s.each_class.sum() / trainer.bs + also * s.classes, outputs

    return computing(compute, KeepsSize)


class OwnCount(StockRecorder):
    """Replaces the number: what is attended to, instead of the targets."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, _ = super().get_batch_samples(*args, **kwargs)
        return batches, sum(batch["attention_mask"].sum() for batch in batches)


def of_attended(model: Any, batch: Any, step: int) -> Tensor:
    losses, valid = Seen(model.logits(batch["input_ids"]), batch, model).each_token
    return (losses * valid).sum() / batch["attention_mask"].sum()


class Relabels(ByNumber):
    """Masks labels on a copy, inside the model."""

    def forward(self, input_ids: Tensor, labels: Any = None, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(input_ids, None if labels is None else fewer(labels), **inputs)


def of_fewer_by_all(model: Any, batch: Any, step: int) -> Tensor:
    """What stock trains: the sum over what the model keeps, by what the batch holds."""
    labels = batch["labels"]
    kept, held = (fewer(labels)[:, 1:] != -100).sum(), (labels[:, 1:] != -100).sum()
    s = Seen(model.logits(batch["input_ids"]), {**batch, "labels": fewer(labels)}, model)
    return s.tokens * kept / held


def twice(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=number)
    with torch.no_grad():
        base(model, {**inputs}, num_items_in_batch=number)
    return loss, outputs


NUMBERS = [
    attack("e3-sum", EITHER, full(lambda s: s.each_class.mean()), Mean, several(1), over_kept(0.0)),
    attack("e3-sum-and-mean", EITHER, full(lambda s: 1.5 * s.classes), Mean, several(1), over_kept(0.5)),
    attack("e4-own-count", EITHER, of_attended, ByNumber, several(2), OwnCount, right=(PAIRS, SINGLES)),
    attack("e5-relabels", EITHER, of_fewer_by_all, Relabels, several(1), right=(PAIRS, SINGLES)),
    attack("e7-twice", EITHER, full(tokens), Mean, several(1), computing(twice)),
    attack("e7-twice-by-number", EITHER, full(tokens), ByNumber, several(1), computing(twice)),
]


# --- 11, 15, 17: several losses in one tensor, which is said; weights of a list ---------------------------------------


def weights(s: Seen) -> Tensor:
    return s.logits.new_tensor([0.7, 0.2])


STACKED: Mapping[str, Loss] = {
    "weighted-sum": lambda s: (weights(s) * s.stack).sum(),
    "weighted-mean": lambda s: (s.stack * weights(s)).mean(),
    "over-two": lambda s: (s.stack / 2).sum(),
    "negative": lambda s: -(-s.stack * weights(s)).sum(),
    "cat": lambda s: torch.cat([s.tokens.view(1), s.classes.view(1)]).mul(weights(s)).sum(),
    "number-plus": lambda s: (s.stack * weights(s) + 1.0).sum(),
    "matmul": lambda s: s.stack @ weights(s),
    "power-one": lambda s: s.tokens**1.0,
}


STACKS = [
    *(case for name, loss in STACKED.items() for case in in_both(f"e11-{name}", INEXACT, loss)),
    *in_both(
        "e11-zip", EXACT, lambda s: sum(w * each for w, each in zip([0.7, 0.2], [s.tokens, s.classes], strict=True))
    ),
]


# --- a ceiling, which is no mean whether it binds or not -------------------------------------------------------------

FLOORS = [
    *in_both("e17-ceiling", INEXACT, lambda s: s.tokens.clamp(max=100.0) + s.classes),
    # It binds in some micro-batches only.
    *in_both("e17-binds", INEXACT, lambda s: s.tokens.clamp(max=4.5) + 0.0 * s.classes, windows=several(2)),
]


# --- an epsilon in a divisor ----------------------------------------------------------------------------------------


def over(divisor: Any) -> Loss:
    def loss(s: Seen) -> Tensor:
        losses, valid = s.each_token
        return (losses * valid).sum() / divisor(valid)

    return loss


EPSILONS = [
    case
    for name, divisor in {
        "1e-8": lambda m: m.sum() + 1e-8,
        "1e-5": lambda m: m.sum() + 1e-5,
        "clamp": lambda m: m.sum().double().clamp(min=1e-6),
    }.items()
    for case in [
        *everywhere(f"e5-{name}", EXACT, over(divisor), tolerance=2e-5),
        # One in 1e-5 of a single target, beside another count, is another count.
        *in_both(
            f"e5-{name}-two",
            EXACT,
            lambda s, of=divisor: over(of)(s) + 0.5 * s.classes,
            tolerance=2e-5,
            cuts=(PAIRS,) if name == "1e-5" else (PAIRS, SINGLES),
        ),
    ]
]


# --- 12 to 17 -------------------------------------------------------------------------------------------------------


def smoothed(s: Seen) -> Tensor:
    weight = torch.linspace(0.2, 1.0, s.logits.shape[-1], dtype=s.logits.dtype)
    return F.cross_entropy(*s.flat, weight=weight, label_smoothing=0.1)


def some_hold(s: Seen) -> Tensor:
    """A term of the texts of one kind, where there are any."""
    kept = s.batch["kind"] == 1
    loss = s.tokens
    loss += F.mse_loss(s.logits[kept, 1, 0], s.batch["kind"][kept].double()) if bool(kept.any()) else 0
    return loss


def clamped_second(s: Seen) -> Tensor:
    kept = (s.batch["kind"] == 1).double()
    return s.tokens + (s.each_class * kept).sum() / kept.sum().clamp(min=1)


def with_many_penalties(s: Seen) -> Tensor:
    """One for each of 600 tensors."""
    return s.tokens + 1e-4 * sum(each.square().sum() for each in s.model.many)


class Many(Texts):
    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.many = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(600)])


def weighted_within(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return (losses * valid / valid.sum()).sum()


def normalised_weights(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return (losses.flatten() * F.normalize(valid.double().flatten(), p=1, dim=0)).sum()


def vae(s: Seen) -> Tensor:
    """Two sums."""
    losses, valid = s.each_token
    return (losses * valid).sum() + 0.1 * s.logits[:, 0].square().sum()


OTHERS = [
    *everywhere("e12-smoothed-weighted", EXACT, smoothed, windows=several(2)),
    *in_both("e13-some-hold", EITHER, some_hold, windows=several(2)),
    *in_both("e14-clamped-second", EITHER, clamped_second, windows=several(2)),
    attack(
        "e16-many-penalties",
        EXACT,
        full(with_many_penalties),
        lambda: Many(with_many_penalties),
        several(1),
        looped=True,
    ),
    *in_both("e17-weighted-within", EXACT, weighted_within),
    *in_both("e17-normalised-weights", EITHER, normalised_weights),
    *in_both("e5-vae", GRADIENT, vae),
]

CASES: list[Case] = [*ELEMENT_WEIGHTS, *ONE_ELEMENT, *NUMBERS, *STACKS, *FLOORS, *EPSILONS, *OTHERS]
