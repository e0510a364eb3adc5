"""How the engine of an ``accelerate.Accelerator`` changes losses, inputs and gradients, read from the live objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.engines.precision import NARROW, Arrival, Leaf
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.trace.preserve import overridden
from hf_accum_fix.upstream.engine_defects import engine_defects_of


def is_deepspeed(accelerator: Any) -> bool:
    """Whether the engine is DeepSpeed, which steps inside the backward."""
    return accelerator is not None and accelerator.distributed_type == DistributedType.DEEPSPEED


def bare_name(name: str) -> str:
    """A parameter's name in the model itself, without what engines put before it or into it."""
    added = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(each for each in name.split(".") if each not in added).removeprefix("module.").removeprefix(".")


def engine_divisor(accelerator: Any, *, scale_wrt_gas: bool | None = None, **_: Any) -> int:
    """The number that the engine divides a loss by; the keyword arguments are those of its ``backward``."""
    if not is_deepspeed(accelerator):
        return 1 if accelerator is None else int(accelerator.gradient_accumulation_steps)
    return (
        1 if scale_wrt_gas is False else int(accelerator.deepspeed_engine_wrapped.engine.gradient_accumulation_steps())
    )


def reducing(accelerator: Any, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around a forward and backward: ranks reduce gradients only in the last micro-batch of a window."""
    if accelerator is None:
        return nullcontext() if last else getattr(model, "no_sync", nullcontext)()
    # accelerate's optimizer and scheduler, and DeepSpeed's engine, step only if this is set.
    accelerator.sync_gradients = last
    set_last_micro_batch(accelerator, last)
    # DeepSpeed uses that boundary; its own no_sync refuses ZeRO-2 and -3.
    return nullcontext() if last or is_deepspeed(accelerator) else accelerator.no_sync(model)


def sharing_no_buffers(model: nn.Module) -> nn.Module:
    """A model for one more forward of a micro-batch, in which DDP shares no buffers: the other ranks would not join."""
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = False
    return model


def set_last_micro_batch(accelerator: Any, last: bool) -> None:
    """Set DeepSpeed's accumulation boundary; without it DeepSpeed counts windows of one length.

    accelerate sets it from 1.8 on; before, the short window at the end of an epoch is not stepped.
    """
    if is_deepspeed(accelerator):
        accelerator.deepspeed_engine_wrapped.engine.set_gradient_accumulation_boundary(last)


def before_the_step(accelerator: Any, optimizer: Any, act: Callable[[], None]) -> ExitStack:
    """Call ``act`` whenever the optimizer is about to step; DeepSpeed's engine steps it inside the backward.

    Returns:
        What stops it: close it, or leave its ``with`` block.
    """
    stack = ExitStack()
    if not is_deepspeed(accelerator):
        stack.callback(optimizer.register_step_pre_hook(lambda *_: act()).remove)
        return stack
    engine = accelerator.deepspeed_engine_wrapped.engine
    step = engine.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            act()
        return step(*args, **kwargs)

    stack.enter_context(overridden(engine, "step", stepping))
    return stack


def is_sharded(accelerator: Any) -> bool:
    """Whether the ranks meet in every forward, to gather the parameters."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def waits_every_micro_batch(accelerator: Any) -> bool:
    """Whether the ranks wait for one another in every micro-batch (FSDP, ZeRO-2 and -3), not once a window (DDP)."""
    if is_deepspeed(accelerator):
        return bool(accelerator.state.deepspeed_plugin.zero_stage >= 2)
    return is_sharded(accelerator)


def narrow_leaves(accelerator: Any, model: nn.Module) -> Iterator[Leaf]:
    """The gradients that the engine would add micro-batch by micro-batch in 16 bits, and where they arrive.

    FSDP adds the gradients of whole parameters in the dtype that it computes in, FSDP2 in the dtype that it reduces in;
    FSDP2 makes its whole parameters in the first forward. DeepSpeed keeps its own sums.
    """
    if is_deepspeed(accelerator):
        return
    sharded = set()
    looks = getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False)
    module: Any
    for module in model.modules():
        for each in parameters_of_fsdp2(module):
            sharded.add(each.sharded_param)
            yield from _leaves_of_fsdp2(each)
        if (handle := getattr(module, "_handle", None)) is not None and hasattr(handle, "flat_param"):
            views = tuple(handle.flat_param._params or ())
            sharded.update((handle.flat_param, *views))
            if handle.flat_param.requires_grad and handle._fwd_bwd_param_dtype in NARROW:
                yield Leaf(handle.flat_param, Arrival.FLAT, views)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in NARROW and parameter not in sharded:
            yield Leaf(parameter, Arrival.HELD if looks else Arrival.AUTOGRAD)


def _leaves_of_fsdp2(each: Any) -> Iterator[Leaf]:
    """A parameter of FSDP2: whole, as autograd knows it, and this rank's piece, where every micro-batch is reduced."""
    whole = getattr(each, "_unsharded_param", None)
    if whole is not None and whole.requires_grad and whole.dtype in NARROW and each.reduce_dtype is not torch.float32:
        yield Leaf(whole)
    if each.sharded_param.requires_grad and each.sharded_param.dtype in NARROW:
        yield Leaf(each.sharded_param, Arrival.REDUCED)


def reduced_in(accelerator: Any, model: nn.Module) -> list[str]:
    """The dtypes, and communication hooks, by which gradients are averaged over ranks; call it after a forward."""
    if is_deepspeed(accelerator):
        return [_name(accelerator.deepspeed_engine_wrapped.engine.communication_data_type)]
    dtypes: set[torch.dtype] = set()
    sharded: set[Any] = set()
    module: Any
    for module in model.modules():
        for each in parameters_of_fsdp2(module):
            # The root's stay whole after a forward.
            sharded.update((each.sharded_param, getattr(each, "_unsharded_param", None)))
            if each.sharded_param.requires_grad:
                dtypes.add(each.reduce_dtype or each.param_dtype or each.sharded_param.dtype)
        if (handle := getattr(module, "_handle", None)) is not None and hasattr(handle, "flat_param"):
            sharded.update((handle.flat_param, *(handle.flat_param._params or ())))
            if handle.flat_param.requires_grad:
                dtypes.add(handle._reduce_dtype)
    dtypes |= {each.dtype for each in model.parameters() if each.requires_grad and each not in sharded}
    hooks = [hook.__qualname__ for hook, _ in getattr(model, "_comm_hooks", ())]
    return [*sorted(map(_name, dtypes)), *hooks]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parameters_of_fsdp2(module: Any) -> Iterator[Any]:
    """FSDP2's record of each parameter of a module; not by its class, which imports slowly."""
    if hasattr(module, "_get_fsdp_state"):
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            yield from group.fsdp_params if group is not None else ()


def check_engine_adds(accelerator: Any, accumulate_in: str) -> str | None:
    """Check how the engine adds the gradients of a window, and in which dtype; all but DeepSpeed leave it to us.

    Returns:
        A warning, if this release of DeepSpeed loses micro-batches, or adds in 16 bits where the option is the default.

    Raises:
        UnsupportedSetupError: if more than 16 bits were requested, and DeepSpeed adds in 16 bits, or LOMO steps before
            the sum is complete.
    """
    if accumulate_in != "parameter" and getattr(accelerator, "has_lomo_optimizer", False):
        raise UnsupportedSetupError(
            f"got accumulate_in={accumulate_in!r} and LOMO, which steps inside the backward of every micro-batch; "
            "expected an optimizer that steps once a window; use another one, or accumulate_in='parameter'"
        )
    if not is_deepspeed(accelerator):
        return None
    engine = accelerator.deepspeed_engine_wrapped.engine
    release = str(getattr(sys.modules.get("deepspeed"), "__version__", ""))
    offloads = all(getattr(engine.optimizer, each, False) for each in ("cpu_offload", "partition_gradients"))
    if offloads and (defects := engine_defects_of("deepspeed", release)):
        return (
            f"DeepSpeed {release} drops micro-batches under ZeRO-2 with an offloaded optimizer ({defects[0].name}); "
            f"{defects[0].remedy}, or remove offload_optimizer from its configuration"
        )
    adds_in = engine.get_data_types()[1]
    if adds_in not in NARROW:
        return None
    found = f"DeepSpeed adds the gradients of a window in {adds_in}"
    what = 'add "data_types": {"grad_accum_dtype": "fp32"} to its configuration (ZeRO 1 to 3)'
    if accumulate_in != "parameter":
        raise UnsupportedSetupError(f"got accumulate_in={accumulate_in!r}, but {found}; expected float32; {what}")
    return f"{found}, which rounds in every micro-batch; {what}"
