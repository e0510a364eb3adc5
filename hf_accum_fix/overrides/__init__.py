"""What the Trainer's methods do instead, as a host of `core`'s windows.

Each function is called as ``fn(wrapped, trainer, args, kwargs, options=...)``, by the patch on the Trainer class and by
`GlobalBatchMixin` through ``super()`` alike; ``wrapped`` is the bound original. With both active the inner call passes
through: everything here is set, nothing is multiplied, so being asked twice changes nothing.

    train              refuse what cannot be right, before anything has run             (training)
    get_batch_samples  count the window; on the first one, observe the loss             (windows, host, observing)
    compute_loss       ours inside a window: call the model with n_mean, or weigh its mean by n / n_mean       (steps)
    training_step      hand accelerate the loss that makes its own division right, and return the one to log   (steps)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_accum_fix.overrides.steps import compute_loss, training_step
from hf_accum_fix.overrides.training import hand_back, train
from hf_accum_fix.overrides.windows import get_batch_samples

__all__ = ["OVERRIDES", "compute_loss", "get_batch_samples", "hand_back", "train", "training_step"]

OVERRIDES: dict[str, Callable[..., Any]] = {
    "train": train,
    "get_batch_samples": get_batch_samples,
    "training_step": training_step,
    "compute_loss": compute_loss,
}
