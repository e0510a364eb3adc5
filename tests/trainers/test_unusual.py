"""Found by reading the code with fresh eyes: stock trains, and so must what is patched; nothing wrong goes unsaid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix.counting.items import Items
from hf_accum_fix.learning.contract import LossContract, Reduction, TermSpec
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.session import Session
from hf_accum_fix.weighing.part import Part
from hf_accum_fix.window.window import Window
from tests.losses.models import texts
from tests.losses.seen import Mean, class_weighted, holding
from tests.numerics.heads import Head, seeded
from tests.numerics.heads.detection import LW_DETR
from tests.numerics.heads.head import of_class
from tests.numerics.heads.samples import boxes, images
from tests.numerics.heads.vision import frozen_batch_norm
from tests.numerics.parity import pass_over_imports
from tests.ranks import join, on_ranks
from tests.trainers import runs
from tests.trainers.runs import Ordered, run

# --- on two ranks ---------------------------------------------------------------------------------------------------

#: Whatever waits for the other rank longer than that waits for ever [s].
PATIENCE = 20


class LeavesOutOnOne(Ordered):
    entered = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.entered += 1
        if self.args.process_index == 1 and self.entered % 2 == 1:
            return torch.zeros((), dtype=torch.float64)
        return super().training_step(*args, **kwargs)


WEIGHTED = Head("weighted", seeded(holding(class_weighted, Mean)), texts())
#: The one is exact.
ON_RANKS = [
    runs.Case("weighted", WEIGHTED, Ordered, right=True),
    runs.Case("leaves-out-on-one", WEIGHTED, LeavesOutOnOne),
]


def rows_of() -> list[dict[str, Any]]:
    """On each rank: what became of each of `ON_RANKS`."""
    join(PATIENCE)
    rows = []
    for case in ON_RANKS:
        pass_over_imports()
        patched = run(case, (2, 2), "apply", steps=3, learning_rate=0.05, ddp_backend="gloo")
        rows.append({"raised": patched.raised and repr(patched.raised), "exact": patched.exact})
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return on_ranks(rows_of, group=False)[0]


def test_a_rank_that_leaves_micro_batches_out_is_not_waited_for(rows: list[dict[str, Any]]) -> None:
    """The items of class weights are counted in the loss call, and summed over ranks as a window ends."""
    assert [row["raised"] for row in rows] == [None] * len(ON_RANKS)
    assert [row["exact"] for row in rows] == [case.right for case in ON_RANKS]


def test_another_loss_than_the_observed_one_is_said_on_any_device(caplog: pytest.LogCaptureFixture) -> None:
    """Which terms a loss has is known without waiting for the device."""
    contract = LossContract(Reduction.MEAN, Items(), terms=(TermSpec(("MeanBackward0", True, (True, False))),))
    part = Part(contract, {Items(): torch.ones(())}, 1, 1)
    part.changed = "its loss has other terms than the observed one: SumBackward0"
    model = nn.Linear(1, 1)
    trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda"), world_size=1, process_index=0, gradient_accumulation_steps=2),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, distributed_type=DistributedType.NO),
        state=SimpleNamespace(global_step=0),
        model=model,
        model_wrapped=model,
    )
    session = Session(trainer, Options())
    session.state.loss.contract = contract
    assert Window(session, [{}], part, done=1).close(model) is None
    assert session.state.inexact == 1
    assert "is not exact: its loss has other terms" in caplog.text


# --- groups of queries: a micro-batch without a box is divided by one box of all groups together -----------------


def test_a_micro_batch_without_boxes_under_groups_of_queries() -> None:
    """LW-DETR divides by boxes x groups, but by at least 1."""

    def some_without(index: int, g: torch.Generator) -> dict[str, Tensor]:
        found = boxes(index, g)
        return {key: value[:0] for key, value in found.items()} if index in (2, 3) else found

    samples = images(some_without, 64, torch.float32)
    config = {**LW_DETR, "group_detr": 8}
    head = of_class("LwDetrForObjectDetection", config, samples, 1e-5, dtype=torch.float32, prepare=frozen_batch_norm)
    case = runs.Case("groups", head, Ordered, floor=1e-5)
    wanted = runs.full_batch(case)
    for cut in ((2, 4), (1, 8)):
        stock, patched = (run(case, cut, path) for path in ("stock", "apply"))
        assert stock.error(wanted) > 0.01
        assert patched.error(wanted) <= 1e-5 and patched.exact, (cut, patched.error(wanted), patched.warned)
