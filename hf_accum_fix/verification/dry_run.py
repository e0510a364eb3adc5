"""Dry run: the trainer's own loop on given micro-batches, with an optimizer that only stores the gradient."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.engines.engine import is_deepspeed, is_sharded
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.overrides.training import DEALER
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.gradients import take
from hf_accum_fix.verification.reference import Split
from hf_accum_fix.verification.sharded import AtTheStep, copied_model

#: TrainingArguments for one optimizer step without logging, saving, uploading, clipping and evaluation.
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


#: The attribute of a trainer with the model as the loop has wrapped it.
_WRAPPED: Final = "_hf_accum_fix_wrapped"


class DryRun(NamedTuple):
    """The result of one optimizer step that was not taken.

    Attributes:
        gradient: at the optimizer step; None: the step was not called.
        loss: the loss that this rank would log.
        steps_run: number of micro-batches trained.
        convention: of the load-balancing loss in training.
    """

    gradient: list[Tensor | None] | None
    loss: float
    steps_run: int
    convention: Convention


class KeepGradient(torch.optim.Optimizer):
    """An optimizer whose step only stores the gradient, without copying it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.parameters = parameters
        self.kept: list[Tensor | None] | None = None
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Store the gradients; do not change the parameters."""
        self.steps += 1
        self.kept = take(self.parameters)


class _AtBegin(TrainerCallback):
    """Start the training at a later step, and call a function once its methods are wrapped."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self._step, self._function = step, function

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the step, because the trainer's own code may read it."""
        state.global_step = self._step
        self._function()


def copy_for_split(trainer: TrainerLike, per_device: int, steps: int, step: int = 0) -> Any:
    """Copy the trainer for another split. The copy shares the model, and no container that it could change.

    The release's own method creates the new accelerator, because it decides whether accelerate divides by G too.
    ``step`` is the optimizer step of its state.
    """
    copied: Any = object.__new__(type(trainer))  # copy.copy would set an attribute on the class
    vars(copied).update((name, _without_sharing(value)) for name, value in vars(trainer).items())
    vars(copied).pop(SESSION, None)
    copied.args = args = copy.copy(trainer.args)
    # Bypass __setattr__, which may validate on assignment.
    vars(args).update({name: value for name, value in _ONE_STEP.items() if hasattr(args, name)})
    vars(args).update(per_device_train_batch_size=per_device, gradient_accumulation_steps=steps, max_steps=step + 1)
    if is_deepspeed(trainer.accelerator):
        # The plugin of accelerate's state, of which `plugins_copied` has made a copy.
        config = AcceleratorState().deepspeed_plugin.hf_ds_config
        vars(args).update(deepspeed_plugin=None, hf_deepspeed_config=config)
    args.accelerator_config = copy.deepcopy(args.accelerator_config)
    # A dispatched loader splits batches of tensors; without dispatching every rank reads the same samples.
    args.accelerator_config.dispatch_batches = False
    if args.accelerator_config.gradient_accumulation_kwargs is not None:
        args.accelerator_config.gradient_accumulation_kwargs.pop("num_steps", None)
    copied.callback_handler = copy.copy(trainer.callback_handler)
    copied.callback_handler.callbacks = [DefaultFlowCallback()]
    copied.control, copied.state = TrainerControl(), copy.deepcopy(trainer.state)
    copied.state.global_step = step
    # The loop sets this when it fetches a window; a single batch is a window of one.
    copied.current_gradient_accumulation_steps = 1
    copied.model_init, copied.neftune_noise_alpha, copied._created_lr_scheduler = None, None, False
    copied._train_batch_size = per_device
    copied.log = _nothing
    copied.create_accelerator_and_postprocess()
    return copied


def dry_run(trainer: TrainerLike, split: Split, step: int = 0) -> DryRun:
    """Run one window through the trainer's own ``train()``: loop, engine, reduction over ranks.

    For a later step, run the window twice, so that code that counts its own calls is past its first window. The model
    as the loop has wrapped it stays with the trainer, for the next run; an engine that shards gets a copy of it.
    """
    parameters, shards = split.scene.parameters, is_sharded(trainer.accelerator)
    actor = copy_for_split(trainer, split.per_device, split.steps, step)
    optimizer: KeepGradient | AtTheStep
    if not shards:
        actor.model_wrapped = vars(trainer).get(_WRAPPED, trainer.model_wrapped)
        optimizer = KeepGradient(parameters)
        actor.optimizer, actor.lr_scheduler = optimizer, LambdaLR(optimizer, lambda _: 1.0)
        actor.create_optimizer = actor.create_scheduler = actor.create_optimizer_and_scheduler = _nothing
    else:
        actor.model = actor.model_wrapped = copied_model(trainer.model)
        optimizer = AtTheStep(actor)
        actor.callback_handler.callbacks.append(optimizer)
    vars(actor)[DEALER] = None  # Keep this split: no length-balancing.
    loader = _loader(actor, split.micro_batches(), len(split.scene.every))
    actor.get_train_dataloader = lambda *_, **__: loader
    losses: list[Tensor] = []
    windows = 0

    def listen() -> None:
        outermost: Callable[..., Tensor] = actor.training_step

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal windows
            if optimizer.steps != windows:
                windows = optimizer.steps
                losses.clear()
            loss = outermost(*args, **kwargs)
            losses.append(loss.detach().double())
            return loss

        actor.training_step = training_step

    actor.callback_handler.callbacks.append(_AtBegin(max(step - 1, 0), listen))
    actor.accelerator.clip_grad_norm_ = functools.partial(_unclipped, actor.accelerator)
    try:
        actor.train()
    finally:
        if shards:
            actor.accelerator.free_memory()
    take(parameters)  # Those of micro-batches after the last step.
    if not shards:
        vars(trainer)[_WRAPPED] = actor.model_wrapped
    session = actor.__dict__.get(SESSION)
    convention = Convention.MEAN if session is None else session.router.in_force
    kept = split.scene.in_order(optimizer.reached) if isinstance(optimizer, AtTheStep) else optimizer.kept
    return DryRun(kept, float(sum(losses)), len(losses), convention)


def _loader(trainer: TrainerLike, micro_batches: Sequence[Any], samples: int) -> Any:
    """A loader as accelerate prepares it, of a data set whose length is the number of samples."""
    return DataLoaderShard(
        [*micro_batches, *[None] * (samples - len(micro_batches))],
        device=trainer.accelerator.device,
        sampler=range(len(micro_batches)),
        batch_size=None,
        collate_fn=lambda batch: batch,
    )


def _unclipped(accelerator: Any, *_: Any, **__: Any) -> Tensor:
    """Do not clip: some releases clip to infinity to get the norm, which overflows before the gradients do."""
    accelerator.unscale_gradients()
    return torch.zeros(())


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _without_sharing(value: Any) -> Any:
    """Copy containers, also nested ones; return anything else as it is."""
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
