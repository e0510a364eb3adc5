"""What a model declares about its loss, read from the module and its configuration without a forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def inside_ddp(model: nn.Module) -> nn.Module | None:
    """The module inside DistributedDataParallel; None: the model is not wrapped."""
    return model.module if isinstance(model, DistributedDataParallel) else None


def takes_number(model: nn.Module) -> bool:
    """Whether the forward, of a compiled module the original one, accepts num_items_in_batch."""
    return has_parameter(_innermost(model).forward, "num_items_in_batch")


def requires_number(model: nn.Module) -> bool:
    """Whether the forward cannot be called without num_items_in_batch."""
    parameter = inspect.signature(_innermost(model).forward).parameters.get("num_items_in_batch")
    return parameter is not None and parameter.default is parameter.empty


def wants_number(model: nn.Module) -> bool:
    """Whether a model gets num_items_in_batch: it accepts it, and does not declare ``accepts_loss_kwargs = False``.

    An adapter accepts any keyword, so the adapted model decides.
    """
    model = adapted(model)
    return getattr(model, "accepts_loss_kwargs", True) is not False and takes_number(model)


def adapted(model: nn.Module) -> nn.Module:
    """The model inside of DDP, compilation and an adapter."""
    model = _innermost(model)
    inside = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def decoder_pad(model: nn.Module) -> int | None:
    """The token that pads the texts of an encoder-decoder's decoder; None: there is no decoder, or it is unknown."""
    config = getattr(model, "config", None)
    token = getattr(config, "pad_token_id", None) if getattr(config, "is_encoder_decoder", False) else None
    return token if isinstance(token, int) else None


def products_are_rounded(model: nn.Module) -> bool:
    """Whether matrix products are less precise than float32: half precision weights, autocast, or TF32.

    torch forbids mixing its two interfaces for TF32.
    """
    matmul = torch.backends.cuda.matmul
    in_tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    half = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    # Before torch 2.4 it takes no device and asks for CUDA.
    asked = (device,) if hasattr(torch, "get_autocast_dtype") else ()
    autocast = torch.is_autocast_enabled(*asked) or (not asked and torch.is_autocast_cpu_enabled())
    return bool(in_tf32) or half or autocast


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is compiled."""
    compiled = (hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in model.modules())
    return any(map(bool, compiled))


def holds_shards(model: nn.Module) -> bool:
    """Whether an engine (FSDP, DeepSpeed, tensor parallelism) shards the parameters."""
    if any(hasattr(each, "to_local") or hasattr(each, "ds_id") for each in model.parameters()):
        return True
    bases = {base for module in model.modules() for base in type(module).__mro__}
    return any(base.__module__.startswith(("torch.distributed.fsdp", "deepspeed")) for base in bases)


def _innermost(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "_orig_mod", None) or inside_ddp(model), nn.Module):
        model = inner
    return model
