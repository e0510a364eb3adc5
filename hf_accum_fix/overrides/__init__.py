"""The overrides of the Trainer's methods.

Each is called as ``fn(wrapped, trainer, args, kwargs, options=...)``, by the patch on the Trainer class and by
`GlobalBatchMixin`; ``wrapped`` is the bound original. If both are active, the inner call passes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_accum_fix.overrides.step import compute_loss, get_batch_samples, training_step
from hf_accum_fix.overrides.training import hand_back, train

__all__ = ["OVERRIDES", "compute_loss", "get_batch_samples", "hand_back", "train", "training_step"]

OVERRIDES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (train, get_batch_samples, training_step, compute_loss)
}
