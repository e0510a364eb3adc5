"""Exact accumulation in your own training loop: with accelerate, with DistributedDataParallel, or on one process.

    windows = accumulation_windows(dataloader, accelerator)     # without accelerate: steps=G
    for epoch in range(epochs):
        for window in windows:
            for batch in window:
                with window.micro_batch(model):
                    loss = window.loss(model, batch)            # or of your own: window.loss(loss_of, batch)
                    accelerator.backward(loss)                  # without accelerate: loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(window.mean_loss())

A window is fetched whole and counted over all ranks by one collective, before its first loss, and may be shorter at the
end of an epoch. How the model reduces its loss is observed in the first window, as under the Trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_accum_fix.confirmation import confirm_loop
from hf_accum_fix.counting.items import ZeroWeightBatch, count_dtype
from hf_accum_fix.coupled.coupled_loss import planned
from hf_accum_fix.data.duplicates import WithoutDuplicates, note_repeated
from hf_accum_fix.engines.engine import engine_divisor, reducing
from hf_accum_fix.engines.sample_shards import axis_size
from hf_accum_fix.errors import ContractError, OptionsError, SeamError, UnsupportedSetupError
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.options import options_from
from hf_accum_fix.trace.preserve import overridden
from hf_accum_fix.upstream.presence import require_accelerator
from hf_accum_fix.window.loop_host import Batch, LoopHost, LossOf
from hf_accum_fix.window.window import Window

__all__ = ["AccumulationWindow", "AccumulationWindows", "accumulation_windows"]


class AccumulationWindow:
    """The micro-batches of one optimizer step on this rank; made by iterating over `AccumulationWindows`.

    Attributes:
        batches: the micro-batches.
    """

    def __init__(self, host: LoopHost, batches: list[Batch]) -> None:
        self.batches, self._host, self._begun = batches, host, 0
        self._model: nn.Module | None = None
        self._window: Window | None = None
        self._in_engine = False

    def __len__(self) -> int:
        """G, the micro-batches of this window."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches, in order."""
        return iter(self.batches)

    @contextmanager
    def micro_batch(self, model: nn.Module) -> Iterator[None]:
        """Around one forward and its backward: ranks reduce gradients only in the last micro-batch of the window.

        Args:
            model: as it is trained, prepared by accelerate or wrapped in DistributedDataParallel.

        Raises:
            SeamError: if it is entered more often than the window has micro-batches, its loss runs backward without the
                accelerator, which divides it, or ``accelerator.accumulate`` is entered inside.
        """
        host, self._begun, self._model = self._host, self._begun + 1, model
        if self._begun > len(self):
            raise SeamError(
                f"got micro_batch() {self._begun} times in a window of {len(self)} micro-batches; "
                "expected once for each; enter it around one forward and backward"
            )
        last = self._begun == len(self)
        with (
            self._engine_noted(),
            reducing(host.accelerator, model, last=last),
            host.delivery.micro_batch(host, model, len(self), self._begun),
        ):
            yield
            if host.accelerator is not None and host.accelerator.sync_gradients != last:
                raise SeamError(
                    "got accelerator.accumulate() inside micro_batch(); expected micro_batch() alone, since both "
                    "choose where ranks reduce and the optimizer steps; remove accumulate()"
                )
        if self._window is not None:
            self._window.done = self._begun
            if last:
                self._window.close(model)

    def loss(self, loss_of: nn.Module | LossOf, batch: Batch) -> Tensor:
        """The loss of one micro-batch, for ``backward``.

        Args:
            loss_of: the model, called with the batch as keywords, and with ``num_items_in_batch`` if it takes it; or a
                function of the model and the batch, for any other loss. It gets the model of `micro_batch`, and
                returns a loss, or outputs with one.
            batch: one of the window's, on the model's device.

        Returns:
            0-dim, with gradient; for the log use `mean_loss`.

        Raises:
            ContractError: if no loss was returned, or its reduction could not be settled.
            RankError: if the ranks' dataloaders ended at different times, or another rank failed.
            SeamError: if a function is given outside of `micro_batch`.
        """
        model = loss_of if isinstance(loss_of, nn.Module) else self._model
        if model is None:
            raise SeamError(
                "got loss() of a function outside micro_batch(); expected it inside, where its model is known; enter "
                "micro_batch(model) first"
            )
        host, window = self._host, self._counted(model, loss_of)
        part, batch = window.part, self._as_its_own(batch)
        contract = part.contract
        inputs = batch if host.coupled is None else host.coupled.inputs(batch)
        with host.around_forward(max(self._begun - 1, 0)):
            if contract.terms:
                with host.capturing(contract, model) as captured:
                    loss, _ = host.forward(model, inputs, part.number if contract.hands_number else None)
                weigh = partial(window.weigh, loss, batch, captured, batch)
                weighed = host.contained("weighting the loss of a micro-batch", weigh, None) or window.average(loss)
            else:
                loss, _ = window.run_by_rule(inputs, window.items_of(batch), partial(host.forward, model))
                weighed = window.average(loss)
        if host.contract is not None and host.state.loss.is_settled and not host.state.recorded:
            host.contained("reporting a loss", partial(host.announce, host.contract), None)
        window.add(weighed.value)
        if host.accelerator is not None and weighed.loss.requires_grad:
            weighed.loss.register_hook(self._refuse_bare_backward)  # type: ignore[no-untyped-call]
        return weighed.loss

    def mean_loss(self) -> Tensor:
        """The loss of the global batch: the mean over the items of all its micro-batches and ranks.

        A collective: call it on every rank.

        Returns:
            0-dim, without gradient, on the device; reading it waits for the device.

        Raises:
            SeamError: if a micro-batch of this window was not run, or no loss has been computed.
        """
        if self._window is None or self._window.value is None or self._begun < len(self):
            got = f"got mean_loss() after {self._begun} of {len(self)} micro-batches"
            raise SeamError(f"{got}; expected all of them; call it after the last")
        loss = self._window.value
        return self._host.summed(loss.to(count_dtype(loss.device))) / self._host.world.size

    def _engine_noted(self) -> AbstractContextManager[None]:
        """Around a micro-batch: note while ``accelerator.backward`` runs."""
        accelerator: Any = self._host.accelerator
        if accelerator is None:
            return nullcontext()
        original = accelerator.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with overridden(self, "_in_engine", True):
                return original(*args, **kwargs)

        return overridden(accelerator, "backward", backward)

    def _refuse_bare_backward(self, _: Tensor) -> None:
        """A hook on a returned loss: its backward is the accelerator's, where that divides it."""
        divisor = engine_divisor(self._host.accelerator)
        if not self._in_engine and divisor != 1:
            raise SeamError(
                f"got loss.backward() on a loss that accelerator.backward(loss) divides by {divisor}; expected the "
                "latter; call it, or pass steps=G and no accelerator"
            )

    def _counted(self, model: nn.Module, loss_of: nn.Module | LossOf) -> Window:
        """The window, counted over all ranks at its first use."""
        host, before = self._host, (self._host.trained, self._host.loss_of is None)
        host.trained, host.loss_of = model, None if isinstance(loss_of, nn.Module) else loss_of
        if self._window is None:
            self._window = host.open(self.batches, next(iter(model.parameters())).device)
        elif before[0] is not None and (host.bare(before[0]), before[1]) != (host.bare(model), host.loss_of is None):
            host.report_inexact("its losses are of two models; give each model accumulation_windows of its own")
        return self._window

    def _as_its_own(self, batch: Batch) -> Batch:
        """The micro-batch to run; a copy of one without weight, perhaps on another device, has none either."""
        is_empty = self._begun > 0 and isinstance(self.batches[self._begun - 1], ZeroWeightBatch)
        return ZeroWeightBatch(batch) if is_empty and all(batch is not each for each in self.batches) else batch


class AccumulationWindows:
    """A dataloader's epochs as accumulation windows; made by `accumulation_windows`."""

    def __init__(self, dataloader: Iterable[Batch], host: LoopHost) -> None:
        self._dataloader, self._host = dataloader, host
        if host.world.size > 1 and isinstance(dataloader, DataLoaderStateMixin):
            self._dataloader = WithoutDuplicates(dataloader, host.options.drop_duplicates, partial(note_repeated, host))
            self._dataloader.check()

    @property
    def contract(self) -> LossContract | None:
        """How the loss is reduced: as given, or observed from the first window on."""
        return self._host.options.contract or self._host.contract

    @property
    def steps(self) -> int:
        """G, micro-batches of a full window."""
        return self._host.steps

    def __len__(self) -> int:
        """Windows, and so optimizer steps, of an epoch.

        Raises:
            TypeError: if the dataloader has no length.
        """
        return -(-len(self._dataloader) // self.steps)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[AccumulationWindow]:
        """One epoch.

        Raises:
            ContractError: if a batch is no mapping.
            SeamError: if a micro-batch was not run.
            RankError: if the ranks' dataloaders end at different times.
        """
        host, batches = self._host, iter(self._dataloader)
        while fetched := list(islice(batches, self.steps)):
            for batch in fetched:
                if not isinstance(batch, Mapping):
                    raise ContractError(
                        f"got a batch of type {type(batch).__name__}; expected a dict, since items are counted by "
                        "name; return one from the collate function"
                    )
            host.state.opened += 1
            window = AccumulationWindow(host, fetched)
            try:
                # torch calls this before every optimizer step.
                with register_optimizer_step_pre_hook(partial(host.delivery.ask, host.delivery.steps.stepped, host)):
                    yield window
            finally:
                host.delivery.gradient.drop()
            if window._begun < len(window):
                raise SeamError(
                    f"got {window._begun} of the {len(window)} micro-batches of a window inside micro_batch(); "
                    "expected all, since the ranks reduce their gradients in the last; do not break out of a window"
                )
        host.contained("reading what windows have shown", host.read, None)
        host.trained = None
        if host.world.size > 1:
            # A rank with more windows joins this with its next one, and gets an error instead of waiting for ever.
            host.open([])


def accumulation_windows(
    dataloader: Iterable[Batch], accelerator: Any = None, *, steps: int | None = None, **options: Any
) -> AccumulationWindows:
    """The epochs of a dataloader as accumulation windows, exact for every split into micro-batches and ranks.

    Create it once and iterate over it once per epoch: the observed contract is kept.

    Args:
        dataloader: of dicts; prepared by accelerate, or with a sampler that gives every rank its own samples.
        accelerator: the ``accelerate.Accelerator``, whose division of the loss is accounted for; None:
            torch.distributed if it is initialised, else one process.
        steps: G; None: the accelerator's ``gradient_accumulation_steps``.
        options: of `Options`, by name: ``contract``, ``drop_duplicates`` (a micro-batch of repeated samples alone is
            run and counts nothing), ``router_loss``, ``coupled_loss``, ``coupled``, ``accumulate_in``.

    Raises:
        SeamError: if the accelerator lacks an attribute that is used.
        OptionsError: if neither an accelerator nor steps are given, steps is no positive integer, or an option is
            invalid or has no meaning in a loop.
        UnsupportedSetupError: if the accelerator's ranks share tensors or samples, or
            repeated samples are to be dropped and cannot be recognised.
    """
    if steps is None and accelerator is None:
        raise OptionsError("got neither steps nor an accelerator; expected the micro-batches of a window; pass steps=G")
    if accelerator is not None:
        require_accelerator(accelerator)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise OptionsError(f"got steps={steps!r}; expected the number of micro-batches of a window, at least 1")
    for axis in ("tp", "cp", "sp"):
        if (size := axis_size(accelerator, axis)) > 1:
            raise UnsupportedSetupError(
                f"got {axis}_size={size} in a loop; expected data-parallel ranks; remove {axis}_size, or train by a "
                "Trainer"
            )
    coupled, given = planned(options_from(options, of_loops=True))
    host = LoopHost(accelerator, steps, given)
    host.coupled = coupled
    windows = AccumulationWindows(dataloader, host)
    confirm_loop(f"torch {torch.__version__}" + f", accelerate {accelerate.__version__}" * (accelerator is not None))
    return windows
