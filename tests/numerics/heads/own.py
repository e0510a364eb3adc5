"""Modules of one's own, and a compute_loss_func of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.heads.head import FLOAT64, VOCABULARY, Batch, Head, Sample, seeded
from tests.numerics.heads.losses import log_likelihoods, over_number, shifted_cross_entropy
from tests.numerics.heads.samples import first_is_target, text
from tests.numerics.heads.text import llama


def func_with_number(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return over_number(outputs["logits"], labels, num_items_in_batch)


def func_with_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return shifted_cross_entropy(outputs["logits"], labels)


def func_by_hand(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """No loss function of torch in it, so nothing can be watched."""
    log_p, valid = log_likelihoods(outputs["logits"].double(), labels)
    return -(log_p * valid).sum() / num_items_in_batch


def func_with_constant(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A constant without a graph where there is no target, as LLaMA-Factory's DFT loss returns."""
    if not bool((labels[:, 1:] != -100).any()):
        return torch.tensor(0.0, dtype=torch.float64)
    return func_by_hand(outputs, labels, num_items_in_batch)


def func_reference(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch.pop("labels")
    return shifted_cross_entropy(model(**batch)["logits"], labels)


class TokenModel(nn.Module):
    """A language model of one's own; subclasses say what they do with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def logits(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + torch.tanh(self.mix(hidden)).cumsum(dim=1) / 4
        return self.head(hidden)

    def mean(self, input_ids: Tensor, labels: Any, number: Any = None) -> dict[str, Tensor]:
        """Logits; with labels also the loss, which is the sum over the number where there is one."""
        logits = self.logits(input_ids)
        return {"logits": logits} if labels is None else {"loss": over_number(logits, labels, number), "logits": logits}


class NoKwargs(TokenModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> dict[str, Tensor]:
        return self.mean(input_ids, labels)


class DropsKwargs(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        return self.mean(input_ids, labels)


class DeclaresFalse(DropsKwargs):
    accepts_loss_kwargs = False


class UsesTensor(TokenModel):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        return self.mean(input_ids, labels, num_items_in_batch)


class UsesItem(UsesTensor):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        number = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).item()
        return super().forward(input_ids, labels, number)


class UsesInt(UsesTensor):
    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **kw: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels, None if num_items_in_batch is None else int(num_items_in_batch))


class MeanOfSampleMeans(TokenModel):
    """The mean over samples of each sample's own token mean: its items are samples, though its labels are tokens."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        logits, labels = self.logits(input_ids)[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()}


class AttendedOnly(TokenModel):
    """Leaves out what the attention mask does, as LLaVA did up to 4.51."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        attended = attention_mask[:, 1:] != 0
        logits, labels = self.logits(input_ids)[:, :-1][attended], labels[:, 1:][attended]
        return {"loss": F.cross_entropy(logits, labels)}


class RootOfMean(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.mean(input_ids, labels)["loss"].sqrt()}


class TwoTerms(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, kind: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        out = self.mean(input_ids, labels)
        return {"loss": out["loss"] + F.cross_entropy(out["logits"][:, 0, :2], kind)}


def by_function(name: str, function: Callable[..., Tensor], samples: Sequence[Sample], **more: Any) -> Head:
    """Llama by a compute_loss_func."""
    given = {"compute_loss_func": function}
    return Head(name, seeded(llama), samples, FLOAT64, loss=func_reference, trainer=given, **more)


def heads() -> list[Head]:
    some = text(masked=lambda index, length: length if index < 4 else 2)
    two_terms = [{**s, "kind": torch.tensor(i % 2)} for i, s in enumerate(text())]
    return [
        by_function("func-with-number", func_with_number, text(), stock_wrong=False),
        by_function("func-with-mean", func_with_mean, text()),
        by_function("func-by-hand", func_by_hand, text(masked=first_is_target), stock_wrong=False),
        # On two ranks the stock step fails on both at once, so that neither waits for the other.
        by_function("func-with-constant", func_with_constant, some),
        Head("no-kwargs", seeded(NoKwargs), text(), FLOAT64),
        Head("drops-kwargs", seeded(DropsKwargs), text(), FLOAT64),
        Head("declares-false", seeded(DeclaresFalse), text(), FLOAT64),
        Head("uses-tensor", seeded(UsesTensor), text(masked=first_is_target), FLOAT64),
        Head("uses-item", seeded(UsesItem), text(), FLOAT64, stock_wrong=False),
        Head("uses-int", seeded(UsesInt), text(), FLOAT64, stock_wrong=False),
        Head("told-false-after-init", seeded(DropsKwargs), text(), FLOAT64, told_false=True),
        Head("compiled", seeded(lambda: torch.compile(DropsKwargs(), backend="eager")), text(), FLOAT64),
        Head("compiled-no-kwargs", seeded(lambda: torch.compile(NoKwargs(), backend="eager")), text(), FLOAT64),
        Head("mean-of-sample-means", seeded(MeanOfSampleMeans), text(), FLOAT64),
        # On two ranks at b=1 the first rank's samples are all of one length and cannot tell whether the mask counts.
        Head("attended-only", seeded(AttendedOnly), text(lengths=(9, 5, 9, 17, 9, 3, 9, 11)), FLOAT64),
        Head("root-of-mean", seeded(RootOfMean), text(), FLOAT64, exact=False),
        Head("two-terms", seeded(TwoTerms), two_terms, FLOAT64),
    ]
