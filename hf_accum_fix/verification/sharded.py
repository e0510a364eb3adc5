"""Engines that shard a model in place (FSDP, DeepSpeed): train a copy of it, and read gradients as projections."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_accum_fix.engines.engine import is_deepspeed, is_sharded
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.trainer_facts import parallel_size
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.projection import Projected, named, projections_of

PROOF = "; hf-accum-fix verify --save proof.json in one process, then --against here"


class AtTheStep(TrainerCallback):
    """Pass the gradient's projections to a function where the optimizer would step, which it then does not."""

    def __init__(self, trainer: TrainerLike, function: Callable[[dict[str, Projected]], object]) -> None:
        self._trainer, self._function = trainer, function

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Engine and optimizer are there."""
        engine = self._trainer.model_wrapped
        if is_deepspeed(self._trainer.accelerator):
            # The engine steps within backward.
            step = engine.step
            engine.step = lambda *args, **kwargs: (
                self._reach() if engine.is_gradient_accumulation_boundary() else step(*args, **kwargs)
            )
            return
        inner = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        inner.register_step_pre_hook(self._reach)

    def _reach(self, optimizer: Any = None, *_: Any) -> None:
        self._function(projections_of(_gradients(self._trainer)))
        for group in [] if optimizer is None else optimizer.param_groups:
            for each in group["params"]:
                each.grad = None


def _gradients(trainer: TrainerLike) -> Iterator[tuple[str, Tensor | None]]:
    """This rank's part of every gradient; a collective for each parameter that is gathered."""
    model = trainer.model_wrapped
    taken: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad  # noqa: E731
    whole: Any = nullcontext()
    if is_deepspeed(trainer.accelerator):
        taken = import_module("deepspeed.utils").safe_get_full_grad
    elif any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules()):
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not model._use_orig_params:
            raise UnsupportedSetupError(
                "got FSDP1 with use_orig_params=False, whose gradients have no names; expected True; set it in "
                "fsdp_config"
            )
        whole = FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True)
    with whole:
        for name, each in named(model):
            if each.requires_grad:
                yield name, taken(each)


def refuse_shards(trainer: TrainerLike) -> None:
    """Refuse what cannot be copied: shards, and other weights on some ranks. Call it on all ranks.

    Raises:
        UnsupportedSetupError: if it is one.
    """
    if parallel_size(trainer, "sp") > 1 or parallel_size(trainer, "cp") > 1:
        raise UnsupportedSetupError(f"got ranks that share samples; expected samples of its own on each rank{PROOF}")
    values = dict(trainer.model.named_parameters())
    is_whole = not any(each.is_meta or hasattr(each, "ds_id") or hasattr(each, "placements") for each in values.values())
    is_whole = is_whole and type(trainer.model_wrapped) is type(trainer.model)
    weights = [float(each.detach().double().sum()) for each in values.values()] if is_whole else None
    ranks = gather_object([weights]) if trainer.args.world_size > 1 else [weights]
    if None in ranks or any(each != ranks[0] for each in ranks):
        raise UnsupportedSetupError(
            "got a model that is in shards, or has other weights on some ranks, before it trains; expected the whole "
            f"model on every rank{PROOF}"
        )


@contextmanager
def plugins_copied(trainer: TrainerLike, size: int, steps: int) -> Iterator[None]:
    """Put copies of accelerate's plugins into its state, which engines fill in; DeepSpeed's with another split."""
    state, ranks = AcceleratorState._shared_state, trainer.args.world_size
    before = {name: each for name, each in state.items() if "plugin" in name and is_sharded(trainer.accelerator)}
    state.update(copy.deepcopy(before))
    if is_deepspeed(trainer.accelerator):
        config = AcceleratorState().deepspeed_plugin.deepspeed_config
        sizes = {"micro_batch_size_per_gpu": size, "batch_size": size * steps * ranks}
        sizes = {**{f"train_{name}": number for name, number in sizes.items()}, "gradient_accumulation_steps": steps}
        config.update({name: number for name, number in sizes.items() if name in config})
    try:
        yield
    finally:
        state.update(before)


def copied_model(model: nn.Module) -> nn.Module:
    """A copy with the hooks on parameters, which deepcopy leaves out."""
    found = copy.deepcopy(model)
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(one, hooks, None):
                setattr(other, hooks, getattr(one, hooks))
    return found


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, or a copy of it where it is elsewhere."""
    return model if all(each.device == device for each in model.parameters()) else copied_model(model).to(device)
