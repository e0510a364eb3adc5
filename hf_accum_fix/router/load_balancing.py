"""The load-balancing function of the library's modeling files: its formula, how to recognise it, how to replace it.

Every family's file has one of its own by the same name, looked up in its module at each call; with few exceptions it is

    A = E sum_i F_i Q_i,    F_i = c_i / T,  Q_i = q_i / T

over all routers and tokens of the batch: c_i the times a token was routed to expert i, q_i the summed probabilities, T
the tokens times the routers. Its source differs by release, so it is recognised by its values and gradients.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from hf_accum_fix.counting.items import count_dtype

#: What the modeling files call the function.
FUNCTION: Final = "load_balancing_loss_func"

#: The modeling file whose function other libraries use for every family; import it before they do.
LENDER: Final = "transformers.models.mixtral.modeling_mixtral"

#: Routers whose logits are drawn at random; two show whether they are pooled.
_ROUTERS_DRAWN: Final = 2


@dataclass(frozen=True)
class Tally:
    """The routing in one call of the loss.

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


#: What a function may get of each router. Logits in every family and release but one: DBRX passes probabilities in some
#: releases of 4.5x.
_GIVEN: Final = ("logits", "probabilities")


def tally(gates: Sequence[Tensor], top_k: int, mask: Tensor | None, given: str = "logits") -> Tally:
    """Count the routing of one call, of ``top_k`` experts per token; no device sync.

    ``gates`` are the logits or probabilities (``given``) of each router, [tokens, E]; ``mask`` is [batch, tokens], zero
    at padding.
    """
    pooled = torch.cat([gate.to(gates[0].device) for gate in gates])
    # In the gates' own dtype, like the library: another dtype would break ties of the top-k differently.
    probabilities = pooled.softmax(dim=-1) if given == "logits" else pooled
    chosen = probabilities.topk(top_k, dim=-1).indices
    rows = torch.ones(len(pooled), dtype=count_dtype(pooled.device), device=pooled.device)
    if mask is not None:
        rows = mask.reshape(-1).to(rows).repeat(len(gates))
    counts = rows.new_zeros(pooled.shape[-1]).scatter_add(0, chosen.reshape(-1), rows.repeat_interleave(top_k))
    wide = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    return Tally(counts, (wide * rows.to(wide)[:, None]).sum(dim=0), rows.sum())


@dataclass(frozen=True)
class Call:
    """One call of a modeling file's function."""

    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def gates(self) -> Sequence[Tensor] | None:
        """The routers' logits; None: the model had none, and the library returns 0."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(first, tuple) or not first or not all(isinstance(gate, Tensor) for gate in first):
            return None
        return first

    def own(self) -> Any:
        """The value of the model's own function."""
        return self.original(*self.args, **self.kwargs)

    def tally(self, given: str) -> Tally:
        """Count the routing, by the library's names of the arguments.

        Raises:
            TypeError: if the function has no ``top_k``.
        """
        arguments, gates = self.arguments, self.gates
        if gates is None or "top_k" not in arguments:
            raise TypeError(f"{FUNCTION}{inspect.signature(self.original)}")
        return tally(gates, arguments["top_k"], arguments.get("attention_mask"), given)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name, with defaults."""
        bound = inspect.signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def with_gates(self, gates: tuple[Tensor, ...]) -> Call:
        """The same call on other logits."""
        if self.args:
            return replace(self, args=(gates, *self.args[1:]))
        return replace(self, kwargs={**self.kwargs, next(iter(self.kwargs)): gates})

    def form(self) -> tuple[str, str]:
        """What the function gets of each router, and "", if it is the pooled form; else "" and the reason.

        Value and gradient are compared on random logits: on the model's own, forms hardly differ, since near balance
        each has a value of about top_k.
        """
        name = f"{self.original.__module__}.{FUNCTION}"
        if self.gates is None:
            return "", f"{name} is not called with a tuple of router outputs"
        draw = torch.Generator().manual_seed(0)
        some = self.gates[:_ROUTERS_DRAWN]
        tolerance = max(1e-5, 16 * torch.finfo(some[0].dtype).eps)
        with torch.enable_grad():
            drawn = tuple((2 * torch.randn(gate.shape, generator=draw)).to(gate).requires_grad_() for gate in some)
            call = self.with_gates(drawn)
            theirs = call.own()
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
        return "", f"{name} is not E sum F Q over all tokens and routers"


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.detach().double(), other.detach().double()
    return bool((one - other).norm() <= tolerance * one.norm())


class Swap:
    """Replace every modeling file's function inside a ``with`` block."""

    def __init__(self) -> None:
        self._holders: list[tuple[ModuleType, Callable[..., Any]]] = []
        self._replacing: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._replacement: Callable[[Call], Any] | None = None

    def look(self) -> None:
        """Find every module that holds the function; other libraries bind its name in their modules.

        Call it before a window: searching all imported modules takes longer than a small forward.
        """
        holders = [module for module in list(sys.modules.values()) if FUNCTION in getattr(module, "__dict__", ())]
        self._holders = [(module, vars(module)[FUNCTION]) for module in holders]

    @contextmanager
    def by(self, replacement: Callable[[Call], Any]) -> Iterator[None]:
        """Call ``replacement`` instead inside the block, then restore the identical functions; call `look` first."""
        self._replacement = replacement
        try:
            for module, original in self._holders:
                setattr(module, FUNCTION, self._for(original))
            yield
        finally:
            self._replacement = None
            for module, original in self._holders:
                setattr(module, FUNCTION, original)

    def _for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same object every time: for another one a compiled model would be compiled again."""
        if original in self._replacing:
            return self._replacing[original]

        @functools.wraps(original)
        def load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
            assert self._replacement is not None
            return self._replacement(Call(original, args, kwargs))

        # Outside of a compiled model's graph, so that Python state is updated in every call.
        dynamo = sys.modules.get("torch._dynamo")
        replacing = load_balancing_loss_func if dynamo is None else dynamo.disable(load_balancing_loss_func)
        return self._replacing.setdefault(original, replacing)
