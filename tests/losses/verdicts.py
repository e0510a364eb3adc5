"""Trainings whose loss is to be read from its graph, by the Trainer and by a loop, and what each has to come to.

A reference starts each window where the training's own steps have left the parameters, so that one window's error is
not another's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import hf_accum_fix
from hf_accum_fix import observations
from tests.numerics.heads import Batch, Sample, seeded
from tests.numerics.heads.head import collate
from tests.numerics.parity import Step, StockRecorder, step_along, trainable, training_arguments

#: Samples of each micro-batch of a window.
Cut = tuple[int, ...]
WHOLE, HALVES, PAIRS, SINGLES, UNEVEN = (8,), (4, 4), (2, 2, 2, 2), (1,) * 8, (3, 1, 2, 2)

#: Relative error of a parameter change that rounding in float64 leaves at most, and where the library has float32.
FLOOR, FLOAT32 = 1e-9, 1e-6
#: So close to stock's error is not worse.
AS_STOCK = 1.05
#: Large enough that a loss moves, and so small that stock's parameters are all but ours, window by window.
RATE = 1e-3

#: The loss of a whole global batch at once, in the window of that number; windows count from 0.
FullLoss = Callable[[nn.Module, Batch, int], Tensor]


class Verdict(Enum):
    """What a training has to come to.

    EXACT: the full batch's gradient and log, called exact, and no warning.
    GRADIENT: the full batch's gradient, whatever is said; its log too if it is called exact, else no worse than stock.
    EITHER: the full batch's gradient; or a warning in time, never worse than stock, not called exact.
    INEXACT: a warning in time, never worse than stock, not called exact.
    NAMED: right or no worse than stock, not called exact, and one warning that names the number.
    """

    EXACT = "exact"
    GRADIENT = "gradient"
    EITHER = "either"
    INEXACT = "inexact"
    NAMED = "named"


@dataclass(frozen=True, eq=False, repr=False)
class Attack:
    """One loss with what trains on it.

    Attributes:
        full: the reference's loss.
        model: its class, or how it is made; seeded, in float64. One that has a ``turn`` is told the window's number.
        trainer: a `StockRecorder`; None: a hand-written loop computes the loss by itself, and has it scaled.
        looped: the model's own loss, so that a hand-written loop has to come to the same.
        windows: the samples of each global batch.
        given, arguments, options: further arguments of the Trainer, TrainingArguments, options of the package.
        right: the cuts at which stock is exact.
        alone: parameters whose gradients are compared by themselves as well.
        whole: stock's one micro-batch of all samples is the full batch.
        prepare: what is done to a model once it is seeded.
    """

    name: str
    verdict: Verdict
    full: FullLoss
    model: Callable[[], nn.Module]
    windows: Sequence[Sequence[Sample]]
    trainer: type | None = StockRecorder
    looped: bool = False
    collate: Callable[[Sequence[Sample]], Batch] = collate
    given: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    cuts: Sequence[Cut] = (PAIRS, SINGLES)
    right: Sequence[Cut] = ()
    alone: Sequence[str] = ()
    floor: float = FLOOR
    whole: bool = True

    def build(self) -> nn.Module:
        return seeded(self.model)()


@dataclass(frozen=True)
class Outcome:
    """What became of a training.

    Attributes:
        errors: of every window's parameter change, relative to the full batch's.
        alone: the same of single parameters, the largest of each window.
        logged, losses: every window's, as logged and of the full batch.
        said: every warning, with the window that was under way.
        exact: what the report says of the run; None: it has no run.
    """

    errors: Sequence[float]
    alone: Sequence[float]
    logged: Sequence[float]
    losses: Sequence[float]
    said: Sequence[tuple[int, str]]
    exact: bool | None

    @property
    def windows(self) -> list[float]:
        """The larger of both errors of each."""
        return [max(pair) for pair in zip(self.errors, self.alone, strict=True)]

    @property
    def worst(self) -> float:
        return max(self.windows)

    @property
    def log_error(self) -> float:
        """Of the logged loss, relative to the largest of them; releases before 5 log four digits after the point."""
        largest = max(map(abs, self.losses))
        return max(abs(a - b) for a, b in zip(self.logged, self.losses, strict=True)) / max(largest, 1e-3)

    def wrong_windows(self, floor: float) -> list[int]:
        return [window for window, error in enumerate(self.windows) if not error <= floor]

    def faults(self, attack: Attack, stock: Outcome, cut: Cut) -> list[str]:
        """What is against the attack's verdict, in words; empty where all is well."""
        verdict, floor, wrong = attack.verdict, attack.floor, self.wrong_windows(attack.floor)
        first = min((window for window, _ in self.said), default=len(self.errors))
        found = []
        if wrong and self.exact:
            found.append(f"called exact, and off by {self.worst:.1e}")
        found += [
            f"window {window} is off by {mine:.1e}, stock by {theirs:.1e}"
            for window, (mine, theirs) in enumerate(zip(self.windows, stock.windows, strict=True))
            if not mine <= AS_STOCK * theirs + floor
        ]
        if verdict in (Verdict.EXACT, Verdict.GRADIENT) and wrong:
            found.append(f"off by {self.worst:.1e}")
        if verdict in (Verdict.EXACT, Verdict.GRADIENT) and not self._log_is_right(stock):
            found.append(f"logs {[*self.logged]} for {[*self.losses]}")
        if verdict is Verdict.EXACT:
            # Of a loss that is declared nothing is reported.
            found += ["not called exact"] * (self.exact is not True and attack.trainer is not None)
            found += [f"said without need: {words}" for _, words in self.said]
        if verdict in (Verdict.EITHER, Verdict.INEXACT):
            found += [
                f"window {window} is off by {self.errors[window]:.1e}, unsaid" for window in wrong if window < first
            ]
        if verdict in (Verdict.INEXACT, Verdict.NAMED):
            found += ["called exact"] * bool(self.exact)
            found += ["nothing said"] * (not self.said)
        if verdict is Verdict.NAMED:
            names = [words for _, words in self.said if names_steps(words, len(cut))]
            found += [f"{len(names)} warnings name the number"] * (len(names) != 1)
        return found

    def _log_is_right(self, stock: Outcome) -> bool:
        if any("the log averages it over micro-batches" in words for _, words in self.said):
            # What has no gradient has no node that shows what it is a mean over.
            return True
        return self.log_error <= 2e-5 or (self.exact is not True and self.log_error <= AS_STOCK * stock.log_error)


def names_steps(words: str, steps: int) -> bool:
    """Whether 1/G is named in one way or another; "G=4" alone names no constant."""
    words = re.sub(r"\bG\s*=\s*\d+", "", words)
    return re.search(rf"(?<![\d.]){steps}(?![\d.]*\d)|{re.escape(f'{1 / steps:g}')}", words) is not None


# --- by the Trainer -----------------------------------------------------------------------------------------------


class _Windows(TrainerCallback):
    """Parameters before and after every optimizer step; tells a model that has a ``turn`` which window it is."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    @property
    def now(self) -> int:
        return max(len(self.before) - 1, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(trainable(model))

    def begin(self, model: nn.Module) -> None:
        self.before.append(trainable(model))
        set_turn(model, self.now)


def set_turn(model: nn.Module, turn: int) -> None:
    if hasattr(model, "turn"):
        model.turn = turn


@contextlib.contextmanager
def _warnings(windows: _Windows) -> Iterator[list[tuple[int, str]]]:
    """A warning belongs to the window whose first micro-batch began last."""
    said: list[tuple[int, str]] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("hf_accum_fix")
    handler.emit = lambda record: said.append((windows.now, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def dealt(attack: Attack, cut: Cut) -> tuple[list[Any], int, Callable[[Any], Batch]]:
    """A dataset, the entries of a micro-batch and their collator: of an uneven cut one entry is a micro-batch."""
    samples = [sample for window in attack.windows for sample in window]
    if len(set(cut)) == 1:
        return samples, cut[0], attack.collate
    ends = [sum(cut[:place]) for place in range(len(cut) + 1)]
    pieces = [list(w[a:b]) for w in attack.windows for a, b in pairwise(ends)]
    return pieces, 1, lambda entries: attack.collate([sample for entry in entries for sample in entry])


@functools.cache
def by_trainer(attack: Attack, cut: Cut, path: str) -> Outcome:
    """Train by the attack's trainer: "stock", or with what is applied."""
    data, per_device, batch = dealt(attack, cut)
    windows = _Windows()
    assert attack.trainer is not None
    with tempfile.TemporaryDirectory() as output, _warnings(windows) as said:
        arguments = {"max_steps": len(attack.windows), "learning_rate": RATE, **attack.arguments}
        args = training_arguments(Path(output), per_device, len(cut), **arguments)
        observations.clear()
        with hf_accum_fix.apply(**attack.options) if path == "apply" else contextlib.nullcontext():
            torch.manual_seed(0)
            given = {"model": attack.build(), "train_dataset": data, "data_collator": batch, **attack.given}
            trainer = attack.trainer(args=args, **given)
            trainer.add_callback(windows)
            trainer.train()
    logged = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return _outcome(attack, windows, logged, said)


# --- by a hand-written loop ---------------------------------------------------------------------------------------


@functools.cache
def by_loop(attack: Attack, cut: Cut, path: str) -> Outcome:
    """Train the model's own loss, or the loop's, by a loop: "stock" divides by G."""
    data, per_device, batch = dealt(attack, cut)
    batches = [batch(data[start : start + per_device]) for start in range(0, len(data), per_device)]
    model, windows = attack.build(), _Windows()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    logged: list[float] = []
    observations.clear()
    with _warnings(windows) as said:
        steps = _by_windows if path == "apply" else _by_hand
        for loss in steps(attack, model, batches, len(cut), windows):
            logged.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            windows.after.append(trainable(model))
    return _outcome(attack, windows, logged, said)


def _by_windows(
    attack: Attack, model: nn.Module, batches: list[Batch], steps: int, windows: _Windows
) -> Iterator[float]:
    torch.manual_seed(0)
    for window in hf_accum_fix.accumulation_windows(batches, steps=steps, **attack.options):
        windows.begin(model)
        for batch in window:
            with window.micro_batch(model):
                if attack.trainer is None:
                    loss = window.scale(attack.full(model, batch, windows.now), batch)
                else:
                    loss = window.loss(model, batch)
                loss.backward()
        yield float(window.mean_loss())


def _by_hand(attack: Attack, model: nn.Module, batches: list[Batch], steps: int, windows: _Windows) -> Iterator[float]:
    torch.manual_seed(0)
    for start in range(0, len(batches), steps):
        windows.begin(model)
        losses = []
        for batch in batches[start : start + steps]:
            alone = attack.trainer is None
            loss = (attack.full(model, batch, windows.now) if alone else model(**batch)["loss"]) / steps
            loss.backward()
            losses.append(float(loss.detach()))
        yield sum(losses)


def _outcome(attack: Attack, windows: _Windows, logged: list[float], said: list[tuple[int, str]]) -> Outcome:
    assert len(windows.after) == len(attack.windows) == len(logged)
    runs = observations.recorded()
    errors, alone, losses = [], [], []
    model = attack.build()
    for step, (before, after) in enumerate(zip(windows.before, windows.after, strict=True)):
        change = {name: (after[name] - before[name]) / RATE for name in before}
        wanted = _full_batch(attack, model, before, step)
        losses.append(wanted.loss)
        errors.append(Step(change, 0.0, 0.0).error(wanted))
        each = [Step({n: change[n]}, 0.0, 0.0).error(Step({n: wanted.change[n]}, 0.0, 0.0)) for n in attack.alone]
        alone.append(max(each, default=0.0))
    return Outcome(errors, alone, logged, losses, said, runs[-1]["exact"] if runs else None)


def _full_batch(attack: Attack, model: nn.Module, parameters: Mapping[str, Tensor], step: int) -> Step:
    """One window's step (lr 1) from these parameters, by one forward of all its samples."""
    model.load_state_dict(parameters, strict=False)
    model.zero_grad()
    model.train()
    set_turn(model, step)
    torch.manual_seed(0)
    return step_along(model, attack.full(model, attack.collate(attack.windows[step]), step))
