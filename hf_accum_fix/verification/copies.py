"""Copies of a trainer, its model and its plugins; and the gradient that the optimizer of one is about to use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.engines.engine import before_the_step, is_deepspeed, is_sharded
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.overrides.trainer_facts import data_ranks, parallel_size
from hf_accum_fix.verification.projection import named

PROOF: Final = "; hf-accum-fix verify --save proof.json in one process, then --against here"
#: TrainingArguments for one optimizer step without logging, saving, uploading, clipping and evaluation.
_ONE_STEP = {
    **dict.fromkeys(("logging_strategy", "save_strategy", "eval_strategy", "evaluation_strategy"), "no"),
    **dict.fromkeys(("eval_on_start", "load_best_model_at_end", "push_to_hub", "ignore_data_skip"), False),
    **dict.fromkeys(("resume_from_checkpoint", "neftune_noise_alpha")),
    **{"auto_find_batch_size": False, "max_grad_norm": 0.0, "debug": [], "optim": "adamw_torch", "past_index": -1},
}


def copy_for_split(trainer: Any, per_device: int, steps: int, step: int = 0) -> Any:
    """Copy the trainer for another split. The copy shares the model, and what else the trainer holds.

    The release's own method creates the new accelerator, because it decides whether accelerate divides by G too.
    ``step`` is the optimizer step of its state.
    """
    copied: Any = object.__new__(type(trainer))  # copy.copy would set an attribute on the class
    vars(copied).update((name, value) for name, value in vars(trainer).items() if name != SESSION)
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
    copied.log = nothing
    copied.create_accelerator_and_postprocess()
    if "backward" in vars(trainer.accelerator) and not own_backward_left_out(trainer):
        copied.accelerator.backward = vars(trainer.accelerator)["backward"]
    return copied


def own_backward_left_out(trainer: Any) -> str:
    """Why splits do not run the ``accelerator.backward`` that this trainer has replaced, if it has; empty: they do.

    Accelerators share the steps that they divide by; engines and loss scales are each one's own.
    """
    scales = getattr(trainer.accelerator, "scaler", None) is not None
    if "backward" not in vars(trainer.accelerator) or not (scales or is_sharded(trainer.accelerator)):
        return ""
    return "accelerator.backward is replaced, and was not run: engine and loss scale of a split are its own"


def nothing(*_: Any, **__: Any) -> None:
    """What a copy does instead of logging, or of making an optimizer."""
    return None


# --- models that an engine shards in place ----------------------------------------------------------------------------


def refuse_shards(trainer: Any) -> None:
    """Refuse what cannot be copied: ranks that share samples, a model that is in shards before it trains."""
    cut = parallel_size(trainer, "sp") > 1 or parallel_size(trainer, "cp") > 1
    parts = any(hasattr(each, "ds_id") or hasattr(each, "placements") for each in trainer.model.parameters())
    held = parts or trainer.model_wrapped is not trainer.model or is_fsdp1(trainer.model)
    if is_sharded(trainer.accelerator) and (cut or held):
        reason = "it was loaded in shards (ZeRO-3's Init), or has trained"
        got = "ranks that cut their samples" if cut else f"a model that an engine holds already: {reason}"
        raise UnsupportedSetupError(
            f"got {got}; expected whole samples on each rank, and the whole model, before it trains{PROOF}"
        )


def whole_model(trainer: Any) -> nn.Module:
    """A copy of the model on this rank's device, with the first rank's weights, as engines take them."""
    found, device = copied_model(trainer.model), trainer.args.device
    found = found.to_empty(device=device) if any(each.is_meta for each in found.parameters()) else found.to(device)
    for each in (*found.parameters(), *found.buffers()) if trainer.args.world_size > 1 else ():
        flat = each.detach().flatten().contiguous()
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows no bool.
        each.detach().copy_(flat.view(each.shape))
    return found


def copied_model(model: nn.Module) -> nn.Module:
    """A copy with the hooks on parameters, which deepcopy leaves out."""
    found = copy.deepcopy(model)
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(one, hooks, None):
                setattr(other, hooks, getattr(one, hooks))
    return found


@contextmanager
def plugins_copied(trainer: Any, size: int = 0, steps: int = 0) -> Iterator[None]:
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


# --- the gradient where the optimizer steps ---------------------------------------------------------------------------


class StepReached(BaseException):
    """The optimizer was about to step; no `Exception`, which code on the way may catch."""


class AtTheStep(TrainerCallback):
    """Call ``act`` where the optimizer is about to step, which then changes no weight; count these steps.

    ``begin`` is called with the trainer's state where the training begins.
    """

    def __init__(
        self, trainer: Any, act: Callable[[], None], begin: Callable[[Any], None] = lambda state: None
    ) -> None:
        self._trainer, self._act, self._begin, self._groups, self.steps = trainer, act, begin, list[Any](), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Engine and optimizer are there."""
        # Not every release passes it.
        optimizer: Any = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        self._groups = optimizer.param_groups
        before_the_step(self._trainer.accelerator, optimizer, self._before)
        self._begin(state)

    def _before(self) -> None:
        self.steps += 1
        self._act()
        for group in self._groups:
            group["lr"] = 0.0
            # DeepSpeed steps partitions of its own.
            for each in () if is_deepspeed(self._trainer.accelerator) else group["params"]:
                each.grad = None


def gradients_of(trainer: Any) -> Iterator[tuple[str, Tensor | None]]:
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


def engine_of(trainer: Any) -> str:
    """What stands around the model, in words."""
    state, kind = trainer.accelerator.state, trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return f"FSDP{getattr(state.fsdp_plugin, 'fsdp_version', 1)}"
    shared = trainer.args.world_size // data_ranks(trainer)
    return f"tensor parallel {shared}" if shared > 1 else "DDP" if trainer.args.world_size > 1 else ""
