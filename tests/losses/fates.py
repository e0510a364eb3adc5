"""What became of a window that is not exact: the mean over its micro-batches, or stock's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.losses.verdicts import by_trainer
from tests.numerics.parity import applied
from tests.trainings import Case, Cut, pieces, train

#: Relative error of a gradient: of the full batch's, and what rounding leaves of a sum in another order.
EXACT, SAME = 1e-9, 1e-12


def fates(case: Case, cut: Cut, window: int = -1) -> dict[str, float]:
    """How far one window's gradient (the last) is from each of what it may be; empty: the training is called exact."""
    ours = by_trainer(case, cut, "apply")
    if ours.exact:
        return {}
    with tempfile.TemporaryDirectory() as output, applied("stock"):
        stock = train(case, cut, Path(output), ours.begun)
    found, at = ours.gradients[window], window % len(case.windows)
    return {
        "exact": ours.windows[window] * SAME / max(EXACT, case.tolerance),
        "averaged": _apart(found, _averaged(case, cut, at, ours.begun[window])),
        "stock": _apart(found, stock.gradients[window]),
    }


def _averaged(case: Case, cut: Cut, window: int, begun: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the mean over micro-batches of the case's own loss."""
    model, parts = case.build(), pieces(case.windows[window], cut)
    model.load_state_dict(begun, strict=False)
    model.train()
    if hasattr(model, "step"):
        model.step = window
    for part in parts:
        (case.loss(model, case.collate(part), window) / len(parts)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The relative error of gradients, of which a missing one is zero."""
    names = sorted({*found, *wanted})
    zeros = {name: torch.zeros_like({**found, **wanted}[name]) for name in names}
    one, other = (torch.cat([{**zeros, **each}[name].flatten().double() for name in names]) for each in (found, wanted))
    return float((one - other).norm() / (other.norm() or 1.0))
