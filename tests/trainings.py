"""Trainings of several windows, by a Trainer or a loop: how far each window is off, and what was said when.

A reference starts each window where the training's own steps have left the parameters, so that one window's error is
not another's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_accum_fix import accumulation_windows, observations
from tests.numerics.heads import Batch, Sample, seeded
from tests.numerics.heads.head import collate
from tests.numerics.parity import Step, StockRecorder, step_along, trainable, training_arguments

#: Samples of a micro-batch, and micro-batches of a window; or the samples of each micro-batch, where they differ.
Cut = tuple[int, ...]
CUTS: tuple[Cut, ...] = ((4, 2), (2, 4), (1, 8))
#: Small enough that a training of a few windows stays where losses are curved, large enough that it moves.
RATE = 0.05

#: ``(model, batch, step)`` -> the loss of a whole global batch at once; steps count from 0.
FullLoss = Callable[[nn.Module, Batch, int], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """One pattern of training.

    Attributes:
        loss: the reference's.
        model: its class, or how it is made; seeded, in float64. One that has a ``step`` is told the window's number.
        windows: the samples of each global batch.
        trainer: a `Recorder`; None: a hand-written loop computes the loss by itself, and has it scaled.
        given, arguments, options: further arguments of the Trainer, TrainingArguments, options of the package.
        tolerance: relative, of the parameter change.
        whole: stock's one micro-batch of all samples is the full batch; False where stock counts what the loss leaves
            out.
        verdict: what it has to come to, of those that are held to one.
        looped: the model's own loss, so that a hand-written loop has to come to the same.
        right: the cuts at which stock is exact.
        alone: parameters whose gradients are compared by themselves as well.
    """

    name: str
    loss: FullLoss
    model: Callable[[], nn.Module]
    windows: Sequence[Sequence[Sample]]
    trainer: type | None = StockRecorder
    given: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[Sequence[Sample]], Batch] = collate
    tolerance: float = 1e-9
    cuts: Sequence[Cut] = CUTS
    whole: bool = True
    rate: float = RATE
    options: Mapping[str, Any] = field(default_factory=dict)
    verdict: Any = None
    looped: bool = False
    right: Sequence[Cut] = ()
    alone: Sequence[str] = ()

    def build(self) -> nn.Module:
        return seeded(self.model)()


@dataclass(frozen=True)
class Training:
    """What became of a case.

    Attributes:
        errors: of every window's parameter change, relative to the full batch's.
        said: every warning, with the window that was under way.
        exact: what the report says of the run; None: it has no run.
        alone: errors of single parameters, the largest of each window.
        logged, losses: every window's, as logged and of the full batch.
        begun: parameters and buffers as each window found them.
        gradients: as each window's optimizer step found them, by a Trainer.
    """

    errors: Sequence[float]
    said: Sequence[tuple[int, str]]
    exact: bool | None
    alone: Sequence[float] = ()
    logged: Sequence[float] = ()
    losses: Sequence[float] = ()
    begun: Sequence[Mapping[str, Tensor]] = ()
    gradients: Sequence[Mapping[str, Tensor]] = ()

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

    def silent(self, tolerance: float) -> list[str]:
        """What is wrong and was not said in time, or is called exact: in words, empty where all is well."""
        wrong = [window for window, error in enumerate(self.errors) if not error <= tolerance]
        first = min((window for window, _ in self.said), default=len(self.errors))
        found = [f"window {window} is off by {self.errors[window]:.1e}, unsaid" for window in wrong if window < first]
        if wrong and self.exact:
            found.append(f"called exact, and off by {max(self.errors):.1e}")
        return found


class Parameters(TrainerCallback):
    """Before and after every optimizer step; ``states`` are the buffers as each step finds them.

    A model that has a ``step`` is told the next one before its window is fetched; ``begun``: where each begins instead.
    """

    def __init__(self, begun: Sequence[Mapping[str, Tensor]] = ()) -> None:
        self.begun = begun
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.states: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note_state(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.begun:
            model.load_state_dict(self.begun[len(self.before)], strict=False)
            self.states.pop()
            self.note_state(model)
        self.before.append(trainable(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(trainable(model))
        self.note_state(model)
        _tell_step(model, len(self.after))

    def note_state(self, model: nn.Module) -> None:
        self.states.append({name: each.detach().clone() for name, each in model.named_buffers()})

    def steps(self, case: Case) -> Iterator[tuple[Step, Step]]:
        """Every step (lr 1), beside that of a full batch by a model of the case's kind."""
        if dist.is_initialized() and self.states[0]:
            # The first rank's go to all ranks with the next forward.
            shared: list[Any] = [self.states]
            dist.broadcast_object_list(shared)
            self.states = shared[0]
        model = case.build()
        for step, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            change = {name: (after[name] - before[name]) / case.rate for name in before}
            yield Step(change, 0.0, 0.0), _full_batch(case, model, {**before, **self.states[step]}, step)


class Warnings(logging.Handler):
    """A warning belongs to the window whose first micro-batch began last."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(logging.WARNING)
        self.parameters = parameters
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((max(len(self.parameters.before) - 1, 0), record.getMessage()))

    def __enter__(self) -> Warnings:
        logging.getLogger("hf_accum_fix").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hf_accum_fix").removeHandler(self)


def train(case: Case, cut: Cut, output: Path, begun: Sequence[Mapping[str, Tensor]] = ()) -> Training:
    """Train a case by its trainer, stock or with what is applied; ``begun``: where each window begins."""
    data, per_device, batch = _dealt(case, cut)
    parameters = Parameters(begun)
    given = {"max_steps": len(case.windows), "learning_rate": case.rate, **case.arguments}
    args = training_arguments(output, per_device, len(sizes(cut)), **given)
    assert case.trainer is not None
    observations.clear()
    with Warnings(parameters) as warnings:
        trainer = case.trainer(model=case.build(), args=args, train_dataset=data, data_collator=batch, **case.given)
        trainer.add_callback(parameters)
        trainer.train()
    logged = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return _training(case, parameters, warnings, logged)


def sizes(cut: Cut) -> tuple[int, ...]:
    """The samples of each micro-batch of a window."""
    return (cut[0],) * cut[1] if len(cut) == 2 else cut


def pieces(samples: Sequence[Sample], cut: Cut) -> list[Sequence[Sample]]:
    """The micro-batches of one window, those that have samples."""
    ends = accumulate(sizes(cut))
    found = [samples[end - size : end] for size, end in zip(sizes(cut), ends, strict=True)]
    return [micro_batch for micro_batch in found if micro_batch]


def _dealt(case: Case, cut: Cut) -> tuple[list[Any], int, Callable[[Any], Batch]]:
    """A dataset, the entries of a micro-batch and their collator: of an uneven cut one entry is a micro-batch."""
    if len(cut) == 2:
        return [sample for window in case.windows for sample in window], cut[0], case.collate
    entries = [list(piece) for window in case.windows for piece in pieces(window, cut)]
    return entries, 1, lambda entries: case.collate([sample for entry in entries for sample in entry])


def _training(case: Case, parameters: Parameters, warnings: Warnings, logged: list[float]) -> Training:
    assert len(parameters.after) == len(case.windows)
    runs = observations.recorded()
    errors, alone, losses = [], [], []
    for found, wanted in parameters.steps(case):
        errors.append(found.error(wanted))
        each = [Step({n: found.change[n]}, 0, 0).error(Step({n: wanted.change[n]}, 0, 0)) for n in case.alone]
        alone.append(max(each, default=0.0))
        losses.append(wanted.loss)
    begun = [{**before, **state} for before, state in zip(parameters.before, parameters.states, strict=False)]
    exact = runs[-1]["exact"] if runs else None
    return Training(errors, warnings.said, exact, alone, logged, losses, begun, parameters.gradients)


def _full_batch(case: Case, model: nn.Module, found: Mapping[str, Tensor], step: int) -> Step:
    """One window's step (lr 1) from the parameters and buffers it found, by one forward of all its samples."""
    model.load_state_dict(found, strict=False)
    model.zero_grad()
    model.train()
    _tell_step(model, step)
    return step_along(model, case.loss(model, case.collate(case.windows[step]), step))


def _tell_step(model: Any, step: int) -> None:
    if hasattr(model, "step"):
        model.step = step


def computing(loss: Callable[..., tuple[Tensor, Any]], kind: type = StockRecorder) -> type:
    """A Trainer whose ``compute_loss`` is ``loss(trainer, base, model, inputs, number)``, with the outputs."""

    class Computing(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            found, outputs = loss(self, super().compute_loss, model, inputs, num_items_in_batch)
            return (found, outputs) if return_outputs else found

    return Computing


def above(change: Callable[[Tensor, Tensor, Batch, Any], Tensor], *, number: bool = True) -> type:
    """A Trainer that makes something of super's loss: ``change(loss, logits, batch, trainer)``."""

    def compute(trainer: Any, base: Any, model: Any, inputs: Any, given: Any) -> Any:
        more = {"num_items_in_batch": given} if number else {}
        loss, outputs = base(model, inputs, return_outputs=True, **more)
        return change(loss, outputs["logits"], inputs, trainer), outputs

    return computing(compute)


# --- on another batch than the one that was fetched ---------------------------------------------------------------

#: A batch -> the batch that is trained on.
Change = Callable[[Any], Any]


def changed(batch: Any, change: Change, how: str = "copy") -> Any:
    """The changed copy; or the batch itself, given other tensors ("key") or with its tensors written ("tensor")."""
    found = change(batch)
    if how == "copy":
        return found
    for key in [key for key in batch if found[key] is not batch[key]]:
        if how == "key":
            batch[key] = found[key]
        else:
            batch[key].copy_(found[key])
    return batch


def in_step(change: Change, how: str = "copy") -> type:
    class InStep(StockRecorder):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(model, changed(inputs, change, how), *args, **kwargs)

    return InStep


def in_loss(change: Change, how: str = "copy") -> type:
    class InLoss(StockRecorder):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            return super().compute_loss(model, changed(inputs, change, how), return_outputs, num_items_in_batch)

    return InLoss


def as_prepared(change: Change, how: str = "copy") -> type:
    class AsPrepared(StockRecorder):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return changed(super()._prepare_inputs(inputs), change, how)

    return AsPrepared


def as_fetched(change: Change, how: str = "copy", *, recount: bool = False) -> type:
    """``recount``: counts the labels that are left, as upstream would have."""

    class AsFetched(StockRecorder):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, number = super().get_batch_samples(*args, **kwargs)
            batches = [changed(batch, change, how) for batch in batches]
            if recount and number is not None:
                number = sum((batch["labels"] != -100).sum() for batch in batches)
            return batches, number

    return AsFetched


# --- by a hand-written loop ---------------------------------------------------------------------------------------

#: ``(case, model, micro-batches, G)``: leaves the gradients of every step in the model, and gives its loss.
Windows = Callable[[Case, nn.Module, Sequence[Batch], int], Iterator[float]]


def ours(case: Case, model: nn.Module, batches: Sequence[Batch], steps: int) -> Iterator[float]:
    for window in accumulation_windows(batches, steps=steps, **case.options):
        for batch in window:
            with window.micro_batch(model):
                own = None if case.trainer else lambda its, batch: case.loss(its, batch, getattr(its, "step", 0))
                window.loss(own or model, batch).backward()
        yield float(window.mean_loss())


def by_hand(case: Case, model: Any, batches: Sequence[Batch], steps: int) -> Iterator[float]:
    """As loops are written: the mean over micro-batches."""
    for start in range(0, len(batches), steps):
        window, total = batches[start : start + steps], 0.0
        for batch in window:
            alone = case.trainer is None
            loss = case.loss(model, batch, getattr(model, "step", 0)) if alone else model(**batch)["loss"]
            (loss / len(window)).backward()
            total += float(loss.detach()) / len(window)
        yield total


def loop(
    case: Case,
    cut: Cut,
    windows: Windows,
    model: Callable[[], nn.Module] | None = None,
    begun: Sequence[Mapping[str, Tensor]] = (),
) -> Training:
    """Train by a loop; ``model``: as it is trained, where that is not the case's, of the same parameters."""
    trained, parameters = seeded(model or case.model)(), Parameters(begun)
    batches = [case.collate(piece) for window in case.windows for piece in pieces(window, cut)]
    optimizer = torch.optim.SGD(trained.parameters(), lr=case.rate)
    told: dict[str, Any] = {"args": None, "state": None, "control": None, "model": trained}
    logged = []
    observations.clear()
    trained.train()
    with Warnings(parameters) as warnings:
        parameters.on_train_begin(**told)
        parameters.on_step_begin(**told)
        for loss in windows(case, trained, batches, len(sizes(cut))):
            logged.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            parameters.on_step_end(**told)
            if len(parameters.after) < len(case.windows):
                parameters.on_step_begin(**told)
    return _training(case, parameters, warnings, logged)
