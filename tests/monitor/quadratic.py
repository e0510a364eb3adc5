"""A model whose gradient noise scale has a closed form: half the squared distance to normal points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Deviation of the points along each axis; distance of the model's place from their mean along each.
DEVIATIONS = [1.0 + 0.1 * axis for axis in range(20)]
DISTANCE = 0.3


class Quadratic(nn.Module):
    """The loss of one point x is ``|place - x|^2 / 2``: its gradient is ``place - x``."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((len(DEVIATIONS),), DISTANCE, dtype=torch.float64))

    def forward(self, points: Tensor) -> Tensor:
        return (self.place - points).square().sum(-1).mean() / 2


def micro_batches(draw: torch.Generator, sizes: list[int]) -> list[Tensor]:
    """Points around the origin, so many in each."""
    spread = torch.tensor(DEVIATIONS, dtype=torch.float64)
    return [spread * torch.randn(size, len(DEVIATIONS), generator=draw, dtype=torch.float64) for size in sizes]


def closed_form() -> float:
    """Trace of the covariance over the squared gradient [items]."""
    return sum(its**2 for its in DEVIATIONS) / (len(DEVIATIONS) * DISTANCE**2)
