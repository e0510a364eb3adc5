"""``train``: refuse unsupported setups before anything runs, and start a new session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.errors import SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.live import parallel_size
from hf_accum_fix.overrides.loss_log import LossLog
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, known_session, new_session
from hf_accum_fix.overrides.steps import training_step
from hf_accum_fix.overrides.windows import count_returned_batches, hide_state_marker, log_padding_saved, whole_windows
from hf_accum_fix.upstream.presence import require_trainer
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.upstream.seams import LOSS_LOG

#: Name in the log of the number of exact windows, once one was not.
EXACT_WINDOWS = "hf_accum_fix/exact_windows"
#: The running trainings.
_TRAINING: Final[list[Session]] = []


def train(wrapped: Original, trainer: TrainerLike, args: Args, kwargs: Kwargs, *, options: Options) -> Any:
    """Refuse unsupported setups, train in a new session, and at the end give the warnings kept on the device."""
    outer = known_session(trainer)
    if not enabled() or (outer is not None and "train" in outer.busy):
        return wrapped(*args, **kwargs)
    off = check_setup(trainer)
    session = new_session(trainer, options)
    session.warn_off(off)
    filtered = LOSS_LOG not in off and trainer.args.logging_nan_inf_filter
    session.loss_log = LossLog(trainer) if filtered else None
    try:
        with (
            session.inside("train"),
            _no_bypass(session),
            whole_windows(session),
            count_returned_batches(session),
            hide_state_marker(trainer),
            _wrap_own_step(session),
            overridden(trainer.accelerator, "backward", _detect_second_backward(session, trainer.accelerator.backward)),
            overridden(trainer.accelerator, "clip_grad_norm_", _close_before_clip(session)),
            session.loss_log.installed() if session.loss_log is not None else nullcontext(),
            overridden(trainer, "log", _log_exact_windows(session)),
        ):
            _TRAINING.append(session)
            result = wrapped(*args, **kwargs)
    finally:
        _TRAINING[:] = [each for each in _TRAINING if each is not session]
        session.window = None
        session.gradient.drop()
    state = session.state
    session.read()
    state.amend(exact=state.exact, windows=state.opened, inexact_windows=state.inexact)
    log_padding_saved(trainer)
    return result


def _log_exact_windows(session: Session) -> Callable[..., Any]:
    """``Trainer.log``, with the number of exact windows once one was not."""
    original, state = session.trainer.log, session.state

    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # A trainer's other logs have no learning rate.
        if ("loss" in logs and "learning_rate" in logs) or "train_loss" in logs:
            # The loss was just read, so this does not wait.
            session.read()
            if state.inexact and session.is_split:
                logs[EXACT_WINDOWS] = state.opened - state.inexact
        return original(logs, *args, **kwargs)

    return log


def _wrap_own_step(session: Session) -> AbstractContextManager[None]:
    """Run a ``training_step`` that never calls the base's as a micro-batch."""
    if session.own_step is None:
        return nullcontext()
    trainer, step = session.trainer, session.trainer.training_step

    def entered(*args: Any, **kwargs: Any) -> Any:
        return training_step(step, trainer, args, kwargs, options=session.options)

    return overridden(trainer, "training_step", entered)


def hand_back(options: Options) -> None:
    """Let trainings with these options continue as stock: put the sum of an open window into ``.grad``."""
    for session in _TRAINING:
        if session.options is options:
            session.gradient.finish()


@contextmanager
def _no_bypass(session: Session) -> Iterator[None]:
    """While a trainer trains, refuse an optimizer step without a micro-batch that came through its wrapped step.

    torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it. Skipped micro-batches leave no
    gradient, and one micro-batch on one rank is not split: neither is refused. A window whose last micro-batch was
    skipped is closed, on every rank.
    """
    trainer = session.trainer

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        window = session.window
        # DeepSpeed and layerwise optimizers step inside a micro-batch.
        if session.running is not None:
            return
        if session.refused is not None:
            raise session.refused
        if window is not None and (window.value is not None or not window.batches):
            if _steps(trainer.optimizer, optimizer):
                _close_unfinished(session)
            return
        is_split = session.steps * session.world_size > 1
        if is_split and _steps(trainer.optimizer, optimizer) and _has_gradients(optimizer):
            raise SeamError(
                "got a gradient that came through neither Trainer.training_step nor accelerator.backward; expected one "
                "of them, since otherwise nothing is corrected; call super().training_step or accelerator.backward in "
                f"the step or loop of {type(trainer).__name__}, or revert()"
            )

    with register_optimizer_step_pre_hook(check):
        yield


def _steps(outer: Any, optimizer: Optimizer) -> bool:
    """Whether an optimizer is ``outer`` or inside it, since engines (accelerate, DeepSpeed) wrap optimizers."""
    while outer is not None and outer is not optimizer:
        outer = vars(outer).get("optimizer")
    return outer is optimizer


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _close_unfinished(session: Session) -> None:
    """Close a window whose last micro-batch was skipped."""
    window = session.window
    if window is not None and window.done and not window.ended:
        window.close(session.trainer.model_wrapped)


def _close_before_clip(session: Session) -> Callable[..., Any]:
    """``Accelerator.clip_grad_norm_``, which first closes a window whose last micro-batch was skipped."""
    trainer, clip = session.trainer, session.trainer.accelerator.clip_grad_norm_

    def close_first(*args: Any, **kwargs: Any) -> Any:
        if session.running is None and trainer.accelerator.sync_gradients:
            _close_unfinished(session)
        return clip(*args, **kwargs)

    return close_first


def _detect_second_backward(session: Session, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``Accelerator.backward``, which warns of gradients from outside ``Trainer.training_step``."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        second = session.running is None and session.window is not None
        if second and session.accelerator.sync_gradients:
            # The engine now reduces what is in .grad.
            session.gradient.finish()
        if second and session.steps * session.world_size > 1:
            session.warn_inexact(
                "second backward",
                f"{type(session.trainer).__name__} calls accelerator.backward outside Trainer.training_step; that "
                "gradient is not rescaled, and the step is reported as not exact",
            )
        return backward(*args, **kwargs)

    return watched


def check_setup(trainer: TrainerLike) -> dict[str, str]:
    """Refuse a setup that does not average losses as assumed here.

    Returns:
        Features that are off because the installed release lacks something, and why.

    Raises:
        SeamError: if it lacks something that is required.
        UnsupportedSetupError: if its ranks or its engine average in another way.
    """
    off = require_trainer(trainer)
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"got torch.nn.DataParallel on {trainer.args.n_gpu} GPUs in {name}; expected one process per GPU; start it "
            "with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if getattr(trainer, "use_apex", False):
        raise UnsupportedSetupError(f"got apex in {name}, which bypasses accelerate; expected torch's bf16 or fp16")
    split = {axis: size for axis in ("cp", "sp") if (size := parallel_size(trainer, axis)) > 1}
    if split:
        found = ", ".join(f"{axis}_size={size}" for axis, size in split.items())
        raise UnsupportedSetupError(
            f"{name}: got samples that are split over ranks ({found}), so that no rank sees the items of a sample; "
            "expected ranks with whole samples; remove context and sequence parallelism from parallelism_config (data "
            "and tensor parallelism are supported)"
        )
    return off
