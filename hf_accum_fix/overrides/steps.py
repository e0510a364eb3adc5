"""``compute_loss`` and ``training_step``: a micro-batch's loss for the engine and for the log."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_accum_fix.core.state import ATTEMPTS
from hf_accum_fix.core.window import Window
from hf_accum_fix.data.whole_windows import PlaceholderBatch
from hf_accum_fix.errors import SeamError
from hf_accum_fix.options import Options, enabled
from hf_accum_fix.overrides.host import TrainerHost, session_of
from hf_accum_fix.overrides.live import gradient_versions, loss_func, remakes_inputs
from hf_accum_fix.overrides.micro_batch import MicroBatch
from hf_accum_fix.upstream.presence import require_in_loop
from hf_accum_fix.upstream.protocols import TrainerLike


def compute_loss(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """The loss of one micro-batch, whose plain mean over micro-batches and ranks is the global batch's.

    Outside of a window (evaluation, the user's own calls) the original runs.
    """
    session = session_of(trainer, options)
    base_loss = session.base_loss
    if base_loss is None:
        result = wrapped(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if session.window is not None and isinstance(loss, Tensor) and loss.requires_grad:
            session.warn_inexact(
                "second loss",
                f"{type(trainer).__name__} computes a loss with gradient outside Trainer.training_step; it is not "
                "weighted, and the step is reported as not exact",
            )
        return result

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = base_loss(model, inputs, num_items_in_batch)
        owns_labels = loss_func(trainer) is not None or trainer.label_smoother is not None
        if owns_labels and isinstance(inputs, MutableMapping):
            # Stock removes them from the caller's batch.
            inputs.pop("labels", None)
        return (loss, _with_loss(outputs, loss)) if return_outputs else loss

    return bind(*args, **kwargs)


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The outputs of a model with the returned loss, since a caller may use either."""
    if isinstance(outputs, MutableMapping) and "loss" in outputs and outputs["loss"] is not loss:
        outputs = copy.copy(outputs)
        outputs["loss"] = loss
    return outputs


def training_step(
    wrapped: Callable[..., Any],
    trainer: TrainerLike,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
) -> Any:
    """Run the original step with the scaled loss for accelerate, and return the loss to log.

    Summed over the window and averaged over ranks, both are the global batch's.
    """
    session = session_of(trainer, options)
    # The inner call of a class that is also patched passes through.
    passes = session.micro_batch is not None or session.observing
    if passes or (session.window is None and not (enabled() and trainer.is_in_train)):
        return wrapped(*args, **kwargs)
    window = _window_of(session)
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if isinstance(inputs, PlaceholderBatch):
        return torch.zeros((), device=session.device)
    _check_gradients(session)
    micro_batch = MicroBatch(session, window, inputs)
    with micro_batch.running(kwargs["model"] if "model" in kwargs else args[0]):
        result = wrapped(*args, **kwargs)
    window.done += 1
    micro_batch.check_reported()
    loss = micro_batch.reported
    if loss is not None:
        window.add(loss)
    if window.done < len(window.batches):
        _keep_gradients(session)
    elif window.done == len(window.batches):
        summed, times = window.value, window.close(trainer.model_wrapped)
        if times is not None and loss is not None and summed is not None:
            # The last micro-batch corrects the window's logged loss.
            loss = loss + (times - 1) * summed
        # Reading waits for the device, so there only in the first window and at the end of training.
        if session.readable or "routing" not in session.warned:
            session.warn_routing()
        session.warned.add("routing")
    loss = result if loss is None else loss
    if session.loss_log is not None:
        session.loss_log.add(loss)
    return loss


def _window_of(session: TrainerHost) -> Window:
    """The window that is open.

    Raises:
        SeamError: if none was counted.
    """
    trainer = session.trainer
    if session.window is None:
        raise SeamError(
            f"got a step without a counted window: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples; expected a call to the original; call super().get_batch_samples, or revert()"
        )
    if not session.entered:
        session.warn_off(require_in_loop(trainer))
    session.entered = True
    return session.window


def _keep_gradients(session: TrainerHost) -> None:
    """Remember the gradients' versions, in the first windows of trainers that override a step."""
    looks = session.state.opened <= ATTEMPTS and remakes_inputs(session.trainer)
    session.gradients = gradient_versions(session.trainer.model_wrapped) if looks else None


def _check_gradients(session: TrainerHost) -> None:
    """Warn if the gradients have changed since the last micro-batch."""
    trainer, kept = session.trainer, session.gradients
    if kept is not None and kept != gradient_versions(trainer.model_wrapped):
        session.warn_inexact(
            "gradients",
            f"{type(trainer).__name__} changes gradients between the micro-batches of a window (clipping?); "
            "the step is reported as not exact",
        )
