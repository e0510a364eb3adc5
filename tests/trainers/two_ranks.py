"""Run by torchrun on two gloo ranks: trainers from the wild, and ranks with different tasks; JSON on rank 0.

torchrun --nproc_per_node 2 -m tests.trainers.two_ranks OUTPUT.json [read]
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.losses import cases as read_loss
from tests.losses.tasks import by_share, in_common
from tests.numerics.heads import Sample, TokenModel, seeded
from tests.numerics.heads.head import Head
from tests.numerics.heads.samples import text
from tests.numerics.parity import pass_over_imports
from tests.torchrun import leave_with
from tests.trainers import custom as wild
from tests.trainers import terms
from tests.trainers.runs import Case, Cut, Ordered, Run, full_batch, run

#: Eight samples a step: of a micro-batch x micro-batches on each of two ranks.
CUTS: tuple[Cut, ...] = ((2, 2), (1, 4))


class TwoTasks(TokenModel):
    """Classes of samples under one key, classes of tokens under another or under the same."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        labels: Any = None,
        class_labels: Any = None,
        token_labels: Any = None,
    ) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        wanted = next(each for each in (labels, class_labels, token_labels) if each is not None)
        if wanted.ndim == 2:
            return {"loss": F.cross_entropy(logits.flatten(0, 1), wanted.flatten())}
        return {"loss": F.cross_entropy(logits[:, 0], wanted)}


def alternately(first: str, second: str) -> list[Sample]:
    """Classes of samples and of tokens by turns, so that each rank has one kind where a micro-batch is one sample."""
    return [
        {"input_ids": sample["input_ids"], **({first: sample["labels"][-1]} if i % 2 else {second: sample["labels"]})}
        for i, sample in enumerate(text(lengths=(9,) * 8))
    ]


def _tasks(name: str, first: str, second: str) -> Case:
    samples = alternately(first, second)
    head = Head(name, seeded(TwoTasks), samples, collate=in_common)
    return Case(name, head, Ordered, loss=lambda model, batch: by_share(model, samples), cuts=((1, 4),))


WILD = ("swift-classes", "swift-dpo", "swift-classes-by-super", "divides-the-base", "without-the-number")
CASES = [
    Case("sum-over-the-number", wild.NUMBER, wild.SumOverTheNumber, cuts=CUTS),
    *(Case(c.name, c.head, c.trainer, c.loss, c.given, c.arguments, cuts=CUTS) for c in wild.CASES if c.name in WILD),
    _tasks("other-keys-on-each-rank", "class_labels", "token_labels"),
    _tasks("other-tasks-on-each-rank", "labels", "labels"),
    *(Case(c.name, c.head, c.trainer, cuts=((4, 1), (2, 2))) for c in wild.OWN_STEPS),
    *(Case(c.name, c.head, c.trainer, c.loss, cuts=CUTS) for c in (*terms.EXACT, *terms.SAID)),
]
#: That of these every one is exact, is held as well.
EXACT = {case.name for case in terms.EXACT}
ROWS = [f"{case.name} {cut[0]}x{cut[1]}" for case in CASES for cut in case.cuts]
#: Losses that are read from their graphs, by a start of their own, with the verdict of each row.
READ = [Case(c.name, c.head, c.trainer, c.loss, cuts=CUTS) for cases in read_loss.TWO_RANKS.values() for c in cases]
VERDICTS = {
    f"{case.name} {cut[0]}x{cut[1]}": verdict
    for verdict, cases in read_loss.TWO_RANKS.items()
    for case in cases
    for cut in CUTS
}
#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 20


def main(output: Path, *group: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    rows = []
    for case in READ if "read" in group else CASES:
        steps = 2 if case.trainer in (wild.OwnStep, wild.OwnStepDividedTwice) else 1
        wanted = full_batch(case, steps)
        for cut in case.cuts:
            pass_over_imports()
            stock, patched = (
                run(case, cut, path, steps=steps, ddp_backend="gloo", ddp_find_unused_parameters=True)
                for path in ("stock", "apply")
            )
            found: dict[str, Any] = {"case": f"{case.name} {cut[0]}x{cut[1]}", "stock": stock.error(wanted)}
            rows.append({**found, **_told(patched, wanted)})
    leave_with(rows, output)


def _told(patched: Run, wanted: dict[str, Tensor]) -> dict[str, Any]:
    if patched.raised is not None:
        told = f"{type(patched.raised).__name__}: {patched.raised}"
        return {"refused": patched.refused, "raised": told, "exact": False}
    warned = bool(patched.warned)
    return {"refused": False, "apply": patched.error(wanted), "exact": bool(patched.exact), "warned": warned}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
