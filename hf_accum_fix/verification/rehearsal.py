"""Dry run: the trainer's own loop on given micro-batches, with an optimizer that only keeps the gradient."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.overrides.loader import DEALER
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.router.router_loss import RouterLoss
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.gradients import take
from hf_accum_fix.verification.sample import Split

#: TrainingArguments of one optimizer step without logging, saving, uploading, clipping and evaluation.
_ONE_STEP = {
    "max_grad_norm": 0.0,
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
    "evaluation_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "auto_find_batch_size": False,
    "resume_from_checkpoint": None,
    "ignore_data_skip": False,
    "neftune_noise_alpha": None,
    "debug": [],
    "optim": "adamw_torch",
    "past_index": -1,
}


@dataclass(frozen=True)
class Rehearsal:
    """One optimizer step, not taken.

    Attributes:
        gradient: the optimizer's, one for each trainable parameter; None: its step was not called.
        loss: what this rank would log.
        steps_run: micro-batches trained on.
        wrapped: the model as the loop wrapped it.
        router: the load-balancing loss that was trained; None: the model's own, unchanged.
    """

    gradient: list[Tensor | None] | None
    loss: float
    steps_run: int
    wrapped: Any
    router: RouterLoss | None = None


class KeepGradient(torch.optim.Optimizer):
    """An optimizer whose step only keeps the gradient, without copying it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.parameters = parameters
        self.kept: list[Tensor | None] | None = None
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the gradients and leave the parameters alone."""
        self.steps += 1
        self.kept = take(self.parameters)


class _At(TrainerCallback):
    """Begin the training at a later step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the step, which the trainer's own code reads."""
        state.global_step = self._step


def understudy(trainer: TrainerLike, per_device: int, steps: int, step: int = 0) -> Any:
    """A copy of the trainer for another split, which shares its model and nothing else that it could change.

    The release's own method makes it a new accelerator: whether accelerate divides by G too depends on that.

    Args:
        trainer: the original.
        per_device: samples of a micro-batch.
        steps: gradient_accumulation_steps.
        step: the optimizer step in its state.
    """
    copied = _unshared(trainer)
    vars(copied).pop(SESSION, None)
    copied.args = args = copy.copy(trainer.args)
    # Arguments with a __setattr__ of their own would run their checks on assignment.
    vars(args).update({name: value for name, value in _ONE_STEP.items() if hasattr(args, name)})
    vars(args).update(per_device_train_batch_size=per_device, gradient_accumulation_steps=steps, max_steps=step + 1)
    args.accelerator_config = copy.deepcopy(args.accelerator_config)
    # A dispatched loader takes batches of tensors apart; read by every rank itself, it gives the same samples.
    args.accelerator_config.dispatch_batches = False
    if args.accelerator_config.gradient_accumulation_kwargs is not None:
        args.accelerator_config.gradient_accumulation_kwargs.pop("num_steps", None)
    copied.callback_handler = copy.copy(trainer.callback_handler)
    copied.callback_handler.callbacks = [DefaultFlowCallback()]
    copied.control, copied.state = TrainerControl(), copy.deepcopy(trainer.state)
    copied.state.global_step = step
    # The loop notes the length of a window as it fetches it; a single batch is a window of one.
    copied.current_gradient_accumulation_steps = 1
    copied.model_init, copied.neftune_noise_alpha, copied._created_lr_scheduler = None, None, False
    copied._train_batch_size = per_device
    copied.log = _nothing
    copied.create_accelerator_and_postprocess()
    return copied


def rehearse(
    trainer: TrainerLike,
    parameters: Sequence[nn.Parameter],
    micro_batches: Sequence[Any],
    split: Split,
    samples: int,
    wrapped: Any = None,
    step: int = 0,
) -> Rehearsal:
    """Run one window through the trainer's own ``train()``: loop, engine, reduction over ranks.

    A later step runs the window twice, so that code that counts its own calls has left its first window, too.

    Args:
        trainer: to run.
        parameters: whose gradient is kept.
        micro_batches: of the window, on this rank.
        split: how the samples are split.
        samples: of the global batch, which the loop takes for the whole data set.
        wrapped: the model as an earlier rehearsal wrapped it.
        step: the optimizer step to run, from 0.
    """
    actor = understudy(trainer, split.per_device, split.steps, step)
    actor.callback_handler.callbacks.append(_At(max(step - 1, 0)))
    if wrapped is not None:
        actor.model_wrapped = wrapped
    optimizer = KeepGradient(parameters)
    actor.optimizer, actor.lr_scheduler = optimizer, LambdaLR(optimizer, _constant)
    actor.create_optimizer = actor.create_scheduler = actor.create_optimizer_and_scheduler = _nothing
    vars(actor)[DEALER] = None  # Keep this split: no dealing by length.
    actor.get_train_dataloader = lambda *_, **__: _loader(actor, micro_batches, samples)
    losses: list[Tensor] = []
    windows = 0
    own_step: Callable[..., Tensor] = actor.training_step

    @functools.wraps(own_step)
    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal windows
        if optimizer.steps != windows:
            windows = optimizer.steps
            losses.clear()
        loss = own_step(*args, **kwargs)
        if not getattr(actor.__dict__.get(SESSION), "observing", False):
            losses.append(loss.detach().double())
        return loss

    actor.training_step = training_step
    actor.accelerator.clip_grad_norm_ = functools.partial(_unclipped, actor.accelerator)
    actor.train()
    session = actor.__dict__.get(SESSION)
    router = None if session is None else session.router
    return Rehearsal(optimizer.kept, float(sum(losses)), len(losses), actor.model_wrapped, router)


class _MicroBatches(Dataset[Any]):
    """Given micro-batches as a loader, with the number of samples they hold."""

    def __init__(self, batches: Sequence[Any], samples: int) -> None:
        self._batches, self._samples = batches, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _loader(trainer: TrainerLike, micro_batches: Sequence[Any], samples: int) -> Any:
    """A loader as accelerate would have prepared it."""
    return DataLoaderShard(
        _MicroBatches(micro_batches, samples),
        device=trainer.accelerator.device,
        sampler=range(len(micro_batches)),
        batch_size=None,
        collate_fn=_same,
    )


def _same(batch: Any) -> Any:
    return batch


def _unclipped(accelerator: Any, *_: Any, **__: Any) -> Tensor:
    """Leave gradients as they are: some releases clip to infinity for their norm, which overflows before they do."""
    accelerator.unscale_gradients()
    return torch.zeros(())


def _constant(_: int) -> float:
    return 1.0


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _unshared(trainer: TrainerLike) -> Any:
    """A copy of a trainer: the same model and data, but containers, and containers in them, are its own."""
    copied = object.__new__(type(trainer))  # copy.copy would leave a note on the class
    vars(copied).update((name, _without_sharing(value)) for name, value in vars(trainer).items())
    return copied


def _without_sharing(value: Any) -> Any:
    """The same, but containers, and containers in them, are new ones."""
    if type(value) in (dict, defaultdict, OrderedDict):
        copied = copy.copy(value)
        copied.update((key, _without_sharing(each)) for key, each in value.items())
        return copied
    if type(value) in (list, deque, set):
        copied = copy.copy(value)
        if type(value) is list:
            copied[:] = map(_without_sharing, value)
        return copied
    return value
