"""``compute_loss`` and ``training_step``: a micro-batch's loss, to the engine and to the log."""

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
    """The loss of one micro-batch, such that its plain mean over micro-batches and ranks is the global batch's.

    The original runs outside of a window: evaluation, and calls of the user's own.
    """
    session = session_of(trainer, options)
    base_loss = session.base_loss
    if base_loss is None:
        result = wrapped(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if session.window is not None and isinstance(loss, Tensor) and loss.requires_grad:
            session.warn_inexact(
                "second loss",
                f"{type(trainer).__name__} computes a loss with gradient beside Trainer.training_step: what it makes "
                "of it is not weighed, so that the step is not called exact",
            )
        return result

    def bind(
        model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = base_loss(model, inputs, num_items_in_batch)
        owns_labels = loss_func(trainer) is not None or trainer.label_smoother is not None
        if owns_labels and isinstance(inputs, MutableMapping):
            # Stock takes them out of the caller's batch.
            inputs.pop("labels", None)
        return (loss, _with_loss(outputs, loss)) if return_outputs else loss

    return bind(*args, **kwargs)


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """The outputs of a model, with the loss that is returned next to them: a caller may take either."""
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
    """Run the original step, with the loss that reaches accelerate set right, and return the one to log.

    Summed over the window and averaged over ranks, as gradients are and as the Trainer logs, both are the global
    batch's.
    """
    session = session_of(trainer, options)
    # The inner call, of a class that is patched as well, passes through.
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
            # The window's loss for the log, by its last micro-batch.
            loss = loss + (times - 1) * summed
        # To look at a number waits for the device: there, only in the first window, and when training ends.
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
            f"no window was counted before this step: {type(trainer).__name__} (or a library that patched it) replaces "
            "Trainer.get_batch_samples without calling it; call super().get_batch_samples, or revert()"
        )
    if not session.entered:
        session.warn_off(require_in_loop(trainer))
    session.entered = True
    return session.window


def _keep_gradients(session: TrainerHost) -> None:
    """Look at the gradients between two micro-batches, in the first windows of trainers with a step around ours."""
    looks = session.state.opened <= ATTEMPTS and remakes_inputs(session.trainer)
    session.gradients = gradient_versions(session.trainer.model_wrapped) if looks else None


def _check_gradients(session: TrainerHost) -> None:
    """Warn if they have changed since."""
    trainer, kept = session.trainer, session.gradients
    if kept is not None and kept != gradient_versions(trainer.model_wrapped):
        session.warn_inexact(
            "gradients",
            f"{type(trainer).__name__} changes gradients between the micro-batches of a window (clips them?), so that "
            "the step is not called exact",
        )
