"""Dry run: the trainer's own loop on given micro-batches, with an optimizer that is kept from changing a weight."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from hf_accum_fix.data.loader import DEALER
from hf_accum_fix.engines.engine import is_sharded
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.router.router_loss import Convention
from hf_accum_fix.verification.copies import AtTheStep, copied_model, copy_for_split, gradients_of, nothing
from hf_accum_fix.verification.gradients import take
from hf_accum_fix.verification.projection import projections_of
from hf_accum_fix.verification.reference import SceneSplit

#: The attribute of a trainer with the model as the loop has wrapped it.
_WRAPPED: Final = "_hf_accum_fix_wrapped"


class DryRun(NamedTuple):
    """The result of one optimizer step that was not taken."""

    gradient: list[Tensor | None] | None  # at the optimizer step; None: the step was not called
    loss: float  # that this rank would log
    steps_run: int  # micro-batches trained
    convention: Convention  # of the load-balancing loss in training


def dry_run(trainer: Any, split: SceneSplit, step: int = 0) -> DryRun:
    """Run one window through the trainer's own ``train()``: loop, engine, reduction over ranks.

    For a later step, run the window twice, so that code that counts its own calls is past its first window. The model
    as the loop has wrapped it stays with the trainer, for the next run; an engine that shards gets a copy of it.
    """
    parameters, shards = split.scene.parameters, is_sharded(trainer.accelerator)
    actor = copy_for_split(trainer, split.per_device, split.steps, step)
    kept: list[Tensor | None] | None = None

    def keep() -> None:
        nonlocal kept
        # In the order of the parameters, as those of the reference.
        kept = [*projections_of(gradients_of(actor)).values()] if shards else take(parameters)

    if shards:
        actor.model = actor.model_wrapped = copied_model(trainer.model)
    else:
        actor.model_wrapped = vars(trainer).get(_WRAPPED, trainer.model_wrapped)
        actor.optimizer = torch.optim.SGD(list(parameters), lr=0.0)
        actor.lr_scheduler = LambdaLR(actor.optimizer, lambda _: 1.0)
        actor.create_optimizer = actor.create_scheduler = actor.create_optimizer_and_scheduler = nothing
    vars(actor)[DEALER] = None  # Keep this split: no length-balancing.
    loader = _loader(actor, split.micro_batches(), len(split.scene.every))
    actor.get_train_dataloader = lambda *_, **__: loader
    losses = defaultdict[int, list[Tensor]](list)

    def begin(state: Any) -> None:
        """Once its methods are wrapped: the trainer's own code may read the step."""
        state.global_step = max(step - 1, 0)
        outermost: Callable[..., Tensor] = actor.training_step

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            # An engine may step inside.
            of_window = losses[at_the_step.steps]
            loss = outermost(*args, **kwargs)
            of_window.append(loss.detach().double())
            return loss

        actor.training_step = training_step

    at_the_step = AtTheStep(actor, keep, begin)
    actor.callback_handler.callbacks.append(at_the_step)
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
    last = losses[max(losses, default=0)]
    return DryRun(kept, float(sum(last)), len(last), convention)


def _loader(trainer: Any, micro_batches: Sequence[Any], samples: int) -> Any:
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
