"""The load-balancing loss of a mixture of experts over the whole global batch, however it is cut.

The library pools every router of a model over every token of the batch it is handed:

    A = E sum_i F_i Q_i,    F_i = c_i / T,  Q_i = q_i / T,

c_i the times a token was routed to expert i (a top-k: no gradient), q_i the summed router probabilities, T the tokens
times the routers. Its mean over micro-batches is another function: E mean_m sum_i f_i p_i keeps the covariance of f and
p between micro-batches, a push towards balance inside each of them, and near balance little else is left of it. But
once F is known, A is linear in q, and so every micro-batch of every rank is given the same F and the same denominator,

    aux(m) = E sum_i F_i q_i(m) / T_mean,    T_mean = T / (G W),

whose plain mean over micro-batches and ranks is A, in value and in gradient: the identity of `window`, once more.

T is known before the first forward, F is not: each router sees what the layers below it made of the tokens. So `EXACT`
runs the window once without gradient; `WINDOW` takes for F what this rank has counted so far in the window, with the
right denominators; `MEAN` leaves the library's own function alone. Source: arXiv 2501.11873 (balance over the global
batch, and what balance inside the micro-batch costs in specialisation); the identity and the figures are in the README.

A loop of one's own uses it so, in all three conventions alike:

    router = RouterLoss(Convention("exact"))
    for window in windows:                                       # lists of micro-batches
        numbers = router.count(forward, window, model, world_size)   # forward(inputs) -> loss
        total = accelerator.reduce(numbers, "sum")               # or beside the item count, in the same collective
        router.settle(total, len(window), world_size)
        for index, inputs in enumerate(window):
            with router.micro_batch(index):
                loss = forward(inputs)
            accelerator.backward(loss)                           # divided by G here, by W in the engine
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_accum_fix.accumulation.window import count_dtype
from hf_accum_fix.errors import ContractError

#: What the library's modeling files call the loss, looked up in the module at every call.
FUNCTION: Final = "load_balancing_loss_func"

#: The modeling file whose function other libraries borrow for every family; it has to be there before they do.
LENDER: Final = "transformers.models.mixtral.modeling_mixtral"

#: Far above the loss itself, so that a small coefficient shows in a loss of few digits.
_SHIFT: Final = 1000.0
_NO_WEIGHT: Final = 1e-9

#: Routers whose logits are drawn at random; two show whether they are pooled.
_ROUTERS_DRAWN: Final = 2

#: The inputs that tell how many tokens reach the routers: masks by their sum, the others by their size.
_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_TOKENS: Final = ("input_ids", "decoder_input_ids", "labels", "position_ids")

#: (inputs) -> loss, 0-dim: one forward as training makes it.
Forward = Callable[[Any], Tensor]


class Convention(str, Enum):
    """What the load-balancing loss of a global batch is."""

    MEAN = "mean"
    WINDOW = "window"
    EXACT = "exact"

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    Convention.MEAN: "the mean over micro-batches and ranks",
    Convention.WINDOW: "by the running counts of the window",
    Convention.EXACT: "of the whole global batch",
}


@dataclass(frozen=True)
class Tally:
    """What one call of the loss saw.

    Attributes:
        counts: c [E], tokens routed to each expert over all routers, without gradient.
        probabilities: q [E], summed router probabilities over all routers, with gradient.
        tokens: T, 0-dim: tokens times routers.
    """

    counts: Tensor
    probabilities: Tensor
    tokens: Tensor

    def loss(self, shares: Tensor, tokens: Tensor) -> Tensor:
        """``E sum_i F_i q_i / T``, 0-dim, in the precision of q."""
        weights = len(shares) * shares / tokens
        return (weights.to(self.probabilities) * self.probabilities).sum()

    def numbers(self) -> Tensor:
        """One vector [E + 1]: c, then T."""
        return torch.cat([self.counts, self.tokens.reshape(1)])


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


def _as_they_are(probabilities: Tensor) -> Tensor:
    return probabilities


#: What a function may be handed of each router, and how probabilities come of it. Logits in every family and release
#: but one: DBRX hands over probabilities in some releases of 4.5x.
_GIVEN: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"logits": _softmax, "probabilities": _as_they_are}


def tally(gates: Sequence[Tensor], top_k: int, mask: Tensor | None, given: str = "logits") -> Tally:
    """Count the routing of one call; no device sync.

    Args:
        gates: what is given of each router, [tokens, E].
        top_k: experts to a token.
        mask: [batch, tokens], zero where a position is none; None: every position counts.
        given: "logits" or "probabilities".
    """
    device, experts = gates[0].device, gates[0].shape[-1]
    exact = count_dtype(device)
    counts = torch.zeros(experts, dtype=exact, device=device)
    tokens = torch.zeros((), dtype=exact, device=device)
    weight = None if mask is None else mask.reshape(-1).to(device=device, dtype=exact)
    summed: Tensor | None = None
    for gate in gates:
        # In the gate's own type, as the library has it: another type would break ties of the top-k otherwise.
        probabilities = _GIVEN[given](gate.to(device))
        chosen = probabilities.topk(top_k, dim=-1).indices
        wide = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        row = torch.ones(len(gate), dtype=exact, device=device) if weight is None else weight
        counts = counts.scatter_add(0, chosen.reshape(-1), row.repeat_interleave(top_k))
        tokens = tokens + row.sum()
        part = wide.sum(dim=0) if weight is None else (wide * weight.to(wide)[:, None]).sum(dim=0)
        summed = part if summed is None else summed + part
    assert summed is not None
    return Tally(counts, summed, tokens)


# --- what a modeling file's own function is ----------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """One call of the loss in a forward: one where all routers are pooled, two for an encoder and a decoder.

    Attributes:
        experts: E.
        routers: how many are pooled.
        given: what the function is handed of each, "logits" or "probabilities".
        counted_from: the input that tells how many tokens reach them; None: none was found to.
    """

    experts: int
    routers: int
    given: str
    counted_from: str | None


@dataclass(frozen=True)
class Form:
    """What was recognised of a model's load-balancing loss.

    Attributes:
        pools: its calls in one forward; empty where there is none.
        weight: what the loss that training takes multiplies it by, as measured.
        refusal: why it is no load-balancing loss of this form; empty where it is one.
        settled: False where nothing could be seen, since the loss was not finite.
    """

    pools: tuple[Pool, ...] = ()
    weight: float = 0.0
    refusal: str = ""
    settled: bool = True

    @property
    def recognised(self) -> bool:
        """Whether the loss is of this form and is part of what is trained."""
        return bool(self.pools) and not self.refusal and self.weight != 0.0


@dataclass(frozen=True)
class _Call:
    """One call of a modeling file's function, taken apart."""

    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def gates(self) -> Sequence[Tensor] | None:
        """The routers' logits; None where the model had none, for which the library returns 0."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(first, tuple) or not first or not all(isinstance(gate, Tensor) for gate in first):
            return None
        return first

    def tally(self, given: str) -> Tally:
        """By the names the library gives the arguments after the first.

        Raises:
            TypeError: if the function has no ``top_k``.
        """
        arguments, gates = self.arguments, self.gates
        if gates is None or "top_k" not in arguments:
            raise TypeError(f"{FUNCTION}{inspect.signature(self.original)}")
        return tally(gates, arguments["top_k"], arguments.get("attention_mask"), given)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name, defaults too."""
        bound = inspect.signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def with_gates(self, gates: tuple[Tensor, ...]) -> _Call:
        """The same call on other logits."""
        if self.args:
            return replace(self, args=(gates, *self.args[1:]))
        return replace(self, kwargs={**self.kwargs, next(iter(self.kwargs)): gates})

    def form(self) -> tuple[str, str]:
        """What the function is given of each router, and "", where it is the pooled form; else "" and why it is not.

        Value and gradient tell, on logits drawn at random: on the model's own, forms hardly differ, since near balance
        each has a value of about top_k.
        """
        name = f"{self.original.__module__}.{FUNCTION}"
        if self.gates is None:
            return "", f"{name} is not called with what its routers say of each token"
        draw = torch.Generator().manual_seed(0)
        some = self.gates[:_ROUTERS_DRAWN]
        tolerance = max(1e-5, 16 * torch.finfo(some[0].dtype).eps)
        with torch.enable_grad():
            drawn = tuple((2 * torch.randn(gate.shape, generator=draw)).to(gate).requires_grad_() for gate in some)
            call = self.with_gates(drawn)
            theirs = self.original(*call.args, **call.kwargs)
            if not isinstance(theirs, Tensor) or not theirs.requires_grad:
                return "", f"{name} has no gradient"
            wanted = (theirs, *torch.autograd.grad(theirs, drawn))
            for given in _GIVEN:
                try:
                    seen = call.tally(given)
                    ours = seen.loss(seen.counts / seen.tokens, seen.tokens)
                except (TypeError, RuntimeError) as error:
                    return "", f"{name} is no load-balancing loss over all tokens and routers ({error})"
                found = (ours, *torch.autograd.grad(ours, drawn))
                if all(_near(one, other, tolerance) for one, other in zip(found, wanted, strict=True)):
                    return given, ""
        return "", f"{name} is another function than E sum F Q over all tokens and routers"


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.detach().double(), other.detach().double()
    return bool((one - other).norm() <= tolerance * one.norm())


class _Swap:
    """Stands in for every modeling file's function inside a ``with`` block."""

    def __init__(self) -> None:
        self._standing: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._replacement: Callable[[_Call], Any] | None = None

    @contextmanager
    def by(self, replacement: Callable[[_Call], Any]) -> Iterator[None]:
        """Let it be ``replacement`` inside the block, and put the identical ones back.

        Other libraries bind the name in modules of their own, so every module that holds it is looked at.
        """
        holders = [module for module in list(sys.modules.values()) if FUNCTION in getattr(module, "__dict__", ())]
        before = [(module, vars(module)[FUNCTION]) for module in holders]
        self._replacement = replacement
        try:
            for module, original in before:
                setattr(module, FUNCTION, self._for(original))
            yield
        finally:
            self._replacement = None
            for module, original in before:
                setattr(module, FUNCTION, original)

    def _for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same object every time: a compiled model would be compiled anew for another one."""
        if original in self._standing:
            return self._standing[original]

        @functools.wraps(original)
        def load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
            assert self._replacement is not None
            return self._replacement(_Call(original, args, kwargs))

        # A compiled model calls it as it is: what it notes is noted outside of the graph.
        dynamo = sys.modules.get("torch._dynamo")
        stand_in = load_balancing_loss_func if dynamo is None else dynamo.disable(load_balancing_loss_func)
        return self._standing.setdefault(original, stand_in)


@contextmanager
def same_draws(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Forwards without gradient that leave the random states and the buffers to be found by the forwards after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone(), buffer._version, isinstance(module, _BatchNorm))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    used = {device, *(parameter.device for parameter in model.parameters())}
    kinds = {each.type for each in used} - {"cpu", "meta", "mps"}
    indices = sorted({each.index or 0 for each in used if each.type in kinds})
    kind = next(iter(kinds), "cuda")
    try:
        with torch.random.fork_rng(indices, device_type=kind), torch.no_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        with torch.no_grad():
            for holder, name, buffer, before, version, uncounted in buffers:
                holder[name] = buffer
                # BatchNorm changes its statistics without counting the version up.
                if uncounted or buffer._version != version:
                    buffer.copy_(before)


# --- one model's loss, window by window --------------------------------------------------------------------------


class RouterLoss:
    """The load-balancing loss of one model under a convention.

    Attributes:
        convention: as asked for.
        form: what was recognised of the model's own loss; None before the first window.
        shares: F [E] of each pool in the last window settled; empty without one, and under `Convention.WINDOW`.
        moved: largest share of a micro-batch's routing that the second pass found elsewhere, 0-dim; None: not compared.
        without_gradient: whether the router logits of a training pass had no graph, so that their loss trains nothing.
    """

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        self.form: Form | None = None
        self.shares: list[Tensor] = []
        self.moved: Tensor | None = None
        self.without_gradient = False
        self._first_pass: list[list[Tally]] = []
        self._mean_tokens: list[Tensor] = []
        self._running: list[Tensor] = []
        self._called = 0
        self._swap = _Swap()

    @property
    def in_force(self) -> Convention:
        """The convention that trains: `MEAN` where the model's loss was not recognised."""
        return self.convention if self.form is not None and self.form.recognised else Convention.MEAN

    @property
    def depends_on_the_cut(self) -> bool:
        """Whether another cut of the same global batch, such as one by length, has another loss."""
        return self.in_force is not Convention.EXACT

    def recognise(self, forward: Forward, inputs: Any, model: nn.Module, device: torch.device) -> Form:
        """Look at the model's own loss on one micro-batch, by two forwards without gradient; sets nothing.

        Its function is held against the form on random logits, and moved, to see what it weighs in the loss.
        """
        calls: list[_Call] = []

        def moved(shift: float) -> Callable[[_Call], Any]:
            def replacement(call: _Call) -> Any:
                value = call.original(*call.args, **call.kwargs)
                if isinstance(value, Tensor):
                    calls.append(call)
                    value = value + shift
                return value

            return replacement

        losses = []
        for shift in (0.0, _SHIFT):
            calls.clear()
            with same_draws(model, device), self._swap.by(moved(shift)):
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
        pools = tuple(_pool(call, inputs, given) for call, (given, _) in zip(calls, forms, strict=True))
        if self.convention is Convention.WINDOW and any(pool.counted_from is None for pool in pools):
            reason = "none of the inputs tells how many tokens reach the routers before they do"
            return Form(pools, weight, f'{reason}; router_loss="exact" counts them')
        return Form(pools, weight)

    def count(
        self, forward: Forward, window: Sequence[Any], model: nn.Module, device: torch.device, world_size: int
    ) -> Tensor:
        """This rank's numbers, [sum of E + 1 over the pools], to be summed over the ranks and handed to `settle`.

        Under `EXACT` every micro-batch is run once without gradient, unless the window is one micro-batch of one rank.

        Args:
            forward: one forward as training makes it, without DistributedDataParallel around it.
            window: the micro-batches of this rank.
            model: whose buffers are looked after.
            device: where training runs.
            world_size: W.
        """
        self._first_pass, self._running, self.shares, self._mean_tokens = [], [], [], []
        pools = self.form.pools if self.form is not None and self.in_force is not Convention.MEAN else ()
        numbers = [torch.zeros(pool.experts + 1, dtype=count_dtype(device), device=device) for pool in pools]
        if not pools or len(window) * world_size == 1:
            return torch.cat(numbers) if numbers else torch.zeros(0, dtype=count_dtype(device), device=device)
        if self.convention is Convention.WINDOW:
            self._running = [torch.zeros_like(each) for each in numbers]
            for inputs in window:
                for pool, number in zip(pools, numbers, strict=True):
                    tokens = _token_count(pool.counted_from, inputs)
                    if tokens is None:
                        raise ContractError(
                            f"the tokens of the routers are counted from {pool.counted_from!r}, but a micro-batch "
                            f"holds {sorted(inputs)}; every micro-batch needs it as a tensor"
                        )
                    number[-1] += pool.routers * tokens
            return torch.cat(numbers)
        with same_draws(model, device):
            for inputs in window:
                found: list[Tally] = []
                with self._swap.by(_noting(found, pools)):
                    forward(inputs)
                if len(found) != len(pools):
                    raise _other_calls(len(found), len(pools))
                self._first_pass.append(found)
        for tallies in self._first_pass:
            numbers = [number + each.numbers().to(device) for number, each in zip(numbers, tallies, strict=True)]
        return torch.cat(numbers)

    def settle(self, numbers: Tensor, micro_batches: int, world_size: int) -> None:
        """Take the numbers of all ranks, as summed.

        Args:
            numbers: the sum over ranks of what `count` returned.
            micro_batches: G of this rank's window.
            world_size: W.
        """
        if not len(numbers) or micro_batches * world_size == 1:
            return
        assert self.form is not None
        for part in torch.split(numbers, [pool.experts + 1 for pool in self.form.pools]):
            tokens = part[-1].clamp(min=1)
            self._mean_tokens.append(tokens / (micro_batches * world_size))
            if self.convention is Convention.EXACT:
                self.shares.append(part[:-1] / tokens)

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Around the forward of a micro-batch, with gradient: its loss is its share of the global batch's.

        Args:
            index: its place in the window, from 0.
        """
        if not self._mean_tokens:
            yield
            return
        self._called = 0
        with self._swap.by(lambda call: self._share(call, index)):
            yield

    def _share(self, call: _Call, index: int) -> Any:
        if call.gates is None:
            return call.original(*call.args, **call.kwargs)
        assert self.form is not None
        place, self._called = self._called, self._called + 1
        if place >= len(self.form.pools):
            raise _other_calls(place + 1, len(self.form.pools))
        seen = call.tally(self.form.pools[place].given)
        self.without_gradient |= torch.is_grad_enabled() and not seen.probabilities.requires_grad
        if self.convention is Convention.WINDOW:
            self._running[place] = self._running[place] + seen.numbers().to(self._running[place])
            counts, tokens = self._running[place][:-1], self._running[place][-1]
            shares = counts / tokens.clamp(min=1)
        else:
            shares = self.shares[place]
            self._compare(seen, self._first_pass[index][place])
        device = seen.probabilities.device
        return seen.loss(shares.to(device), self._mean_tokens[place].to(device))

    def _compare(self, second: Tally, first: Tally) -> None:
        with torch.no_grad():
            moved = (second.counts - first.counts.to(second.counts)).abs().sum() / 2
            share = moved / first.counts.to(moved).sum().clamp(min=1)
            self.moved = share if self.moved is None else torch.maximum(self.moved.to(share), share)


def _noting(found: list[Tally], pools: Sequence[Pool]) -> Callable[[_Call], Any]:
    def replacement(call: _Call) -> Any:
        if call.gates is not None:
            if len(found) == len(pools):
                raise _other_calls(len(found) + 1, len(pools))
            found.append(call.tally(pools[len(found)].given))
        return call.original(*call.args, **call.kwargs)

    return replacement


def _other_calls(found: int, wanted: int) -> ContractError:
    return ContractError(
        f"{FUNCTION} was called {found} times in one micro-batch and {wanted} times in the one it was learnt from; "
        'needed is the same number in each, or router_loss="mean"'
    )


def _pool(call: _Call, inputs: Any, given: str) -> Pool:
    gates, seen = call.gates, call.tally(given)
    assert gates is not None
    names = _TOKENS if call.arguments.get("attention_mask") is None else _MASKS
    counts = ((name, _token_count(name, inputs)) for name in names)
    told = (name for name, count in counts if count is not None and float(count) * len(gates) == float(seen.tokens))
    return Pool(len(seen.counts), len(gates), given, next(told, None))


def _token_count(name: str | None, inputs: Any) -> Tensor | int | None:
    """How many tokens an input tells of, a mask by its sum; no device sync."""
    value = inputs.get(name) if isinstance(inputs, Mapping) else None
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    return value.sum() if name in _MASKS else value.numel()
