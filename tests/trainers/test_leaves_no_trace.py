"""Uncut, a patched run is stock's bit for bit, whatever the model or its trainer keeps of the calls it has seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.numerics.heads import DropsKwargs, TokenModel, seeded, shifted_cross_entropy
from tests.numerics.heads.head import Head, collate
from tests.numerics.heads.samples import text
from tests.trainers.custom import NUMBER
from tests.trainers.runs import Case, Ordered, run

# --- trainers ---------------------------------------------------------------------------------------------------


class LogsInComputeLoss(Ordered):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.log({"rows": float(len(inputs["labels"]))})
        return (loss, outputs) if return_outputs else loss


class Meter:
    """A mean over all that it was shown."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def show(self, value: float) -> None:
        self.total += value
        self.count += 1


class Metered(Ordered):
    """Weighs its loss by what its meter has been shown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = Meter()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.meter.show(float(loss.detach()))
        loss = loss / self.meter.count
        return (loss, outputs) if return_outputs else loss


class Running(Ordered):
    """Divides by a running mean of its losses, a tensor of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running = torch.ones((), dtype=torch.float64)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.running.mul_(0.9).add_(0.1 * loss.detach())
        loss = loss / self.running
        return (loss, outputs) if return_outputs else loss


class Draws(Ordered):
    """Adds the loss of another sample, from a stream of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream = iter(text(seed=7))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        other = collate([next(self.stream)])
        loss = loss + 0.1 * shifted_cross_entropy(model.logits(other["input_ids"]), other["labels"])
        return (loss, outputs) if return_outputs else loss


class OfTheInstance(Ordered):
    """Its compute_loss is put on the object, and counts there."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        base = self.compute_loss

        def compute_loss(model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
            self.calls += 1
            loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
            return (loss / self.calls, outputs) if return_outputs else loss / self.calls

        self.compute_loss = compute_loss


class CountsAsItPrepares(Ordered):
    """Masks more of the first micro-batches than of the later ones."""

    prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        prepared = super()._prepare_inputs(inputs)
        labels = prepared["labels"].clone()
        labels[:, : 4 - self.prepared] = -100
        return {**prepared, "labels": labels}


class PreparesByItsMeter(Ordered):
    """The same, with the count in an object of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = Meter()

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.meter.show(1.0)
        prepared = super()._prepare_inputs(inputs)
        labels = prepared["labels"].clone()
        labels[:, : 4 - self.meter.count] = -100
        return {**prepared, "labels": labels}


# --- models -----------------------------------------------------------------------------------------------------


class OwnGenerator(DropsKwargs):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)

    def logits(self, input_ids: Tensor) -> Tensor:
        logits = super().logits(input_ids)
        return logits + torch.rand(logits.shape[:1], generator=self.noise, dtype=logits.dtype)[:, None, None] * logits


class OwnRandom(DropsKwargs):
    """Draws from generators of Python and of NumPy that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.chance, self.noise = random.Random(3), np.random.default_rng(4)

    def logits(self, input_ids: Tensor) -> Tensor:
        return super().logits(input_ids) * (1 + self.chance.random() + self.noise.random())


class Taught(TokenModel):
    """Learns from a teacher, a parameter without gradient that follows it by a moving average in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(16, 16), requires_grad=False)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        if self.training:
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(0.1 * self.mix.weight)
        far = (self.mix.weight - self.teacher).square().mean()
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) + far}


class RelativeToTheFirst(TokenModel):
    """Divides by the first loss that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        loss = shifted_cross_entropy(self.logits(input_ids), labels)
        if self.first is None:
            self.first = loss.detach()
        return {"loss": loss / self.first}


class WarmsUp(TokenModel):
    """Counts its calls, and weighs its loss by them."""

    calls = 0

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Mapping[str, Tensor]:
        if self.training:
            self.calls += 1
        return {"loss": shifted_cross_entropy(self.logits(input_ids), labels) * min(1.0, self.calls / 8)}


def _of(model: type[nn.Module]) -> Head:
    return Head(model.__name__, seeded(model), text())


LOGS = Case("logs-in-compute-loss", NUMBER, LogsInComputeLoss)
METERED = Case("meter-in-compute-loss", NUMBER, Metered)
CASES = [
    Case("nothing-kept", _of(DropsKwargs), Ordered),
    Case("nothing-kept-number", NUMBER, Ordered),
    LOGS,
    METERED,
    Case("meter-in-compute-loss-mean", _of(DropsKwargs), Metered),
    Case("running-mean", NUMBER, Running),
    Case("stream-of-ones-own", NUMBER, Draws),
    Case("compute-loss-of-the-instance", NUMBER, OfTheInstance),
    Case("counter-in-prepare-inputs", _of(DropsKwargs), CountsAsItPrepares),
    Case("meter-in-prepare-inputs", _of(DropsKwargs), PreparesByItsMeter),
    Case("own-generator", _of(OwnGenerator), Ordered),
    Case("own-random", _of(OwnRandom), Ordered),
    Case("teacher", _of(Taught), Ordered),
    Case("relative-to-the-first", _of(RelativeToTheFirst), Ordered),
    Case("call-counter", _of(WarmsUp), Ordered),
]


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


class Remembering(Ordered):
    """Hands the model its own memory again, as releases with ``past_index`` do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.past_index = 1
        self._past: Any = None
        self.on_entering: list[Any] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.on_entering.append(self._past)
        return super().training_step(*args, **kwargs)


class GivesMemory(TokenModel):
    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logits = self.logits(input_ids)
        return shifted_cross_entropy(logits, labels), logits[:, -1]


def test_observing_leaves_no_past_behind() -> None:
    patched = run(Case("past", _of(GivesMemory), Remembering), (2, 4), "apply")
    assert patched.raised is None
    left_behind = patched.trainer.on_entering[0] is not None
    assert not left_behind
