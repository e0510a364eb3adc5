"""``coupled_loss="exact"``: a training whose loss couples samples, from its first window to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.counting.items import sample_count
from hf_accum_fix.coupled.accept import WithoutCollectives, accepted, varying
from hf_accum_fix.coupled.cuts import cuts_of
from hf_accum_fix.coupled.whole_window import Key, WholeWindow, kind_of
from hf_accum_fix.engines.model import is_compiled
from hf_accum_fix.engines.ranks import Training
from hf_accum_fix.errors import AccumFixError, ContractError, UnsupportedSetupError
from hf_accum_fix.learning.contract import LossContract, Reduction
from hf_accum_fix.learning.look import LossRun
from hf_accum_fix.options import Options
from hf_accum_fix.trace.preserve import preserved_state

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


class CoupledLoss(WholeWindow):
    """The loss of one training; ``convention``: "exact", over all ranks, or "rank"; ``named``: modules, by the user."""

    def __init__(self, convention: str, named: Sequence[str]) -> None:
        super().__init__({})
        self._convention, self._named = convention, named
        self._trains = False  # a window was cut
        #: inputs that were not one value in a window that was tried, by kind, and vectors a sample.
        self._varied: dict[str, set[str]] = {}
        self._vectors: dict[Key, float] = {}

    def open(self, host: Training, batches: Sequence[Any]) -> None:
        """Run a window once without gradient, and keep its vectors; the first that is cut is tried, or refused."""
        self.ranks = host.world.data_ranks if self._convention == "exact" else 1
        self._say_differences(host)
        error, why = None, ""
        try:
            self.collect([], lambda _: None)
            if batches:
                with host.run_counting(batches) as run:
                    self._collect(host, run, batches)
        except Exception as caught:
            # Once one was cut, a window that is unlike it ends no training.
            error, why = (None, str(caught)) if self._trains and isinstance(caught, AccumFixError) else (caught, "")
        self._gather(host, error, why)

    def _collect(self, host: Training, run: LossRun, batches: Sequence[Any]) -> None:
        sharded = run.sharded
        state = partial(preserved_state, run.model, *run.others, leave=run.leave, sharded=sharded)
        alike = {kind: [each for each in batches if kind_of(each) == kind] for kind in map(kind_of, batches)}
        # A micro-batch alone is not cut.
        for kind, its in alike.items() if len(batches) * self.ranks > 1 else ():
            new = varying(its, self._varied.get(kind, ()))
            # Ranks that meet in their forwards have to run as many.
            meets = sharded or self.ranks < host.world.data_ranks
            if not self._varied or (not meets and (new or kind not in self._varied)):
                given = self.modules or _known(host, run, self._named)
                with state(), WithoutCollectives() if self.ranks > 1 else nullcontext():  # type: ignore[no-untyped-call]
                    rounded = host.rounds_products
                    self.modules = accepted(run, its, given, host.head, sharded=sharded, rounded=rounded)
            elif kind not in self._varied:
                raise UnsupportedSetupError("got micro-batches of two data sets; expected one where ranks meet")
            self._varied[kind] = new | self._varied.get(kind, set())
        with state():
            self.collect(batches, lambda batch: run.forward(batch, None))
        for kind, what in {**self._vectors, **self.kept} if self.modules else ():
            each, samples = self.kept.get((kind, what), []), [*map(sample_count, alike.get(kind, []))]
            expected = self._vectors.setdefault((kind, what), len(each[0]) / samples[0] if each else 0.0)
            if [*map(len, each)] != [expected * count for count in samples]:
                raise ContractError(
                    f"got {[*map(len, each)]} rows of {what} in the micro-batches of a window; expected {expected:g} "
                    "a sample; with coupled_loss='exact' each has to call the same modules and have the same labels"
                )

    def facts(self) -> dict[str, Any]:
        """Its entries in a report."""
        return {"coupled_loss": self._convention, "coupled_at": [name or "the model" for name in self.modules]}

    def _say_differences(self, host: Training) -> None:
        """Say once that a window's vectors were others in the second pass, or its losses not all the same."""
        drift = torch.zeros(()) if self.drift is None else self.drift
        for losses in map(torch.stack, self.losses.values()):
            # Reading waits for the device. Near zero the rounding of its terms is left.
            spread = (losses.max() - losses.min()) / losses.abs().max().clamp(min=1e-2)
            if max(float(drift), float(spread)) > _ROUNDING[drift.dtype]:
                words = f"losses that differ by {spread:.1e}, or vectors by {drift:.1e} in the second pass; samples "
                words += "reach the loss past the modules of coupled=, it draws numbers, or a forward keeps a state"
                host.warn_inexact("drift", f"{host.head}: the micro-batches of a window have {words}")

    def _gather(self, host: Training, error: Exception | None, why: str) -> None:
        """Add the vectors of the ranks whose samples the loss gets, in order; what one rank raises is raised on all."""
        mine = {key: [(tuple(each.shape), each.dtype) for each in its] for key, its in self.kept.items()}
        every = host.all_of((len(self.kinds), mine, why, bool(self.modules)), error)
        why = next((each for _, _, each, _ in every if each), "")
        keys = sorted({key for _, its, _, _ in every for key in its})
        shapes = {key: [its.get(key, []) for _, its, _, _ in every] for key in keys}
        for (_, what), of_ranks in shapes.items():
            rows = sorted({f"{[*shape[1:]]} of {dtype}" for each in of_ranks for shape, dtype in each})
            if len(rows) > 1 and not why:
                why = f"got {what} with rows of {' and '.join(rows)} in one window; expected rows of one shape, which "
                why += "can be concatenated; pad to a fixed length, or name another module in coupled="
        if why and not self._trains:
            raise ContractError(why)
        if why:
            self.kept = {}
            words = "is unlike those before, and trains as without coupled_loss"
            host.warn_inexact("unlike", f"{host.head}: {host.where} {words}: {why}")
        elif self.ranks > 1:
            self.micro_batches = sum(length for length, *_ in every)
            self.first = {key: sum(map(len, its[: host.world.rank])) for key, its in shapes.items()}
            self.kept = {key: _gathered(host, self.kept.get(key, []), each) for key, each in shapes.items()}
        self._trains = self._trains or any(each for *_, each in every)


def _gathered(
    host: Training, own: Sequence[Tensor], shapes: Sequence[Sequence[tuple[Any, torch.dtype]]]
) -> list[Tensor]:
    """The tensors of every rank in order, by a sum: each adds its own to zeros; ``shapes``: those of every rank."""
    shape, dtype = next(each[0] for each in shapes if each)
    lengths = [shape[0] for each in shapes for shape, _ in each]
    # Bools have no sum.
    whole = torch.zeros(
        (sum(lengths), *shape[1:]), dtype=torch.uint8 if dtype == torch.bool else dtype, device=host.world.device
    )
    begun = sum(shape[0] for each in shapes[: host.world.rank] for shape, _ in each)
    if own:
        rows = torch.cat([*own]).to(whole)
        whole[begun : begun + len(rows)] = rows
    return [*torch.split(host.summed(whole).to(dtype), lengths)]


def _known(host: Training, run: LossRun, named: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at which a loss is cut, as far as they are known; whatever never can be cut is refused."""
    norms = [name for name, each in run.model.named_modules() if isinstance(each, _BatchNorm) and each.training]
    for found, words in (
        (bool(norms), f"BatchNorm in training mode ({', '.join(norms)}); expected none; call .eval() on it"),
        (host.world.size != host.world.data_ranks, "ranks that share samples; expected data-parallel ranks only"),
        (is_compiled(host.model), "compiled code, which calls no hooks; expected eager code; set torch_compile=False"),
    ):
        if found:
            raise UnsupportedSetupError(f"got coupled_loss='exact' and {words}, or leave the option out")
    samplers = [str(getattr(getattr(each, "args", None), "batch_sampler", "")).lower() for each in run.others]
    if any("no_duplicates" in each for each in samplers):
        words = "looks at a micro-batch; expected no text twice in a window, as its own negative; drop duplicates"
        host.warn_once("duplicates", f"{host.head}: got batch_sampler NO_DUPLICATES, which {words} from the data set")
    return cuts_of(run.model, named, run.others)
