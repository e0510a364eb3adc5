"""End a window: hold what its micro-batches have shown against what was observed, and correct the gradient."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.overrides.live import data_ranks, head_name, steps_itself
from hf_accum_fix.overrides.session import Session, Window


def end_window(trainer: Any, session: Session, window: Window) -> Tensor | float | None:
    """Correct the gradient of a window that counted otherwise than its rule; say what was not as observed.

    Numbers are read where that waits for no device. On another device a window is corrected unread, where its loss
    was observed to need it.

    Returns:
        What the gradient, and the loss for the log, were multiplied by; None: they are right as they are.
    """
    certificate = window.certificate
    if certificate is None or not window.batches:
        return None
    device, several = trainer.args.device, data_ranks(trainer) > 1
    readable = device.type == "cpu"
    if readable:
        _tell_changes(trainer, session, certificate)
    elif certificate.changed:
        # Told by the number of calls, which waits for nothing.
        _tell(trainer, session, certificate.changed)
    if several and not session.corrects:
        if readable:
            seen, predicted = certificate.counts(device).tolist()
            if abs(seen - predicted) > 1e-6 * predicted:
                session.differs = True
                _tell(trainer, session, f"its loss calls reduced over {seen:g} items, where {predicted:g} were counted")
        return None
    if not (readable or session.corrects):
        return None
    if several and steps_itself(trainer):
        _tell(trainer, session, "a training_step of the trainer's own may leave micro-batches out on one rank alone")
        return None
    sums = certificate.counts(device)
    if several:
        sums = trainer.accelerator.reduce(sums, reduction="sum")
    seen_items, predicted_items = sums[0], sums[1]
    times: Tensor | float = torch.where(seen_items > 0, predicted_items / seen_items, torch.ones_like(seen_items))
    if readable:
        times = float(times)
        if abs(times - 1) <= 1e-12:
            return None
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Its engine has taken the step within the backward.
        _tell(trainer, session, "DeepSpeed keeps the gradients, so that they are not divided by the items seen")
        return None
    scale_gradients(trainer.model_wrapped, times)
    return times


def scale_gradients(model: nn.Module, times: Tensor | float) -> None:
    """Multiply every gradient there is, a shard by its local part; no device sync."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
            by_device.setdefault(local.device, []).append(local)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, times.to(device) if isinstance(times, Tensor) else times)


def gradient_versions(model: nn.Module) -> int:
    """A number that an in-place change of any gradient changes."""
    return sum(parameter.grad._version for parameter in model.parameters() if parameter.grad is not None)


def _tell_changes(trainer: Any, session: Session, certificate: Certificate) -> None:
    broken = certificate.broken()
    if certificate.changed:
        _tell(trainer, session, certificate.changed)
    elif broken is not None and bool(broken):
        _tell(trainer, session, "the loss holds something beside the loss calls that it was observed to be made of")


def _tell(trainer: Any, session: Session, why: str) -> None:
    session.note_inexact()
    if data_ranks(trainer) * trainer.args.gradient_accumulation_steps > 1:
        session.warn_once(
            "certificate",
            f"{head_name(trainer)}: window {session.windows} (step {trainer.state.global_step + 1}) is not exact: "
            f"{why}. Every window is checked; report() has how many were not.",
        )
