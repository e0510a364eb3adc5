"""Engines that shard a model in place (FSDP, DeepSpeed): train a copy of it, and read gradients as projections."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_accum_fix.engines.engine import is_deepspeed, is_sharded
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.trainer_facts import parallel_size
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.projection import Projected, named, projections_of

PROOF = "; hf-accum-fix verify --save proof.json in one process, then --against here"


class Reached(BaseException):
    """The optimizer was about to step; no `Exception`, which code on the way may catch."""


class AtTheStep(TrainerCallback):
    """Keep the gradient's projections where the optimizer steps, which then changes no weight; or end the training."""

    def __init__(self, trainer: TrainerLike, *, ends: bool = False) -> None:
        self._trainer, self._ends = trainer, ends
        self.steps, self.reached = 0, dict[str, Projected]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Engine and optimizer are there."""
        engine = self._trainer.model_wrapped
        if not is_deepspeed(self._trainer.accelerator):
            inner = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
            inner.register_step_pre_hook(self._before_the_step)
            return
        # The engine steps within backward.
        step = engine.step

        def at_the_boundary(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._read()
                for group in engine.optimizer.param_groups:
                    group["lr"] = 0.0
            return step(*args, **kwargs)

        engine.step = at_the_boundary

    def _before_the_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._read()
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = None

    def _read(self) -> None:
        self.steps += 1
        self.reached = projections_of(_gradients(self._trainer))
        if self._ends:
            raise Reached


def _gradients(trainer: TrainerLike) -> Iterator[tuple[str, Tensor | None]]:
    """This rank's part of every gradient; a collective for each parameter that is gathered."""
    model = trainer.model_wrapped
    taken: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad  # noqa: E731
    whole: Any = nullcontext()
    if is_deepspeed(trainer.accelerator):
        taken = import_module("deepspeed.utils").safe_get_full_grad
    elif _is_fsdp1(model):
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


def _is_fsdp1(model: nn.Module) -> bool:
    return any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules())


def refuse_shards(trainer: TrainerLike) -> None:
    """Refuse what cannot be copied.

    Raises:
        UnsupportedSetupError: if ranks share samples, or the model is in shards before it trains.
    """
    if not is_sharded(trainer.accelerator):
        return
    if parallel_size(trainer, "sp") > 1 or parallel_size(trainer, "cp") > 1:
        raise UnsupportedSetupError(f"got ranks that cut their samples; expected whole samples on each rank{PROOF}")
    shards = any(hasattr(each, "ds_id") or hasattr(each, "placements") for each in trainer.model.parameters())
    if shards or trainer.model_wrapped is not trainer.model or _is_fsdp1(trainer.model):
        raise UnsupportedSetupError(
            "got a model that an engine holds already: it was loaded in shards (ZeRO-3's Init), or has trained; "
            f"expected the whole model, before it trains{PROOF}"
        )


def whole_model(trainer: TrainerLike) -> nn.Module:
    """A copy of the model on this rank's device, with the first rank's weights, as engines take them."""
    found, device = copied_model(trainer.model), trainer.args.device
    found = found.to_empty(device=device) if any(each.is_meta for each in found.parameters()) else found.to(device)
    for each in (*found.parameters(), *found.buffers()) if trainer.args.world_size > 1 else ():
        flat = each.detach().flatten().contiguous()
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows no bool.
        each.detach().copy_(flat.view(each.shape))
    return found


@contextmanager
def plugins_copied(trainer: TrainerLike, size: int = 0, steps: int = 0) -> Iterator[None]:
    """Put copies of accelerate's plugins into its state, which engines fill in; DeepSpeed's with another split."""
    state = AcceleratorState._shared_state
    before = {name: each for name, each in state.items() if "plugin" in name and is_sharded(trainer.accelerator)}
    state.update(copy.deepcopy(before))
    if size and is_deepspeed(trainer.accelerator):
        config = AcceleratorState().deepspeed_plugin.deepspeed_config
        sizes = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": steps}
        sizes["train_batch_size"] = size * steps * trainer.args.world_size
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
