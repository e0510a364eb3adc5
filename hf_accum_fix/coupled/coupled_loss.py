"""``coupled_loss="exact"``: a training whose loss couples samples, from its first window to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.declared import holds_shards, is_compiled
from hf_accum_fix.accumulation.look import LossRun
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.core.host import Host
from hf_accum_fix.coupled.accept import accepted
from hf_accum_fix.coupled.cuts import cuts_of
from hf_accum_fix.coupled.whole_window import Kept, WholeWindow
from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.options import Options

#: How the loss is reduced then.
CONTRACT = LossContract(Reduction.WINDOW, reason="each micro-batch computes the loss of all samples of a step")

#: Relative difference of vectors that rounding explains, by bytes of a number.
_DRIFT = {8: 1e-12, 4: 1e-5}


def planned(options: Options) -> tuple[CoupledLoss | None, Options]:
    """The loss over a whole window that options ask for, and the options of its training; None: they do not."""
    if options.coupled_loss == "micro-batch":
        return None, options
    loss = CoupledLoss(options.coupled_loss, options.coupled)
    return loss, replace(options, contract=CONTRACT, coupled_loss="micro-batch")


class CoupledLoss:
    """The loss of one training, over the samples of a window.

    Args:
        convention: "exact", over all ranks; "rank", over each rank's own samples.
        named: the modules that the user has named.
    """

    def __init__(self, convention: str, named: Sequence[str]) -> None:
        self._convention, self._named = convention, named
        self._window: WholeWindow | None = None
        self._checked = False

    def open(self, host: Host, batches: Sequence[Any]) -> None:
        """Run a window once without gradient, and keep its vectors; in the first one, check that this is exact.

        Raises:
            UnsupportedSetupError: if the loss cannot be cut, or the gradient is another one.
        """
        if self._window is None:
            model = host.bare(host.model)
            _refuse(host, host.model)
            ranks = host.data_ranks if self._convention == "exact" else 1
            self._window = WholeWindow(cuts_of(model, self._named), ranks)
        self._say_drift(host)
        error: Exception | None = None
        try:
            if batches:
                with host.run_counting(batches) as run:
                    self._collect(host, run, batches)
            else:
                self._window.kept = {}
        except Exception as caught:
            error = caught
        self._gather(host, error)

    def _collect(self, host: Host, run: LossRun, batches: Sequence[Any]) -> None:
        window, sharded = self._window, holds_shards(run.model)
        assert window is not None
        # Where ranks meet in every forward, no rank runs more than another.
        if not (self._checked or sharded):
            with preserved_state(run.model, *run.others, leave=run.leave):
                window.modules, shows = accepted(run, batches, window.modules, host.head)
            if not shows:
                host.warn_inexact(
                    "coupled",
                    f"{host.head}: two micro-batches joined have other vectors than each alone, or cannot be joined, "
                    "so that coupled_loss='exact' was not checked",
                )
        self._checked = True
        with preserved_state(run.model, *run.others, leave=run.leave, sharded=sharded):
            window.collect(batches, lambda batch: run.forward(batch, None))

    def micro_batch(self, place: int) -> AbstractContextManager[None]:
        """Around the forward of a micro-batch in training; ``place``: in its window."""
        assert self._window is not None
        return self._window.micro_batch(place)

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Of a micro-batch, with the labels of the window."""
        assert self._window is not None
        return self._window.inputs(inputs)

    def facts(self) -> dict[str, Any]:
        """Its entries in a report."""
        at = [] if self._window is None else [name or "the model" for name in self._window.modules]
        return {"coupled_loss": self._convention, "coupled_at": at}

    def _say_drift(self, host: Host) -> None:
        """Say once that a module has returned other vectors in the second pass."""
        assert self._window is not None
        drift, self._window.drift = self._window.drift, None
        if drift is None:
            return
        # Reading waits for the device: once.
        self._window.compares = False
        if (times := float(drift)) > _DRIFT.get(drift.element_size(), 5e-2):
            host.warn_inexact(
                "drift",
                f"{host.head}: a module returned other vectors as it was trained than as they were collected, by "
                f"{times:.1e} of the largest; its forward may keep a state",
            )

    def _gather(self, host: Host, error: Exception | None) -> None:
        """Add the vectors of the ranks whose samples the loss gets, in order; what one rank raises is raised on all."""
        window = self._window
        assert window is not None
        mine = {key: [(tuple(each.shape), each.dtype) for each in its] for key, its in window.kept.items()}
        every = host.all_of((window.micro_batches if mine else 0, mine), error)
        if window.ranks == 1:
            return
        window.first = sum(length for length, _ in every[: host.rank])
        keys, kept = sorted({key for _, its in every for key in its}), Kept()
        for key in keys:
            shapes = [its.get(key, []) for _, its in every]
            width, dtype = next((each[0][0][1:], each[0][1]) for each in shapes if each)
            rows = [sum(shape[0] for shape, _ in each) for each in shapes]
            longest = max(rows)
            flat = torch.zeros((longest, *width), dtype=dtype, device=host.device)
            if rows[host.rank]:
                flat[: rows[host.rank]] = torch.cat(window.kept[key]).to(host.device)
            gathered = _gathered(host, flat)
            kept[key] = []
            for rank, each in enumerate(shapes):
                own = gathered[rank * longest : rank * longest + rows[rank]]
                kept[key] += torch.split(own, [shape[0] for shape, _ in each])
        window.kept = kept


def _gathered(host: Host, own: Tensor) -> Tensor:
    """The rows of every rank, by a sum: each adds its own to zeros."""
    whole = torch.zeros((host.world_size * len(own), *own.shape[1:]), dtype=own.dtype, device=own.device)
    whole[host.rank * len(own) : (host.rank + 1) * len(own)] = own
    return host.summed(whole)


def _refuse(host: Host, model: nn.Module) -> None:
    """Refuse a model whose vectors depend on more than their sample, or whose hooks are compiled away."""
    norm = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)
    if norm is not None:
        raise UnsupportedSetupError(
            f"got coupled_loss='exact' and BatchNorm in training mode ({norm}), whose statistics come from one "
            "micro-batch; expected none; call .eval() on it, or leave the option out"
        )
    if host.world_size != host.data_ranks:
        raise UnsupportedSetupError(
            "got coupled_loss='exact' and ranks that share samples; expected data-parallel ranks only; leave the "
            "option out"
        )
    if is_compiled(model):
        raise UnsupportedSetupError(
            "got coupled_loss='exact' and compiled code, which calls no hooks; expected a model that runs eagerly; "
            "leave torch_compile out"
        )
