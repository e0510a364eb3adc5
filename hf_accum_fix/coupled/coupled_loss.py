"""``coupled_loss="exact"``: a training whose loss couples samples, from its first window to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from hf_accum_fix.coupled.accept import WithoutCollectives, accepted
from hf_accum_fix.coupled.cuts import cuts_of
from hf_accum_fix.coupled.whole_window import WholeWindow
from hf_accum_fix.errors import ContractError, UnsupportedSetupError
from hf_accum_fix.options import Options

#: How the loss is reduced then.
CONTRACT = LossContract(Reduction.WINDOW, reason="each micro-batch computes the loss of all samples of a step")

#: Relative difference of vectors, and of losses, that rounding explains.
_ROUNDING = defaultdict(lambda: 5e-2, {torch.float64: 1e-9, torch.float32: 1e-4})


def planned(options: Options) -> tuple[CoupledLoss | None, Options]:
    """The loss over a whole window that options ask for, and the options of its training; None: they do not."""
    if options.coupled_loss == "micro-batch":
        return None, options
    loss = CoupledLoss(options.coupled_loss, options.coupled)
    return loss, replace(options, contract=CONTRACT, coupled_loss="micro-batch", coupled=())


class CoupledLoss:
    """The loss of one training, over the samples of a window.

    Args:
        convention: "exact", over all ranks; "rank", over each rank's own samples.
        named: the modules that the user has named.
    """

    def __init__(self, convention: str, named: Sequence[str]) -> None:
        self._convention, self._named = convention, named
        self._window: WholeWindow | None = None

    def open(self, host: Host, batches: Sequence[Any]) -> None:
        """Run a window once without gradient, and keep its vectors; in the first that is cut, check that this is exact.

        Raises:
            UnsupportedSetupError: if the loss cannot be cut, or the gradient is another one.
        """
        if self._window is None:
            self._window = WholeWindow({}, host.data_ranks if self._convention == "exact" else 1)
        self._say_differences(host)
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
        # A window of one micro-batch is not cut.
        if not window.modules and len(batches) * window.ranks > 1:
            _refuse(host, run.model)
            given = cuts_of(run.model, self._named, run.others)
            with (
                preserved_state(run.model, *run.others, leave=run.leave, sharded=sharded),
                WithoutCollectives() if window.ranks > 1 else nullcontext(),  # type: ignore[no-untyped-call]
            ):
                window.modules = accepted(run, batches, given, host.head, sharded=sharded, rounded=host.rounds_products)
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

    def note(self, loss: Tensor) -> None:
        """What a micro-batch adds to the logged loss, 0-dim."""
        if self._window is not None and self._window.modules and self._window.compares:
            self._window.losses.append(loss)

    def facts(self) -> dict[str, Any]:
        """Its entries in a report."""
        at = [] if self._window is None else [name or "the model" for name in self._window.modules]
        return {"coupled_loss": self._convention, "coupled_at": at}

    def _say_differences(self, host: Host) -> None:
        """Say once that the first window's vectors were others in the second pass, or its losses not all the same."""
        window = self._window
        assert window is not None
        if window.drift is None or not window.losses:
            return
        # Reading waits for the device: once.
        window.compares, losses, rounding = False, torch.stack(window.losses).double(), _ROUNDING[window.drift.dtype]
        if (times := float(window.drift)) > rounding:
            host.warn_inexact(
                "drift",
                f"{host.head}: a module returned other vectors as it was trained than as they were collected, by "
                f"{times:.1e} of the largest; its forward may keep a state",
            )
        elif (times := float((losses.max() - losses.min()) / losses.abs().max().clamp(min=1e-30))) > rounding:
            host.warn_inexact(
                "spread",
                f"{host.head}: the micro-batches of a window have losses that differ by {times:.1e}, instead of the "
                "window's; samples reach it past the modules of coupled=, or it draws random numbers behind them",
            )

    def _gather(self, host: Host, error: Exception | None) -> None:
        """Add the vectors of the ranks whose samples the loss gets, in order; what one rank raises is raised on all."""
        window = self._window
        assert window is not None
        mine = {key: [(tuple(each.shape), each.dtype) for each in its] for key, its in window.kept.items()}
        every = host.all_of((window.micro_batches if mine else 0, mine), error)
        shapes = {
            key: [its.get(key, []) for _, its in every] for key in sorted({key for _, its in every for key in its})
        }
        for key, of_ranks in shapes.items():
            rows = sorted({f"{[*shape[1:]]} of {dtype}" for each in of_ranks for shape, dtype in each})
            if len(rows) > 1:
                raise ContractError(
                    f"got {key} with rows of {' and '.join(rows)} in one window; expected rows of one shape, which "
                    "can be concatenated; pad to a fixed length, or name another module in coupled="
                )
        if window.ranks > 1:
            window.first = sum(length for length, _ in every[: host.rank])
            window.kept = {key: _gathered(host, window.kept.get(key, []), each) for key, each in shapes.items()}


def _gathered(host: Host, own: Sequence[Tensor], shapes: Sequence[Sequence[tuple[Any, torch.dtype]]]) -> list[Tensor]:
    """The tensors of every rank in order, by a sum: each adds its own to zeros; ``shapes``: those of every rank."""
    shape, dtype = next(each[0] for each in shapes if each)
    lengths = [shape[0] for each in shapes for shape, _ in each]
    # Bools have no sum.
    whole = torch.zeros(
        (sum(lengths), *shape[1:]), dtype=torch.uint8 if dtype == torch.bool else dtype, device=host.device
    )
    begun = sum(shape[0] for each in shapes[: host.rank] for shape, _ in each)
    if own:
        rows = torch.cat([*own]).to(whole)
        whole[begun : begun + len(rows)] = rows
    return [*torch.split(host.summed(whole).to(dtype), lengths)]


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
    if is_compiled(host.model):
        raise UnsupportedSetupError(
            "got coupled_loss='exact' and compiled code, which calls no hooks; expected a model that runs eagerly; "
            "leave torch_compile out"
        )
