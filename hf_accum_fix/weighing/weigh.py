"""Weight a micro-batch's loss, so that the plain mean over micro-batches and ranks is the global batch's.

The loss of each micro-batch is read from its graph (`loss_graph`). A term that divides by d is multiplied by

    d / n_mean        n_mean = N / (G W)    of the items that this term counts (`items`)

whatever d is. If all terms have one weight, the loss is scaled; else each term has a hook on its node. Weights are kept
as divisors, n_mean / d: where all micro-batches are alike that is G, and the division is bitwise upstream's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_accum_fix.counting.items import Items, ZeroWeightBatch, count_dtype
from hf_accum_fix.learning.contract import How, TermSpec
from hf_accum_fix.reading.loss_graph import Term, read, without_nothing
from hf_accum_fix.reading.nodes import has_several_outputs, is_parameter, on_host
from hf_accum_fix.reading.values import Captured, Values
from hf_accum_fix.weighing.part import Number, Part, differ, kept, scaled


class Weighed(NamedTuple):
    """A micro-batch's weighted loss."""

    loss: Tensor  # for the engine's backward, 0-dim, with gradient
    value: Tensor  # its part of the window's logged loss, 0-dim


def weigh(
    loss: Tensor, part: Part, inputs: Mapping[str, Any], items: Mapping[Items | int, Tensor], captured: Captured
) -> Weighed:
    """Weight the loss of a micro-batch, before its backward, and note its terms' divisors in its part.

    Args:
        loss: of one element.
        part: of the window, that has this loss.
        inputs: of its forward; a `ZeroWeightBatch` counts nothing.
        items: as predicted, 0-dim: by every rule of the part; by the place of its `TermSpec` for a term that an earlier
            forward has counted.
        captured: of its forward.
    """
    contract, left, counts = part.contract, part.remaining_divisor, not isinstance(inputs, ZeroWeightBatch)
    if part.is_whole and counts and part.share == 1:
        return _ready(loss, left, part)
    terms = without_nothing(read(loss, captured.routers, captured.values, deep=contract.deep))
    matched = _matched(terms, contract.terms)
    if matched is None and terms and all(term.is_nothing for term in terms):
        # As in `logits.sum() * 0`, where there is no target.
        matched = [(spec, []) for spec in contract.terms]
    if matched is None and counts:
        names = sorted({each.name for each in terms}) or ["none with a gradient"]
        part.changed = f"its loss has other terms than the observed one: {', '.join(names)}"
        part.mixed = True
        for term in (each for each in terms if each.divides):
            _keep_finite(term, term.factors[-1].value, part)
        # What divides by the number of the global batch itself is added up.
        adds = contract.custom and any(each.how is How.NUMBER for each in contract.terms)
        return _ready(loss, 1 / part.engine_divisor if adds else left, part)
    micro_batch = _MicroBatch(loss, part, inputs, items, captured.values, counts)
    weights = [each for place, one in enumerate(matched or ()) for each in micro_batch.weights(place, *one)]
    if not weights:
        return _ready(loss, math.inf, part)
    if contract.groups == 1 and contract.added is None:
        return _ready(loss, weights[0].divisor, part)
    return _hooked(loss, weights, captured.values, part)


def _ready(loss: Tensor, weight: Number, part: Part) -> Weighed:
    """A loss divided by one weight, in a new tensor: DeepSpeed (stage 0) hangs hooks on the model's output."""
    weighed = loss / _cast(weight, loss)
    value = weighed.detach().reshape(()) if weighed.ndim else weighed.detach()
    value = _settled(value, weight == math.inf)
    return Weighed(weighed, value if part.engine_divisor == 1 else value / part.engine_divisor)


def _matched(terms: Sequence[Term], specs: Sequence[TermSpec]) -> list[tuple[TermSpec, list[Term]]] | None:
    """The terms of every spec; None: some fit no spec, or cannot be distinguished."""
    by_shape: dict[Any, list[Term]] = {spec.shape: [] for spec in specs}
    for term in terms:
        if term.shape not in by_shape:
            return None
        by_shape[term.shape].append(term)
    places = Counter([spec.shape for spec in specs if spec.place is not None])
    found = list[tuple[TermSpec, list[Term]]]()
    for spec in specs:
        alike = by_shape[spec.shape]
        if alike and spec.place is not None:
            if len(alike) != places[spec.shape]:
                return None
            alike = [alike[spec.place]]
        found.append((spec, alike))
    return found if terms else None


class _Weight(NamedTuple):
    """What to divide a term by."""

    term: Term
    divisor: Number
    group: tuple[Any, ...]


@dataclass(frozen=True)
class _MicroBatch:
    """The loss of one micro-batch, as its terms are weighted; ``counts``: False: nothing."""

    loss: Tensor
    part: Part
    inputs: Mapping[str, Any]
    items: Mapping[Items | int, Tensor]
    values: Values | None
    counts: bool

    def weights(self, place: int, spec: TermSpec, found: Sequence[Term]) -> list[_Weight]:
        """Of a `TermSpec`'s term, or its rows, so that the sum over micro-batches, averaged over ranks, is exact."""
        part, counts = self.part, self.counts
        if spec.how is How.MEAN:
            # What this micro-batch adds to N: as much as the observed batch, where nothing counts it.
            rule = spec.rule if spec.rule is not None or part.is_corrected else part.contract.items
            items = self.items.get(place, None if rule is None else scaled(self.items[rule], spec.ratio))
            planned: Number = (spec.counted[0] or 1.0) * part.share if items is None else items if counts else 0.0
            if not found:
                part.note(place, 0.0, planned)
                return []
            seen, divisor = self._of_mean(spec, found, rule, planned, known=items is not None)
            part.note(place, seen if counts else 0.0, planned)
            # Without a correction at the end, weights have to use the planned counts.
            count = planned if spec.floor is None or items is None else kept(items, spec.floor)
            count = divisor if part.is_corrected else count
            divisor = part.mean_of(place, spec, rule) / count if isinstance(count, Tensor) or count else math.inf
            if part.contract.groups > 1 and differ(*part.counts[place][0]):
                # One number cannot correct several terms: the first micro-batch decides whether the rule fits.
                divisor = part.remaining_divisor
        elif not found:
            if spec.how in (How.CONSTANT, How.ROUTER) and counts:
                part.changed = f"{spec.shape[0]} is a part of the loss in some of its micro-batches only"
            return []
        else:
            divisor = self._of_other(place, spec, found[0])
        divisor = divisor / _product(found[0], spec.own) if spec.own else divisor
        if not counts:
            divisor = math.inf if spec.how in (How.MEAN, How.NUMBER, How.SUM) else divisor
        elif (constant := _constant(found[0], spec)) is not None:
            part.note_constant(place, f"{found[0].name} is multiplied by", constant)
        value = _value(found[0], self.values) if counts and spec.how is How.CONSTANT else None
        if value is not None and on_host(value):
            # One that a floor or a selection has made need not stay one.
            part.note_constant(-1 - place, f"{found[0].name} is", float(value))
        return [_Weight(each, divisor, spec.group) for each in found]

    def _of_other(self, place: int, spec: TermSpec, term: Term) -> Number:
        """What to divide a term by that is no mean over its own items."""
        part, counted = self.part, _product(term, spec.counts)
        weight: Number = part.remaining_divisor
        if spec.how is How.NUMBER and part.contract.custom:
            # Already divided by the items of the global batch; only the engine's mean over ranks follows.
            weight = 1 / part.engine_divisor
        elif spec.how is How.NUMBER:
            # By the rule of the number that was passed.
            weight = part.mean_of(place, spec, next(iter(part.totals))) / counted
        elif spec.how is How.SUM:
            weight = 1 / (part.engine_divisor * part.world_size)
        counted_by = spec.rule if spec.how is How.ROUTER and self.counts else None
        if counted_by is not None and differ(counted, counted_by.count(self.inputs) * spec.ratio):
            # In the observed batch it counted padding.
            part.changed = f"{term.name} is not over every position, as it was in the observed batch"
        return weight

    def _of_mean(
        self, spec: TermSpec, found: Sequence[Term], rule: Items | None, planned: Number, *, known: bool
    ) -> tuple[Number, Number]:
        """The items that a mean has seen, and what it divides by, by its graph; ``known``: it was counted before."""
        term = found[0]
        is_function = term.divides and spec.counts == (len(term.factors) - 1,)
        divisor = _product(term, spec.counts) if spec.counts else planned
        if not is_function:
            if rule is None and self.counts and on_host(divisor) and math.isnan(divisor):
                self.part.changed = f"what divides {term.name} is nan"
            # A divisor that is itself a mean over no items.
            empty = not isinstance(divisor, Tensor) and math.isnan(divisor)
            divisor = divisor.nan_to_num(0.0) if isinstance(divisor, Tensor) else 0.0 if empty else divisor
        # 16 bits round the count.
        seen = planned if isinstance(divisor, Tensor) and divisor.dtype.itemsize < 4 else divisor
        below = None if spec.floor is None else term.factors[spec.counts[0]].below
        by_chance = below is None or (known and spec.floor is not None and spec.floor.read and differ(below, planned))
        if by_chance and spec.floor is not None and on_host(divisor) and divisor <= spec.floor.least:
            self.part.changed = f"{term.name} divides by its floor, and the count below it was not seen"
        elif below is not None:
            # No operation on a device, where nothing is compared.
            if on_host(divisor) and differ(kept(below, spec.floor), kept(divisor, None)):
                self.part.changed = f"{term.name} divides by another function of its count than in the observed batch"
            seen = planned if below.dtype.itemsize < 4 else below.to(count_dtype(below.device)).reshape(())
        elif spec.counts and (not is_function or (rule is not None and rule.entry is not None)):
            seen = self._unclamped(seen, found, spec, rule, known=known)
        if term.rows and self.counts and differ(seen, planned):
            self.part.changed = f"{term.name} is a mean over elements of a sample, not over the samples"
        for each in found:
            if each.learnt_nodes or not is_function:
                # The gradient of a custom mean over no items is 0 / 0.
                _keep_finite(each, divisor, self.part)
        return seen, divisor

    def _unclamped(
        self, seen: Number, found: Sequence[Term], spec: TermSpec, rule: Items | None, *, known: bool
    ) -> Tensor:
        """The items of a mean that hides their count, as by ``max(n, 1)``: 1 is none by all rules, or by its value."""
        device, values = self.loss.device, [v for each in found if (v := _value(each, self.values)) is not None]
        nothing = (torch.stack(values).sum() if len(values) == len(found) else self.loss) == 0
        # Samples without a target are counted by no rule.
        hides = rule is not None and not rule.marks and rule.entry is None
        # Labels may be masked once a window was counted.
        rules = [each for each in dict.fromkeys((rule, *spec.rules)) if each is not None]
        counts = [each.count(self.inputs, device) for each in rules if each.has_targets(self.inputs)]
        none = torch.stack(counts).amax(0) == 0 if counts else nothing
        one = on_host(nothing) and on_host(seen) and float(seen) == 1
        if one and (hides if bool(nothing) else not known or bool(none)):
            self.part.changed = f"{found[0].name} divides by 1: it has one target, or none and a divisor of at least 1"
        if counts:
            nothing = none | (nothing & (counts[0] != 1))
        return torch.as_tensor(seen, dtype=count_dtype(device), device=device) * ~(nothing & (seen == 1))


def _constant(term: Term, spec: TermSpec) -> float | None:
    """What a term is multiplied by, apart from counts and learnt factors; None: it is on a device, or zero."""
    counts = {*spec.counts, *spec.own}
    if term.divides and spec.how is not How.NUMBER:
        # A mean times its items over the number is a sum.
        counts.add(len(term.factors) - 1)
    if spec.place is None:
        # Of a sum over rows each has its own.
        counts.update(range(term.above, len(term.factors)))
    places = [place for place, each in enumerate(term.factors) if place not in counts and not each.learnt]
    if term.is_nothing or not all(on_host(term.factors[place].value) for place in places):
        return None
    divisor = float(_product(term, places))
    return 1 / divisor if divisor else None


def _product(term: Term, places: Sequence[int]) -> Number:
    """The product of a term's divisors in these places."""
    result: Number = 1.0
    for at in places:
        factor = term.factors[at]
        value: Number = factor.value
        if isinstance(value, Tensor):
            # An integer tensor divided by a Python number would be float32.
            value = value.detach() if value.is_floating_point() else value.to(count_dtype(value.device))
            value = value.reshape(()) if value.ndim else value
        if factor.divides:
            result = value if isinstance(result, float) and result == 1.0 else result * value
        else:
            result = result / value
    return result


def _keep_finite(term: Term, count: Number, part: Part) -> None:
    """Zero the gradient through a mean over no items, which would be 0 / 0."""
    if not isinstance(count, Tensor) and count > 0:
        return
    zero = _hook(lambda grad: _settled(grad, count == 0 if isinstance(count, Tensor) else True), part)
    term.leaf.register_prehook(zero)
    for node in term.learnt_nodes:
        # Only its outgoing gradients: other terms may have the same factor.
        node.register_hook(zero)


def _hooked(loss: Tensor, weights: Sequence[_Weight], values: Values | None, part: Part) -> Weighed:
    """Weight the loss by one base weight, and every term relative to that by a hook on its node."""
    rest = loss.detach().reshape(())
    total, tops = torch.zeros_like(rest), set[Any]()
    blank, known = dict[Any, Number](), list[tuple[Tensor, Number]]()
    leaves = [term.leaf for term, *_ in weights]
    # A shared node cannot have a hook for one term, so the base is that term's weight.
    base = next((weight for term, weight, _ in weights if _is_shared(term.top)), part.remaining_divisor)
    for term, weight, group in weights:
        value = _value(term, values)
        if value is None:
            blank[group] = weight
        else:
            known.append((value, weight))
            rest = rest - value
            total = total + _settled(value / _cast(weight, value), weight == math.inf)
        is_base = isinstance(weight, float) and isinstance(base, float) and weight == base
        # A hook sees the gradients of all terms that share its node.
        top = term.leaf if leaves.count(term.leaf) > 1 else term.top
        if top not in tops and not is_base and not _is_shared(top):
            tops.add(top)
            relative = weight if isinstance(base, float) and base == 1 else weight / base
            top.register_prehook(_scaled(relative, part))
    if added := part.contract.added is not None or any(term.added for term, *_ in weights):
        # A mean over no items hides what is added to it.
        hides = [each.isnan() & (weight == math.inf) for each, weight in known]
        rest = torch.where(torch.stack(hides).any(), part.contract.added or 0.0, rest) if hides else rest
    if added or blank:
        # Else the rest of the loss belongs to the terms without a value.
        of_blank = next(iter(blank.values())) if len(blank) == 1 else part.remaining_divisor
        of_rest = base if added else of_blank
        total = total + _settled(rest / _cast(of_rest, rest), of_rest == math.inf)
    return Weighed(loss / _cast(base, loss), total / part.engine_divisor)


def _is_shared(node: Any) -> bool:
    """Whether a node may get gradients of several terms: a parameter, or the parts of one."""
    return is_parameter(node) or has_several_outputs(node)


def _value(term: Term, values: Values | None) -> Tensor | None:
    """A term's part of the loss, 0-dim."""
    top = term.top
    # Of a vector of parameters the sum.
    value = top.variable.detach().sum() if is_parameter(top) else None if values is None else values.of(top)
    if value is not None:
        for factor in term.factors[: term.above]:
            value = value / factor.value if factor.divides else value * factor.value
    return None if value is None else value.reshape(())


def _scaled(weight: Number, part: Part) -> Callable[..., Any]:
    """A hook that divides gradients."""
    return _hook(lambda grad: (grad / _cast(weight, grad)).to(grad.dtype), part)


def _hook(change: Callable[[Tensor], Tensor], part: Part) -> Callable[..., Any]:
    """A hook that changes gradients; its failure leaves them as they are, and is reported: a backward has to end."""

    def changed(grads: Sequence[Tensor | None], *_: Any) -> tuple[Tensor | None, ...] | None:
        try:
            return tuple(None if grad is None else change(grad) for grad in grads)
        except Exception as error:
            part.changed = f"weighting one of its terms failed ({type(error).__name__}: {error})"
            return None

    return changed


def _cast(weight: Number, like: Tensor) -> Number:
    """A weight on the device of ``like``, in its precision, but at least float32."""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(like.device, like.dtype if like.dtype.itemsize > 2 else torch.float32)


def _settled(value: Tensor, nothing: Tensor | bool) -> Tensor:
    """A value, or zero where it counts nothing, since a mean over no items is nan."""
    if not isinstance(nothing, Tensor):
        return torch.zeros_like(value) if nothing else value
    return value.masked_fill(nothing.to(value.device), 0.0)
