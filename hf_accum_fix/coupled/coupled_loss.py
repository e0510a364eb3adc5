"""``coupled_loss="exact"``: a training whose loss couples samples, from its first window to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
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

CONTRACT = LossContract(Reduction.WINDOW, reason="each micro-batch computes the loss of all samples of a step")
#: Relative difference of vectors, and of losses, that rounding explains.
_ROUNDING = defaultdict(lambda: 5e-2, {torch.float64: 1e-9, torch.float32: 1e-4})
#: Of a window: the relative difference that rounding explains, and losses.
Noted = tuple[float, dict[str, list[float]]]


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
        #: By kind, inputs that were not one value in a window that was tried, and those of this one.
        self._varied: dict[str, set[str]] = {}
        self._new: dict[str, set[str]] = {}
        self._vectors: dict[Key, float] = {}  # a sample

    def open(self, host: Training, batches: Sequence[Any]) -> None:
        """Run a window once without gradient, and keep its vectors; the first that is cut is tried, or refused."""
        self.ranks = host.world.data_ranks if self._convention == "exact" else 1
        self._new, noted, error, why, run = {}, self._noted(), None, "", None
        with ExitStack() as stack:
            try:
                self.collect([], lambda _: None)
                if batches:
                    run = stack.enter_context(host.run_counting(batches))
                    self._collect(host, run, batches)
            except Exception as caught:
                # Once one was cut, a window that is unlike it ends no training.
                error, why = (None, str(caught)) if self._trains and isinstance(caught, AccumFixError) else (caught, "")
            why, is_cut, is_new = self._gather(host, error, why, noted)
            why = why or (self._run_before(host, run, batches) if is_new else "")
        if why and not self._trains:
            raise ContractError(why)
        if why:
            self.kept = {}
            words = "is unlike those before, and trains as without coupled_loss"
            host.warn_inexact("unlike", f"{host.head}: {host.where} {words}: {why}")
        else:
            self._trains = self._trains or is_cut
            self._varied |= {kind: new | self._varied.get(kind, set()) for kind, new in self._new.items()}

    def _preserved(self, run: LossRun) -> AbstractContextManager[object]:
        return preserved_state(run.model, *run.others, leave=run.leave, sharded=run.sharded)

    def _collect(self, host: Training, run: LossRun, batches: Sequence[Any]) -> None:
        sharded = run.sharded
        alike = {kind: [each for each in batches if kind_of(each) == kind] for kind in map(kind_of, batches)}
        # A micro-batch alone is not cut.
        for kind, its in alike.items() if len(batches) * self.ranks > 1 else ():
            self._new[kind] = new = varying(its, self._varied.get(kind, ()))
            # Ranks that meet in their forwards have to run as many.
            meets = sharded or self.ranks < host.world.data_ranks
            if (not self._varied and len(self._new) == 1) or (not meets and (new or kind not in self._varied)):
                given = self.modules or _known(host, run, self._named)
                alone = WithoutCollectives() if self.ranks > 1 else nullcontext()  # type: ignore[no-untyped-call]
                with self._preserved(run), alone:
                    self.modules = accepted(run, its, given, host.head, sharded=sharded, rounded=host.rounds_products)
            elif kind not in self._varied:
                raise UnsupportedSetupError("got micro-batches of two data sets; expected one where ranks meet")
        with self._preserved(run):
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

    def _run_before(self, host: Training, run: LossRun | None, batches: Sequence[Any]) -> str:
        """Run a window as in training, but without gradient; why it is not exact, or nothing."""
        why = ""
        try:
            with self._preserved(run) if run else nullcontext():
                for place, batch in enumerate(batches):
                    with self.micro_batch(place):
                        self.note(run.forward(self.inputs(batch), None) / len(batches))  # type: ignore[union-attr]
        except Exception as caught:
            why = f"{type(caught).__name__}: {caught}"
        every = host.all_of((why, self._noted()), None)
        why = next((each for each, _ in every if each), "") or self._differences([each for _, each in every])
        self.losses, names = {}, ", ".join(sorted({*chain(*self._new.values())}))
        return why and (
            f"got micro-batches that vary in {names}, with {why}; expected one loss for all micro-batches of a window; "
            "pass what varies through a module, or as rows of an input with label in its name, or omit coupled_loss"
        )

    def _noted(self) -> Noted:
        """Of the last window; reading waits for the device."""
        rounding = max((_ROUNDING[each[0].dtype] for each in self.losses.values()), default=0.0)
        return rounding, {kind: torch.stack(each).tolist() for kind, each in self.losses.items()}

    def _differences(self, noted: Sequence[Noted]) -> str:
        """How the losses of a window differ; empty: they do not."""
        alike = defaultdict[object, list[float]](list)
        for rank, (_, losses) in enumerate(noted):
            for kind, its in losses.items():
                alike[kind, self._convention == "exact" or rank] += its
        # Near zero the rounding of its terms is left.
        off = max(((max(its) - min(its)) / max(1e-2, *map(abs, its)) for its in alike.values()), default=0.0)
        words = "samples reach the loss past the modules of coupled=, it draws numbers, or a forward keeps a state"
        words = f"losses, or vectors in the second pass, that differ by {off:.1e}; {words}"
        return words if off > max(each for each, _ in noted) else ""

    def _gather(self, host: Training, error: Exception | None, why: str, noted: Noted) -> tuple[str, bool, bool]:
        """Add the vectors of the ranks whose samples the loss gets, in order; what one rank raises is raised on all."""
        mine = {key: [(tuple(each.shape), each.dtype) for each in its] for key, its in self.kept.items()}
        is_new = any(new or kind not in self._varied for kind, new in self._new.items())
        every = host.all_of((len(self.kinds), mine, why, bool(self.modules), is_new, noted), error)
        if words := self._differences([each for *_, each in every]):
            host.warn_inexact("drift", f"{host.head}: the micro-batches of a window have {words}")
        why = next((each for _, _, each, *_ in every if each), "")
        keys = sorted({key for _, its, *_ in every for key in its})
        shapes = {key: [its.get(key, []) for _, its, *_ in every] for key in keys}
        for (_, what), of_ranks in shapes.items():
            rows = sorted({f"{[*shape[1:]]} of {dtype}" for each in of_ranks for shape, dtype in each})
            if len(rows) > 1 and not why:
                why = f"got {what} with rows of {' and '.join(rows)} in one window; expected rows of one shape, which "
                why += "can be concatenated; pad to a fixed length, or name another module in coupled="
        if self.ranks > 1 and not why:
            self.micro_batches = sum(length for length, *_ in every)
            self.first = {key: sum(map(len, its[: host.world.rank])) for key, its in shapes.items()}
            self.kept = {key: _gathered(host, self.kept.get(key, []), each) for key, each in shapes.items()}
        return why, any(each for _, _, _, each, *_ in every), any(each for *_, each, _ in every)


def _gathered(host: Training, own: Sequence[Tensor], shapes: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The tensors of every rank in order, by a sum: each adds its own to zeros; ``shapes``: those of every rank."""
    (_, *width), dtype = next(each[0] for each in shapes if each)
    lengths = [[rows for (rows, *_), _ in each] for each in shapes]
    # Bools have no sum.
    given: Any = {"dtype": torch.uint8 if dtype == torch.bool else dtype, "device": host.world.device}
    others = [[torch.zeros((sum(each), *width), **given)] for each in lengths]
    others[host.world.rank] = [each.to(**given) for each in own]
    return [*torch.split(host.summed(torch.cat([*chain(*others)])).to(dtype), [*chain(*lengths)])]


def _known(host: Training, run: LossRun, named: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at which a loss is cut, as far as they are known; whatever never can be cut is refused."""
    norms = [name for name, each in run.model.named_modules() if isinstance(each, _BatchNorm) and each.training]
    past = host.world.size > 1 and any(hasattr(getattr(each, "loss", None), "sentence_embedder") for each in run.others)
    for found, words in (
        (past, "a loss that calls its model past DistributedDataParallel; expected one that calls it; use one rank"),
        (bool(norms), f"BatchNorm in training mode ({', '.join(norms)}); expected none; call .eval() on it"),
        (host.world.size != host.world.data_ranks, "ranks that share samples; expected data-parallel ranks only"),
        (is_compiled(host.model), "compiled code, which calls no hooks; expected eager code; set torch_compile=False"),
    ):
        if found:
            raise UnsupportedSetupError(f"got coupled_loss='exact' and {words}, or leave the option out")
    samplers = str([getattr(getattr(each, "args", None), "batch_sampler", "") for each in run.others])
    if "no_duplicates" in samplers.lower():
        words = "looks at a micro-batch; expected no text twice in a window, as its own negative; drop duplicates"
        host.warn_once("duplicates", f"{host.head}: got batch_sampler NO_DUPLICATES, which {words} from the data set")
    return cuts_of(run.model, named, run.others)
