"""Run by torchrun on two gloo ranks: class weights, a trainer that leaves micro-batches out on one rank, sample means.

torchrun --nproc_per_node 2 -m tests.trainers.unusual_two_ranks OUTPUT.json
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_accum_fix
from tests.losses.models import Mean, class_weighted, texts
from tests.numerics.heads import Batch, TokenModel, seeded
from tests.numerics.heads.head import Head
from tests.numerics.parity import pass_over_imports
from tests.torchrun import leave_with
from tests.trainers.runs import Case, Ordered, full_batch, run

#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 20


class Weighted(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        return {"loss": class_weighted(self.logits(input_ids), labels)}


class LeavesOutOnOne(Ordered):
    entered = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.entered += 1
        if self.args.process_index == 1 and self.entered % 2 == 1:
            return torch.zeros((), dtype=torch.float64)
        return super().training_step(*args, **kwargs)


HEAD = Head("weighted", seeded(Weighted), texts())
#: The one is exact.
CASES = [Case("weighted", HEAD, Ordered, right=True), Case("leaves-out-on-one", HEAD, LeavesOutOnOne)]


def sample_means(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over samples, each by the mean over its own targets."""
    return torch.stack([model(**HEAD.batch([sample]))["loss"] for sample in MEANS.head.samples]).mean()


MEANS = Case("sample-means", Head("mean", seeded(Mean), texts()), Ordered, loss=sample_means)


def main(output: Path) -> None:
    torch.set_num_threads(1)
    wanted = full_batch(MEANS)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    rows = []
    for case in CASES:
        pass_over_imports()
        patched = run(case, (2, 2), "apply", steps=3, learning_rate=0.05, ddp_backend="gloo")
        rows.append({"raised": patched.raised and repr(patched.raised), "exact": patched.exact})
    pass_over_imports()
    with hf_accum_fix.apply(per_sample=True):
        means = run(MEANS, (2, 2), "stock", ddp_backend="gloo")
    rows.append({"raised": None, "exact": means.exact, "error": means.error(wanted)})
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
