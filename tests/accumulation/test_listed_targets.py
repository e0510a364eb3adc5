"""A window whose observed samples list no target, or in part none, is not taken for a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.conclude import Setting
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, Reduction
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.reading import LossRun
from hf_accum_fix.accumulation.rules import matching_rules


class Boxes(nn.Module):
    """The sum over boxes, and over queries without one, by the number of boxes, or by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        boxes = torch.cat([each["class_labels"] for each in labels])
        values = torch.cat([boxes.double(), pixel_values.square().flatten()])
        return (self.scale * values).sum() / max(len(boxes), 1)


def batch(*counts: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(len(counts), 3, generator=generator, dtype=torch.float64)
    return {"pixel_values": values, "labels": [{"class_labels": torch.arange(1, 1 + count)} for count in counts]}


@pytest.mark.parametrize(
    ("counts", "conclusive"), [((2, 0), True), ((1, 0), True), ((3, 1, 0), True), ((0, 0), False)], ids=str
)
def test_boxes_that_are_missing_make_no_sum(counts: tuple[int, ...], conclusive: bool) -> None:
    model = Boxes()

    def call(inputs: Any, number: Any) -> Tensor:
        return model(**inputs)

    found = observe(LossRun(call, model, torch.device("cpu")), [batch(*counts)], Setting())
    assert found.reduction is Reduction.MEAN and str(found.items) == "rows of 'class_labels'"
    assert found.conclusive == conclusive and (found.reason == NO_TARGET_SEEN) != conclusive


@pytest.mark.parametrize(
    ("box", "query"), [(1.0, 0.1), (1.0, 0.4), (0.9, 1.2345), (2.0, 1 / 3)], ids=lambda each: f"{each:.4g}"
)
@pytest.mark.parametrize("rounding", [0.0, 3e-8, -3e-8])
def test_factors_of_a_mix_are_the_same_on_ranks_that_round_apart(box: float, query: float, rounding: float) -> None:
    """Otherwise ranks would seem to train different losses."""
    batches = [batch(3, 1, 0), batch(3), batch(1, 0)]
    counts = [box * sum(map(_boxes, each["labels"])) + query * len(each["labels"]) for each in batches]
    (rule,), times = matching_rules([count * (1 + rounding) for count in counts], batches)
    assert times == 1.0
    assert [factor for factor, _ in rule.mix] == [float(f"{box:.6g}"), float(f"{query:.6g}")]
    assert [str(each) for _, each in rule.mix] == ["rows of 'class_labels'", "samples"]


def _boxes(target: dict[str, Tensor]) -> int:
    return len(target["class_labels"])
