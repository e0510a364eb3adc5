"""What a model declares of its loss: read off the module and its configuration, without a forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def inside_ddp(model: nn.Module) -> nn.Module | None:
    """The module that DistributedDataParallel wraps; None where it wraps none."""
    return model.module if isinstance(model, DistributedDataParallel) else None


def takes_number(model: nn.Module) -> bool:
    """Whether the forward can be called with the number at all: a compiled module's own signature takes anything."""
    return has_parameter(_innermost(model).forward, "num_items_in_batch")


def requires_number(model: nn.Module) -> bool:
    """Whether the forward cannot be called without the number."""
    parameter = inspect.signature(_innermost(model).forward).parameters.get("num_items_in_batch")
    return parameter is not None and parameter.default is parameter.empty


def wants_number(model: nn.Module) -> bool:
    """Whether a model is to be handed the number: it takes one and does not declare ``accepts_loss_kwargs = False``.

    An adapter's own signature takes anything, so what it adapts is asked.
    """
    model = _innermost(model)
    adapted = getattr(model, "get_base_model", None)
    model = model if adapted is None else adapted()
    return getattr(model, "accepts_loss_kwargs", True) is not False and takes_number(model)


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def router_coefficients(model: nn.Module) -> tuple[float, float]:
    """What the configuration multiplies the router's load-balancing loss and its z-loss by; 0.0: it names none."""
    config = getattr(model, "config", None)
    holders = (config, getattr(config, "text_config", None))

    def configured(*names: str) -> float:
        values = (getattr(holder, name, None) for holder in holders for name in names)
        return next((float(value) for value in values if isinstance(value, (int, float))), 0.0)

    return configured("router_aux_loss_coef", "aux_loss_coef"), configured("router_z_loss_coef")


def products_are_rounded(model: nn.Module) -> bool:
    """Whether matrix products keep fewer digits than float32's: half precision weights, autocast, or TF32.

    TF32 is read by the interface that the user set it with; the two must not be mixed.
    """
    matmul = torch.backends.cuda.matmul
    in_tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    half = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    # Before torch 2.4 is_autocast_enabled takes no device and asks for CUDA.
    by_device = hasattr(torch, "get_autocast_dtype")
    autocast = (
        torch.is_autocast_enabled(device)
        if by_device
        else torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
    )
    return bool(in_tf32) or half or autocast


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made the forward of the model, or of a part of it."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def holds_shards(model: nn.Module) -> bool:
    """Whether an engine (FSDP, DeepSpeed, tensor parallelism) moves the parameters, and keeps notes on the modules."""
    engines = ("torch.distributed.fsdp", "deepspeed")
    return any(
        hasattr(parameter, "to_local") or hasattr(parameter, "ds_id") for parameter in model.parameters()
    ) or any(base.__module__.startswith(engines) for module in model.modules() for base in type(module).__mro__)


def _innermost(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "_orig_mod", None) or inside_ddp(model), nn.Module):
        model = inner
    return model
