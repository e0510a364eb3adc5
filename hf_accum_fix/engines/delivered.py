"""The gradient of a window on its way to the optimizer: added in the chosen dtype, and compared where it arrives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn

from hf_accum_fix.engines.engine import check_engine_adds, is_deepspeed, narrow_leaves
from hf_accum_fix.engines.precision import WindowGradient, rounding_words
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.engines.reached import Reached
from hf_accum_fix.options import Options

logger = logging.getLogger("hf_accum_fix")


class Delivery:
    """The gradient of a training's windows.

    Attributes:
        gradient: the sum of a window's gradients.
        reached: whether it is what the optimizer uses.
    """

    def __init__(self, options: Options) -> None:
        self.gradient, self.reached = WindowGradient(options.accumulate_in), Reached(options.prove_every)

    def micro_batch(
        self, host: Training, model: nn.Module, micro_batches: int, begun: int
    ) -> AbstractContextManager[None]:
        """Around micro-batch number ``begun``: add gradients in the chosen dtype; warn once of what 16 bits lose."""
        if self.gradient.idle and self.reached.idle and not is_deepspeed(host.accelerator):
            return nullcontext()
        return self._watched(host, model, micro_batches, begun)

    @contextmanager
    def _watched(self, host: Training, model: nn.Module, micro_batches: int, begun: int) -> Iterator[None]:
        first, last, gradient = begun == 1, begun >= micro_batches, self.gradient
        if first and not last and (found := check_engine_adds(host.accelerator, host.options.accumulate_in)):
            host.warn_inexact("16 bits", found)
        unknown = gradient.lost is None
        with (
            gradient.micro_batch(partial(narrow_leaves, host.accelerator, model), first=first, last=last),
            self.reached.micro_batch(host, model, first=first, last=last),
        ):
            yield
        if unknown and gradient.lost is not None:
            host.note(lost_in_16_bits=gradient.lost)
            if gradient.matters:
                head = type(host.bare(model)).__name__
                host.warn_inexact("16 bits", f"{head}: {rounding_words(gradient.lost, micro_batches)}")

    def check(self, host: Training, times: Tensor | float | None) -> None:
        """Say whether what autograd delivered in this window is what the optimizer is about to use.

        ``times``: what the gradient was multiplied by at the window's end. A collective in a window that is checked.
        """
        if self.reached.idle or (verdict := self.reached.close(host, times)) is None:
            return
        host.note(**self.reached.facts())
        where = f"{host.head}: {host.where}"
        if verdict.wrong:
            host.warn_inexact(
                "reached",
                f"{where}: got {verdict.words[4:]} in what the optimizer uses; expected the gradient that autograd "
                "delivered, averaged over ranks; look at the engine, gradient and communication hooks",
            )
        elif verdict.inside and host.steps > 1:
            host.warn_inexact(
                "reached",
                f"{where}: got an optimizer that steps inside the backward of every micro-batch; expected one step a "
                "window; use another optimizer, or gradient_accumulation_steps=1",
            )
        elif verdict.final and host.world.rank == 0:
            logger.info("%s: the gradient reached the optimizer: %s", host.head, verdict.words)
