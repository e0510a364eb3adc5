"""What trains by the stock Trainer trains on under the patch, and by nothing worse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_accum_fix
from tests.numerics.heads import (
    HEADS,
    Batch,
    DropsKwargs,
    Sample,
    TokenModel,
    seeded,
)
from tests.numerics.heads.head import Head, collate
from tests.numerics.heads.samples import generator, normal, text
from tests.numerics.parity import training_arguments
from tests.trainers.runs import (
    SINGLES,
    WHOLE,
    Case,
    Cut,
    Ordered,
    full_batch,
    of_texts,
    run,
)

DROPS = HEADS["drops-kwargs"]


def no_further_off(case: Case, cut: Cut, wanted: Mapping[str, Tensor] | None = None, **arguments: Any) -> None:
    """Nor refused: nothing is wrong with what is trained here."""
    wanted = full_batch(case) if wanted is None else wanted
    stock, patched = (run(case, cut, path, **arguments) for path in ("stock", "apply"))
    ours, theirs = patched.error(wanted), stock.error(wanted)
    assert ours <= theirs * (1 + 1e-6) + case.floor


def stocks_bits(case: Case, cut: Cut, **arguments: Any) -> None:
    stock, patched = (run(case, cut, path, **arguments) for path in ("stock", "apply"))
    same_bits = patched.same_bits(stock)
    assert same_bits


# --- memory that ends ---------------------------------------------------------------------------------------------


class SmallMemory(DropsKwargs):
    """Holds two samples with gradient; without, it holds all."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("cut", [(4, 2), (4, 1)], ids=lambda cut: f"{cut[0]}x{cut[1]}")
def test_a_batch_size_is_found_where_memory_ends_in_training(cut: Cut) -> None:
    """Two samples of a micro-batch stay, and as many micro-batches as before."""
    steps = {"auto_find_batch_size": True}
    case = Case("small-memory", of_texts(SmallMemory), Ordered)
    taken = dataclasses.replace(case.head, build=seeded(DropsKwargs), samples=text()[: 2 * cut[1]])
    no_further_off(case, cut, full_batch(Case("", taken, Ordered)), **steps)
    if cut[1] == 1:
        stocks_bits(case, cut, **steps)


# --- micro-batches that are left out --------------------------------------------------------------------------------


class Forgiving(Ordered):
    """Goes on after a micro-batch that raises."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().training_step(*args, **kwargs)
        except ValueError:
            return torch.zeros((), dtype=torch.float64)


class Picky(DropsKwargs):
    """Cannot run what begins with a certain token, but is not asked for gradients of it while it is observed."""

    def logits(self, input_ids: Tensor) -> Tensor:
        if torch.is_grad_enabled() and bool((input_ids[:, 0] == 1).any()):
            raise ValueError("an image that cannot be read")
        return super().logits(input_ids)


def _with_unreadable(*places: int) -> list[Sample]:
    samples = text() * 2
    return [
        {**s, "input_ids": s["input_ids"].index_fill(0, torch.tensor([0]), 1)} if i in places else s
        for i, s in enumerate(samples)
    ]


@pytest.mark.parametrize("places", [(2,), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_a_step_that_forgives_is_stock_uncut(places: tuple[int, ...]) -> None:
    case = Case("forgiving", of_texts(Picky), Forgiving)
    stocks_bits(case, (2, 1), steps=8, samples=_with_unreadable(*places), learning_rate=0.1)


def test_a_step_that_leaves_micro_batches_out_goes_on() -> None:
    given = {"steps": 2, "samples": _with_unreadable(0, 4, 8, 9, 10), "learning_rate": 0.1}
    assert run(Case("forgiving", of_texts(Picky), Forgiving), SINGLES, "apply", **given).raised is None


# --- batches of other shapes --------------------------------------------------------------------------------------


class Nested(TokenModel):
    def forward(self, text: Mapping[str, Tensor], labels: Any = None, **kwargs: Any) -> Any:
        return self.mean(text["input_ids"], labels)


class Takes(TokenModel):
    """Something beside its tokens: one for each sample, or three numbers for all of them."""

    def forward(
        self, input_ids: Tensor, labels: Any = None, each: Any = None, three: Any = None, attention_mask: Any = None
    ) -> Any:
        assert each is None or len(each) == len(input_ids)
        assert three is None or len(three) == 3
        return self.mean(input_ids, labels)


def _nested_labels_first(samples: Sequence[Sample]) -> Batch:
    batch = collate(samples)
    return {"labels": batch["labels"], "text": {"input_ids": batch["input_ids"], "more": {"rows": len(samples)}}}


def _beside(**found: Any) -> Any:
    def batch(samples: Sequence[Sample]) -> Batch:
        return {**collate(samples), **{key: make(samples) for key, make in found.items()}}

    return batch


class LabelsInAList(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None) -> Any:
        return self.mean(input_ids, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100))


def _labels_in_a_list(samples: Sequence[Sample]) -> Batch:
    return {**collate(samples), "labels": [sample["labels"] for sample in samples]}


SHAPES = {
    "three-numbers-in-a-list": _beside(three=lambda samples: [0.1, 0.2, 0.3]),
    "nested-labels-first": _nested_labels_first,
    "labels-in-a-list": _labels_in_a_list,
}
MODELS = {
    "nested-labels-first": Nested,
    "labels-in-a-list": LabelsInAList,
}


@pytest.mark.parametrize("cut", [(6, 1), (3, 2)], ids=lambda cut: f"{cut[0]}x{cut[1]}")
@pytest.mark.parametrize("name", SHAPES)
def test_batches_of_any_shape_train(name: str, cut: Cut) -> None:
    """Six samples, as micro-batches of three rows are where three numbers look like rows."""
    head = of_texts(MODELS.get(name, Takes), collate=SHAPES[name], samples=text()[:6])
    case = Case(name, head, Ordered)
    no_further_off(case, cut)
    if cut[1] == 1:
        stocks_bits(case, cut)


class OneAtATime(DropsKwargs):
    """Written for one sample: two in a batch raise, as images of any size do."""

    def logits(self, input_ids: Tensor) -> Tensor:
        if len(input_ids) > 1:
            raise ValueError("one sample at a time")
        return super().logits(input_ids)


def test_a_model_for_one_sample_at_a_time_trains() -> None:
    case = Case("one-at-a-time", of_texts(OneAtATime), Ordered)
    no_further_off(case, SINGLES, full_batch(Case("", of_texts(DropsKwargs), Ordered)))
    stocks_bits(case, (1, 1), steps=3, samples=text(), learning_rate=0.1)


# --- gradients inside of a forward ------------------------------------------------------------------------------------


class Forces(nn.Module):
    """Its forces are the gradient of its energy, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, positions: Tensor, labels: Any = None) -> Any:
        positions = positions.clone().requires_grad_()
        energy = self.last(torch.tanh(self.first(positions))).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return {"loss": (gradient + labels).square().mean()}


def _molecules() -> list[Sample]:
    g = generator(1)
    return [{key: normal(g, 3) for key in ("positions", "labels")} for _ in range(8)]


def _stacked(samples: Sequence[Sample]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def test_what_needs_gradients_trains() -> None:
    case = Case("forces", Head("forces", seeded(Forces), _molecules(), collate=_stacked), Ordered)
    stocks_bits(case, WHOLE, steps=2, learning_rate=0.1)
    # Uncut stock is the full batch.
    wanted = run(case, WHOLE, "stock").change
    for cut in case.cuts:
        no_further_off(case, cut, wanted)


class PopsLabels(Ordered):
    """Keeps its labels from ``compute_loss``, whose divisor of at least 1 is 1 in a micro-batch without a target."""

    kept: Any = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept = inputs.pop("labels")
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.get("labels", self.kept)
        loss = (model(x=inputs["x"]).relu() * (labels != -100)).sum() / (labels != -100).sum().clamp(min=1)
        return (loss, {}) if return_outputs else loss


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x: Tensor, labels: Any = None) -> Tensor:
        return self.layer(x)[:, 0]  # type: ignore[no-any-return]


def test_a_forward_without_the_labels_that_were_counted_ends_no_training(tmp_path: Path) -> None:
    g = generator(0)
    data = [{"x": normal(g, 3), "labels": torch.tensor(1 if place % 3 else -100)} for place in range(32)]
    with hf_accum_fix.apply():
        args = training_arguments(tmp_path, 2, 4, max_steps=3)
        assert PopsLabels(model=OneNumber(), args=args, train_dataset=data).train().global_step == 3
