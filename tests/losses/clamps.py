"""Means over a count that something keeps from zero, as libraries write them: the count below is the one that adds up.

A micro-batch without a target divides by the floor, and counts none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses.models import points
from tests.losses.rows import EITHER, EXACT, of_points
from tests.losses.seen import Loss, Points, Seen
from tests.losses.verdicts import HALVES, PAIRS, SINGLES, Verdict
from tests.numerics.heads import Sample
from tests.trainings import Case

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


def dapo(s: Seen) -> Tensor:
    """TRL: samples that were cut off are masked."""
    mask = found(s) * (s.batch["labels"].sum(1, keepdim=True) % 2)
    log_p, advantages = F.logsigmoid(s.logits), s.batch["wanted"]
    ratio = torch.exp(log_p - log_p.detach() + 0.1 * s.batch["scores"])
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def vapo(s: Seen) -> Tensor:
    """verl: beside a loss of all tokens the likelihood of those that were right."""
    right = found(s)
    return crossed(s).mean() + 0.1 * (-F.logsigmoid(s.logits) * right).sum() / right.sum().clamp(min=1)


def doremi(s: Seen) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for domain, weight in enumerate((0.2, 0.3, 0.5), 1):
        its = s.batch["labels"] == domain
        loss = loss + weight * (errors(s) * its).sum() / its.sum().clamp_min(1)
    return loss


def deepar(s: Seen) -> Tensor:
    """gluonts: weights."""
    weights = s.batch["scores"]
    weighted = torch.where(weights != 0, errors(s) * weights, torch.zeros_like(weights))
    return weighted.sum() / torch.clamp(weights.sum(), min=1.0)


def corner_net(s: Seen) -> Tensor:
    mask = s.batch["labels"] > 0
    loss = F.smooth_l1_loss(s.logits[mask], s.batch["wanted"][mask], reduction="sum")
    return loss / (mask.to(loss).sum() + 1e-4)


def triplets(s: Seen) -> Tensor:
    """pytorch-metric-learning: those that are not solved; places are anchors, positives and negatives."""
    loss = F.relu(s.logits[:, :2] - s.logits[:, 2:4] + s.batch["wanted"][:, :2])
    return loss.sum() / ((loss > 1e-16).sum() + 1e-16)


def anchors(s: Seen) -> Tensor:
    """mmdetection: one count of two terms."""
    avg_factor = found(s).sum().clamp(min=1.0)
    return crossed(s).sum() / avg_factor + 2.0 * (errors(s) * found(s)).sum() / avg_factor


def ssd(s: Seen) -> Tensor:
    """torchvision: a number of Python, that a rule counts."""
    num_foreground = sum(int((row != -100).sum()) for row in s.batch["matched_labels"])
    return (errors(s) * found(s)).sum() / max(1, num_foreground)


# --- a count that Python has read, or compared --------------------------------------------------------------------


def retina_net(s: Seen) -> Tensor:
    """torchvision: image by image."""
    rows = [s.rows(slice(row, row + 1)) for row in range(len(s.logits))]
    losses = [crossed(row).sum() / max(1, found(row).sum()) for row in rows]
    return sum(losses[1:], losses[0]) / len(losses)


def fcos(s: Seen) -> Tensor:
    num_foreground = found(s).sum().item()
    return (crossed(s).sum() + errors(s)[found(s) > 0].sum()) / max(1, num_foreground)


def yolo(s: Seen) -> Tensor:
    target_scores_sum = max(s.batch["scores"].sum(), 1)
    return F.binary_cross_entropy_with_logits(s.logits, s.batch["scores"], reduction="none").sum() / target_scores_sum


def corn(s: Seen) -> Tensor:
    """coral-pytorch: of each rank those that reach the one below it."""
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


def detr(s: Seen) -> Tensor:
    num_boxes = torch.as_tensor([sum(int((row > 0).sum()) for row in s.batch["labels"])], dtype=torch.float)
    num_boxes = torch.clamp(num_boxes / 1, min=1).item()
    return (errors(s) * found(s)).sum() / num_boxes


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


def bare(s: Seen) -> Tensor:
    """A micro-batch of one target divides by 1."""
    return (errors(s) * found(s)).sum() / found(s).sum()


def with_samples(s: Seen) -> Tensor:
    """As many more as samples are part of the count, which no rule predicts, though one gives the other part."""
    targets = (s.batch["matched_labels"] != -100).sum()
    return crossed(s).sum() / (targets + len(s.logits)) + 0.5 * errors(s).mean()


def one_more_among_them(s: Seen) -> Tensor:
    """A sum that holds more than targets: it counts 1 where there is none."""
    return (crossed(s) * found(s)).sum() / torch.cat([found(s).flatten(), torch.ones(1)]).sum()


#: Other ways to keep a count from zero.
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


def kept(floor: Callable[[Tensor], Tensor]) -> Loss:
    """All elements, as of detectors, over the targets."""
    return lambda s: crossed(s).sum() / floor(found(s).sum())


def three(make: Callable[[int], list[Sample]] = window) -> list[list[Sample]]:
    return [make(number) for number in range(len(TARGETS))]


def by_six(name: str, verdict: Verdict, loss: Loss, **more: Any) -> Case:
    given = {"windows": three(), "cuts": (PAIRS, HALVES, SINGLES), **more}
    return of_points(f"clamp-{name}", verdict, loss, lambda: Points(out=6), **given)


KEPT = (
    bare,
    gliner,
    dapo,
    vapo,
    doremi,
    deepar,
    corner_net,
    triplets,
    anchors,
    corn_of_pixels,
    fcos,
    detr,
    yolo,
    tempered,
)
CASES = [
    *(by_six(each.__name__, EXACT, each) for each in KEPT),
    by_six("ssd", EXACT, ssd, windows=three(matched)),
    *(by_six(f"floor-{name}", EXACT, kept(floor), cuts=(PAIRS,)) for name, floor in FLOORS.items()),
    *(by_six(each.__name__, EXACT, each, cuts=(PAIRS, HALVES)) for each in (corn, two_reads)),
    # A length shows no count; nor do two numbers that were read.
    *(by_six(f"{each.__name__}-alone", EITHER, each, cuts=(SINGLES,)) for each in (corn, two_reads)),
    by_six("either_read", EITHER, either_read, cuts=(HALVES, SINGLES)),
    by_six("one-more", EXACT, kept(lambda n: n + 1)),
    by_six("samples-more", EXACT, with_samples, windows=three(matched), cuts=(PAIRS, HALVES)),
    by_six("one-more-among-them", EITHER, one_more_among_them, cuts=(SINGLES,)),
    by_six("retina_net", EXACT, retina_net, right=(PAIRS, HALVES, SINGLES)),
]
