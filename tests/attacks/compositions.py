"""A training put together from named parts, stock and patched, and what is wrong with it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

import hf_accum_fix
from hf_accum_fix.errors import AccumFixError
from hf_accum_fix.upstream import environment
from tests.attacks.parts import COLLATORS, HEADS, OVERRIDES, Head, built, drawn
from tests.attacks.trainings import Case, Training, train
from tests.numerics.heads import Batch, Sample

#: Relative error of a parameter change that rounding leaves at most: of a loss in float64, and in float32.
FLOOR, FLOOR32 = 1e-9, 5e-6
#: Warnings that say nothing of exactness.
BESIDE = ("no target", "is a sum over the global batch")


@dataclass(frozen=True)
class Composition:
    """One training; ``outcome(Composition(...), folder)`` runs it again.

    Attributes:
        head, override, collator: their names in `parts`.
        data: a name in `parts.DATA` for every window.
        cut: samples of a micro-batch, and micro-batches of a window, on each rank.
        missing: samples that the last window lacks.
        declares_false: the model says that it takes no number.
        seed: of weights and samples.
        ranks: W.
    """

    head: str = "mean"
    override: str = "none"
    collator: str = "right"
    data: tuple[str, ...] = ("ragged",)
    cut: tuple[int, int] = (2, 4)
    missing: int = 0
    declares_false: bool = False
    seed: int = 0
    ranks: int = 1

    @property
    def floor(self) -> float:
        return FLOOR32 if HEADS[self.head].float32 or OVERRIDES[self.override].float32 else FLOOR

    def case(self) -> Case:
        head, override, collator = HEADS[self.head], OVERRIDES[self.override], COLLATORS[self.collator]
        size = self.cut[0] * self.cut[1] * self.ranks
        sizes = [size] * (len(self.data) - 1) + [size - self.missing]
        windows = [
            drawn(head, kind, count, 10 * self.seed + place)
            for place, (kind, count) in enumerate(zip(self.data, sizes, strict=True))
        ]

        def loss(model: nn.Module, batch: Batch, step: int) -> Tensor:
            return override.full(model, batch)

        ranks = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True} if self.ranks > 1 else {}
        return Case(
            repr(self),
            loss,
            lambda: self._model(head),
            windows,
            override.trainer(head),
            override.given(head),
            {"logging_strategy": "no", **override.arguments, **ranks},
            lambda samples: collator(samples, head),
            self.floor,
            [self.cut],
        )

    def _model(self, head: Head) -> nn.Module:
        model = built(head, self.seed)
        if self.declares_false:
            model.accepts_loss_kwargs = False
        return model


class _Stepped(TrainerCallback):
    """Whether an optimizer step was taken."""

    def __init__(self) -> None:
        self.taken = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.taken = True


@dataclass(frozen=True)
class Outcome:
    """What became of a composition.

    Attributes:
        patched: None: it was not trained to its end.
        stock: None: it was not needed, as ours is exact, or it cannot train that at all.
        faults: what is wrong, in words.
    """

    patched: Training | None
    stock: Training | None
    faults: tuple[str, ...]


def outcome(composition: Composition, output: Path) -> Outcome:
    """Train a composition patched, and where that is not exact stock as well; on every rank alike."""
    case, floor, stepped = composition.case(), composition.floor, _Stepped()
    try:
        with hf_accum_fix.apply():
            patched = train(replace(case, given={**case.given, "callbacks": [stepped]}), composition.cut, output)
    except Exception as error:
        if isinstance(error, AccumFixError) and not stepped.taken:
            return Outcome(None, None, ())
        plain = stock(case, composition, output)
        faults = () if plain is None else (f"raised, where stock trains: {type(error).__name__}: {error}",)
        return Outcome(None, plain, faults)
    patched = _of_all_ranks(patched)
    if all(error <= floor for error in patched.errors):
        return Outcome(patched, None, ())
    plain = stock(case, composition, output)
    # The parameters of stock and ours part after the first step that differs: each has its own reference.
    # A window with one micro-batch that counts is right by chance where stock is wrong.
    stock_is_right = plain is not None and all(error <= floor for error in plain.errors) and _tells(case, composition)
    worse = [f"off by {max(patched.errors):.1e}, where stock is exact"] if stock_is_right else []
    return Outcome(patched, plain, (*_without_stocks_nan(patched, plain).silent(floor), *worse))


def _tells(case: Case, composition: Composition) -> bool:
    """Whether some window has two micro-batches that count: of one, a sum that should be a mean is right by chance."""
    model, size = case.model(), composition.cut[0]

    def counts(samples: Sequence[Sample]) -> bool:
        loss = float(case.loss(model, case.collate(samples), 0).detach())
        return isfinite(loss) and loss != 0.0

    cut = [[window[at : at + size] for at in range(0, len(window), size)] for window in case.windows]
    return any(sum(map(counts, micro_batches)) > 1 for micro_batches in cut)


def _without_stocks_nan(patched: Training, plain: Training | None) -> Training:
    """A loss that is nan in stock too is in the log (see ``loss_log``), which is not silent."""
    if plain is None:
        return patched
    pairs = zip(patched.errors, plain.errors, strict=False)
    return replace(patched, errors=[0.0 if isnan(ours) and isnan(theirs) else ours for ours, theirs in pairs])


def stock(case: Case, composition: Composition, output: Path) -> Training | None:
    """Train it by stock; None: that raises, as where it multiplies in place a loss whose backward needs it."""
    try:
        return train(case, composition.cut, output)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def _of_all_ranks(training: Training) -> Training:
    """What any rank has said; it is called exact if all do, since a rank learns with the next window of the others'."""
    said = [(window, words) for window, words in training.said if not any(each in words for each in BESIDE)]
    mine = said, training.exact
    gathered: list[Any] = [mine] if not dist.is_initialized() else [None] * dist.get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(gathered, mine)
    exact = training.exact and all(each for _, each in gathered)
    return replace(training, said=[each for rank, _ in gathered for each in rank], exact=exact)


def told(composition: Composition, found: Outcome) -> str:
    """A composition and its faults, such that a person can run it again."""
    lines = [repr(composition), *found.faults]
    for name, training in (("stock", found.stock), ("ours", found.patched)):
        if training is not None:
            lines.append(f"{name} is off by {', '.join(f'{each:.1e}' for each in training.errors)}")
    if found.patched is not None:
        lines += [f"exact: {found.patched.exact}"]
        lines += [f"said in window {window}: {words}" for window, words in found.patched.said]
    return "\n".join(lines)


@contextmanager
def installed_once() -> Iterator[None]:
    """Look up what is installed once, and let no seed note who set it: both take longer than a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "format_stack", lambda *_, **__: [])
        for name in ("_version", "fingerprint"):
            patch.setattr(environment, name, cache(getattr(environment, name)))
        yield
