"""BatchNorm with small micro-batches: the samples behind its statistics, and whether the ranks still share them.

Symptom: a run on several devices, or with accumulation, trains worse than the same batch on one device, although loss
and gradients are scaled right.

**Convert before wrapping.** DDP reduces, and the optimizer steps, the parameters that they were given. torch's own
converter moves these into the new layers; others copy them, and then nobody reduces and steps what the forward uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks, alike, by_rank
from hf_accum_fix.monitor.thresholds import SETTLED_FORWARDS, SMALL_BATCH, UNEVEN


def check_batch_norm(
    model: nn.Module,
    *,
    per_device_batch: int,
    accumulation_steps: int = 1,
    optimizer: Any = None,
    ranks: Ranks | None = None,
) -> tuple[Alarm, ...]:
    """Everything found about the BatchNorm layers of a model; empty without any.

    Call it in training mode, after the first step: layers in evaluation mode are frozen and take no statistics.

    Args:
        model: the model that training runs, wrapped or not.
        per_device_batch: samples of one micro-batch.
        accumulation_steps: micro-batches of one optimizer step on a rank.
        optimizer: expected to hold the layers' parameters; None: not checked.
        ranks: the data-parallel ranks; None: torch.distributed.
    """
    ranks = ranks or TorchRanks()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    samples = {
        name: per_device_batch * (ranks.size if isinstance(its, nn.SyncBatchNorm) else 1)
        for name, its in layers.items()
        if its.training
    }
    few = " or ".join(map(str, sorted(set(samples.values()))))
    found = [_stale(model, layers, optimizer), _converted_late(model, layers), compare_buffers(model, ranks)]
    use = "use larger micro-batches, SyncBatchNorm (times the ranks), GroupNorm, or frozen statistics"
    if min(samples.values(), default=SMALL_BATCH) < SMALL_BATCH:
        words = f"BatchNorm layers take their statistics from {few} samples; below {SMALL_BATCH} their noise costs "
        found.insert(0, Alarm("batch-norm-small-batch", f"{words}accuracy; {use}"))
    if samples and accumulation_steps > 1:
        words = (
            f"{len(samples)} BatchNorm layers take their statistics from one micro-batch: {few} samples, while an "
            f"optimizer step has {per_device_batch * accumulation_steps * ranks.size}; no scaling of loss or gradients "
            f"changes that; {use}"
        )
        found.insert(0, Alarm("batch-norm-accumulation", words))
    return tuple(alarm for alarm in found if alarm is not None)


def compare_buffers(model: nn.Module, ranks: Ranks | None = None, accumulation_steps: int = 1) -> Alarm | None:
    """The layer whose running statistics differ most over the ranks, if nothing synchronises them; else None.

    With DistributedDataParallel's defaults they differ between two forwards by design: the next one copies rank 0's.
    What a rank has added to them since then is its own data's: after 50 forwards, data of which the first layer has
    other statistics are reported. Ranks that hold other layers (stages of a pipeline) are not compared. At most three
    collectives.
    """
    ranks = ranks or TorchRanks()
    buffers = [
        buffer.detach().double()
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    copied = isinstance(model, DistributedDataParallel) and model.broadcast_buffers
    # A collective, so it comes before any early return: a rank without layers would leave the others waiting.
    if ranks.size == 1 or not alike(ranks, [copied, *(buffer.shape for buffer in buffers)]):
        return None
    if copied or not buffers:
        return _uneven(model, ranks, accumulation_steps) if buffers else None
    mine = torch.cat([buffer.flatten().cpu() for buffer in buffers])
    apart = (mine - ranks.sum(mine) / ranks.size).abs()
    amount = float(by_rank(ranks, apart.max()).max())
    if amount == 0:
        return None
    return Alarm(
        "batch-norm-buffers-differ",
        f"the running statistics of the ranks differ, by {amount:.3g} from their mean at most: nothing brings them "
        "together, so that every rank evaluates with its own, and a checkpoint holds rank 0's alone; use "
        "SyncBatchNorm, or average the buffers over the ranks before evaluating",
    )


def _uneven(model: nn.Module, ranks: Ranks, accumulation_steps: int) -> Alarm | None:
    """A rank whose samples have other statistics, by what it has added to those of rank 0 at the first layer."""
    its = next(its for its in model.modules() if isinstance(its, _BatchNorm) and its.running_mean is not None)
    assert its.running_mean is not None and its.running_var is not None and its.num_batches_tracked is not None
    row = [its.running_mean, its.running_var, its.num_batches_tracked.expand_as(its.running_mean)]
    mean, variance, forwards = by_rank(ranks, torch.stack([each.detach().double().cpu() for each in row])).unbind(1)
    if isinstance(its, nn.SyncBatchNorm) or its.momentum is None or forwards.min() < SETTLED_FORWARDS:
        return None
    added = 1 - (1 - its.momentum) ** accumulation_steps
    means = (mean - mean[0]).square().div(variance[0]).mean(1).sqrt() / added
    variances = ((variance - variance[0]).abs() / variance[0]).median(1).values / added
    apart = torch.maximum(means, variances)
    rank = int(apart.argmax())
    if not apart[rank] > UNEVEN:
        return None
    return Alarm(
        f"batch-norm-uneven-data-{rank}",
        f"the samples of rank {rank} have other statistics than rank 0's at the first BatchNorm layer: their mean is "
        f"{means[rank]:.2g} standard deviations apart, their variance by {variances[rank]:.2g} times rank 0's; the "
        "running statistics, and so every evaluation, follow rank 0 alone; look at this rank's normalisation of its "
        "inputs and at its shard",
    )


def _stale(model: nn.Module, layers: dict[str, _BatchNorm], optimizer: Any) -> Alarm | None:
    """Layers in use whose parameters DDP does not reduce or the optimizer does not step."""
    trained = [
        (f"{name}.{key}", parameter)
        for name, layer in layers.items()
        for key, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    holders = {"reduced by DDP": model._module_parameters} if isinstance(model, DistributedDataParallel) else {}
    if optimizer is not None:
        holders["held by the optimizer"] = [its for group in optimizer.param_groups for its in group["params"]]
    found = []
    for what, parameters in holders.items():
        known = set(map(id, parameters))
        missing = [name for name, parameter in trained if id(parameter) not in known]
        found += [f"{len(missing)} are not {what} (first {missing[0]})"] if missing else []
    if not found:
        return None
    return Alarm(
        "batch-norm-stale-parameters",
        f"of {len(trained)} parameters of BatchNorm layers {' and '.join(found)}: the layers were replaced after the "
        "model was wrapped or the optimizer made, and what the forward uses is not what is trained; convert first "
        "(torch's convert_sync_batchnorm), then wrap, then make the optimizer",
    )


def _converted_late(model: nn.Module, layers: dict[str, _BatchNorm]) -> Alarm | None:
    """DDP notes at its construction whether it saw a SyncBatchNorm."""
    if not isinstance(model, DistributedDataParallel) or _stale(model, layers, None) is not None:
        return None
    now = any(isinstance(layer, nn.SyncBatchNorm) for layer in layers.values())
    noted: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if not now or noted.get("has_sync_bn") != 0:
        return None
    return Alarm(
        "sync-batch-norm-after-ddp",
        "BatchNorm was converted to SyncBatchNorm after DDP wrapped the model; this converter kept the parameters, so "
        "that DDP still reduces them, but others copy them and leave DDP with stale ones; convert before wrapping",
    )
