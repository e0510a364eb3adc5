"""The same SGD steps by hand-written loops.

accumulate  ``with accelerator.accumulate(model)``: the first page of accelerate's guide
windows     accumulation windows under accelerate
plain       accumulation windows under DistributedDataParallel alone, or nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hf_accum_fix import AccumulationWindows, accumulation_windows
from tests.numerics.heads import Head, Sample
from tests.numerics.parity import Step, cut, moved, trainable

OURS = ("windows", "plain")


def world() -> tuple[int, int]:
    """W and this process's rank."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def accelerator(accumulate: int, **given: Any) -> Accelerator:
    """A new one: accelerate keeps the last for the whole process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **given)


def epoch(
    windows: AccumulationWindows, model: Any, optimizer: Any = None, live: Accelerator | None = None, loss: Any = None
) -> Iterator[Any]:
    """One epoch: every window once its gradient is there; ``loss``: where it is not the model's own."""
    for window in windows:
        for batch in window:
            with window.micro_batch(model):
                found = window.loss(loss or model, batch)
                found.backward() if live is None else live.backward(found)
        yield window
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def by_accumulate(loader: Any, model: nn.Module, optimizer: Any, live: Accelerator) -> Iterator[tuple[float, float]]:
    losses = []
    for batch in loader:
        with live.accumulate(model):
            loss = model(**batch)["loss"]
            live.backward(loss)
            losses.append(loss.detach())
            if live.sync_gradients:
                yield float(live.reduce(torch.stack(losses).mean(), "mean")), norm_of(model)
                losses.clear()
            optimizer.step()
            optimizer.zero_grad()


def norm_of(model: nn.Module) -> float:
    grads = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(grads)))


def own_batches(head: Head, samples: Sequence[Sample], per_device: int) -> list[Any]:
    """This rank's micro-batches as accelerate would deal them, every W-th one."""
    ranks, rank = world()
    return [head.batch(each) for each in cut(samples, per_device)[rank::ranks]]


def take_steps(
    head: Head, samples: Sequence[Sample], per_device: int, accumulate: int, way: str, *, rate: float = 1.0,
    epochs: int = 1, batches: Iterable[Any] | None = None, mixed_precision: str = "no",
    ddp: Mapping[str, Any] = MappingProxyType({}), **options: Any,
) -> tuple[Step, list[tuple[float, float]], Any]:  # fmt: skip
    """Epochs in order: the whole change beside the first window's loss and norm; every window's; the windows.

    Args:
        batches: this rank's micro-batches, where they are not those that accelerate deals.
        ddp, options: further keywords of DistributedDataParallel and of the windows.
    """
    model = head.build()
    model.train()
    before = trainable(model)
    trained: Any = model
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    live = None
    if way == "plain":
        if world()[0] > 1:
            trained = DistributedDataParallel(model, **ddp)
        loader: Any = own_batches(head, samples, per_device) if batches is None else batches
        windows = accumulation_windows(loader, steps=accumulate, **options)
    else:
        live = accelerator(accumulate, mixed_precision=mixed_precision)
        loader = DataLoader(list(samples), batch_size=per_device, collate_fn=head.batch)  # type: ignore[arg-type]
        trained, optimizer, loader = live.prepare(model, optimizer, loader)
        windows = accumulation_windows(loader if batches is None else batches, live, **options)
    seen: list[tuple[float, float]] = []
    for _ in range(epochs):
        if way == "accumulate":
            seen += by_accumulate(loader, trained, optimizer, live)
        else:
            for window in epoch(windows, trained, optimizer, live):
                seen.append((float(window.mean_loss()), norm_of(trained)))
    return Step(moved(model, before), *seen[0]), seen, windows
