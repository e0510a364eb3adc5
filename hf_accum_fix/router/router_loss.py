"""The load-balancing loss of a mixture of experts over the whole global batch, for every split.

Once F, the shares of the experts, is known, A (see `load_balancing`) is linear in q. So every micro-batch of every
rank gets the same F and the same denominator,

    aux(m) = E sum_i F_i q_i(m) / T_mean,    T_mean = T / (G W),

whose plain mean over micro-batches and ranks is A, in value and in gradient: the identity of `items` again. T is known
before the first forward, F is not: a router depends on the layers below it. So `EXACT` runs the window once without
gradient; `MEAN` leaves the library's own function alone.

In a hand-written loop, ``forward(inputs)`` is the loss of a micro-batch, by the model inside DistributedDataParallel
where nothing is trained:

    router = RouterLoss(Convention("exact"))
    for window in windows:                                           # lists of micro-batches
        if router.form is None:                                      # once; the same on every rank
            router.form = router.recognise(forward, window[0], model)
        numbers = router.count(forward, window, model, device, world_size)
        total = accelerator.reduce(numbers, "sum")                   # or with the item count, in one collective
        router.settle(total, len(window), world_size)
        for index, inputs in enumerate(window):
            with router.micro_batch(index):
                loss = forward(inputs)
            accelerator.backward(loss)                               # divided by G here, by W in the engine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hf_accum_fix.counting.items import Items, ZeroWeightBatch, count_dtype
from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.router.load_balancing import FUNCTION, Call, Swap, Tally
from hf_accum_fix.trace.preserve import random_states, with_buffers

#: Far above the loss itself, so that a small coefficient shows in a loss of few digits.
_SHIFT: Final = 1000.0
_NO_WEIGHT: Final = 1e-9

#: (inputs) -> loss, 0-dim: one forward as training makes it.
Forward = Callable[[Any], Tensor]


class Convention(str, Enum):
    """Which load-balancing loss a global batch has."""

    MEAN = "mean"
    EXACT = "exact"

    def __str__(self) -> str:
        return "of the whole global batch" if self is Convention.EXACT else "the mean over micro-batches and ranks"


def router_loss(outputs: Any, name: str) -> Tensor | None:
    """The router loss in a model's outputs, of encoder and decoder together; None: none.

    ``name`` is "aux_loss" (load balancing) or "z_loss", as in the library's output classes.
    """
    parts = outputs.items() if isinstance(outputs, Mapping) else ()
    tensors = [part for key, part in parts if f"_{key}".endswith(f"_{name}") and isinstance(part, Tensor)]
    return sum((part.to(tensors[0]) for part in tensors[1:]), start=tensors[0]) if tensors else None


def weighted_router_loss(contract: LossContract, outputs: Any) -> Tensor | None:
    """The router losses in a loss, times their coefficients, 0-dim; None: the loss has none.

    Raises:
        ContractError: if the outputs lack a router loss that is in the contract.
    """
    named = {"aux_loss": contract.router_coefficient, "z_loss": contract.router_z_coefficient}
    terms = [(name, factor, router_loss(outputs, name)) for name, factor in named.items() if factor]
    for name, factor, term in terms:
        if term is None:
            found = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ContractError(
                f"got outputs with {found}; expected {name}, since the contract has {factor:g} x {name} in the "
                "loss; return the router loss from the model"
            )
    weighed = [factor * term for _, factor, term in terms if term is not None]
    return sum(weighed[1:], start=weighed[0]) if weighed else None


# --- recognising the loss --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """One call of the loss in a forward: one where all routers are pooled, two for an encoder and a decoder.

    Attributes:
        experts: E.
        given: what the function gets of each router, "logits" or "probabilities".
    """

    experts: int
    given: str


@dataclass(frozen=True)
class Form:
    """A model's load-balancing loss, as recognised.

    Attributes:
        pools: its calls in one forward; empty: none.
        weight: its coefficient in the trained loss, as measured.
        refusal: why it is no load-balancing loss of this form; empty: it is one.
        settled: False: unknown yet, since the loss was not finite.
    """

    pools: tuple[Pool, ...] = ()
    weight: float = 0.0
    refusal: str = ""
    settled: bool = True

    @property
    def recognised(self) -> bool:
        """Whether the loss is of this form and is part of what is trained."""
        return bool(self.pools) and not self.refusal and self.weight != 0.0


def one_form(seen: Sequence[Form]) -> Form:
    """One form for all ranks, from what each has recognised: if one refuses, all do."""
    settled = [form for form in seen if form.settled]
    refused = [form for form in settled if form.refusal]
    return (refused or settled or list(seen))[0]


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Run forwards without gradient, then restore random states and buffers."""
    with with_buffers(random_states(), model), torch.no_grad():
        yield


# --- one model's loss, window by window --------------------------------------------------------------------------


class RouterLoss:
    """The load-balancing loss of one model under a convention.

    Attributes:
        convention: the one requested.
        form: what was recognised of the model's own loss; None before the first window.
        shares: F [E] of each pool in the last window settled; empty without one.
        moved: largest share of a micro-batch's routing that differed in the second pass, 0-dim; None: not compared.
    """

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        self.form: Form | None = None
        self.shares: list[Tensor] = []
        self.moved: Tensor | None = None
        self._counts: list[bool] = []
        self._first_pass: list[list[Tally]] = []
        self._mean_tokens: list[Tensor] = []
        self._called = 0
        self._failed: Exception | None = None
        self._swap = Swap()

    @property
    def in_force(self) -> Convention:
        """The convention that trains: `MEAN` if the model's loss was not recognised."""
        return self.convention if self.form is not None and self.form.recognised else Convention.MEAN

    @property
    def runs_forwards(self) -> bool:
        """Whether the next window is first run without gradient: to recognise the loss, or to count."""
        if self.convention is Convention.MEAN:
            return False
        return self.form is None or not self.form.settled or self.in_force is Convention.EXACT

    def why_mean(self, has_router_loss: bool) -> str:
        """Why the loss stays a mean though another convention was requested; empty: it does not.

        ``has_router_loss``: the model's outputs have a router loss that is part of the trained loss.
        """
        form = self.form
        if form is None or not form.settled or form.recognised or not (form.refusal or has_router_loss):
            return ""
        reason = form.refusal or "its outputs carry a router loss that no load-balancing function of its file made"
        return (
            f"its router loss stays {Convention.MEAN}, as configured, though {self.convention.value!r} was requested: "
            f"{reason}"
        )

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Warnings from the windows so far, each with a name; waits for the device."""
        if self.moved is not None and bool(self.moved > 0):
            yield (
                "moved",
                f"{float(self.moved):.2g} of a micro-batch's routing differed between the counting pass and the "
                "training pass, and its load-balancing loss is off by that; look for randomness inside the model, "
                "and for kernels that differ without gradient",
            )

    def recognise_among(self, forward: Forward, window: Sequence[Any], items: Items | None, model: nn.Module) -> Form:
        """`recognise` on the micro-batch with the most ``items`` (None: the first); not settled if there is none."""
        if not window:
            return Form(settled=False)
        most = max(window, key=lambda each: float(items.count(each)) if items and items.has_targets(each) else 0.0)
        return self.recognise(forward, most, model)

    def recognise(self, forward: Forward, inputs: Any, model: nn.Module) -> Form:
        """Recognise the model's own loss on one micro-batch, by two forwards without gradient; sets nothing.

        Its function is compared with the form on random logits, and shifted, to measure its coefficient.
        """
        calls: list[Call] = []

        def moved(shift: float) -> Callable[[Call], Any]:
            def replacement(call: Call) -> Any:
                value = call.own()
                if isinstance(value, Tensor):
                    calls.append(call)
                    value = value + shift
                return value

            return replacement

        losses = []
        for shift in (0.0, _SHIFT):
            calls.clear()
            self._swap.look()
            with same_draws(model), self._swap.by(moved(shift)):
                losses.append(float(forward(inputs).detach()))
        if not calls:
            return Form()
        forms = [call.form() for call in calls]
        refusal = next((reason for _, reason in forms if reason), "")
        if refusal:
            return Form(refusal=refusal)
        if not np.isfinite(losses).all():
            return Form(settled=False, refusal="the loss was not finite")
        weight = (losses[1] - losses[0]) / _SHIFT
        if abs(weight) < _NO_WEIGHT:
            return Form()
        found = zip(calls, forms, strict=True)
        return Form(tuple(Pool(len(call.tally(given).counts), given) for call, (given, _) in found), weight)

    def count(
        self, forward: Forward, window: Sequence[Any], model: nn.Module, device: torch.device, world_size: int
    ) -> Tensor:
        """This rank's numbers, [sum of E + 1 over the pools], to sum over the ranks and pass to `settle`.

        Every micro-batch runs once without gradient, unless the window is one micro-batch on one rank.
        ``forward`` has no DistributedDataParallel around the model, whose buffers are restored.
        """
        self.forget()
        self._counts = [not isinstance(inputs, ZeroWeightBatch) for inputs in window]
        pools = self._pools
        if not pools or len(window) * world_size == 1:
            return self.nothing(device)
        self._swap.look()
        numbers = [torch.zeros(pool.experts + 1, dtype=count_dtype(device), device=device) for pool in pools]
        with same_draws(model):
            for inputs in window:
                self._first_pass.append([])
                with self._swap.by(self._note):
                    forward(inputs)
                if self._failed is not None:
                    raise self._failed
                if len(self._first_pass[-1]) != len(pools):
                    raise _other_calls(len(self._first_pass[-1]), len(pools))
        for tallies in (each for each, counts in zip(self._first_pass, self._counts, strict=True) if counts):
            numbers = [number + each.numbers().to(device) for number, each in zip(numbers, tallies, strict=True)]
        return torch.cat(numbers)

    def _note(self, call: Call) -> Any:
        if call.gates is not None:
            pools, found = self._pools, self._first_pass[-1]
            if len(found) == len(pools):
                raise _other_calls(len(found) + 1, len(pools))
            try:
                found.append(call.tally(pools[len(found)].given))
            except Exception as error:
                # A fault of ours, which is no error of this forward.
                self._failed = self._failed or error
        return call.own()

    def forget(self) -> None:
        """Forget the last window, so that micro-batches have the model's own loss."""
        self._first_pass, self.shares, self._mean_tokens, self._failed = [], [], [], None

    def nothing(self, device: torch.device) -> Tensor:
        """Zeros: the numbers of a rank without micro-batches."""
        size = sum(pool.experts + 1 for pool in self._pools)
        return torch.zeros(size, dtype=count_dtype(device), device=device)

    @property
    def _pools(self) -> tuple[Pool, ...]:
        return self.form.pools if self.form is not None and self.in_force is not Convention.MEAN else ()

    def settle(self, numbers: Tensor, micro_batches: int, world_size: int) -> None:
        """Set F and the denominators from the sum over ranks of what `count` returned."""
        if not len(numbers) or micro_batches * world_size == 1:
            return
        assert self.form is not None
        for part in torch.split(numbers, [pool.experts + 1 for pool in self.form.pools]):
            tokens = part[-1].clamp(min=1)
            self._mean_tokens.append(tokens / (micro_batches * world_size))
            self.shares.append(part[:-1] / tokens)

    @contextmanager
    def micro_batch(self, index: int, share: float = 1.0) -> Iterator[None]:
        """Around a training forward, number ``index`` of the window: scale its router loss for the global batch's.

        ``share``: of its samples, if only those run; the loss is multiplied by that once it is weighted.
        """
        if not self._mean_tokens:
            yield
            return
        self._called = 0
        with self._swap.by(lambda call: self._share(call, index, share)):
            yield

    def _share(self, call: Call, index: int, share: float) -> Any:
        if call.gates is None:
            return call.own()
        assert self.form is not None
        place, self._called = self._called, self._called + 1
        if place >= len(self.form.pools):
            raise _other_calls(place + 1, len(self.form.pools))
        seen = call.tally(self.form.pools[place].given)
        # Without a first pass where it failed on this rank, which the others have not heard of yet.
        if self._first_pass and share == 1:
            self._compare(seen, self._first_pass[index][place])
        device = seen.probabilities.device
        loss = seen.loss(self.shares[place].to(device), self._mean_tokens[place].to(device))
        return self._counts[index] / share * loss

    def _compare(self, second: Tally, first: Tally) -> None:
        with torch.no_grad():
            moved = (second.counts - first.counts.to(second.counts)).abs().sum() / 2
            share = moved / first.counts.to(moved).sum().clamp(min=1)
            self.moved = share if self.moved is None else torch.maximum(self.moved.to(share), share)


def _other_calls(found: int, wanted: int) -> ContractError:
    return ContractError(
        f"got {found} calls of {FUNCTION} in one micro-batch; expected {wanted}, as in the "
        'first one; use router_loss="mean"'
    )


def router_coefficients(model: nn.Module) -> tuple[float, float]:
    """The configuration's coefficients of the load-balancing loss and the z-loss; 0.0: none."""
    return _configured(model, "router_aux_loss_coef", "aux_loss_coef"), _configured(model, "router_z_loss_coef")


def has_z_loss(model: nn.Module) -> bool:
    """Whether the configuration has a z-loss over all positions, padding among them (Bamba)."""
    return bool(_configured(model, "z_loss_coefficient"))


def _configured(model: nn.Module, *names: str) -> float:
    config = getattr(model, "config", None)
    holders = (config, getattr(config, "text_config", None))
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((float(value) for value in values if isinstance(value, (int, float))), 0.0)
