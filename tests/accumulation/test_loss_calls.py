"""What is seen of loss calls: torch's, and Liger's, whose kernels tests/clients/test_liger.py runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accum_fix.accumulation.loss_calls import LossCalls, weighing
from hf_accum_fix.errors import ContractError

LIGER = "liger_kernel.transformers.functional"


@dataclass
class WithAccuracy:
    """As Liger returns its loss where it is asked for more."""

    loss: Tensor
    token_accuracy: Tensor


def fused(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Any = None,
    ce_weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_token_accuracy: bool = False,
) -> Any:
    """A loss by hand, in Liger's order of arguments."""
    kept = target != ignore_index
    at = target.where(kept, 0)
    weights = kept.float() if ce_weight is None else ce_weight[at] * kept
    losses = -(input @ weight.T).log_softmax(-1).gather(1, at[:, None])[:, 0] * weights
    loss = losses.sum() / (weights.sum() if reduction == "mean" else 1)
    return WithAccuracy(loss, kept.float().mean()) if return_token_accuracy else loss


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType(LIGER)
    module.liger_fused_linear_cross_entropy = fused
    monkeypatch.setitem(sys.modules, LIGER, module)
    yield module
    assert module.liger_fused_linear_cross_entropy is fused


INPUT, LINEAR = torch.randn(5, 4), torch.randn(7, 4)
TARGET = torch.tensor([1, -100, 3, 6, -100])
CLASSES = torch.arange(1.0, 8.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("more", [False, True])
def test_a_fused_loss_is_seen_as_its_cross_entropy(liger: Any, reduction: str, more: bool) -> None:
    for weights in (None, CLASSES):
        given = {"ce_weight": weights, "reduction": reduction, "return_token_accuracy": more}
        with LossCalls() as calls:
            out = liger.liger_fused_linear_cross_entropy(INPUT, LINEAR, TARGET, **given)
            F.cross_entropy(INPUT @ LINEAR.T, TARGET, weights, reduction=reduction)
        ours, torchs = calls.seen
        assert isinstance(out, WithAccuracy) is more
        assert (ours.reduction, ours.weighted, ours.ignore_index) == (reduction, weights is not None, -100)
        assert (float(ours.items), int(ours.targets)) == (float(torchs.items), 3)
        assert float(ours.value) == pytest.approx(float(torchs.value), rel=1e-6)


def test_a_fused_loss_takes_no_weights_of_samples(liger: Any) -> None:
    """It would train them all alike."""
    with pytest.raises(ContractError, match="expected torch's"), weighing({5: torch.ones(5)}):
        liger.liger_fused_linear_cross_entropy(INPUT, LINEAR, TARGET)
