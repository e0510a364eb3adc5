"""A dataloader's epochs as accumulation windows, whose micro-batches are weighed as they are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch import Tensor, nn

from hf_accum_fix.accumulation.closing import scale_gradients
from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.precision import WindowGradient, rounding_words
from hf_accum_fix.accumulation.share import Cut, loss_among, of_window, run_by_rule, share_of
from hf_accum_fix.accumulation.values import listening
from hf_accum_fix.accumulation.weigh import WindowCheck, unlike_declared, weigh
from hf_accum_fix.accumulation.window import Items, Weightless, count_by_rules, count_dtype
from hf_accum_fix.counting import count, note_empty, say_empty
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.engines.engine import (
    check_engine_adds,
    inputs_are_rounded,
    narrow_leaves,
    reducing,
)
from hf_accum_fix.errors import ContractError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.loop.run import LoopRun
from hf_accum_fix.loop.settling import routing_of, run_model, settle
from hf_accum_fix.options import Options, options_from, shows_options
from hf_accum_fix.upstream.presence import require_accelerator
from hf_accum_fix.upstream.protocols import AcceleratorLike

Batch = Mapping[str, Any]


class AccumulationWindow:
    """The micro-batches of one optimizer step on this rank; made by iterating over `AccumulationWindows`.

    Attributes:
        batches: the micro-batches, as the dataloader gave them.
    """

    def __init__(self, windows: AccumulationWindows, batches: list[Batch]) -> None:
        """Made by `AccumulationWindows` alone."""
        self.batches = batches
        self._windows = windows
        self._begun = 0
        self._counts: list[dict[Items, Tensor]] = []
        self._cuts: list[Cut] = []
        self._checks: dict[int, WindowCheck] = {}
        self._loss: Tensor | None = None

    def __len__(self) -> int:
        """G, the micro-batches of this window."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches, in order."""
        return iter(self.batches)

    @contextmanager
    def micro_batch(self, model: nn.Module) -> Iterator[None]:
        """Around one forward and its backward: ranks reduce gradients in the last micro-batch of the window alone.

        Args:
            model: as it is trained, prepared by accelerate or wrapped in DistributedDataParallel.

        Raises:
            SeamError: if it is entered more often than the window has micro-batches.
        """
        self._begun += 1
        if self._begun > len(self.batches):
            raise SeamError(
                f"micro_batch() was entered {self._begun} times in a window of {len(self.batches)} micro-batches; "
                "expected once for each; enter it around one forward and backward"
            )
        last = self._begun == len(self.batches)
        with self._windows._reducing(model, last=last), self._windows._adding(model, len(self), self._begun):
            yield
        if last and (self._checks or self._windows._run.corrects_others):
            self._end(model)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one micro-batch by the model's own head, to be handed to ``backward``.

        Args:
            model: called with the batch's items as keywords, and with ``num_items_in_batch`` where it takes it.
            batch: one of the window's, on the model's device.

        Returns:
            0-dim, with gradient; for the log take `mean_loss`.

        Raises:
            ContractError: if the model returned no loss, or how it reduces it could not be settled.
            RankError: if the ranks' dataloaders ended at different times, or another rank failed.
        """
        self._open(model, next(iter(model.parameters())).device)
        contract, cut, check = self._of(batch)

        def forward(inputs: Batch, number: Tensor | None) -> tuple[Tensor, Any]:
            outputs = run_model(self._windows._run, model, inputs, number)
            return loss_among(outputs, batch, model), outputs

        run = self._windows._run
        batch, counts = self._counted(contract, batch)
        with run.router.micro_batch(max(self._begun - 1, 0)):
            if check is None or not contract.is_read:
                items = counts.get(contract.items) if contract.items is not None else None
                loss, _ = run_by_rule(contract, batch, items, cut, forward, rounded=self._windows._rounds)
                return self._add(loss)
            with listening(contract, run.bare(model)) as heard:
                loss, _ = forward(batch, cut.number if contract.hands_number else None)
        weightless = isinstance(batch, Weightless)
        weighed = weigh(loss, contract, cut, check, batch, counts, heard, weightless=weightless)
        self._loss = weighed.value if self._loss is None else self._loss + weighed.value
        return weighed.loss

    def scale(self, loss: Tensor, batch: Batch) -> Tensor:
        """The same for a loss that you computed yourself, reduced as the contract given by hand says.

        The mean over its own items: `Reduction.MEAN`. A sum that you divided by `mean_items`: `Reduction.NUMBER`; it
        stays finite for a micro-batch without items, whose mean is nan whatever it is multiplied by.

        Args:
            loss: 0-dim, of this micro-batch, without a term that is no mean over items.
            batch: the micro-batch it is of, which holds what the contract counts.

        Raises:
            ContractError: if no contract was given.
        """
        self._open(None, loss.device)
        contract, cut, _ = self._of(batch)
        batch, counts = self._counted(contract, batch)
        items = counts.get(contract.items) if contract.items is not None else None
        if unlike := unlike_declared(loss, contract, items, cut):
            self._windows._run.warn_once(
                "declared",
                f"scale(): got a loss whose graph shows that {unlike}; expected one that {contract}, as the contract "
                "says: it gets the plain mean over micro-batches and is not exact; give the contract that it has",
            )
            return self._add(loss)
        share = share_of(contract, batch, items, cut, own_loss=True, rounded=self._windows._rounds)
        return self._add(share.of(loss))

    @property
    def mean_items(self) -> Tensor:
        """The mean item count per micro-batch, N / (G * W), 0-dim: what to divide a summed loss by.

        Raises:
            ContractError: if the window has not been counted: no loss of it was asked for, and no contract given.
        """
        self._open(None, None)
        return self._cuts[0].mean

    def mean_loss(self) -> Tensor:
        """The loss of the global batch: the mean over the items of all its micro-batches and ranks.

        Every rank has to ask, since it costs a collective.

        Returns:
            0-dim, without gradient, on the device; reading it waits for the device.

        Raises:
            SeamError: if no loss of this window has been computed.
        """
        if self._loss is None:
            raise SeamError("mean_loss() was asked for before any loss of this window was computed")
        loss = self._loss.to(count_dtype(self._loss.device))
        return self._windows._run.summed(loss) / self._windows.world_size

    def _open(self, model: nn.Module | None, beside: torch.device | None) -> None:
        """Count the window over all ranks, beside a loss or a model, where that has not been done."""
        run = self._windows._run
        if self._cuts:
            return
        run.count_beside(beside)
        while True:
            contract = settle(run, model, self.batches)
            routing, trouble = routing_of(run, model, self.batches, contract)
            counted = count(run, run, contract, self.batches, trouble=trouble, router=run.router, routing=routing)
            if not run.asks:
                break
        self._counts, self._cuts = counted.by_rule, counted.cuts
        contracts = [contract, *run.contracts[1:]]
        if model is not None:
            self._checks = {
                id(each): WindowCheck(each, cut.is_corrected)
                for each, cut in zip(contracts, self._cuts, strict=True)
                if each.is_read and any(run.contract_of(batch) is each for batch in self.batches)
            }
        if self.batches and all(each.items is not None for each in run.contracts):
            note_empty(run, run, counted.total)

    def _of(self, batch: Batch) -> tuple[LossContract, Cut, WindowCheck | None]:
        """A micro-batch's contract, cut and check."""
        run = self._windows._run
        contract = run.contract_of(batch)
        place = next(at for at, each in enumerate(run.losses) if each.contract is contract)
        return contract, self._cuts[place], self._checks.get(id(contract))

    def _counted(self, contract: LossContract, batch: Batch) -> tuple[Batch, dict[Items, Tensor]]:
        """A micro-batch as it is to be run, and its items by every rule."""
        counted = zip(self.batches, self._counts, strict=False)
        # None: it was put on another device, or made anew; then it is counted again.
        counts = next((each for fetched, each in counted if fetched is batch), None)
        if counts is None and self._begun and isinstance(self.batches[self._begun - 1], Weightless):
            batch = Weightless(batch)
        if counts is None:
            counts = count_by_rules(contract.rules, [batch], self._cuts[0].mean.device)[0][0]
        return batch, counts

    def _end(self, model: nn.Module) -> None:
        """Correct the gradient of a window whose loss calls counted otherwise than its rule; say what changed."""
        times = self._windows._run.closing.end(self._windows._run, [*self._checks.values()])
        self._windows._run.reconsider_if_other()
        if times is not None:
            scale_gradients(model, times)
            self._loss = None if self._loss is None else self._loss * times

    def _add(self, share: Tensor) -> Tensor:
        part = share.detach() / len(self.batches)
        self._loss = part if self._loss is None else self._loss + part
        return of_window(share, len(self.batches), self._windows._run.engine_divisor)

    def _check_run(self) -> None:
        if self._begun < len(self.batches):
            raise SeamError(
                f"{self._begun} of the {len(self.batches)} micro-batches of a window were run inside micro_batch(); "
                "expected all of them, since the ranks reduce their gradients in the last; do not break out of a window"
            )


class AccumulationWindows:
    """A dataloader's epochs as accumulation windows; made by `accumulation_windows`."""

    def __init__(
        self,
        dataloader: Iterable[Batch],
        accelerator: AcceleratorLike | None,
        steps: int | None,
        options: Options,
    ) -> None:
        """Made by `accumulation_windows` alone."""
        self._run = LoopRun(accelerator, steps, options)
        self._dataloader = dataloader
        self._gradient = WindowGradient(options.accumulate_in)
        if self.world_size > 1 and isinstance(dataloader, DataLoaderStateMixin):
            self._dataloader = WithoutDuplicates(dataloader, options.drop_duplicates, self._run.tell_repeated)
            self._dataloader.check()

    @property
    def contract(self) -> LossContract | None:
        """How the loss is reduced, as given or, from the first window on, as observed."""
        return self._run.contract

    @property
    def world_size(self) -> int:
        """W, data-parallel ranks."""
        return self._run.world_size

    @property
    def steps(self) -> int:
        """G, micro-batches of a window that is not the short one at the end of an epoch."""
        return self._run.steps

    def __len__(self) -> int:
        """Windows, and so optimizer steps, of an epoch.

        Raises:
            TypeError: if the dataloader knows no length.
        """
        return -(-len(self._dataloader) // self.steps)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[AccumulationWindow]:
        """One epoch.

        Raises:
            ContractError: if a batch is no mapping.
            SeamError: if a micro-batch was not run.
            RankError: if the ranks' dataloaders end at different times.
        """
        batches = iter(self._dataloader)
        while fetched := list(islice(batches, self.steps)):
            for batch in fetched:
                if not isinstance(batch, Mapping):
                    raise ContractError(
                        f"a batch is {type(batch).__name__}; items are counted by name: let the collate function "
                        "return a dict"
                    )
            self._run.windows.opened += 1
            window = AccumulationWindow(self, fetched)
            try:
                yield window
            finally:
                self._gradient.drop()
            window._check_run()
        run = self._run
        run.closing.read(run)
        if self.world_size > 1:
            # A rank that has more joins this with its next window, so that it learns of it instead of waiting for ever.
            AccumulationWindow(self, [])._open(None, None)
        for kind, words in run.router.remarks():
            run.warn_once(kind, words)
        say_empty(run, run)

    def _reducing(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Have the ranks reduce gradients in a backward, or not."""
        if self._run.accelerator is not None:
            return reducing(self._run.accelerator, model, last=last)
        return nullcontext() if last else getattr(model, "no_sync", nullcontext)()

    @contextmanager
    def _adding(self, model: nn.Module, micro_batches: int, begun: int) -> Iterator[None]:
        """What gradients are added in; after the first window say what 16 bits have lost, where that matters."""
        gradient, run, first = self._gradient, self._run, begun == 1
        adds_in = run.options.accumulate_in
        if first and micro_batches > 1 and (said := check_engine_adds(run.accelerator, adds_in)):
            run.tell_rounded(said)
        unknown = gradient.lost is None
        leaves = partial(narrow_leaves, run.accelerator, model)
        with gradient.micro_batch(leaves, first=first, last=begun == micro_batches):
            yield
        if unknown and gradient.matters and gradient.lost is not None:
            head = type(run.bare(model)).__name__
            run.tell_rounded(f"{head}: {rounding_words(gradient.lost, micro_batches)}")

    @property
    def _rounds(self) -> bool:
        return self._run.accelerator is not None and inputs_are_rounded(self._run.accelerator)


@partial(shows_options, of_loops=True)
def accumulation_windows(
    dataloader: Iterable[Batch],
    accelerator: Any = None,
    *,
    steps: int | None = None,
    **options: Any,
) -> AccumulationWindows:
    """The epochs of a dataloader as accumulation windows, exact for every cut into micro-batches and ranks.

    Make it once and iterate over it once an epoch: what was observed of the loss is kept.

    Args:
        dataloader: of dicts; prepared by accelerate, or with a sampler that gives every rank its own samples.
        accelerator: the live ``accelerate.Accelerator``, whose own division of the loss is taken into account; None:
            torch.distributed as it is initialised, or one process.
        steps: G; None: the accelerator's ``gradient_accumulation_steps``.
        options: of `Options`, by name: ``contract`` (also for a loss that is computed outside of the model),
            ``drop_duplicates`` (a micro-batch of nothing else is run and counts nothing), ``router_loss``,
            ``per_sample``, ``accumulate_in``.

    Raises:
        SeamError: if the accelerator lacks something that is used of it.
        OptionsError: if neither an accelerator nor steps are given, steps is no positive integer, or an option is
            invalid or has no meaning in a loop.
        UnsupportedSetupError: if the accelerator's ranks split samples (tensor, context or sequence parallelism), or
            repeated samples are to be dropped and cannot be told.
    """
    if steps is None and accelerator is None:
        raise OptionsError("got neither steps nor an accelerator; expected the micro-batches of a window; give steps=G")
    if accelerator is not None:
        require_accelerator(accelerator)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise OptionsError(f"got steps={steps!r}; expected the number of micro-batches of a window, at least 1")
    config = getattr(accelerator, "parallelism_config", None)
    split = {kind: getattr(config, f"{kind}_size", 1) or 1 for kind in ("tp", "cp", "sp")}
    if any(size > 1 for size in split.values()):
        raise UnsupportedSetupError(f"ranks split samples {split}; only data-parallel ranks are supported")
    return AccumulationWindows(dataloader, accelerator, steps, options_from(options, of_loops=True))
