"""Means over a count that something keeps from zero, as libraries write them: the count below is the one that adds up.

A micro-batch without a target divides by the floor, and counts none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.reading.values import capture
from hf_accum_fix.window import host
from tests.losses.models import points
from tests.losses.seen import Points, Seen, bare
from tests.losses.verdicts import by_trainer
from tests.numerics.heads import Sample, seeded
from tests.ranks import on_ranks
from tests.trainings import Case, cells, computing

#: How many of six places are targets, by sample: a micro-batch of none and one of one, at every cut.
TARGETS = ((0, 1, 3, 0, 0, 0, 2, 4), (0, 0, 0, 0, 1, 0, 0, 5), (2, 1, 0, 0, 3, 6, 0, 1))


def window(number: int) -> list[Sample]:
    def label(index: int, g: torch.Generator) -> dict[str, Tensor]:
        places = torch.randperm(6, generator=g) < TARGETS[number][index]
        return {
            "labels": torch.where(places, torch.randint(1, 4, (6,), generator=g), 0),
            "wanted": torch.randn(6, generator=g, dtype=torch.float64),
            "scores": torch.rand(6, generator=g, dtype=torch.float64) * places,
        }

    return points(label, number)


def matched(number: int) -> list[Sample]:
    """A rule counts those that are not -100."""
    return [{**its, "matched_labels": its["labels"].masked_fill(its["labels"] == 0, -100)} for its in window(number)]


def found(s: Seen) -> Tensor:
    return (s.batch["labels"] > 0).double()


def errors(s: Seen) -> Tensor:
    return F.smooth_l1_loss(s.logits, s.batch["wanted"], reduction="none")


def crossed(s: Seen) -> Tensor:
    return F.binary_cross_entropy_with_logits(s.logits, found(s), reduction="none")


# --- as libraries write them ------------------------------------------------------------------------------------


def gliner(s: Seen) -> Tensor:
    mask = (s.batch["labels"] != 1).double() * found(s)
    return (crossed(s) * mask).sum() / mask.sum().clamp(min=1.0)


def armorm(s: Seen) -> Tensor:
    """Ratings of which most are missing."""
    mask = found(s)
    return ((s.logits - s.batch["wanted"]) ** 2 * mask).sum() / mask.sum().clamp(min=1)


def dapo(s: Seen) -> Tensor:
    """Samples that were cut off are masked."""
    mask = found(s) * (s.batch["labels"].sum(1, keepdim=True) % 2)
    log_p, advantages = F.logsigmoid(s.logits), s.batch["wanted"]
    ratio = torch.exp(log_p - log_p.detach() + 0.1 * s.batch["scores"])
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def vapo(s: Seen) -> Tensor:
    """Beside a loss of all tokens the likelihood of those that were right."""
    right = found(s)
    return crossed(s).mean() + 0.1 * (-F.logsigmoid(s.logits) * right).sum() / right.sum().clamp(min=1)


def cringe(s: Seen) -> Tensor:
    good, bad = (s.batch["labels"] > 1), (s.batch["labels"] == 1)
    likely = -(F.logsigmoid(s.logits) * good).sum() / good.sum().clamp(min=1)
    return likely - 0.5 * (F.logsigmoid(-s.logits) * bad).sum() / bad.sum().clamp(min=1)


def doremi(s: Seen) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for domain, weight in enumerate((0.2, 0.3, 0.5), 1):
        its = s.batch["labels"] == domain
        loss = loss + weight * (errors(s) * its).sum() / its.sum().clamp_min(1)
    return loss


def deepar(s: Seen) -> Tensor:
    weights = s.batch["scores"]
    weighted = torch.where(weights != 0, errors(s) * weights, torch.zeros_like(weights))
    return weighted.sum() / torch.clamp(weights.sum(), min=1.0)


def mase(s: Seen) -> Tensor:
    scale = s.batch["wanted"].abs().mean(1, keepdim=True) + 0.1
    return ((s.logits - s.batch["wanted"]).abs() / scale * found(s)).sum() / (found(s).sum() + 1e-8)


def corn(s: Seen) -> Tensor:
    """Of each rank those that reach the one below it."""
    loss, examples, reached = torch.zeros((), dtype=torch.float64), 0, s.batch["labels"].amax(1)
    for rank in range(3):
        its = reached >= rank
        higher = (reached[its] > rank).double()
        if len(higher) < 1:
            continue
        examples += len(higher)
        chances = F.logsigmoid(s.logits[its, rank])
        loss = loss - torch.sum(chances * higher + (chances - s.logits[its, rank]) * (1 - higher))
    return loss / examples


def corn_of_pixels(s: Seen) -> Tensor:
    """As corn, over places, of which a micro-batch may have none."""
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for rank in range(1, 3):
        its = s.batch["labels"] >= rank
        higher = (s.batch["labels"][its] > rank).double()
        loss = loss + F.binary_cross_entropy_with_logits(s.logits[its], higher, reduction="sum")
        count += int(its.sum())
    return loss / max(count, 1)


def center_net(s: Seen) -> Tensor:
    mask = found(s)
    return F.l1_loss(s.logits * mask, s.batch["wanted"] * mask, reduction="sum") / (mask.sum() + 1e-4)


def corner_net(s: Seen) -> Tensor:
    mask = s.batch["labels"] > 0
    loss = F.smooth_l1_loss(s.logits[mask], s.batch["wanted"][mask], reduction="sum")
    return loss / (mask.to(loss).sum() + 1e-4)


def triplets(s: Seen) -> Tensor:
    """Those that are not solved; places are anchors, positives and negatives."""
    loss = F.relu(s.logits[:, :2] - s.logits[:, 2:4] + s.batch["wanted"][:, :2])
    return loss.sum() / ((loss > 1e-16).sum() + 1e-16)


def anchors(s: Seen) -> Tensor:
    avg_factor = found(s).sum().clamp(min=1.0)
    return crossed(s).sum() / avg_factor + 2.0 * (errors(s) * found(s)).sum() / avg_factor


def retina_net(s: Seen) -> Tensor:
    """Image by image."""
    losses = [
        crossed(row).sum() / max(1, found(row).sum()) for row in map(s.rows, torch.arange(len(s.logits))[:, None])
    ]
    return sum(losses[1:], losses[0]) / len(losses)


def fcos(s: Seen) -> Tensor:
    num_foreground = found(s).sum().item()
    return (crossed(s).sum() + errors(s)[found(s) > 0].sum()) / max(1, num_foreground)


def ssd(s: Seen) -> Tensor:
    num_foreground = sum(int((row != -100).sum()) for row in s.batch["matched_labels"])
    return (errors(s) * found(s)).sum() / max(1, num_foreground)


def detr(s: Seen) -> Tensor:
    num_boxes = torch.as_tensor([sum(int((row > 0).sum()) for row in s.batch["labels"])], dtype=torch.float)
    num_boxes = torch.clamp(num_boxes / 1, min=1).item()
    return (errors(s) * found(s)).sum() / num_boxes


def yolo(s: Seen) -> Tensor:
    target_scores_sum = max(s.batch["scores"].sum(), 1)
    return F.binary_cross_entropy_with_logits(s.logits, s.batch["scores"], reduction="none").sum() / target_scores_sum


def two_reads(s: Seen) -> Tensor:
    """Beside the count an accuracy is logged."""
    num_pos = int(found(s).sum())
    float(((s.logits.detach() > 0) == (found(s) > 0)).double().mean())
    return crossed(s).sum() / max(1, num_pos)


def either_read(s: Seen) -> Tensor:
    count = int((s.batch["labels"] == 1).sum())
    num_pos = int((s.batch["labels"] > 1).sum())
    return crossed(s).sum() / max(1, num_pos) + 0 * count


def tempered(s: Seen) -> Tensor:
    """A constant is compared, which is no count."""
    temperature = torch.tensor(2.0)
    assert temperature > 1e-2 and temperature <= 100
    return (crossed(s) * found(s)).sum() / max(found(s).sum(), torch.tensor(1)) / temperature


def sim_mim(s: Seen) -> Tensor:
    mask = found(s)
    return (F.l1_loss(s.batch["wanted"], s.logits, reduction="none") * mask).sum() / (mask.sum() + 1e-5) / 3


# --- other ways to keep a count from zero -----------------------------------------------------------------------

ONE = torch.ones((), dtype=torch.float64)
FLOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "small": lambda n: n.clamp(min=1e-6),
    "half": lambda n: torch.clamp(n, 0.5),
    "open": lambda n: torch.clip(n, 1, None),
    "large": lambda n: n.clamp(min=3.0),
    "in-place": lambda n: n.clamp_(min=1),
    "maximum": lambda n: torch.maximum(n, torch.ones_like(n)),
    "maximum-turned": lambda n: torch.max(torch.tensor(1.0), n),
    "where": lambda n: torch.where(n > 0, n, 1),
    "where-turned": lambda n: torch.where(n == 0, torch.ones_like(n), n),
    "filled": lambda n: n.masked_fill(n == 0, 1.0),
    "more": lambda n: 1e-4 + n,
    "whole": lambda n: n.long().clamp(min=1).to(torch.float32),
}


def kept(floor: Callable[[Tensor], Tensor]) -> Callable[[Seen], Tensor]:
    """All elements, as of detectors, over the targets."""
    return lambda s: crossed(s).sum() / floor(found(s).sum())


ROWS: list[tuple[str, str, Callable[[Seen], Tensor]]] = [
    ("gliner", "GLiNER", gliner),
    ("armorm", "RLHFlow", armorm),
    ("dapo", "TRL", dapo),
    ("vapo", "verl", vapo),
    ("cringe", "ParlAI", cringe),
    ("doremi", "doremi", doremi),
    ("deepar", "gluonts", deepar),
    ("mase", "neuralforecast", mase),
    ("center-net", "CenterNet", center_net),
    ("corner-net", "CornerNet", corner_net),
    ("triplets", "pytorch-metric-learning", triplets),
    ("anchors", "mmdetection", anchors),
    ("sim-mim", "SimMIM", sim_mim),
    # A count that Python has read.
    ("corn-of-pixels", "coral-pytorch", corn_of_pixels),
    ("fcos", "torchvision", fcos),
    ("detr", "DETR", detr),
    ("yolo", "ultralytics", yolo),
    ("tempered", "a loss with a temperature", tempered),
]
#: A length shows no count, and two counts that were read do not show which it is.
HIDDEN = [
    ("corn", "coral-pytorch", corn),
    ("two-reads", "a custom loss that logs", two_reads),
    ("either-read", "a custom loss that logs", either_read),
]


def case_of(name: str, loss: Callable[[Seen], Tensor], samples: Callable[[int], list[Sample]] = window) -> Case:
    def compute(trainer: object, base: object, model: Points, inputs: dict[str, Tensor], number: object) -> object:
        outputs = model(x=inputs["x"])
        return loss(Seen(outputs["logits"], inputs, bare(model))), outputs

    return Case(
        name,
        lambda model, batch, step: loss(Seen(model.logits(batch["x"]), batch, model)),
        lambda: Points(out=6),
        [samples(number) for number in range(len(TARGETS))],
        computing(compute),
        cuts=((2, 4), (4, 2), (1, 8)),
    )


EXACT = [*(case_of(name, loss) for name, _, loss in ROWS), case_of("ssd", ssd, matched)]
EXACT += [replace(case_of(loss.__name__, loss), cuts=((2, 4), (4, 2))) for loss in (corn, two_reads)]
EXACT += [replace(case_of(f"floor-{name}", kept(floor)), cuts=((2, 4),)) for name, floor in FLOORS.items()]


@cells(EXACT)
def test_every_split_is_the_full_batch_and_nothing_is_said(case: Case, cut: tuple[int, ...]) -> None:
    ours = by_trainer(case, cut, "apply")
    assert by_trainer(case, cut, "stock").worst > 1e-3
    assert ours.worst <= 1e-9 and ours.log_error <= 1e-4
    assert ours.exact and not ours.said


def on_two_ranks(name: str) -> list[tuple[float, bool, int]]:
    """The worst error, whether it is called exact, and how many warnings there were."""
    [case] = [each for each in EXACT if each.name == name]
    ours = by_trainer(case, (1, 4), "apply")
    return [(ours.worst, bool(ours.exact), len(ours.said))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gliner", "cringe", "fcos", "floor-large"])
def test_ranks_sum_the_counts_below(name: str) -> None:
    for [(worst, exact, said)] in on_ranks(on_two_ranks, name):
        assert worst <= 1e-9 and exact and not said


@cells([case_of("retina-net", retina_net)])
def test_a_count_of_each_image_is_its_own(case: Case, cut: tuple[int, ...]) -> None:
    """As in stock."""
    ours = by_trainer(case, cut, "apply")
    assert ours.worst <= 1e-9 and ours.log_error <= 1e-4 and ours.exact and not ours.said


@cells([case_of(name, loss) for name, _, loss in HIDDEN])
def test_a_hidden_count_is_never_silent_and_no_worse_than_stock(case: Case, cut: tuple[int, ...]) -> None:
    ours, stock = by_trainer(case, cut, "apply"), by_trainer(case, cut, "stock")
    # Once a window differs, so do the parameters of the next.
    assert not ours.silent(1e-9) and ours.worst <= 1.1 * stock.worst + 1e-9


def weighted(number: int, weight: float = 1.0) -> list[Sample]:
    return [{**its, "scores": (its["labels"] > 0).double() * weight} for its in window(number)]


def by_weights(s: Seen) -> Tensor:
    total = s.batch["scores"].sum()
    return (errors(s) * s.batch["scores"]).sum() / torch.where(total > 0, total, 1.0)


@pytest.mark.parametrize("cut", [(2, 4), (1, 8)])
def test_weights_that_add_up_to_less_than_1_in_a_window_that_no_look_sees(cut: tuple[int, int]) -> None:
    """A clamp would divide them by 1; `where` does not, and what was taken for a floor is none."""
    windows = [*(weighted(number % 3) for number in range(11)), weighted(2, 1e-3)]
    ours = by_trainer(replace(case_of("fading", by_weights), windows=windows), cut, "apply")
    assert max(ours.errors[:-1]) <= 1e-9 and ours.errors[-1] > 0.1
    assert not ours.exact and "divides by another function of its count" in ours.said[0][1]


def test_the_counts_below_are_looked_for_where_a_look_has_seen_a_clamp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is a function of torch's runs without the mode once it is settled."""
    entered: list[bool] = []
    monkeypatch.setattr(
        host, "capture", lambda *given, **which: entered.append(which["values"]) or capture(*given, **which)
    )
    mean = case_of("mean", lambda s: F.cross_entropy(s.logits, s.batch["labels"].amax(1)))
    clamped = case_of("clamped", gliner)
    for case, values in ((mean, set()), (clamped, {True})):
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
    case = replace(case_of("logged", logged(mean)), windows=windows, rate=1e-4)
    ours = by_trainer(case, (1, 8), "apply")
    assert ours.worst <= 1e-9 and (ours.exact or (mean is by_samples and misses == {2: 3, 3: 4}))
    assert ours.exact is not bool(ours.said)
