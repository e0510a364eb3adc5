"""``train``: refuse unsupported setups before anything runs, and start a new session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.errors import SeamError, UnsupportedSetupError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.live import parallel_size
from hf_accum_fix.overrides.loader import log_padding_saved, whole_windows
from hf_accum_fix.overrides.loss_log import LossLog, is_loss
from hf_accum_fix.overrides.micro_batch import training_step
from hf_accum_fix.overrides.session import Args, Kwargs, Original, Session, known_session, new_session
from hf_accum_fix.overrides.windows import count_returned_batches, hide_state_marker
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
    _TRAINING.append(session)
    try:
        with (
            session.inside("train"),
            whole_windows(session),
            count_returned_batches(session),
            hide_state_marker(trainer),
            _stepping(session),
            nullcontext() if session.loss_log is None else session.loss_log.installed(),
            _logging(session),
        ):
            result = wrapped(*args, **kwargs)
    finally:
        _TRAINING.remove(session)
        session.window = None
        session.gradient.drop()
    state = session.state
    session.read()
    state.amend(exact=state.exact, windows=state.opened, inexact_windows=state.inexact)
    log_padding_saved(trainer)
    return result


def hand_back(options: Options) -> None:
    """Let trainings with these options continue as stock: put the sum of an open window into ``.grad``."""
    for session in _TRAINING:
        if session.options is options:
            session.gradient.finish()


def _logging(session: Session) -> AbstractContextManager[None]:
    """Log what the training loss hides: losses that are not finite, and windows that were not exact."""
    original, state = session.trainer.log, session.state

    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if is_loss(logs) or "train_loss" in logs:
            if session.loss_log is not None:
                session.loss_log.add_filtered(logs)
            # The loss was just read, so this does not wait.
            session.read()
            if state.inexact and session.is_split:
                logs[EXACT_WINDOWS] = state.opened - state.inexact
        return original(logs, *args, **kwargs)

    return overridden(session.trainer, "log", log)


@contextmanager
def _stepping(session: Session) -> Iterator[None]:
    """Around a training: every gradient of a step comes through a micro-batch, and every window is closed before it."""
    trainer, accelerator = session.trainer, session.trainer.accelerator
    step, backward, clip = trainer.training_step, accelerator.backward, accelerator.clip_grad_norm_

    def training_step_of_own(*args: Any, **kwargs: Any) -> Any:
        return training_step(step, trainer, args, kwargs, options=session.options)

    def backward_or_warn(*args: Any, **kwargs: Any) -> Any:
        second = session.base_loss is None and session.window is not None
        if second and accelerator.sync_gradients:
            # The engine now reduces what is in .grad.
            session.gradient.finish()
        if second and session.is_split:
            session.not_exact("second backward", "calls accelerator.backward outside Trainer.training_step, unweighted")
        return backward(*args, **kwargs)

    def close_and_clip(*args: Any, **kwargs: Any) -> Any:
        if session.base_loss is None and accelerator.sync_gradients:
            _close_unfinished(session)
        return clip(*args, **kwargs)

    own: AbstractContextManager[Any] = nullcontext()
    if session.own_step is not None:
        # It never reaches the class's.
        own = overridden(trainer, "training_step", training_step_of_own)
    with (
        own,
        overridden(accelerator, "backward", backward_or_warn),
        overridden(accelerator, "clip_grad_norm_", close_and_clip),
        # torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it.
        register_optimizer_step_pre_hook(lambda optimizer, *_: _check_step(session, optimizer)),
    ):
        yield


def _check_step(session: Session, optimizer: Optimizer) -> None:
    """Refuse an optimizer step without a micro-batch that came through its wrapped step, before it is taken.

    Skipped micro-batches leave no gradient, and one micro-batch on one rank is not split: neither is refused.
    """
    window = session.window
    # DeepSpeed and layerwise optimizers step inside a micro-batch.
    if session.base_loss is not None:
        return
    if session.refused is not None:
        raise session.refused
    outer: Any = session.trainer.optimizer
    # Engines (accelerate, DeepSpeed) wrap optimizers.
    while outer is not None and outer is not optimizer:
        outer = vars(outer).get("optimizer")
    if outer is None:
        return
    if window is not None and (window.value is not None or not window.batches):
        _close_unfinished(session)
    elif session.steps * session.world_size > 1 and _has_gradients(optimizer):
        raise SeamError(
            "got a gradient that came through neither Trainer.training_step nor accelerator.backward; expected one "
            "of them, since otherwise nothing is corrected; call super().training_step or accelerator.backward in "
            f"the step or loop of {type(session.trainer).__name__}, or revert()"
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _close_unfinished(session: Session) -> None:
    """Close a window whose last micro-batch was skipped, on every rank."""
    window = session.window
    if window is not None and window.done and not window.ended:
        window.close(session.trainer.model_wrapped)


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
