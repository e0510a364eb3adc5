"""Found by reading the code with fresh eyes: stock trains, and so must what is patched; nothing wrong goes unsaid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_accum_fix
from hf_accum_fix.accumulation.contract import LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.scaling import Normalizer
from hf_accum_fix.accumulation.weigh import WindowCheck
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.core.window import Part, Window
from hf_accum_fix.options import Options
from hf_accum_fix.overrides.host import TrainerHost
from tests.losses.models import Mean, Points, class_weighted, points, texts
from tests.numerics.heads import Batch, Head, Sample, TokenModel, seeded, shifted_cross_entropy
from tests.numerics.heads.detection import LW_DETR
from tests.numerics.heads.head import of_class
from tests.numerics.heads.samples import boxes, images, text
from tests.numerics.heads.vision import frozen_batch_norm
from tests.numerics.parity import pass_over_imports
from tests.ranks import join, on_ranks
from tests.trainers import runs
from tests.trainers.runs import WHOLE, Ordered, run
from tests.trainings import Case, Cut, train

HALVES: Cut = (4, 2)


def itself(model: Any, batch: Batch, step: int) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


# --- losses that are exact, or said not to be -------------------------------------------------------------------


def class_or_255(index: int, g: torch.Generator) -> Tensor:
    return torch.tensor(255 if index in (1, 2, 5) else int(torch.randint(0, 3, (), generator=g)))


def void_is_255(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """Segmentation's: what is void has an index beyond the classes."""
    weight = torch.linspace(0.2, 1.0, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight, None, 255)


def with_weight(window: int) -> list[Sample]:
    def label(index: int, g: torch.Generator) -> dict[str, Tensor]:
        value = torch.randn((), generator=g, dtype=torch.float64)
        return {"labels": value, "row_weight": torch.tensor(1.0 if window == 0 else 1.0 + index).double()}

    return points(label, window)


def weighted_squares(logits: Tensor, labels: Tensor, row_weight: Tensor, **kwargs: Any) -> Tensor:
    return F.mse_loss(logits[:, 0], labels, weight=row_weight)


CASES = [
    Case("void-is-255", itself, lambda: Points(void_is_255, 3), [points(class_or_255, w) for w in (0, 1)]),
    Case("squares-weighted-later", itself, lambda: Points(weighted_squares, 1), [with_weight(w) for w in (0, 1)]),
    Case("squares-weighted", itself, lambda: Points(weighted_squares, 1), [with_weight(w) for w in (1, 2)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_or_said(case: Case, tmp_path: Path) -> None:
    with hf_accum_fix.apply():
        training = train(case, HALVES, tmp_path)
    assert not training.silent(case.tolerance), training


# --- traces and harm ---------------------------------------------------------------------------------------------


class SparseBuffer(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels)}


class InferenceBuffer(SparseBuffer):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.graph = torch.ones(3)


class QuantizedBuffer(SparseBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


class LazyBuffer(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        if "level" not in self._buffers:
            self.register_buffer("level", torch.zeros((), dtype=torch.float64), persistent=False)
        self.level += 1
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * self.level}


class AverageByData(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        loss = shifted_cross_entropy(self.logits(input_ids), labels)
        self.mean.data = self.mean.data * 0.9 + loss.detach()
        return {"loss": loss * self.mean}


class CountsInNumpy(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(64)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        np.add.at(self.seen, input_ids.flatten().numpy() % 64, 1)
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * float(self.seen.max())}


class CountsByIterator(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * next(self.calls)}


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class CountsInSlots(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Slotted()

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        self.meter.calls += 1
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * self.meter.calls}


class Named(dict[str, int]):
    """As there are many, such as EasyDict."""


class CountsInNamed(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Named(calls=0)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        self.meter["calls"] += 1
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * self.meter["calls"]}


class OtherData(Ordered):
    """Draws from a second loader, as semi-supervised training does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unlabelled = iter(DataLoader(torch.arange(1.0, 200.0, dtype=torch.float64), batch_size=1))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * next(self.unlabelled).mean()


class OtherList(OtherData):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unlabelled = iter([torch.tensor(float(i)) for i in range(1, 200)])


def scripted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


class ScriptsLate(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        logits = self.logits(input_ids)
        loss = torch.jit.script(scripted)
        return {"loss": loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def _of(model: type[nn.Module]) -> Head:
    return Head(model.__name__, seeded(model), text())


class Plain(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels)}


MODELS = [
    SparseBuffer, InferenceBuffer, QuantizedBuffer, LazyBuffer, AverageByData, CountsInNumpy, CountsByIterator,
    CountsInSlots, CountsInNamed, ScriptsLate,
]  # fmt: skip
HARM = [
    *(runs.Case(model.__name__, _of(model), Ordered) for model in MODELS),
    runs.Case("other-data", _of(Plain), OtherData),
    runs.Case("other-list", _of(Plain), OtherList),
]


@pytest.mark.parametrize("case", HARM, ids=lambda case: case.name)
def test_three_uncut_steps_are_stocks(case: runs.Case) -> None:
    stock, patched = (run(case, WHOLE, path, steps=3, learning_rate=0.01) for path in ("stock", "apply"))
    same_bits = patched.same_bits(stock)
    assert same_bits


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


WEIGHTED = Head("weighted", seeded(Weighted), texts())
#: The one is exact.
ON_RANKS = [
    runs.Case("weighted", WEIGHTED, Ordered, right=True),
    runs.Case("leaves-out-on-one", WEIGHTED, LeavesOutOnOne),
]


def sample_means(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over samples, each by the mean over its own targets."""
    return torch.stack([model(**WEIGHTED.batch([sample]))["loss"] for sample in MEANS.head.samples]).mean()


MEANS = runs.Case("sample-means", Head("mean", seeded(Mean), texts()), Ordered, loss=sample_means)


def rows_of() -> list[dict[str, Any]]:
    """On each rank: what became of each of `ON_RANKS`, and of sample means."""
    # Before there are ranks.
    wanted = runs.full_batch(MEANS)
    join(PATIENCE)
    rows = []
    for case in ON_RANKS:
        pass_over_imports()
        patched = run(case, (2, 2), "apply", steps=3, learning_rate=0.05, ddp_backend="gloo")
        rows.append({"raised": patched.raised and repr(patched.raised), "exact": patched.exact})
    pass_over_imports()
    with hf_accum_fix.apply(per_sample=True):
        means = run(MEANS, (2, 2), "stock", ddp_backend="gloo")
    return [*rows, {"raised": None, "exact": means.exact, "error": means.error(wanted)}]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return on_ranks(rows_of, group=False)[0]


def test_a_rank_that_leaves_micro_batches_out_is_not_waited_for(rows: list[dict[str, Any]]) -> None:
    """The items of class weights are counted in the loss call, and summed over ranks as a window ends."""
    *found, _ = rows
    assert [row["raised"] for row in found] == [None] * len(ON_RANKS)
    assert [row["exact"] for row in found] == [case.right for case in ON_RANKS]


def test_sample_means_are_exact_on_two_ranks(rows: list[dict[str, Any]]) -> None:
    """A sample's weights add up to 1 but for the last digits."""
    *_, means = rows
    assert means["error"] <= runs.FLOOR and means["exact"]


def test_another_loss_than_the_observed_one_is_said_on_any_device(caplog: pytest.LogCaptureFixture) -> None:
    """Which terms a loss has is known without waiting for the device."""
    contract = LossContract(Reduction.MEAN, Items(), terms=(TermSpec(("MeanBackward0", True, (True, False))),))
    check = WindowCheck(contract, changed="its loss has other terms than the observed one: SumBackward0")
    number = torch.ones(())
    normalizer = Normalizer(number, number, 1, 1)
    model = nn.Linear(1, 1)
    trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda"), world_size=1, process_index=0, gradient_accumulation_steps=2),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, distributed_type=DistributedType.NO),
        state=SimpleNamespace(global_step=0),
        model=model,
        model_wrapped=model,
    )
    session = TrainerHost(trainer, Options())
    session.state.first.contract = contract
    assert Window(session, [{}], [Part(contract, normalizer, check)], [], number, done=1).close(model) is None
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
