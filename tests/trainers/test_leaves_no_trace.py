"""Uncut, a patched run is stock's bit for bit, whatever is kept in attributes, lists, dicts and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.losses.models import z_loss
from tests.numerics.heads import DropsKwargs, TokenModel, shifted_cross_entropy
from tests.numerics.heads.samples import text
from tests.trainers.custom import NUMBER
from tests.trainers.runs import Case, Ordered, of_texts, owning, run

# --- trainers ---------------------------------------------------------------------------------------------------


def logging_rows(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
    trainer.log({"rows": float(len(inputs["labels"]))})
    return base(model, inputs, return_outputs=True, num_items_in_batch=number)


class Meter:
    """How often it was shown something."""

    count = 0


class Metered(Ordered):
    """Weighs its loss by what its meter has been shown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = Meter()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.meter.count += 1
        return (loss / self.meter.count, outputs) if return_outputs else loss / self.meter.count


# --- models -----------------------------------------------------------------------------------------------------


class OwnGenerator(DropsKwargs):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)

    def logits(self, input_ids: Tensor) -> Tensor:
        logits = super().logits(input_ids)
        return logits + torch.rand(logits.shape[:1], generator=self.noise, dtype=logits.dtype)[:, None, None] * logits


class AverageByData(TokenModel):
    """Its loss times an average of its own, which goes on with its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros((), dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        loss = shifted_cross_entropy(self.logits(input_ids), labels)
        self.average.data = self.average.data * 0.9 + loss.detach()
        return {"loss": loss * self.average}


MODELS = [OwnGenerator, AverageByData]
LOGS = Case("logs-in-compute-loss", NUMBER, owning(logging_rows))
METERED = Case("meter-in-compute-loss", NUMBER, Metered)
CASES = [*(Case(model.__name__, of_texts(model), Ordered) for model in MODELS), LOGS, METERED]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_three_uncut_steps_are_stocks(case: Case) -> None:
    stock, patched = (run(case, (8, 1), path, steps=3, learning_rate=0.1) for path in ("stock", "apply"))
    same_bits = patched.same_bits(stock)
    assert same_bits
    assert [_without_time(entry) for entry in patched.history] == [_without_time(entry) for entry in stock.history]


def _without_time(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not key.endswith(("_runtime", "_per_second"))}


@pytest.mark.parametrize("case", [LOGS, METERED], ids=lambda case: case.name)
def test_what_a_trainer_notes_of_a_cut_batch_is_what_it_ran(case: Case) -> None:
    """Four micro-batches, four notes."""
    patched = run(case, (2, 4), "apply")
    assert patched.raised is None
    logged = sum("rows" in entry for entry in patched.history)
    noted = logged if case is LOGS else patched.trainer.meter.count
    assert noted == 4


# --- counting by forwards -----------------------------------------------------------------------------------------


class Hidden(TokenModel):
    """Beside the mean over targets a z-loss over tokens that its forward chooses, or that are an input."""

    dropout = 0.0

    def forward(self, input_ids: Tensor, labels: Any = None, attention_mask: Any = None, chosen: Any = None) -> Any:
        logits = nn.functional.dropout(self.logits(input_ids), self.dropout, self.training)
        chosen = input_ids % 3 == 1 if chosen is None else chosen.bool()
        return {"loss": shifted_cross_entropy(logits, labels) + 0.1 * z_loss(logits, chosen), "logits": logits}


class WithDropout(Hidden):
    dropout = 0.5


class Counting(Ordered):
    """Counts its losses, and keeps a sum of them."""

    calls, kept = 0, 0.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = super().compute_loss(model, inputs, *args, **kwargs)
        self.kept += float(result.detach())
        return result


def test_counting_by_forwards_leaves_no_trace() -> None:
    stock, counted = (run(Case("", of_texts(Hidden), Counting), (2, 4), path) for path in ("stock", "apply"))
    assert counted.exact and counted.trainer.calls == 4
    assert counted.trainer.kept == pytest.approx(stock.trainer.kept)


def test_counting_by_forwards_draws_nothing() -> None:
    """The same dropout, whether forwards count a term or an input does."""
    by_input = [{**sample, "chosen": (sample["input_ids"] % 3 == 1).long()} for sample in text()]
    hidden, given = (
        run(Case("", of_texts(WithDropout, samples=samples), Ordered), (2, 4), "apply")
        for samples in (text(), by_input)
    )
    assert hidden.error(given.change) <= 1e-12 and hidden.exact and given.exact
