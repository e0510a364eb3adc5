"""Weigh a micro-batch's loss, so that the plain mean over micro-batches and ranks is the global batch's.

The loss that is about to be trained is read from its graph (`loss_graph`). A term that divides by d is multiplied by

    d / n_mean        n_mean = N / (G W)    of the items that this term counts (`window`)

whatever d is: the number that the loss was handed, its integer, or the items of the micro-batch. Terms that all have
one weight are weighed by scaling the loss, others by a hook on the node of each term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import How, LossContract, TermSpec
from hf_accum_fix.accumulation.loss_graph import Factor, Term, read
from hf_accum_fix.accumulation.per_sample import sum_of_samples
from hf_accum_fix.accumulation.share import Cut
from hf_accum_fix.accumulation.values import Heard, Values
from hf_accum_fix.accumulation.window import Items, count_dtype

#: A number on the host where reading it waits for no device, else a tensor there.
Number = Tensor | float


@dataclass
class WindowCheck:
    """What the micro-batches of one window on one rank divided by, beside what was predicted.

    Attributes:
        contract: how their loss is reduced.
        predicted: items of this rank's micro-batches by every rule.
        micro_batches: G.
        changed: what a micro-batch did that the observation did not show, in words; empty: nothing.
    """

    contract: LossContract
    predicted: Mapping[Items, Tensor] = field(default_factory=dict)
    micro_batches: int = 1
    changed: str = ""
    _seen: dict[int, list[Number]] = field(default_factory=dict)
    _flags: list[Number] = field(default_factory=list)

    def note(self, place: int, count: Number) -> None:
        """Take what one term of a micro-batch divided by; ``place``: of its `TermSpec`."""
        self._seen.setdefault(place, []).append(count)

    def note_flag(self, is_other: Number) -> None:
        """Take whether a micro-batch was not as observed."""
        self._flags.append(is_other)

    @property
    def counted(self) -> bool:
        """Whether one count of the window was taken, by which its gradient can be corrected."""
        return bool(self._seen) and self.contract.groups == 1

    def counts(self, device: torch.device) -> Tensor:
        """Items seen, and items predicted, of this rank's window: [2] on ``device``."""
        place = next(iter(self._seen), None)
        if place is None or not self.counted:
            return torch.zeros(2, dtype=count_dtype(device), device=device)
        seen, predicted = self._sums(place)
        return torch.stack(
            [torch.as_tensor(each, dtype=count_dtype(device), device=device) for each in (seen, predicted)]
        )

    def broken(self) -> Number | None:
        """Whether the loss was made in another way than observed; a tensor on the device, or a bool; None: no sign."""
        flags = list(self._flags)
        if not self.counted:
            for place in self._seen:
                seen, predicted = self._sums(place)
                flags.append(abs(seen - predicted) > abs(1e-6 * predicted))
        if not flags:
            return None
        if any(isinstance(each, Tensor) for each in flags):
            return torch.stack([torch.as_tensor(each) for each in flags]).any()
        return any(flags)

    def _sums(self, place: int) -> tuple[Any, Any]:
        spec, seen = self.contract.terms[place], self._seen[place]
        total: Any = sum(seen)
        if not spec.rules:
            return total, spec.count * self.micro_batches
        predicted = self.predicted[spec.rules[0]] * spec.times
        return total, predicted if isinstance(total, Tensor) else float(predicted)


@dataclass(frozen=True)
class Weighed:
    """A micro-batch's loss, weighed.

    Attributes:
        loss: 0-dim, with gradient.
        value: the same as a number for the log, 0-dim; with several terms not the value of ``loss``.
        as_stock: it keeps the scale that the stock Trainer hands to the engine.
    """

    loss: Tensor
    value: Tensor
    as_stock: bool = False


def weigh(
    loss: Tensor,
    contract: LossContract,
    cut: Cut,
    check: WindowCheck,
    inputs: Mapping[str, Any],
    *,
    heard: Heard,
    predicted: Mapping[Items, Tensor] | None = None,
    weightless: bool = False,
) -> Weighed:
    """Weigh the loss of a micro-batch, before its backward.

    Args:
        loss: of one number, as it was computed.
        contract: how its terms are reduced.
        cut: n_mean of every rule, G and W.
        check: takes what the terms divide by.
        inputs: of the forward.
        heard: of the forward.
        predicted: items of the micro-batch by every rule; None: it is not as it was fetched.
        weightless: the micro-batch counts nothing.
    """
    if contract.items is not None and contract.items.per_sample:
        count = _host(contract.items.count(inputs, cut.mean.device))
        check.note(0, 0.0 if weightless else count)
        summed = sum_of_samples(loss, contract.items, inputs) * (0.0 if weightless else 1.0)
        loss = summed / _cast(cut.host_mean(contract.items), summed)
        return Weighed(loss, loss.detach())
    terms = read(loss, heard.routers, inside=contract.inside)
    matched = _matched(terms, contract.terms)
    if matched is None:
        if not cut.is_whole:
            check.changed = "its loss has other terms than when it was observed: " + ", ".join(
                sorted({each.name for each in terms}) or ["none with a gradient"]
            )
        return Weighed(loss, loss.detach())
    as_stock = any(spec.as_stock for spec, _ in matched)
    if cut.is_whole and not weightless:
        return Weighed(loss, loss.detach(), as_stock)
    weights: list[tuple[Term, Number]] = []
    for place, (spec, found) in enumerate(matched):
        weight = _weight(place, spec, found, cut, check, inputs, loss, predicted or {}, weightless=weightless)
        weights += [(term, weight) for term in found]
    if contract.groups == 1 and weights:
        weight = weights[0][1]
        return Weighed(loss * _cast(weight, loss), _settled(loss.detach() * _cast(weight, loss), weight), as_stock)
    return Weighed(loss * 1.0, _hooked(loss, weights, heard.values), as_stock)


def _matched(terms: Sequence[Term], specs: Sequence[TermSpec]) -> list[tuple[TermSpec, list[Term]]] | None:
    """The terms of every spec; None: some are of none, or cannot be told from each other."""
    by_shape: dict[Any, list[Term]] = {}
    for term in terms:
        by_shape.setdefault(term.shape, []).append(term)
    found: list[tuple[TermSpec, list[Term]]] = []
    for spec in specs:
        alike = by_shape.get(spec.shape, [])
        several = sum(each.shape == spec.shape for each in specs)
        if spec.place is not None and alike and len(alike) != several:
            return None
        found.append((spec, alike if spec.place is None else alike[spec.place : spec.place + 1]))
    return found if terms and set(by_shape) <= {each.shape for each in specs} else None


def _weight(
    place: int,
    spec: TermSpec,
    terms: Sequence[Term],
    cut: Cut,
    check: WindowCheck,
    inputs: Mapping[str, Any],
    loss: Tensor,
    predicted: Mapping[Items, Tensor],
    *,
    weightless: bool,
) -> Number:
    """What a term is multiplied by, so that the plain mean over micro-batches and ranks is right."""
    if not terms:
        return 1.0
    term = terms[0]
    given: Number = 1.0
    for at in spec.own:
        given = _times(given, term.factors[at], inverse=True)
    if spec.handed and spec.own:
        # It was divided by the items of the global batch: the engine's mean over ranks is all that follows.
        return 0.0 if weightless else float(cut.micro_batches)
    if spec.how is How.SUM:
        return 0.0 if weightless else given * float(cut.micro_batches * cut.world_size)
    if spec.how is not How.MEAN:
        return given
    rule = spec.rules[0] if spec.rules else None
    mean = cut.host_mean(rule) * spec.times if rule is not None else spec.count
    count = _count(spec, term, inputs, cut)
    seen: Number | None = count if not spec.handed else _host(getattr(term.leaf, "_saved_total_weight", None))
    if seen is not None and (spec.counts or spec.handed):
        check.note(place, 0.0 if weightless else _without_clamp(seen, spec, term, inputs, loss))
    if weightless:
        return 0.0
    # What is not corrected in the end is weighed as predicted, or its scale would be another.
    by_rule = rule is not None and rule in predicted and not cut.is_corrected
    weight = (_host(predicted[rule]) * spec.times if by_rule and rule is not None else count) / mean
    if not term.name.startswith("NllLoss"):
        for each in terms:
            _keep_finite(each, count)
    return weight if isinstance(given, float) and given == 1.0 else weight * given


def _count(spec: TermSpec, term: Term, inputs: Mapping[str, Any], cut: Cut) -> Number:
    """What a term divides by."""
    if not spec.counts:
        counted = spec.rules[0].count(inputs, cut.mean.device) * spec.times
        return float(counted) if counted.device.type == "cpu" else counted
    count: Number = 1.0
    for at in spec.counts:
        count = _times(count, term.factors[at], inverse=True)
    return count


def _times(number: Number, factor: Factor, *, inverse: bool) -> Number:
    value: Number = _host(factor.value)
    if factor.divides is inverse:
        return value if isinstance(number, float) and number == 1.0 else number * value
    return number / value if isinstance(value, Tensor) or value else float("nan")


def _host(value: Any) -> Any:
    """A number on the host where reading it waits for no device."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else value.detach()
    return None if value is None else float(value)


def _without_clamp(seen: Number, spec: TermSpec, term: Term, inputs: Mapping[str, Any], loss: Tensor) -> Number:
    """A divisor clamped to 1 counts nothing where there is nothing to count."""
    if spec.rules and spec.rules[0].entry is not None:
        return seen if float(spec.rules[0].count(inputs)) else 0.0
    if term.divides or isinstance(seen, Tensor):
        return seen
    return 0.0 if seen == 1.0 and float(loss) == 0.0 else seen


def _keep_finite(term: Term, count: Number) -> None:
    """Let nothing go back through a mean over nothing, which divides zero by zero."""
    if isinstance(count, float) and count > 0:
        return
    if term.divides and not isinstance(count, Tensor):
        return

    def zero(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if isinstance(count, Tensor):
            return tuple(None if g is None else torch.where(count.to(g.device) > 0, g, 0.0) for g in grads)
        return tuple(None if g is None else torch.zeros_like(g) for g in grads)

    for node in (term.leaf, *term.path.learnt):
        node.register_prehook(zero)


def _hooked(loss: Tensor, weights: Sequence[tuple[Term, Number]], values: Values | None) -> Tensor:
    """Weigh every term by a hook on its node; the loss for the log."""
    total, rest = torch.zeros_like(loss.detach()), loss.detach()
    blank: Number = 1.0
    hooked: dict[Any, Number] = {}
    for term, weight in weights:
        value = _value(term, values)
        if value is None:
            blank = weight
        else:
            rest = rest - value
            total = total + _settled(value * _cast(weight, value), weight)
        if term.path.top not in hooked and not (isinstance(weight, float) and weight == 1.0):
            hooked[term.path.top] = weight
            term.path.top.register_prehook(_scaled(weight))
    return total + _settled(rest * _cast(blank, rest), blank)


def _value(term: Term, values: Values | None) -> Tensor | None:
    """A term's part of the loss, 0-dim."""
    value = None if values is None else values.of(term.path.top)
    if value is None:
        return None
    for factor in term.factors[: term.path.above]:
        value = value / factor.value if factor.divides else value * factor.value
    return value


def _scaled(weight: Number) -> Any:
    def scale(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad * _cast(weight, grad) for grad in grads)

    return scale


def _cast(weight: Number, beside: Tensor) -> Number:
    """A weight in the precision of what it multiplies, at least float32."""
    return weight if isinstance(weight, float) else weight.to(beside.device, beside.dtype)


def _settled(value: Tensor, weight: Number) -> Tensor:
    """A value, or zero where it weighs nothing: a mean over nothing is nan."""
    if isinstance(weight, float):
        return value if weight else torch.zeros_like(value)
    return torch.where(weight.to(value.device) > 0, value, torch.zeros_like(value))
