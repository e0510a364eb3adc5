"""Whole trainings of one pattern, window by window: how far from the full batch, what was said and when.

A reference starts each window where the training's own steps have left the parameters, so that one window's error is
not another's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_accum_fix import observations
from tests.numerics.heads import Batch, Sample, seeded
from tests.numerics.heads.head import collate
from tests.numerics.parity import Step, StockRecorder, step_along, trainable, training_arguments

Cut = tuple[int, int]
CUTS: tuple[Cut, ...] = ((4, 2), (2, 4), (1, 8))
#: Small enough that a training of a few windows stays where losses are curved, large enough that it moves.
RATE = 0.05


@dataclass(frozen=True)
class Case:
    """One pattern of training.

    Attributes:
        loss: ``(model, batch, step)`` -> the loss of a whole global batch at once; steps count from 0.
        model: its class, or how it is made; seeded, in float64.
        windows: the samples of each global batch.
        trainer: a `Recorder`.
        given: further keyword arguments of the Trainer.
        arguments: further TrainingArguments.
        tolerance: relative, of the parameter change.
        cuts: micro-batch sizes, and how many there are in a window.
        whole: stock's one micro-batch of all samples is the full batch; False where stock counts what the loss leaves
            out.
    """

    name: str
    loss: Callable[[nn.Module, Batch, int], Tensor]
    model: Callable[[], nn.Module]
    windows: Sequence[Sequence[Sample]]
    trainer: type = StockRecorder
    given: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[Sequence[Sample]], Batch] = collate
    tolerance: float = 1e-9
    cuts: Sequence[Cut] = CUTS
    whole: bool = True


@dataclass(frozen=True)
class Training:
    """What became of a case.

    Attributes:
        errors: of every window's parameter change, relative to the full batch's.
        said: every warning, with the window that was under way.
        exact: what the report says of the run; None: it has no run.
    """

    errors: Sequence[float]
    said: Sequence[tuple[int, str]]
    exact: bool | None

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

    A model that has a ``step`` is told the next one before its window is fetched.
    """

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.states: list[dict[str, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note_state(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before.append(trainable(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(trainable(model))
        self.note_state(model)
        if hasattr(model, "step"):
            model.step = len(self.after)

    def note_state(self, model: nn.Module) -> None:
        self.states.append({name: each.detach().clone() for name, each in model.named_buffers()})

    def errors(self, case: Case, model: nn.Module) -> list[float]:
        """Of every step, beside that of a full batch by a model of the case's kind."""
        if dist.is_initialized() and self.states[0]:
            # The first rank's go to all ranks with the next forward.
            shared: list[Any] = [self.states]
            dist.broadcast_object_list(shared)
            self.states = shared[0]
        found = []
        for step, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            change = {name: (after[name] - before[name]) / RATE for name in before}
            wanted = _full_batch(case, model, {**before, **self.states[step]}, step)
            found.append(Step(change, 0.0, 0.0).error(wanted))
        return found


class Warnings(logging.Handler):
    """A warning belongs to the window whose first micro-batch began last."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(logging.WARNING)
        self.parameters = parameters
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((max(len(self.parameters.before) - 1, 0), record.getMessage()))


def train(case: Case, cut: Cut, output: Path) -> Training:
    """Train a case, stock or with what is applied."""
    per_device, accumulate = cut
    samples = [sample for window in case.windows for sample in window]
    build, parameters = seeded(case.model), Parameters()
    steps = {"max_steps": len(case.windows), "learning_rate": RATE}
    args = training_arguments(output, per_device, accumulate, **steps, **case.arguments)
    warnings, logger = Warnings(parameters), logging.getLogger("hf_accum_fix")
    observations.clear()
    logger.addHandler(warnings)
    try:
        trainer = case.trainer(
            model=build(), args=args, train_dataset=samples, data_collator=case.collate, **case.given
        )
        trainer.add_callback(parameters)
        trainer.train()
    finally:
        logger.removeHandler(warnings)
    assert len(parameters.after) == len(case.windows)
    runs = observations.recorded()
    return Training(parameters.errors(case, build()), warnings.said, runs[-1]["exact"] if runs else None)


def _full_batch(case: Case, model: nn.Module, found: Mapping[str, Tensor], step: int) -> Step:
    """One window's step (lr 1) from the parameters and buffers it found, by one forward of all its samples."""
    model.load_state_dict(found, strict=False)
    model.zero_grad()
    model.train()
    return step_along(model, case.loss(model, case.collate(case.windows[step]), step))


def computing(loss: Callable[..., tuple[Tensor, Any]]) -> type:
    """A Trainer whose ``compute_loss`` is ``loss(trainer, base, model, inputs, number)``, with the outputs."""

    class Computing(StockRecorder):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            found, outputs = loss(self, super().compute_loss, model, inputs, num_items_in_batch)
            return (found, outputs) if return_outputs else found

    return Computing
