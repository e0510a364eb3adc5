"""Watch the backward of a micro-batch in a hand-written loop: whether it runs, by whom, and on which loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from hf_accum_fix.accumulation.loss_graph import read
from hf_accum_fix.accumulation.nodes import on_host
from hf_accum_fix.accumulation.part import Number
from hf_accum_fix.accumulation.preserve import overridden
from hf_accum_fix.accumulation.rules import is_near
from hf_accum_fix.core.host import Host
from hf_accum_fix.engines.engine import engine_divisor
from hf_accum_fix.errors import SeamError


class WatchedBackward:
    """The backward of one micro-batch, inside `watched`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: Of the losses that the micro-batch has returned.
        self._nodes: list[Any] = []
        #: ``accelerator.backward`` runs; a backward has reached one of the losses.
        self._in_engine = self._ran = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a micro-batch's forward and backward.

        Raises:
            SeamError: if a loss runs backward without the accelerator, which divides it.
        """
        accelerator = self._host.accelerator
        self._original: Any = getattr(accelerator, "backward", None)
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
        """Instead of ``accelerator.backward``: say what was made of the loss after it was returned."""
        # Before torch 2.5 reading takes a gradient, too.
        with overridden(self, "_in_engine", True):
            self._host.contained("reading a loss", partial(self._note_changes, loss), None)
            return self._original(loss, *args, **kwargs)

    def _note_changes(self, loss: Tensor) -> None:
        times, added = made_of(loss, self._nodes) if self._nodes else (1.0, [])
        if added:
            words = f"{', '.join(added)} was added to its loss after that was returned"
            self._host.report_inexact(f"{words}: it is averaged over G micro-batches, and the log lacks it")
        self._note(times)

    def _reached(self, gradient: Tensor) -> None:
        """A hook on the loss, in its backward."""
        host, self._ran = self._host, True
        if self._in_engine:
            return
        if (divisor := engine_divisor(host.accelerator)) != 1:
            raise SeamError(
                f"got loss.backward() on a loss that accelerator.backward(loss) divides by {divisor}; expected the "
                "latter; call it, or pass steps=G and no accelerator"
            )
        # A first window that is observed waits anyway. A loop's loss scaler multiplies; a division by G does not.
        looks = host.state.opened == 1 and (host.reads_are_free or host.options.contract is None)
        if looks and float(gradient) < 1:
            self._note(float(gradient))

    def _note(self, times: Number) -> None:
        if on_host(times) and not is_near(float(times), 1.0, 1e-2):
            words = f"its loss was multiplied by {float(times):g} after it was returned, which the log lacks"
            self._host.report_inexact(words)


def made_of(loss: Tensor, returned: Collection[Any]) -> tuple[Number, list[str]]:
    """What a loss multiplies one of the ``returned`` nodes by, and the names of the terms that it adds to it."""
    times: Number = 1.0
    added = list[str]()
    for term in read(loss, returned):
        if term.leaf not in returned:
            added.append(term.name)
        for factor in term.factors if term.leaf in returned else ():
            times = times / factor.value if factor.divides else times * factor.value
    return times, added
