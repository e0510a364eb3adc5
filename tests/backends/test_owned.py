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
from tests.trainings import computing


def summed(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """The summed loss of a causal head's micro-batch, and its items."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    targets = inputs["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), (targets != -100).sum()


def by_number(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """It never calls the base, divides by N and multiplies by W, as TRL's does."""
    return summed(model, inputs)[0] / number * dist.get_world_size(), None


def own_mean(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    """It never calls the base, and takes no count."""
    loss, items = summed(model, inputs)
    return loss / items.clamp(min=1), None


class BySteps(DividesTheBase, StockRecorder):
    """It divides the base's loss by G, and is stock's, and said, on a rank whose samples have no target, too."""


def blind_at_first(head: Head, per_device: int) -> Head:
    """Twenty samples, of which the second rank's of the first window have no target."""
    blind = [index for index in range(8) if index // per_device % 2]
    samples = without_targets((list(head.samples) * 3)[:20], blind)
    return replace(head, samples=samples)


#: A trainer and its head; the last is a head that drops the number, which a rank without a target cannot see.
KINDS: dict[str, tuple[type, str]] = {
    "by number": (computing(by_number), "llama"), "own mean": (computing(own_mean), "llama"),
    "by steps": (BySteps, "llama"), "stock": (StockRecorder, "llama-classification"),
}  # fmt: skip


def row(case: str) -> dict[str, tuple[float, bool]]:
    """By trainer how far off it is, and whether it is called exact."""
    found = {}
    for name, (kind, of) in KINDS.items():
        pass_over_imports()
        head = blind_at_first(HEADS[of], SPLITS[0][0])
        folder = Path(tempfile.gettempdir()) / "owned"
        trained = train(head, BACKENDS[case], SPLITS[0], "apply", UNCLIPPED, folder, trainer_class=kind)
        run = hf_accum_fix.report().to_dict()["runs"][-1]
        found[name] = (trained.error(reference(head, UNCLIPPED, BACKENDS[case])), run["exact"])
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    return row_of_each(request, row, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", ["ddp", "fsdp2-launched"])
def test_a_rank_that_begins_without_a_target_keeps_a_sharded_model_in_step(case: str, rows: Any) -> None:
    for name, (error, exact) in rows[case].items():
        # Its code names the steps, and so is stock's.
        assert exact is (name != "by steps") and (error <= 1e-6 or not exact), rows[case]
