"""An engine that rounds the loss to 16 bits, as FSDP2 does in mixed precision, does not hide what the loss does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.accumulation.contract import Reduction
from tests.numerics.heads import HEADS
from tests.numerics.parity import contract_of, take_step


class Rounded(nn.Module):
    """A model whose loss comes out in bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        outputs = self.inner(input_ids=input_ids, labels=labels, **kwargs)
        outputs["loss"] = outputs["loss"].bfloat16()
        return outputs


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_rounded_loss_is_observed_as_the_loss_it_is(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    rounded = type(head)(**{**vars(head), "build": lambda: Rounded(head.build())})
    plain = contract_of(take_step(head, head.samples, 2, 4, "apply", tmp_path))
    found = contract_of(take_step(rounded, head.samples, 2, 4, "apply", tmp_path))
    assert plain.reduction is Reduction.NUMBER and plain.dtype is not torch.bfloat16
    assert (found.reduction, found.items, found.router_coefficient, found.conclusive) == (
        plain.reduction,
        plain.items,
        plain.router_coefficient,
        plain.conclusive,
    )
