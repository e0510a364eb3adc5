"""A model with a branch that the last micro-batch of a window does not use, one that none uses, and a tied weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_accum_fix import Items, LossContract, Reduction
from tests.precision.gradients import VOCABULARY

CONTRACT = LossContract(Reduction.MEAN, Items(("labels",)))


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Linear(32, 32)
        self.rare = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)

    def logits(self, input_ids: Tensor) -> Tensor:
        hidden = self.body(self.embed(input_ids)).relu()
        # Rows of 6 tokens come last, with 5 others: whole windows of them end without this branch.
        if int((input_ids > 0).sum()) % 3:
            hidden = hidden + self.rare(hidden)
        return hidden @ self.embed.weight.T

    def summed(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}
