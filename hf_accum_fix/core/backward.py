"""Watch the backward of a micro-batch in a hand-written loop: whether it runs, by whom, and on which loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.rules import is_near
from hf_accum_fix.core.host import Host
from hf_accum_fix.engines.engine import engine_divisor, is_deepspeed
from hf_accum_fix.errors import SeamError

#: The least that a loss scaler begins at; more than the micro-batches that a loop may multiply by.
_LEAST_SCALE = 2.0**7


class WatchedBackward:
    """The backward of one micro-batch, inside `watched`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: Of the losses that the micro-batch has returned.
        self._nodes: list[Any] = []
        #: ``accelerator.backward`` runs, or first reads the loss, which before torch 2.5 takes a gradient.
        self._in_engine = self._reads = False
        #: It has reached one of the losses.
        self._ran = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a micro-batch's forward and backward.

        Raises:
            SeamError: if a loss runs backward without the accelerator, which divides it.
        """
        accelerator = self._host.accelerator
        if accelerator is not None:
            self._original = accelerator.backward
        with nullcontext() if accelerator is None else overridden(accelerator, "backward", self._by_engine):
            yield
        if self._nodes and not self._ran:
            words = "the backward of one of its losses was skipped, or ran outside of micro_batch()"
            self._host.report_inexact(words)

    def expect(self, loss: Tensor) -> None:
        """Watch for the backward of a loss that is about to be returned."""
        if loss.requires_grad:
            self._nodes.append(loss.grad_fn)
            loss.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _by_engine(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Instead of ``accelerator.backward``: say what was added to the loss after it was returned."""
        if self._nodes and loss.grad_fn not in self._nodes:
            with overridden(self, "_reads", True):
                others = [term.name for term in read(loss, self._nodes) if term.leaf not in self._nodes]
            if others:
                words = f"{', '.join(others)} was added to its loss after that was returned"
                self._host.report_inexact(f"{words}: it is averaged over G micro-batches, and the log lacks it")
        with overridden(self, "_in_engine", True):
            return self._original(loss, *args, **kwargs)

    def _reached(self, gradient: Tensor) -> None:
        """A hook on the loss, in its backward."""
        if self._reads:
            return
        host, self._ran = self._host, True
        divisor = engine_divisor(host.accelerator)
        if divisor != 1 and not self._in_engine:
            raise SeamError(
                f"got loss.backward() on a loss that accelerator.backward(loss) divides by {divisor}; expected the "
                "latter; call it, or pass steps=G and no accelerator"
            )
        # A first window that is observed waits anyway; a loss scaler multiplies, and so may DeepSpeed.
        looks = host.state.opened == 1 and (host.on_cpu or host.options.contract is None)
        is_scaled = getattr(host.accelerator, "scaler", None) is not None or is_deepspeed(host.accelerator)
        if not looks or is_scaled:
            return
        times = float(gradient) * divisor
        if not is_near(times, 1.0, 1e-2) and not _is_by_scaler(times):
            host.report_inexact(f"its loss was multiplied by {times:g} after it was returned, which the log lacks")


def _is_by_scaler(times: float) -> bool:
    """Whether a loop's own loss scaler multiplies: by a large power of two (torch.amp.GradScaler at first by 2**16)."""
    return times >= _LEAST_SCALE and math.frexp(times)[0] == 0.5
