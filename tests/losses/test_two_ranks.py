"""Two gloo ranks, started once, and once more in CI: they agree on what each reads, also of other labels or chunks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.losses.cases import CASES, KEYS, TURNS, labelled
from tests.losses.models import texts
from tests.losses.rows import EITHER, GRADIENT, INEXACT, attack, in_model
from tests.losses.seen import Loss, Mean, Seen, Texts, class_weighted, full, holding
from tests.losses.verdicts import Verdict, by_trainer, faults
from tests.numerics.parity import StockRecorder, pass_over_imports
from tests.ranks import on_ranks
from tests.trainings import Case, Cut

CUT: Cut = (1, 4)
ON_RANKS = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True}
#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 60


class TwoHeads(Texts):
    """Another head, whose loss is logged and has no gradient: ranks wait for none of its parameters."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.other = nn.Linear(16, len(self.head.bias))

    def logits_of_other(self, input_ids: Tensor) -> Tensor:
        return self.other(self.embed(input_ids))


def by_other(s: Seen) -> Seen:
    return s.by(s.model.logits_of_other(s.batch["input_ids"]))


class LeavesOutOnOne(StockRecorder):
    """Every other micro-batch of the second rank, which the first one must not wait for."""

    entered = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.entered += 1
        if self.args.process_index == 1 and self.entered % 2 == 1:
            return torch.zeros((), dtype=torch.float64)
        return super().training_step(*args, **kwargs)


#: Of `CASES`: read alike by both ranks; said, or stock's; declared, clamped and in chunks; trainers of the wild.
_ALSO = """
    alone-teacher alone-mean-of-texts terms-weighted-model terms-hidden-model terms-masked-later
    alone-checkpointed-kind alone-mean-and-kind-detached alone-mean-and-kind-uncertain alone-reentrant-kind
    alone-fused-kind alone-mean-and-kind-reversed alone-mean-and-kind-stop-gradient alone-mean-and-kind-greatest
    public-a-key-that-the-step-adds public-number-plus-one public-number-in-a-kernel public-a-models-number-plus-one
    clamp-gliner-own clamp-doremi-own clamp-floor-large-own chunks-sums
    swift-classes swift-mlm-by-super swift-dpo divides-the-base sum-over-the-number own-step own-step-divided-twice
"""
NAMED = {case.name: case for case in CASES}
WINDOWS = [texts(window) for window in range(3)]
READ = [
    in_model("detached-head", GRADIENT, lambda s: s.tokens + by_other(s).classes.detach(), head=TwoHeads),
    in_model("detached-tokens", GRADIENT, lambda s: s.classes + by_other(s).tokens.detach(), head=TwoHeads),
    # W is 2.
    replace(NAMED["alone-own-half"], verdict=EITHER),
    attack("leaves-out", INEXACT, full(class_weighted), holding(class_weighted, Mean), WINDOWS, LeavesOutOnOne),
]
ROWS: Mapping[str, Case] = {
    each.name: replace(
        each,
        cuts=(each.cuts[0] if each.verdict is Verdict.AVERAGED else CUT,),
        arguments={**each.arguments, **ON_RANKS},
        tolerance=1e-12 if each.verdict is Verdict.STOCK else each.tolerance,
    )
    for each in [
        *READ,
        *(NAMED[name] for name in _ALSO.split()),
        *(labelled(turns, keys, (2, 2), 2) for turns in TURNS for keys in KEYS),
    ]
}


#: One of each that a rank has to hear of.
EVERYDAY = {
    *("detached-head-model", "leaves-out", "alone-own-half", "alone-teacher", "alone-mean-and-kind-uncertain"),
    *("alone-reentrant-kind", "terms-hidden-model", "public-number-plus-one", "clamp-doremi-own", "chunks-sums"),
    *("swift-classes", "divides-the-base", "own-step"),
    next(each.name for each in (labelled(turns, keys, (2, 2), 2) for turns in TURNS for keys in KEYS)),
}


def found(*, everyday: bool) -> dict[str, list[str]]:
    """On each rank: what is against each row."""
    rows = {}
    for name, case in ROWS.items():
        if (name in EVERYDAY) is not everyday:
            continue
        pass_over_imports()
        stock, ours = (by_trainer(case, case.cuts[0], path) for path in ("stock", "apply"))
        every: list[Any] = [None, None]
        dist.all_gather_object(every, (ours.said, ours.exact))
        ours = replace(ours, said=[each for said, _ in every for each in said], exact=all(each for _, each in every))
        rows[name] = faults(ours, case, stock, case.cuts[0])
    return rows


@functools.cache
def of_ranks(*, everyday: bool) -> list[dict[str, list[str]]]:
    return on_ranks(functools.partial(found, everyday=everyday), patience=PATIENCE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.slow) for n in ROWS])
def test_both_ranks_train_the_loss_of_both(name: str) -> None:
    assert [rows[name] for rows in of_ranks(everyday=name in EVERYDAY)] == [[], []]
