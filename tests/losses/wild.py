"""Losses as public code writes them: each once trained wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses import models
from tests.losses.models import model_itself
from tests.losses.rows import EITHER, EXACT, GRADIENT, INEXACT, STOCK, attack, texts
from tests.losses.seen import ByNumber, Mean, Seen, full, tokens
from tests.losses.verdicts import HALVES, PAIRS, SINGLES, Verdict
from tests.numerics.heads import Batch
from tests.numerics.heads.samples import without_targets
from tests.trainings import Case, computing

#: ``(trainer, seen, number)`` -> the loss of a micro-batch.
Public = Callable[[Any, Seen, Any], Tensor]


def public(
    name: str, verdict: Verdict, loss: Public, wanted: Callable[[Seen, int], Tensor] | None = None, **more: Any
) -> Case:
    """``wanted``: of the global batch, by step; None: the same loss, which needs no trainer or number."""

    def computed(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        return loss(trainer, Seen(logits, inputs, models.bare(model)), number), {}

    def reference(model: Any, batch: Batch, step: int) -> Tensor:
        return full(lambda s: loss(None, s, None) if wanted is None else wanted(s, step))(model, batch, step)

    given = {"windows": [texts(0), texts(1)], "cuts": (HALVES, PAIRS, SINGLES), **more}
    return attack(f"public-{name}", verdict, reference, Mean, given.pop("windows"), computing(computed), **given)


def summed(s: Seen) -> Tensor:
    return s.each_token[0].sum()


def of_one_class(s: Seen) -> Tensor:
    """Of no sample of some micro-batches."""
    its = s.batch["kind"] == 1
    return (s.each_class * its).sum() / its.sum().clamp(min=1)


def in_parts(s: Seen) -> Tensor:
    losses, valid = s.each_token
    return sum((each.sum() for each in losses.flatten().split(7)), torch.zeros(())) / valid.sum()


SUMS = [
    # A temperature squared, that is G by chance; a trainer's own division would be in both terms.
    public("four-times-one-term", EXACT, lambda t, s, n: s.tokens + 4.0 * s.classes, cuts=(PAIRS,)),
    public("a-sum-in-parts", EXACT, lambda t, s, n: in_parts(s)),
    public("a-mean-over-samples-of-sums", EXACT, lambda t, s, n: s.classes + s.logits[:, :2].square().mean(0).sum()),
    # A divisor of 1 is one item, or none.
    public("of-one-class", EXACT, lambda t, s, n: of_one_class(s), cuts=(HALVES,)),
    public("of-one-class-or-none", EITHER, lambda t, s, n: of_one_class(s), cuts=(PAIRS, SINGLES)),
    public("changed-in-place", EITHER, lambda t, s, n: of_one_class(s).add_(s.tokens), cuts=(PAIRS, SINGLES)),
    public("a-vector-of-one", EXACT, lambda t, s, n: s.tokens.unsqueeze(0).mean()),
    # Targets of one sample alone at first, which is said.
    attack(
        "public-few-targets",
        GRADIENT,
        full(tokens),
        ByNumber,
        [without_targets(models.texts(), {*range(8)} - {3}), models.texts(1), models.texts(2)],
        cuts=(HALVES, SINGLES),
        right=(HALVES, SINGLES),
    ),
]


# --- a number that is hidden: stock's, to the bit -----------------------------------------------------------------


class SumOver(torch.autograd.Function):
    """A fused kernel that divides by the number within."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, number: Any) -> Tensor:
        ctx.number, ctx.count = number, losses.shape
        return losses.sum() / number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (gradients[0] / ctx.number).expand(ctx.count), None


def of_added_key(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    logits = model(input_ids=inputs["input_ids"])["logits"] / inputs["temperature"]
    return summed(Seen(logits, inputs)) / number, {}


class AddsKey(computing(of_added_key)):  # type: ignore[misc]
    """A step that adds what the loss reads, so that the loss cannot be observed before it."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(model, {**inputs, "temperature": 1.0}, *args, **kwargs)


class PlusOne(ByNumber):
    """A model that divides by one more than its number, or than its own count, which is trained then."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return self.mean(input_ids, labels, count + 1)


def over_one_more(s: Seen, step: int) -> Tensor:
    return summed(s) / ((s.batch["labels"] != -100).sum() + 1)


def in_a_kernel(trainer: Any, s: Seen, number: Any) -> Tensor:
    return SumOver.apply(s.each_token[0].flatten(), number)


TWO = [models.texts(0), models.texts(1)]
RIGHT = {"right": (HALVES, PAIRS, SINGLES)}
STOCK_IS_RIGHT = [
    attack("public-a-key-that-the-step-adds", STOCK, full(tokens), Mean, TWO, AddsKey, cuts=RIGHT["right"], **RIGHT),
    public("number-plus-one", STOCK, lambda t, s, n: summed(s) / (n + 1), over_one_more, **RIGHT),
    public("number-in-a-kernel", STOCK, in_a_kernel, lambda s, _: s.tokens, **RIGHT),
    attack("public-a-models-number-plus-one", EXACT, model_itself, PlusOne, TWO, cuts=RIGHT["right"], **RIGHT),
]


# --- no sum of means ----------------------------------------------------------------------------------------------


def alike_later(s: Seen, step: int) -> Tensor:
    """From the second window on also of every text to the others of its batch."""
    found = F.normalize(s.logits[:, 0], dim=-1)
    return s.tokens + min(1.0, step / 2) * (found @ found.T).logsumexp(1).mean()


def hardest(s: Seen) -> Tensor:
    """A third of a micro-batch's tokens, at least one."""
    losses, valid = s.each_token
    found = losses[valid].sort(descending=True)[0]
    return found[: max(1, len(found) // 3)].mean()


def over_first(trainer: Any, s: Seen, number: Any) -> Tensor:
    """Over its first value, which the trainer keeps."""
    if not hasattr(trainer, "first_loss"):
        trainer.first_loss = float(s.tokens.detach())
    return s.tokens / trainer.first_loss


def with_backward(trainer: Any, s: Seen, number: Any) -> Tensor:
    trainer.accelerator.backward(0.5 * s.tokens / trainer.args.gradient_accumulation_steps, retain_graph=True)
    return s.classes


def normed_weights(s: Seen) -> Tensor:
    """Weights over their mean, of a policy's ratios, which begin at 1."""
    weights = 1.0 + s.batch["kind"]
    ratio = (s.each_class - s.each_class.detach()).exp()
    return -(weights / weights.double().mean() * ratio).mean()


def over_the_batch_size(trainer: Any, s: Seen, number: Any) -> Tensor:
    """At G = 2 a half may be the trainer's own division, beside the batch size too."""
    return 0.5 * s.each_class.sum() / trainer.args.per_device_train_batch_size


def positions(s: Seen) -> Tensor:
    """Texts of one length, and of one class, do not show on what it depends."""
    return F.cross_entropy(s.logits.mean(1)[:, :4], s.batch["kind"])


NO_SUMS = [
    public(name, INEXACT, lambda t, s, n, loss=loss: loss(s), **more)  # type: ignore[misc]
    for name, loss, more in [
        ("normed-weights-of-ratios", normed_weights, {}),
        # Padding is no position of its micro-batch alone.
        ("squares-over-padding", lambda s: s.tokens + s.logits.square().mean(), {"cuts": (PAIRS, SINGLES)}),
        ("hardest-third", hardest, {"cuts": (PAIRS, SINGLES)}),
        ("spike-guard", lambda s: s.classes * (0.1 if float(s.classes.detach()) > 3.0 else 1.0), {"cuts": (SINGLES,)}),
        ("padded-later", positions, {"windows": [texts(0, (12,) * 8), texts(1)], "cuts": (HALVES, PAIRS)}),
        ("stacked-dot", lambda s: torch.dot(torch.tensor([0.3, 0.7]).double(), s.stack), {}),
    ]
]
NO_SUMS += [
    public("half-over-the-batch-size", INEXACT, over_the_batch_size, lambda s, _: 0.5 * s.classes, cuts=(HALVES,)),
    public(
        "coupled-later",
        INEXACT,
        lambda t, s, n: alike_later(s, t.state.global_step),
        alike_later,
        windows=[texts(window) for window in range(3)],
    ),
    public("over-its-first-value", INEXACT, over_first, lambda s, _: s.tokens / s.tokens.detach(), windows=[texts()]),
    public("backward-in-compute-loss", INEXACT, with_backward, lambda s, _: 0.5 * s.tokens + s.classes, whole=False),
]

CASES = [*SUMS, *STOCK_IS_RIGHT, *NO_SUMS]
