"""End a window of a Trainer (see `closing`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_accum_fix.accumulation.closing import scale_gradients
from hf_accum_fix.overrides.live import is_cut
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, Window
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.protocols import TrainerLike

#: Name in the log of the windows of this training that were exact so far, once one was not.
EXACT_WINDOWS = "hf_accum_fix/exact_windows"


def end_window(trainer: TrainerLike, session: Session, window: Window) -> Tensor | float | None:
    """Correct the gradient of a window that counted otherwise than its rule; say what was not as observed.

    Returns:
        What the gradient, and the loss for the log, were multiplied by; None: they are right as they are.
    """
    window.ended = True
    session.gradient.finish()
    checks = window.checks
    if not window.batches or not (checks or session.corrects_others):
        return None
    left_out = len(window.batches) - window.steps_run
    times = session.closing.end(TrainerRun(trainer, session), checks, left_out)
    session.reconsider_if_other()
    if times is not None:
        scale_gradients(trainer.model_wrapped, times)
    return times


def read_certificates(trainer: TrainerLike, session: Session) -> None:
    """Read what was found on the device since the last log."""
    session.closing.read(TrainerRun(trainer, session))


@contextmanager
def exact_windows_logged(trainer: TrainerLike, session: Session) -> Iterator[None]:
    """From the first window on that is not exact, log beside each loss how many were; until then the log is stock's."""
    original = trainer.log

    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # What a trainer logs beside has no learning rate.
        if ("loss" in logs and "learning_rate" in logs) or "train_loss" in logs:
            # Waits for nothing: the loss was read just now.
            read_certificates(trainer, session)
            if session.inexact_windows and is_cut(trainer):
                logs[EXACT_WINDOWS] = session.windows.exact if session.can_be_exact or session.reconsidered else 0
        return original(logs, *args, **kwargs)

    with shadow(trainer, "log", log):
        yield


def gradient_versions(model: nn.Module) -> int:
    """A number that an in-place change of any gradient changes."""
    return sum(parameter.grad._version for parameter in model.parameters() if parameter.grad is not None)
