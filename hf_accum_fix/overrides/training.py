"""``train``: what cannot be right is refused before anything has run; every training has a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from hf_accum_fix import observations
from hf_accum_fix.counting import say_empty
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.bypass import no_bypass
from hf_accum_fix.overrides.certifying import end_window, exact_windows_logged, read_certificates
from hf_accum_fix.overrides.live import parallel_size
from hf_accum_fix.overrides.loader import tell_saved, whole_windows
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.overrides.routing import note_routing
from hf_accum_fix.overrides.run import TrainerRun
from hf_accum_fix.overrides.session import Session, busy, new_session, session_of
from hf_accum_fix.overrides.steps import training_step
from hf_accum_fix.overrides.windows import counted_as_returned, mark_passed_over, open_window
from hf_accum_fix.shadow import shadow
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import LOSS_LOG

#: The trainings that run.
_TRAINING: Final[list[Session]] = []


def train(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """Refuse what cannot be right, start from a fresh session, and say at the end what was kept on the device."""
    session = session_of(trainer, options)
    if not enabled() or "train" in session.busy:
        return wrapped(*args, **kwargs)
    off = check_setup(trainer)
    session = new_session(trainer, options)
    session.say_off(off)
    filtered = LOSS_LOG not in off and trainer.args.logging_nan_inf_filter
    session.loss_log = LossLog(trainer) if filtered else None

    def opened(window: list[Any]) -> None:
        open_window(trainer, session, window, None, options)

    try:
        logged = session.loss_log.installed() if session.loss_log is not None else nullcontext()
        with (
            busy(session, "train"),
            no_bypass(trainer, session, lambda window: end_window(trainer, session, window)),
            whole_windows(trainer, options, opened),
            counted_as_returned(trainer, options),
            mark_passed_over(trainer),
            _own_step_entered(trainer, session, options),
            shadow(trainer.accelerator, "backward", _listened(trainer, session, trainer.accelerator.backward)),
            shadow(trainer.accelerator, "clip_grad_norm_", _ended_first(trainer, session)),
            logged,
            exact_windows_logged(trainer, session),
        ):
            _TRAINING.append(session)
            result = wrapped(*args, **kwargs)
    finally:
        _TRAINING[:] = [each for each in _TRAINING if each is not session]
        session.window = None
        session.gradient.drop()
    say_empty(TrainerRun(trainer, session), session)
    note_routing(trainer, session)
    read_certificates(trainer, session)
    windows = session.windows
    if windows.recorded:
        observations.amend(
            {"exact": session.exact, "windows": windows.opened, "inexact_windows": session.inexact_windows}
        )
    tell_saved(trainer)
    return result


def _own_step_entered(trainer: TrainerLike, session: Session, options: Options) -> AbstractContextManager[None]:
    """Let a ``training_step`` that never calls the base's be run as a micro-batch."""
    if session.own_step is None:
        return nullcontext()
    step = trainer.training_step

    def entered(*args: Any, **kwargs: Any) -> Any:
        return training_step(step, trainer, args, kwargs, options=options)

    return shadow(trainer, "training_step", entered)


def hand_back(options: Options) -> None:
    """Let trainings that began with these options go on as stock: what a window has added is put into ``.grad``."""
    for session in _TRAINING:
        if session.options is options:
            session.gradient.finish()


def _ended_first(trainer: TrainerLike, session: Session) -> Callable[..., Any]:
    """``Accelerator.clip_grad_norm_``, which a window whose last micro-batch was left out reaches with it not ended."""
    clip = trainer.accelerator.clip_grad_norm_

    def ended_first(*args: Any, **kwargs: Any) -> Any:
        window = session.window
        left_out = window is not None and window.steps_run and not window.ended and session.micro_batch is None
        if window is not None and left_out and trainer.accelerator.sync_gradients:
            end_window(trainer, session, window)
        return clip(*args, **kwargs)

    return ended_first


def _listened(trainer: TrainerLike, session: Session, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``Accelerator.backward``, listened to where a gradient is added beside ``Trainer.training_step``."""

    def listened(*args: Any, **kwargs: Any) -> Any:
        beside = session.micro_batch is None and session.entered and session.window is not None
        if beside and trainer.accelerator.sync_gradients:
            # The engine reduces what is in .grad by now.
            session.gradient.finish()
        if beside and trainer.args.gradient_accumulation_steps * trainer.args.world_size > 1:
            session.windows.note_inexact()
            session.warn_once(
                "second backward",
                f"{type(trainer).__name__} calls accelerator.backward beside Trainer.training_step: what it adds to "
                "the gradient is added as it is, so that the step is not called exact",
            )
        return backward(*args, **kwargs)

    return listened


def check_setup(trainer: TrainerLike) -> dict[str, str]:
    """Refuse a setup whose averaging is not the one this package rests on.

    Returns:
        What is off because the installed release lacks something, and why, in words.

    Raises:
        SeamError: if it lacks what nothing can stand in for.
        UnsupportedSetupError: if its ranks or its engine average otherwise.
    """
    off = require_trainer(trainer)
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"{name} would run torch.nn.DataParallel on {trainer.args.n_gpu} GPUs; start it with "
            "`accelerate launch` (one process a GPU), or show it one GPU by CUDA_VISIBLE_DEVICES"
        )
    if getattr(trainer, "use_apex", False):
        raise UnsupportedSetupError(f"{name} uses apex, which goes past accelerate.backward; use torch's bf16 or fp16")
    split = {kind: size for kind in ("cp", "sp") if (size := parallel_size(trainer, kind)) > 1}
    if split:
        told = ", ".join(f"{kind}_size={size}" for kind, size in split.items())
        raise UnsupportedSetupError(
            f"{name}: got samples that are split over ranks ({told}), so that no rank sees the items of a sample; "
            "expected ranks with whole samples; leave context and sequence parallelism out of the parallelism_config "
            "(data and tensor parallelism are supported)"
        )
    return off
