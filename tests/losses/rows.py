"""How a row of a table of losses is written: a loss, where it stands, and the verdict that it must get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.losses import models
from tests.losses.models import bare
from tests.losses.seen import ForFunctions, Loss, Seen, Texts, full, func, holding, own
from tests.losses.verdicts import PAIRS, RATE, SINGLES, UNEVEN, Verdict
from tests.numerics.heads import Sample
from tests.numerics.parity import StockRecorder
from tests.trainings import Case, FullLoss, computing

EXACT, GRADIENT, EITHER, INEXACT, NAMED, AVERAGED, STOCK = Verdict
EVEN, THREE = (PAIRS, SINGLES), (PAIRS, SINGLES, UNEVEN)


def texts(window: int = 0, lengths: Any = None) -> list[Sample]:
    """Eight ragged texts with masked prompts, and a class of each."""
    made = models.texts(window) if lengths is None else models.texts(window, lengths)
    return [{**sample, "kind": torch.tensor((i * i + i // 3 + window) % 4)} for i, sample in enumerate(made)]


def several(count: int, make: Callable[[int], list[Sample]] = texts) -> list[list[Sample]]:
    return [make(window) for window in range(count)]


def attack(
    name: str, verdict: Verdict, loss: FullLoss, model: Any, windows: Any, trainer: Any = StockRecorder, **more: Any
) -> Case:
    given = {"rate": RATE, "cuts": EVEN, **more}
    return Case(name, loss, model, windows, trainer, verdict=verdict, **given)


def in_own(name: str, verdict: Verdict, loss: Loss, *, learnt: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """In a compute_loss of one's own."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-own", verdict, model=lambda: Texts(**learnt or {}), trainer=own(loss), **given)


def in_model(
    name: str, verdict: Verdict, loss: Loss, *, head: type[Texts] = Texts, learnt: Any = None, **more: Any
) -> Case:
    """In the model, by the Trainer and by a loop."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-model", verdict, model=holding(loss, head, **learnt or {}), looped=True, **given)


def in_func(name: str, verdict: Verdict, loss: Loss, *, learnt: Any = None, **more: Any) -> Case:
    """In a compute_loss_func; stock trains G times what it returns."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-func", verdict, model=lambda: ForFunctions(**learnt or {}), given=func(loss), **given)


def by_super(name: str, verdict: Verdict, trainer: type, loss: Loss, *, head: type[Texts] = Texts, **more: Any) -> Case:
    """By a trainer that calls super; the whole of its loss is given as well."""
    given = {"windows": several(1), "loss": full(loss), **more}
    return attack(f"{name}-super", verdict, model=head, trainer=trainer, **given)


def of_points(name: str, verdict: Verdict, loss: Loss, model: Callable[[], Any], windows: Any, **more: Any) -> Case:
    """In a compute_loss of one's own, of numbers instead of texts."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, number: Any) -> Any:
        outputs = model(x=inputs["x"])
        return loss(Seen(outputs["logits"], inputs, bare(model))), outputs

    def reference(model: Any, batch: Any, step: int) -> Tensor:
        return loss(Seen(model.logits(batch["x"]), batch, model))

    return attack(f"{name}-own", verdict, reference, model, windows, computing(compute), **more)
