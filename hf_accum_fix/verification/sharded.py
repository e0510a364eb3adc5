"""The gradient as the optimizer is about to use it, under every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_accum_fix.engines.engine import before_the_step, is_deepspeed
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.trainer_facts import data_ranks
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.projection import named


class Reached(BaseException):
    """The optimizer was about to step; no `Exception`, which code on the way may catch."""


class AtTheStep(TrainerCallback):
    """Call ``act`` where the optimizer is about to step, which then changes no weight; count these steps."""

    def __init__(self, trainer: TrainerLike, act: Callable[[], None]) -> None:
        self._trainer, self._act, self._groups, self.steps = trainer, act, list[Any](), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Engine and optimizer are there."""
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        self._groups = optimizer.param_groups
        before_the_step(self._trainer.accelerator, optimizer, self._before)

    def _before(self) -> None:
        self.steps += 1
        self._act()
        for group in self._groups:
            group["lr"] = 0.0
            # DeepSpeed steps partitions of its own.
            for each in () if is_deepspeed(self._trainer.accelerator) else group["params"]:
                each.grad = None


def gradients_of(trainer: TrainerLike) -> Iterator[tuple[str, Tensor | None]]:
    """The gradients that the optimizer is about to use; a collective for each parameter that is gathered."""
    model = trainer.model_wrapped
    taken: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad  # noqa: E731
    whole: Any = nullcontext()
    if is_deepspeed(trainer.accelerator):
        taken = import_module("deepspeed.utils").safe_get_full_grad
    elif is_fsdp1(model):
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


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 holds a part of a model."""
    return any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules())


def engine_of(trainer: TrainerLike) -> str:
    """What stands around the model, in words."""
    state, kind = trainer.accelerator.state, trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return f"FSDP{getattr(state.fsdp_plugin, 'fsdp_version', 1)}"
    shared = trainer.args.world_size // data_ranks(trainer)
    return f"tensor parallel {shared}" if shared > 1 else "DDP" if trainer.args.world_size > 1 else ""
