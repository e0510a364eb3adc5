"""Run by torchrun on two gloo ranks: one step of each head and cut, beside the float64 full batch; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.distributed.two_ranks OUTPUT.json "bert-mlm 2x2" "llama 1x4 without items" ...
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.numerics.heads import HEADS, Sample
from tests.numerics.parity import cut, pass_over_imports, reference_step, take_step
from tests.torchrun import leave_with

SPLITS = ((4, 1), (2, 2), (1, 4))
#: A compiled module's DDP graph is dynamo's affair; DDP refuses reversible layers, which run a backward pass inside the
#: backward pass.
LEFT_OUT = ("compiled", "compiled-no-kwargs", "ReformerForMaskedLM")

WITHOUT_ITEMS = (
    "llama", "mixtral", "uses-tensor", "bert-mlm", "no-kwargs", "llama-smoothing", "func-with-mean",
    "DetrForObjectDetection",
)  # fmt: skip


def blank_on_second_rank(samples: Sequence[Sample]) -> list[Sample]:
    """Every other sample without a target: at b=1 the second rank has no item at all."""
    blanked = [dict(sample) for sample in samples]
    for sample in blanked[1::2]:
        labels = sample["labels"]
        listed = isinstance(labels, dict)
        sample["labels"] = (
            {key: value[:0] for key, value in labels.items()} if listed else torch.full_like(labels, -100)
        )
    return blanked


def main(output: Path, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    asked = []
    for case in cases:
        name, cut_as, *blanked = case.split(" ", maxsplit=2)
        per_device, accumulate = map(int, cut_as.split("x"))
        head = HEADS[name]
        samples = blank_on_second_rank(head.samples) if blanked else head.samples
        pass_over_imports()
        # Before there are ranks: a detection head would average its number of boxes over them.
        asked.append((case, head, samples, per_device, accumulate, reference_step(head, cut(samples, per_device))))
    dist.init_process_group("gloo")
    rows = []
    for case, head, samples, per_device, accumulate, reference in asked:
        pass_over_imports()
        row = {"case": case, "tolerance": head.tolerance, "stock_wrong": head.stock_wrong}
        paths = ["apply", "trainer", "stock"] if (per_device, accumulate) == (2, 2) else ["apply"]
        bits = {}
        for path in paths:
            try:
                step = take_step(
                    head,
                    samples,
                    per_device,
                    accumulate,
                    path,
                    Path(tempfile.gettempdir()) / "two_ranks",
                    ddp_backend="gloo",
                )
            except (RuntimeError, TypeError) as error:
                # Of both ranks alike, or the other one would wait for ever.
                row[path] = {"raised": str(error)}
                continue
            bits[path] = step
            row[path] = {
                "gradient": step.error(reference),
                "loss": abs(step.loss - reference.loss) / max(abs(reference.loss), 1e-12),
                "norm": abs(step.norm - reference.norm) / max(reference.norm, 1e-12),
            }
        rows.append(row)
        if "apply" not in bits:
            continue
        if "trainer" in bits:
            one, other = bits["apply"], bits["trainer"]
            same = all(torch.equal(one.change[key], other.change[key]) for key in one.change)
            row["same_bits"] = same and one.loss == other.loss
        # Every rank must hold the same parameters after the step.
        digest = torch.stack([change.sum() for change in bits["apply"].change.values()])
        first_rank = digest.clone()
        dist.broadcast(first_rank, src=0)
        agree = torch.tensor(float(torch.equal(digest, first_rank)))
        dist.all_reduce(agree, op=dist.ReduceOp.MIN)
        row["ranks_agree"] = bool(agree)
    leave_with(rows, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
