"""What the gradients of a Trainer's window are added in (see `accumulation.precision`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.precision import rounding_words
from hf_accum_fix.engines.engine import check_engine_adds, narrow_leaves
from hf_accum_fix.overrides.live import head_name
from hf_accum_fix.overrides.session import Session, Window
from hf_accum_fix.upstream.protocols import TrainerLike


@contextmanager
def adding(trainer: TrainerLike, session: Session, window: Window, model: nn.Module) -> Iterator[None]:
    """Around the step of one micro-batch; after the first window say what 16 bits have lost, where that matters."""
    gradient, accelerator = session.gradient, trainer.accelerator
    first, last = window.steps_run == 0, window.steps_run + 1 >= len(window.batches)
    if first and not last and (said := check_engine_adds(accelerator, session.options.accumulate_in)) is not None:
        session.windows.note_inexact()
        session.warn_once("16 bits", said)
    unknown = gradient.lost is None
    with gradient.micro_batch(lambda: narrow_leaves(accelerator, model), first=first, last=last):
        yield
    if unknown and gradient.lost is not None:
        observations.amend({"lost_in_16_bits": gradient.lost})
        if gradient.matters:
            session.windows.note_inexact()
            words = rounding_words(gradient.lost, len(window.batches))
            session.warn_once("16 bits", f"{head_name(trainer)}: {words}")
