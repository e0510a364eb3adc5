"""How a head reduces its loss, and what its items are: observed, or given by hand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError


class Reduction(str, Enum):
    """What a loss does with the items of its micro-batch."""

    NUMBER = "divides by the number handed in"
    INTEGER = "divides by the number handed in, cut to an integer"
    MEAN = "is the mean over its own items"
    SUM = "is a sum"
    PLAIN = "is averaged over micro-batches"


@dataclass(frozen=True)
class LossContract:
    """What has to be known of a loss to accumulate it exactly.

    Attributes:
        reduction: how the loss is reduced.
        items: what ``N`` counts; None only for `Reduction.SUM` and `Reduction.PLAIN`.
        router_coefficient: factor of ``outputs.aux_loss`` inside the loss, a mean per micro-batch that keeps its
            weight; 0.0: there is none.
        alternatives: every rule that fits what was seen as well as ``items``, itself first; another rank's samples, or
            a later window's, may tell them apart.
        owned_by_trainer: a Trainer subclass computes the loss in a ``compute_loss`` that never calls the base.
        changed_by_trainer: a Trainer subclass makes another loss of the one the base computed.
        dtype: of the loss; the number is handed over in float64 only to a loss in float64.
        conclusive: False: settled by the loss call as watched alone, to be observed again in the next window.
        reason: one sentence on how it was found out.
    """

    reduction: Reduction
    items: Items | None = None
    router_coefficient: float = 0.0
    alternatives: tuple[Items, ...] = ()
    owned_by_trainer: bool = False
    changed_by_trainer: bool = False
    dtype: torch.dtype = torch.float32
    conclusive: bool = True
    reason: str = "given by hand"

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            known = ", ".join(f"Reduction.{each.name}" for each in Reduction)
            raise ContractError(f"reduction is {self.reduction!r}; needed is one of {known}")
        if self.items is None and self.reduction in (Reduction.NUMBER, Reduction.INTEGER, Reduction.MEAN):
            raise ContractError(f"a loss that {self.reduction.value} needs its items; pass items=Items(...)")

    @property
    def by_number(self) -> bool:
        """Whether the loss divides by the number handed in."""
        return self.reduction in (Reduction.NUMBER, Reduction.INTEGER)

    @property
    def exact(self) -> bool:
        """Whether every cut of the global batch is known to give the same gradient (router terms by convention)."""
        if self.reduction is Reduction.PLAIN or not self.conclusive or self.changed_by_trainer:
            return False
        return self.by_number or not self.owned_by_trainer

    def __str__(self) -> str:
        of = f" ({self.items})" if self.items is not None else ""
        router = f", plus {self.router_coefficient:g} x router loss" if self.router_coefficient else ""
        return f"{self.reduction.value}{of}{router}"
