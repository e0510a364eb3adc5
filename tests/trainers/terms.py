"""Losses with terms, and losses that a trainer owns: each a mean over items of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.models import z_loss
from tests.numerics.heads import Batch, NoKwargs, TokenModel, seeded, shifted_cross_entropy
from tests.numerics.heads.head import Head
from tests.numerics.heads.samples import text
from tests.trainers.runs import Case, FullLoss, Ordered, owning
from tests.trainings import in_step


class Number(TokenModel):
    """Divides by the number, as the library's causal heads do, beside a z-loss over attended tokens."""

    weight = 0.0

    def forward(self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        number = kwargs.get("num_items_in_batch")
        made = self.mean(input_ids, labels, (labels[:, 1:] != -100).sum() if number is None else number)
        return {**made, "loss": made["loss"] + self.weight * z_loss(made["logits"], attention_mask.bool())}


class NumberAndZ(Number):
    """With it."""

    weight = 0.1


class Weighted(TokenModel):
    """Classes of tokens, weighted, beside classes of texts: no rule counts the weights."""

    def forward(self, input_ids: Tensor, labels: Any = None, kind: Any = None, attention_mask: Any = None) -> Any:
        logits = self.logits(input_ids)
        weight = torch.linspace(0.2, 1.0, logits.shape[-1], dtype=logits.dtype)
        tokens = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weight)
        return {"loss": tokens + F.cross_entropy(logits[:, 0, :2], kind), "logits": logits}


class Hidden(TokenModel):
    """Beside the mean over targets a z-loss over tokens that its forward chooses."""

    dropout = 0.0

    def forward(self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None, chosen: Any = None) -> Any:
        logits = F.dropout(self.logits(input_ids), self.dropout, self.training)
        chosen = self.chosen(input_ids, logits) if chosen is None else chosen.bool()
        loss = shifted_cross_entropy(logits, labels)
        return {"loss": loss + 0.1 * z_loss(logits, chosen), "logits": logits}

    def chosen(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        return input_ids % 3 == 1


class Hard(Hidden):
    """Over the tokens that its parameters choose."""

    def chosen(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        return logits[..., 0] > logits[..., 1]


class WithDropout(Hidden):
    dropout = 0.5


def by(loss: FullLoss) -> Any:
    """Computes its loss by itself, and ignores the number."""
    return owning(lambda trainer, base, model, inputs, number: (loss(model, inputs), {}))


def own_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over samples that no loss function of torch computes."""
    logits = model(input_ids=batch["input_ids"])["logits"]
    return -F.logsigmoid(logits[:, 0, 0] - logits[:, 0, 1]).mean()


def masked_later(inputs: Any) -> dict[str, Any]:
    """Without the labels of every fourth token."""
    return {**inputs, "labels": inputs["labels"].masked_fill(inputs["input_ids"] % 4 == 0, -100)}


def divergence(logits: Tensor, inputs: Any) -> Tensor:
    """Of a fixed teacher that is a function of the tokens, over attended tokens."""
    teacher = torch.cos(inputs["input_ids"][..., None] * torch.arange(1, logits.shape[-1] + 1)).to(logits)
    each = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return each[inputs["attention_mask"].bool()].mean()


def distilling(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """The base's loss, and a divergence."""
    loss, outputs = base(model, inputs, True, num_items_in_batch=number)
    return loss + 0.4 * divergence(outputs["logits"], inputs), outputs


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(**batch)
    return outputs["loss"] + 0.4 * divergence(outputs["logits"], batch)


TEXT = text()
KINDS = [{**sample, "kind": torch.tensor(i % 2)} for i, sample in enumerate(TEXT)]
#: What `Hidden` chooses, as an input.
CHOSEN = [{**sample, "chosen": (sample["input_ids"] % 3 == 1).long()} for sample in TEXT]
MEAN, NUMBER, NUMBER_AND_Z, WEIGHTED, HIDDEN, HARD, WITH_DROPOUT, CHOSEN_BY_INPUT = (
    Head(cls.__name__, seeded(cls), samples)
    for cls, samples in [
        (NoKwargs, TEXT),
        (Number, TEXT),
        (NumberAndZ, TEXT),
        (Weighted, KINDS),
        (Hidden, TEXT),
        (Hard, TEXT),
        (WithDropout, TEXT),
        (WithDropout, CHOSEN),
    ]
)
SHORT = (3, 3)
CUTS = ((2, 4), SHORT)

EXACT = [
    Case("number-and-z-loss", NUMBER_AND_Z, Ordered, cuts=CUTS),
    Case("own-by-hand", MEAN, by(own_by_hand), own_by_hand, cuts=(SHORT,)),
    Case("distilled-number", NUMBER, owning(distilling), distilled, cuts=CUTS),
    # No input counts one of their terms, so forwards count it.
    Case("weighted-beside-classes", WEIGHTED, Ordered, cuts=CUTS),
    Case("hidden-choice", HIDDEN, Ordered, cuts=CUTS),
    Case("hard-examples", HARD, Ordered, cuts=CUTS),
]
#: After the window was fetched.
SAID = [
    Case(
        "number-and-z-loss-masked-later",
        NUMBER_AND_Z,
        in_step(masked_later),
        lambda model, batch: model(**masked_later(batch))["loss"],
        cuts=CUTS,
    )
]
