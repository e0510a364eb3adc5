"""Copies of a trainer, its model and its plugins, so that running a split changes nothing of the user's."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerControl
from transformers.trainer_callback import DefaultFlowCallback

from hf_accum_fix.engines.engine import is_deepspeed, is_sharded
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.overrides.session import SESSION
from hf_accum_fix.overrides.trainer_facts import parallel_size
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.sharded import is_fsdp1

PROOF: Final = "; hf-accum-fix verify --save proof.json in one process, then --against here"
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
    copied.log = nothing
    copied.create_accelerator_and_postprocess()
    return copied


def nothing(*_: Any, **__: Any) -> None:
    """What a copy does instead of logging, or of making an optimizer."""
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


# --- models that an engine shards in place ----------------------------------------------------------------------------


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
    if shards or trainer.model_wrapped is not trainer.model or is_fsdp1(trainer.model):
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


def copied_model(model: nn.Module) -> nn.Module:
    """A copy with the hooks on parameters, which deepcopy leaves out."""
    found = copy.deepcopy(model)
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(one, hooks, None):
                setattr(other, hooks, getattr(one, hooks))
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
