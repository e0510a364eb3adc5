"""Refuse a gradient that did not come through ``Trainer.training_step``, before the optimizer takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_accum_fix.errors import SeamError
from hf_accum_fix.options import enabled


@contextmanager
def no_bypass(session: Any) -> Iterator[None]:
    """While a trainer trains, refuse an optimizer step without a micro-batch that came through its wrapped step.

    torch calls this in every optimizer step, whatever engine, scaler or wrapper runs it. Skipped micro-batches leave no
    gradient, and one micro-batch on one rank is not split: neither is refused. A window whose last micro-batch was
    skipped is closed, on every rank.
    """
    trainer = session.trainer

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        window = session.window
        # DeepSpeed and layerwise optimizers step inside a micro-batch.
        if session.micro_batch is not None or not enabled():
            return
        if session.refused is not None:
            raise session.refused
        if window is not None and (window.value is not None or not window.batches):
            if window.done and not window.ended and _steps(trainer.optimizer, optimizer):
                window.close(trainer.model_wrapped)
            return
        if (
            session.steps * session.world_size > 1
            and _steps(trainer.optimizer, optimizer)
            and _has_gradients(optimizer)
        ):
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
