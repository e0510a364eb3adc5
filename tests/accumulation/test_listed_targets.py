"""A window whose observed samples list no target, or in part none, is not taken for a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Reduction
from hf_accum_fix.accumulation.evidence.terms import _without_noise
from hf_accum_fix.accumulation.observe import observe


class Boxes(nn.Module):
    """The sum over boxes, and over queries without one, by the number of boxes, or by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        boxes = torch.cat([each["class_labels"] for each in labels])
        summed = boxes.double().sum() + pixel_values.square().sum()
        return self.scale * summed / max(len(boxes), 1)


def batch(*counts: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(len(counts), 3, generator=generator, dtype=torch.float64)
    return {"pixel_values": values, "labels": [{"class_labels": torch.arange(1, 1 + count)} for count in counts]}


@pytest.mark.parametrize(
    ("counts", "conclusive"), [((2, 0), True), ((1, 0), True), ((3, 1, 0), True), ((0, 0), False)], ids=str
)
def test_boxes_that_are_missing_make_no_sum(counts: tuple[int, ...], conclusive: bool) -> None:
    model = Boxes()

    def call(inputs: Any, number: Any) -> tuple[Tensor, dict[str, Any]]:
        return model(**inputs), {}

    found = observe(call, [batch(*counts)], model, device=torch.device("cpu"), passes_number=False)
    assert found.reduction is Reduction.MEAN and str(found.items) == "rows of 'class_labels'"
    assert found.conclusive == conclusive and (found.reason == NO_TARGET_SEEN) != conclusive


@pytest.mark.parametrize(("here", "there"), [(0.3999994, 0.4000001), (0.90000033, 0.8999997), (1.2345004, 1.2344996)])
def test_factors_of_a_mix_are_the_same_on_ranks_that_round_apart(here: float, there: float) -> None:
    """Otherwise ranks would seem to train different losses."""
    assert _without_noise(here) == _without_noise(there)
