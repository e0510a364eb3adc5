"""Run by torchrun on two gloo ranks: trainers that compute the loss themselves, one rank beginning without a target.

Its loss does not move with the number handed in, so that it sees another loss than the other rank. JSON on rank 0.
torchrun --nproc_per_node 2 -m tests.backends.owned OUTPUT.json "fsdp2-launched" ...
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_accum_fix
from tests.backends.rows import BACKENDS
from tests.backends.trajectory import HEADS, SPLITS, UNCLIPPED, reference, train
from tests.numerics.heads import Head
from tests.numerics.parity import StockRecorder, pass_over_imports
from tests.torchrun import leave_with

#: Seconds that one training may take.
PATIENCE = 40


def summed(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """The summed loss of a causal head's micro-batch, and its items."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    targets = inputs["labels"][:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return loss, (targets != -100).sum()


class ByNumber(StockRecorder):
    """It never calls the base, divides by N and multiplies by W, as TRL's does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return summed(model, inputs)[0] / num_items_in_batch * dist.get_world_size()


class OwnMean(StockRecorder):
    """It never calls the base, and takes no count."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, items = summed(model, inputs)
        return loss / items.clamp(min=1)


class BySteps(StockRecorder):
    """It divides the base's loss by G, which a rank whose samples have no target cannot see."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def blind_at_first(head: Head, per_device: int) -> Head:
    """Twenty samples, of which the second rank's of the first window have no target."""
    samples = [dict(sample) for sample in (list(head.samples) * 3)[:20]]
    for index in range(8):
        if index // per_device % 2:
            samples[index]["labels"] = torch.full_like(samples[index]["labels"], -100)
    return replace(head, samples=samples)


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, folder = [], Path(tempfile.gettempdir()) / "owned"
    for case in cases:
        backend = BACKENDS[case]
        for kind in (ByNumber, OwnMean, BySteps):
            pass_over_imports()
            # A rank that waits for ever says where.
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            head = blind_at_first(HEADS["llama"], SPLITS[0][0])
            hf_accum_fix.observations.clear()
            found = train(head, backend, SPLITS[0], "apply", UNCLIPPED, folder, trainer_class=kind)
            (run,) = hf_accum_fix.report().to_dict()["runs"]
            error = found.error(reference(head, UNCLIPPED, backend))
            rows.append({"case": case, "kind": kind.__name__, "error": error, "exact": run["exact"]})
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
