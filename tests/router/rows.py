"""Errors of the auxiliary gradient, one row a family and size of a micro-batch, on one rank or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.numerics.parity import pass_over_imports
from tests.ranks import join, on_ranks
from tests.router.conventions import FAMILIES, InFloat64, auxiliary, twin

CONVENTIONS = ("stock", "mean", "exact")


def row(case: str, ranks: int) -> dict[str, Any]:
    """The relative errors to the float64 twin, and what their logged values say."""
    family, size = case.rsplit(" ", maxsplit=1)
    head, per_device = FAMILIES[family], int(size)
    arguments: dict[str, Any] = {"ddp_backend": "gloo"} if ranks > 1 else {}
    # Label smoothing is the Trainer's; a loop trains by the model's own loss.
    conventions = CONVENTIONS if "label_smoothing_factor" in head.arguments else (*CONVENTIONS, "loop")
    pass_over_imports()
    with InFloat64():
        wanted, value = twin(head)
        found = {name: auxiliary(head, name, per_device, ranks, **arguments) for name in conventions}
    return {
        "family": family,
        "per_device": per_device,
        "ranks": ranks,
        "error": {name: each.error(wanted) for name, each in found.items()},
        "value": {name: each.value / value for name, each in found.items()},
    }


def rows_of(cases: Sequence[str]) -> list[dict[str, Any]]:
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        join()
    return [row(case, ranks) for case in cases]


def errors(ranks: int, cases: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of some cases, "family size", computed by processes of their own."""
    return on_ranks(rows_of, cases, ranks=ranks, timeout=1500, group=False)[0]
