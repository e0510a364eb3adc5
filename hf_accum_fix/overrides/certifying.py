"""End a window: hold what its micro-batches have shown against what was observed, and correct the gradient."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.overrides.live import data_ranks, head_name
from hf_accum_fix.overrides.session import Session, Window

_BESIDE = "the loss holds something beside the loss calls that it was observed to be made of"


def end_window(trainer: Any, session: Session, window: Window) -> Tensor | float | None:
    """Correct the gradient of a window that counted otherwise than its rule; say what was not as observed.

    Numbers are read where that waits for no device. On another device a window is corrected unread, where its loss
    was observed to need it.

    Returns:
        What the gradient, and the loss for the log, were multiplied by; None: they are right as they are.
    """
    window.ended = True
    certificate = window.certificate
    if certificate is None or not window.batches:
        return None
    device, several = trainer.args.device, data_ranks(trainer) > 1
    readable = device.type == "cpu"
    _hold(trainer, session, certificate, readable=readable)
    left_out = len(window.batches) - window.steps_run
    if left_out and not (several and session.corrects):
        _tell(trainer, session, f"{left_out} of its {len(window.batches)} micro-batches were left out")
    if not session.corrects and not certificate.counted:
        return None
    if not session.corrects and (several or not readable):
        sums = certificate.counts(device)
        if not readable:
            _read_later(session, (sums[0] - sums[1]).abs() > 1e-6 * sums[1])
            return None
        seen, predicted = sums.tolist()
        if abs(seen - predicted) > 1e-6 * predicted:
            session.differs = True
            _tell(trainer, session, f"its loss calls reduced over {seen:g} items, where {predicted:g} were counted")
        return None
    sums = certificate.counts(device)
    if several:
        sums = trainer.accelerator.reduce(torch.cat([sums, sums.new_full((1,), left_out)]), reduction="sum")
        if readable and float(sums[2]):
            _tell(trainer, session, f"{float(sums[2]):g} micro-batches of its ranks were left out")
        sums = sums[:2]
    times: Tensor | float
    if readable:
        seen, predicted = sums.tolist()
        times = predicted / seen if seen else 1.0
        if abs(times - 1) <= 1e-12:
            return None
    else:
        times = torch.where(sums[0] > 0, sums[1] / sums[0], torch.ones_like(sums[0]))
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


def read_certificates(trainer: Any, session: Session) -> None:
    """Read what was found on the device since the last log: the Trainer has just waited for it to log the loss."""
    if session.unread is not None and bool(session.unread):
        _tell(trainer, session, f"{_BESIDE}, or reduces over other items than were counted")
        # From here on what is counted otherwise is corrected, unread; ranks would have to agree on it.
        session.corrects = session.corrects or data_ranks(trainer) == 1
    session.unread = None


def _read_later(session: Session, flag: Tensor) -> None:
    session.unread = flag if session.unread is None else session.unread | flag


def _hold(trainer: Any, session: Session, certificate: Certificate, *, readable: bool) -> None:
    """Hold a window against what was observed."""
    broken = certificate.broken()
    if certificate.changed:
        _tell(trainer, session, certificate.changed)
    elif broken is None:
        return
    elif not readable:
        _read_later(session, broken)
    elif bool(broken):
        _tell(trainer, session, _BESIDE)


def _tell(trainer: Any, session: Session, why: str) -> None:
    session.note_inexact()
    if data_ranks(trainer) * trainer.args.gradient_accumulation_steps > 1:
        session.warn_once(
            "certificate",
            f"{head_name(trainer)}: window {session.windows} (step {trainer.state.global_step + 1}) is not exact: "
            f"{why}. Every window is checked; report() has how many were not.",
        )
