"""The two modes in which a trainer is verified: stock and patched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hf_accum_fix.applying import active_handle, apply
from hf_accum_fix.options import SWITCH, Options, enabled
from hf_accum_fix.trainer import GlobalBatchMixin
from hf_accum_fix.upstream.protocols import TrainerLike
from hf_accum_fix.verification.report import PATCHED, STOCK


def active_mode(trainer: TrainerLike) -> str:
    """The mode in which this process trains."""
    handle = active_handle()
    patched = isinstance(trainer, GlobalBatchMixin) or (handle is not None and handle.active)
    return PATCHED if patched and enabled() else STOCK


def options_of(trainer: TrainerLike) -> Options:
    """The options of the trainer's class, or of the active patch; else the defaults."""
    handle = active_handle()
    if isinstance(trainer, GlobalBatchMixin):
        return trainer.global_batch_options
    return Options() if handle is None else handle.options


@contextmanager
def in_mode(mode: str, trainer: TrainerLike, options: Options) -> Iterator[None]:
    """Train stock, with patch and subclass switched off, or patched."""
    if mode == PATCHED:
        already = active_mode(trainer) == PATCHED
        with nullcontext() if already else apply(**vars(options), quiet=True):
            yield
        return
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
