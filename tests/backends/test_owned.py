"""Trainers that compute the loss themselves: ranks that see different losses run as many forwards to observe it.

One rank begins without a target: its loss does not move with the number handed in, so that it sees another loss than
the other rank.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import hf_accum_fix
from tests.backends.rows import BACKENDS
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, reference, train
from tests.numerics.heads import Head
from tests.numerics.heads.samples import without_targets
from tests.numerics.parity import StockRecorder, pass_over_imports
from tests.ranks import row_of_each
from tests.trainers.custom import DividesTheBase


def summed(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """The summed loss of a causal head's micro-batch, and its items."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    targets = inputs["labels"][:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return loss, (targets != -100).sum()


class ByNumber(StockRecorder):
    """It never calls the base, divides by N and multiplies by W, as TRL's does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return summed(model, inputs)[0] / num_items_in_batch * dist.get_world_size()


class OwnMean(StockRecorder):
    """It never calls the base, and takes no count."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, items = summed(model, inputs)
        return loss / items.clamp(min=1)


class BySteps(DividesTheBase, StockRecorder):
    """It divides the base's loss by G, and is stock's, and said, on a rank whose samples have no target, too."""


def blind_at_first(head: Head, per_device: int) -> Head:
    """Twenty samples, of which the second rank's of the first window have no target."""
    blind = [index for index in range(8) if index // per_device % 2]
    samples = without_targets((list(head.samples) * 3)[:20], blind)
    return replace(head, samples=samples)


def row(case: str) -> dict[str, dict[str, Any]]:
    """By trainer and head: whether it is called exact, and how far off it is."""
    found = {}
    # The last is a head that takes the number and drops it, which a rank without a target cannot see.
    kinds = {ByNumber: "llama", OwnMean: "llama", BySteps: "llama", StockRecorder: "llama-classification"}
    for kind, name in kinds.items():
        pass_over_imports()
        head = blind_at_first(HEADS[name], SPLITS[0][0])
        hf_accum_fix.observations.clear()
        folder = Path(tempfile.gettempdir()) / "owned"
        trained = train(head, BACKENDS[case], SPLITS[0], "apply", UNCLIPPED, folder, trainer_class=kind)
        (run,) = hf_accum_fix.report().to_dict()["runs"]
        found[f"{kind.__name__} {name}"] = {
            "error": trained.error(reference(head, UNCLIPPED, BACKENDS[case])),
            "exact": run["exact"],
        }
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", ["ddp", "fsdp2-launched"])
def test_a_rank_that_begins_without_a_target_keeps_a_sharded_model_in_step(case: str, rows: Any) -> None:
    for name, found in rows[case].items():
        # Its code names the steps, and so is stock's.
        said = name.startswith(BySteps.__name__)
        assert found["exact"] is not said and (said or found["error"] <= 1e-6), rows[case]
