"""The promise for a training loop written by hand, with accelerate, with DistributedDataParallel, or on one process.

    windows = accumulation_windows(dataloader, accelerator)     # without accelerate: steps=G
    for epoch in range(epochs):
        for window in windows:
            for batch in window:
                with window.micro_batch(model):
                    loss = window.loss(model, batch)            # a loss of your own: window.scale(loss, batch)
                    accelerator.backward(loss)                  # without accelerate: loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(window.mean_loss())

A window is fetched whole and counted over all ranks by one collective, before its first loss; the short one at the end
of an epoch is a window like any other. How the model reduces its loss is observed in the first window, as under the
Trainer. Nothing waits for the device until a number is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import DistributedType
from torch import Tensor, nn

from hf_accum_fix import observations
from hf_accum_fix.accumulation.agreement import agree
from hf_accum_fix.accumulation.certificate import Certificate
from hf_accum_fix.accumulation.closing import Closing, scale_gradients
from hf_accum_fix.accumulation.contract import NO_TARGET_SEEN, SEVERAL_FIT, LossContract, Reduction
from hf_accum_fix.accumulation.declared import (
    inside_ddp,
    is_compiled,
    products_are_rounded,
    router_coefficients,
    wants_number,
)
from hf_accum_fix.accumulation.micro_batch import run_micro_batch
from hf_accum_fix.accumulation.observe import observe
from hf_accum_fix.accumulation.per_sample import by_sample
from hf_accum_fix.accumulation.precision import WindowGradient, rounding_words
from hf_accum_fix.accumulation.second_look import ATTEMPTS, as_before, is_due, look, several_fit, trained_wrongly
from hf_accum_fix.accumulation.share import Cut, loss_among, share_of
from hf_accum_fix.accumulation.window import Items, Weightless, count_by_rules, count_dtype
from hf_accum_fix.data.duplicates import WithoutDuplicates
from hf_accum_fix.engines import ranks
from hf_accum_fix.engines.engine import (
    check_engine_adds,
    engine_divisor,
    inputs_are_rounded,
    narrow_leaves,
    reduced_in,
    reducing,
    waits_every_micro_batch,
)
from hf_accum_fix.engines.own_counts import own_counts
from hf_accum_fix.errors import ContractError, OptionsError, SeamError, UnevenRanksError, UnsupportedSetupError
from hf_accum_fix.observations import Windows
from hf_accum_fix.options import Options, options_from, shows_options
from hf_accum_fix.router.router_loss import Convention, Form, RouterLoss, one_form
from hf_accum_fix.upstream.presence import require_accelerator
from hf_accum_fix.upstream.protocols import AcceleratorLike

logger = logging.getLogger("hf_accum_fix")

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
        self._cut: Cut | None = None
        self._certificate: Certificate | None = None
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
        if last and self._certificate is not None:
            self._end(model, self._certificate)

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
        contract = self._open(model, next(iter(model.parameters())).device)
        assert self._cut is not None

        def run(inputs: Batch, number: Tensor | None) -> tuple[Tensor, Any]:
            outputs = self._windows._run(model, inputs, number)
            return loss_among(outputs, batch, model), outputs

        batch, counts = self._counted(contract, batch)
        with self._windows._router.micro_batch(max(self._begun - 1, 0)):
            ran = run_micro_batch(
                contract, batch, counts, self._cut, run, self._certificate, rounded=self._windows._rounds()
            )
        if ran.items is not None and self._certificate is not None and contract.items is not None:
            self._certificate.note_items(ran.items, counts[contract.items])
        return self._add(ran.loss)

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
        contract = self._open(None, loss.device)
        assert self._cut is not None
        batch, counts = self._counted(contract, batch)
        items = counts.get(contract.items) if contract.items is not None else None
        share = share_of(contract, batch, items, self._cut, own_loss=True, rounded=self._windows._rounds())
        return self._add(share.of(loss))

    @property
    def mean_items(self) -> Tensor:
        """The mean item count per micro-batch, N / (G * W), 0-dim: what to divide a summed loss by.

        Raises:
            ContractError: if the window has not been counted: no loss of it was asked for, and no contract given.
        """
        if self._cut is None:
            self._open(None, None)
        assert self._cut is not None
        return self._cut.mean

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
        return self._windows._summed(loss) / self._windows.world_size

    def _open(self, model: nn.Module | None, beside: torch.device | None) -> LossContract:
        """Count the window over all ranks, beside a loss or a model, where that has not been done."""
        windows = self._windows
        if self._cut is not None and windows.contract is not None:
            return windows.contract
        runs_ahead = windows._observes(self) or windows._router.runs_forwards
        if windows._in_step and runs_ahead and len(set(windows._gathered(len(self)))) > 1:
            raise windows._uneven()
        contract = windows._settle(self, model)
        device = windows._device_beside(beside)
        totals = [torch.zeros((), dtype=count_dtype(device), device=device)]
        if contract.rules:
            self._counts, totals = count_by_rules(
                contract.rules, self.batches, device, several_ranks=windows.world_size > 1
            )
        runs = len(self) if windows._in_step else min(len(self), 1)
        marks = [torch.full_like(totals[0], each) for each in (runs, runs * runs)]
        numbers = torch.stack([totals[0], *marks, *totals[1:]])
        routing = windows._count_routing(self.batches, model, contract, device)
        sums = windows._summed(torch.cat([numbers, routing]))
        # Read where that waits for no device, and by the rank that would else be waited for.
        told = windows.world_size > 1 and (device.type == "cpu" or runs < (windows.steps if windows._in_step else 1))
        # By Cauchy and Schwarz, equality holds where all are alike.
        if told and float(sums[1]) ** 2 != windows.world_size * float(sums[2]):
            raise windows._uneven()
        terms, routing = sums[3 : 2 + len(totals)], sums[2 + len(totals) :]
        self._cut = cut = Cut.of(contract, sums[0], len(self.batches), windows.world_size, [*terms])
        windows._router.settle(routing, cut.micro_batches, cut.world_size)
        if self.batches and windows._listens(contract):
            self._certificate = Certificate(contract)
        if contract.items is not None and self.batches:
            windows._note_empty(sums[0] == 0)
        return contract

    def _counted(self, contract: LossContract, batch: Batch) -> tuple[Batch, dict[Items, Tensor]]:
        """A micro-batch as it is to be run, and its items by every rule."""
        assert self._cut is not None
        counted = zip(self.batches, self._counts, strict=False)
        # None: it was put on another device, or made anew; then it is counted again.
        counts = next((each for fetched, each in counted if fetched is batch), None)
        if counts is None and self._begun and isinstance(self.batches[self._begun - 1], Weightless):
            batch = Weightless(batch)
        if counts is None:
            counts = count_by_rules(contract.rules, [batch], self._cut.mean.device)[0][0]
        return batch, counts

    def _end(self, model: nn.Module, certificate: Certificate) -> None:
        """Correct the gradient of a window whose loss calls counted otherwise than its rule; say what changed."""
        times = self._windows._closing.end(_Loop(self._windows), certificate)
        if times is not None:
            scale_gradients(model, times)
            self._loss = None if self._loss is None else self._loss * times

    def _add(self, share: Tensor) -> Tensor:
        part = share.detach() / len(self.batches)
        self._loss = part if self._loss is None else self._loss + part
        # Never the model's output itself: DeepSpeed hangs hooks on that, which divide once more (stage 0).
        return share * (self._windows._divisor() / len(self.batches))

    def _check_run(self) -> None:
        if self._begun < len(self.batches):
            raise SeamError(
                f"{self._begun} of the {len(self.batches)} micro-batches of a window were run inside micro_batch(); "
                "expected all of them, since the ranks reduce their gradients in the last; do not break out of a window"
            )


@dataclass(frozen=True)
class _Loop:
    """A hand-written loop, as `closing.Run` asks for it."""

    windows: AccumulationWindows

    @property
    def device(self) -> torch.device:
        return self.windows._device_beside(None)

    @property
    def readable(self) -> bool:
        # A loop reads no number of a window unless it is asked to.
        return False

    @property
    def several(self) -> bool:
        return self.windows.world_size > 1

    @property
    def steps_in_backward(self) -> bool:
        accelerator = self.windows._accelerator
        return accelerator is not None and accelerator.distributed_type == DistributedType.DEEPSPEED

    def summed(self, numbers: Tensor) -> Tensor:
        return self.windows._summed(numbers)

    def tell(self, why: str, windows: int = 1) -> None:
        self.windows._tell_inexact(why, windows)


class AccumulationWindows:
    """A dataloader's epochs as accumulation windows; made by `accumulation_windows`.

    Attributes:
        contract: how the loss is reduced, as given or, from the first window on, as observed.
        world_size: W, data-parallel ranks.
    """

    def __init__(
        self,
        dataloader: Iterable[Batch],
        accelerator: AcceleratorLike | None,
        steps: int | None,
        options: Options,
    ) -> None:
        """Made by `accumulation_windows` alone."""
        self.contract = options.contract
        self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._dataloader = dataloader
        self._options = options
        self._gradient = WindowGradient(options.accumulate_in)
        self._accelerator = accelerator
        self._router = RouterLoss(Convention(options.router_loss))
        self._steps = steps
        self._given = options.contract is not None
        self._attempts = 0
        self._passes_number = False
        self._device: torch.device | None = None if accelerator is None else accelerator.device
        self._empty: Tensor | None = None
        self._closing = Closing()
        self._counted = Windows()
        self._said: set[str] = set()
        self._repeated: dict[str, Any] = {}
        if self.world_size > 1 and isinstance(dataloader, DataLoaderStateMixin):
            self._dataloader = WithoutDuplicates(dataloader, options.drop_duplicates, self._tell_repeated)
            self._dataloader.check()

    @property
    def steps(self) -> int:
        """G, micro-batches of a window that is not the short one at the end of an epoch."""
        if self._steps is not None:
            return self._steps
        assert self._accelerator is not None
        return int(self._accelerator.gradient_accumulation_steps)

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
            self._counted.opened += 1
            window = AccumulationWindow(self, fetched)
            try:
                yield window
            finally:
                self._gradient.drop()
            window._check_run()
        self._closing.read(_Loop(self))
        if self.world_size > 1:
            # A rank that has more joins this with its next window, so that it learns of it instead of waiting for ever.
            self._counted.opened += 1
            AccumulationWindow(self, [])._open(None, None)
        for kind, words in self._router.remarks():
            self._warn_once(kind, words)
        if self._empty is not None and int(self._empty):
            self._warn_once(
                "empty",
                "a whole accumulation window had no target: its gradient and its loss are zero; look at truncation, "
                "label masking, or samples without an answer",
            )

    def _settle(self, window: AccumulationWindow, model: nn.Module | None) -> LossContract:
        """The contract as it is now; observed where it has not been, on every rank alike."""
        known = self.contract
        if self._given:
            assert known is not None
            if model is not None:
                self._passes_number = known.by_number
                if known.by_number and not wants_number(self._bare(model)):
                    raise ContractError(
                        f"the contract given says that the loss {known.reduction.words}, but {self._name(model)} "
                        "does not take num_items_in_batch; give Reduction.MEAN"
                    )
            return known
        if known is not None and not self._observes(window):
            return known
        settled = self._settled
        if model is None and window.batches:
            raise ContractError(
                "got a loss of your own, which cannot be observed; expected how it is reduced and what it counts; give "
                "accumulation_windows(..., contract=LossContract(Reduction.MEAN, Items(('labels',), shift=True)))"
            )
        seen, trouble = look(
            lambda again: self._seen(model, window, again=again),
            lambda mine, trouble: any(self._agreed(mine, trouble)),
            window.batches,
            matters=self.steps * self.world_size > 1,
        )
        gathered = self._agreed(seen, trouble)
        observed = [each for each in gathered if each is not None]
        if observed and len(observed) < len(gathered):
            raise self._uneven()
        if not observed and known is not None:
            return known
        found = by_sample(agree(observed)) if self._options.per_sample else agree(observed)
        if known is not None and settled:
            return self._narrowed(known, found, window)
        self.contract = found
        if trained_wrongly(known, found):
            alike = known is None or found.reason == SEVERAL_FIT
            self._tell_inexact(found.reason if alike else f"the loss {found}; it was observed as: {known}")
        # On one rank a gradient is corrected unread, in every window; several need one more collective for it.
        self._closing.corrects = found.made_of is not None and (self.world_size == 1 or not found.made_of.counted)
        self._attempts += found.reason != NO_TARGET_SEEN
        if model is not None and (found.conclusive or self._attempts >= ATTEMPTS):
            self._say(model, len(window), found)
        return found

    def _observes(self, window: AccumulationWindow) -> bool:
        """Whether the loss is observed in this window."""
        if self._given:
            return False
        if self.contract is None or not self._settled:
            return True
        return is_due(self.contract, self._counted.opened, window.batches, alone=self.world_size == 1)

    def _seen(
        self, model: nn.Module | None, window: AccumulationWindow, *, again: int
    ) -> tuple[LossContract | None, Exception | None]:
        """What this rank sees of the loss; None: it has no model, or the trouble that it met."""
        try:
            return None if model is None else self._observe(model, window.batches, again=again), None
        except Exception as error:
            return None, error

    def _agreed(self, value: Any, trouble: Exception | None) -> list[Any]:
        """A value of every rank; the trouble of one is raised as soon as all know."""
        return ranks.agreed_by(
            lambda said: self._gathered(said[0]), value, trouble, rank=self._rank, world_size=self.world_size
        )

    def _narrowed(self, known: LossContract, found: LossContract, window: AccumulationWindow) -> LossContract:
        """The contract after a later window was observed too: as it was, narrowed down, or with a warning another."""
        narrowed = as_before(known, found)
        self.contract = narrowed or found
        if narrowed is None:
            self._tell_inexact(f"the loss {found}; it was observed as: {known}")
        elif several_fit(narrowed, window.batches):
            self._tell_inexact(SEVERAL_FIT)
        return self.contract

    def _observe(self, model: nn.Module, batches: list[Batch], *, again: int) -> LossContract:
        module = inside_ddp(model) or model
        # An engine that keeps its parameters on the CPU runs them elsewhere.
        device = self._device_beside(next(iter(model.parameters())).device)
        self._passes_number = wants_number(self._bare(model))

        def call(inputs: Batch, number: Tensor | None) -> tuple[Tensor, Any]:
            inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
            outputs = self._run(module, inputs, number)
            return loss_among(outputs, inputs, model), outputs

        found = observe(
            call,
            batches,
            module,
            device=device,
            passes_number=self._passes_number,
            router_coefficients=router_coefficients(self._bare(model)),
            world_size=self.world_size,
            low_precision=products_are_rounded(module) or getattr(self._accelerator, "mixed_precision", "no") != "no",
            again=again,
        )
        return found.without_calls() if is_compiled(module) else found

    def _count_routing(
        self, batches: list[Batch], model: nn.Module | None, contract: LossContract, device: torch.device
    ) -> Tensor:
        """This rank's numbers of the window, to be summed over ranks; none where the router's loss stays a mean."""
        router = self._router
        if router.convention is Convention.MEAN:
            return router.nothing(device)
        if model is None and batches:
            raise ContractError(
                f"router_loss={router.convention.value!r} needs the model's own loss, window.loss(model, batch); of a "
                "loss of your own only the mean over micro-batches is taken"
            )

        def forward(inputs: Batch) -> Tensor:
            assert model is not None
            inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
            number = contract.as_number(torch.ones((), dtype=count_dtype(device), device=device))
            return loss_among(self._run(inside_ddp(model) or model, inputs, number), inputs, model)

        if router.form is None or not router.form.settled:
            seen = Form(settled=False)
            if model is not None:
                seen = router.recognise_among(forward, batches, contract.items, model, device)
            router.form = one_form(self._gathered(seen))
            if model is not None and (why := router.why_mean(contract.has_router_loss)):
                self._warn_once("router", f"{self._name(model)}: {why}")
        if model is None:
            return router.nothing(device)
        return router.count(forward, batches, model, device, self.world_size)

    def _gathered(self, value: Any) -> list[Any]:
        gathered = [value]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            dist.all_gather_object(gathered, value)
        return gathered

    def _run(self, model: nn.Module, inputs: Batch, number: Tensor | None) -> Any:
        """The outputs of a forward, which is handed the number where it takes one."""
        handed = {"num_items_in_batch": number} if self._passes_number and number is not None else {}
        with own_counts(inputs):
            return model(**{**inputs, **handed})

    def _say(self, model: nn.Module, steps: int, contract: LossContract) -> None:
        """Once: what was observed, in the log and for report()."""
        head = self._name(model)
        observations.record(
            {
                "head": head,
                "trainer": "accumulation_windows",
                **contract.facts(),
                "exact": contract.exact and not self._counted.inexact,
                "inexact_windows": self._counted.inexact,
                "accumulation_steps": steps,
                "world_size": self.world_size,
                "reduced_in": reduced_in(self._accelerator, model) if self.world_size > 1 else [],
                "stock_gradient_factor": None,
                **self._repeated,
            }
        )
        self._counted.recorded = True
        logger.info("%s: the loss %s; G=%d, W=%d.", head, contract, steps, self.world_size)
        if contract.reduction is Reduction.PLAIN:
            self._warn_once("inexact", f"{head}: {contract.reason}. It gets the plain mean over micro-batches.")
        elif contract.beside:
            self._warn_once("inexact", f"{head}: {contract.reason}, so that it is not called exact.")
        elif not contract.conclusive:
            self._warn_once("inexact", f"{head}: the loss {contract}, as far as {ATTEMPTS} windows tell.")
        if contract.reduction is Reduction.SUM:
            self._warn_once("sum", f"{head}: the loss is a sum over the global batch, and grows with it.")

    def _tell_inexact(self, why: str, windows: int = 1) -> None:
        self._counted.note_inexact(windows=windows)
        if self.steps * self.world_size > 1:
            self._warn_once(
                "certificate",
                f"window {self._counted.opened} is not exact: {why}. Every window is checked; report() has how many "
                "were not.",
            )

    def _tell_repeated(self, samples: int) -> None:
        if self._repeated:
            return
        self._repeated = {"repeated_samples": samples, "repeated_samples_dropped": self._options.drop_duplicates}
        if self._counted.recorded:
            observations.amend(self._repeated)
        if not self._options.drop_duplicates:
            words = f"repeat {samples} samples, so that every rank has as many, and count them twice"
            self._warn_once("repeated", f"an epoch's last micro-batches {words}; drop_duplicates=True leaves them out")

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(message)

    def _reducing(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Have the ranks reduce gradients in a backward, or not."""
        if self._accelerator is not None:
            return reducing(self._accelerator, model, last=last)
        return nullcontext() if last else getattr(model, "no_sync", nullcontext)()

    @contextmanager
    def _adding(self, model: nn.Module, micro_batches: int, begun: int) -> Iterator[None]:
        """What gradients are added in; after the first window say what 16 bits have lost, where that matters."""
        gradient, first = self._gradient, begun == 1
        if first and micro_batches > 1 and (said := check_engine_adds(self._accelerator, self._options.accumulate_in)):
            self._tell_rounded(said)
        unknown = gradient.lost is None
        leaves = partial(narrow_leaves, self._accelerator, model)
        with gradient.micro_batch(leaves, first=first, last=begun == micro_batches):
            yield
        if unknown and gradient.matters and gradient.lost is not None:
            self._tell_rounded(f"{self._name(model)}: {rounding_words(gradient.lost, micro_batches)}")

    def _tell_rounded(self, words: str) -> None:
        if "16 bits" not in self._said:
            self._counted.note_inexact()
        self._warn_once("16 bits", words)

    def _divisor(self) -> int:
        return 1 if self._accelerator is None else engine_divisor(self._accelerator, {})

    def _rounds(self) -> bool:
        return self._accelerator is not None and inputs_are_rounded(self._accelerator)

    def _summed(self, value: Tensor) -> Tensor:
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def _device_beside(self, beside: torch.device | None) -> torch.device:
        """Where counts are put: accelerate's device, or where the first loss or model was."""
        if self._device is None and beside is None:
            on_gpu = self.world_size > 1 and dist.get_backend() == "nccl"
            return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._device = self._device or beside
        assert self._device is not None
        return self._device

    @property
    def _in_step(self) -> bool:
        """Whether a rank with fewer micro-batches than the others would be waited for in the middle of a window."""
        return self.world_size > 1 and self._accelerator is not None and waits_every_micro_batch(self._accelerator)

    @property
    def _settled(self) -> bool:
        known = self.contract
        return self._given or (known is not None and (known.conclusive or self._attempts >= ATTEMPTS))

    def _listens(self, contract: LossContract) -> bool:
        """Whether loss calls are listened to: where no rule counts what they do, else in windows 4, 8, 16 and so on."""
        if contract.made_of is None:
            return False
        sampled = self._counted.opened >= 4 and self._counted.opened & (self._counted.opened - 1) == 0
        return sampled or contract.made_of.has_terms or not contract.made_of.counted

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _uneven(self) -> UnevenRanksError:
        found, needed = "some ranks have a micro-batch in this window and others have none", "every rank needs one"
        if self._in_step:
            found = "the ranks do not have the same number of micro-batches in this window"
            needed = "under FSDP and ZeRO-2 and -3, which meet in each, every rank needs as many"
        return UnevenRanksError(
            f"rank {self._rank}: {found}; {needed}: let accelerate even the batches out (even_batches=True), or drop "
            "the rest"
        )

    def _bare(self, model: nn.Module) -> nn.Module:
        """The model inside of what an engine has put around it."""
        model = model if self._accelerator is None else self._accelerator.unwrap_model(model)
        return inside_ddp(model) or model

    def _name(self, model: nn.Module) -> str:
        return type(self._bare(model)).__name__

    def _note_empty(self, empty: Tensor) -> None:
        self._empty = empty.long() if self._empty is None else self._empty + empty


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
