"""Two gloo ranks, started once: what each reads of a loss is agreed on, also where one has other labels or chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.losses import cases, models, test_chunks, test_labels
from tests.losses.cases import EITHER, EXACT, GRADIENT, INEXACT, in_model, in_own
from tests.losses.seen import Loss, Seen, Texts, both
from tests.losses.test_called_exact import AS_STOCK
from tests.losses.verdicts import Verdict, by_trainer, faults
from tests.numerics.parity import pass_over_imports
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


READ = [
    in_own("both", EXACT, both),
    in_own("sample-means", EXACT, cases.sample_means),
    in_own("checkpoint", EXACT, cases.beside_classes(cases.checkpointed(False))),
    in_own("detached", GRADIENT, cases.with_detached),
    in_model("detached-head", GRADIENT, lambda s: s.tokens + by_other(s).classes.detach(), head=TwoHeads),
    in_model("detached-tokens", GRADIENT, lambda s: s.classes + by_other(s).tokens.detach(), head=TwoHeads),
    # In the model, since ranks look for its parameters in a forward.
    in_model("uncertain", EITHER, cases.uncertain, learnt={"s": [0.2, -0.3]}),
    in_own("reentrant", EITHER, cases.beside_classes(cases.checkpointed(True))),
    in_own("fused", EITHER, cases.beside_classes(cases.by_function(models.Fused))),
    in_own("reversed", EITHER, cases.with_reversed),
    # W is 2.
    in_own("half", EITHER, cases.half),
    in_own("balanced", INEXACT, cases.balanced_terms),
    in_own("max", INEXACT, cases.greater),
]
ROWS: Mapping[str, Case] = {
    each.name: replace(each, cuts=(each.cuts[0] if each.verdict is Verdict.AVERAGED else CUT,), arguments=ON_RANKS)
    for each in [
        *READ,
        *(replace(each, verdict=Verdict.STOCK, tolerance=1e-12) for each in AS_STOCK),
        *(replace(test_chunks.case(name, CUT, ranks=2), name=f"chunks-{name}") for name in ("halves", "pairs")),
        *(test_labels.case(turns, keys, (2, 2), 2) for turns in test_labels.TURNS for keys in test_labels.KEYS),
    ]
}


def found() -> dict[str, list[str]]:
    """On each rank: what is against each row."""
    rows = {}
    for name, case in ROWS.items():
        pass_over_imports()
        stock, ours = (by_trainer(case, case.cuts[0], path) for path in ("stock", "apply"))
        every: list[Any] = [None, None]
        dist.all_gather_object(every, (ours.said, ours.exact))
        ours = replace(ours, said=[each for said, _ in every for each in said], exact=all(each for _, each in every))
        rows[name] = faults(ours, case, stock, case.cuts[0])
    return rows


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, list[str]]]:
    return on_ranks(found, patience=PATIENCE)


@pytest.mark.parametrize("name", ROWS)
def test_both_ranks_train_the_loss_of_both(name: str, of_ranks: list[dict[str, list[str]]]) -> None:
    assert [rows[name] for rows in of_ranks] == [[], []]
