"""Weight a micro-batch's loss, so that the plain mean over micro-batches and ranks is the global batch's.

The loss of each micro-batch is read from its graph (`loss_graph`). A term that divides by d is multiplied by

    d / n_mean        n_mean = N / (G W)    of the items that this term counts (`items`)

whatever d is. If all terms have one weight, the loss is scaled; else each term has a hook on its node. Weights are kept
as divisors, n_mean / d: where all micro-batches are alike that is G, and the division is bitwise upstream's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hf_accum_fix.accumulation.contract import How, LossContract, Reduction, TermSpec
from hf_accum_fix.accumulation.items import Items, count_dtype
from hf_accum_fix.accumulation.loss_graph import Term, has_several_outputs, on_host, read, without_nothing
from hf_accum_fix.accumulation.per_sample import sum_of_samples
from hf_accum_fix.accumulation.scaling import Normalizer
from hf_accum_fix.accumulation.values import Captured, Values

#: A Python number, or a tensor of one element on the device.
Number = Tensor | float


@dataclass
class WindowCheck:
    """The divisors of one window on one rank, and their predictions.

    Attributes:
        contract: of their loss.
        is_corrected: the gradient is corrected by their sum, so single ones may differ from the prediction.
        changed: how a micro-batch differed from the observed loss, in words; empty: it did not.
        other_terms: the shapes of its terms, where it had others than that.
        plain_log: a micro-batch's values were not captured, so the log is the mean over micro-batches.
    """

    contract: LossContract
    is_corrected: bool = True
    changed: str = ""
    other_terms: tuple[Any, ...] = ()
    plain_log: bool = False
    _seen: dict[int, list[Number]] = field(default_factory=dict)
    _predicted: dict[int, list[Number]] = field(default_factory=dict)
    _unpredicted: set[int] = field(default_factory=set)
    _constants: dict[int, float] = field(default_factory=dict)

    def note_constant(self, place: int, term: Term, constant: float) -> None:
        """Compare a term's constant factors with those of the window's first micro-batch; ``place`` as for `note`."""
        first = self._constants.setdefault(place, constant)
        if abs(constant - first) > 1e-6 * abs(first):
            self.changed = f"{term.name} is multiplied by {first:g} and by {constant:g} in two of its micro-batches"

    def note(self, place: int, seen: Number, predicted: Number) -> None:
        """Add the divisor of one term of a micro-batch, and its prediction; ``place``: of its `TermSpec`."""
        if self.contract.groups > 1 and place not in self._seen and _differ(seen, predicted):
            # One number cannot correct several terms: the window's first micro-batch decides whether its rule fits.
            self._unpredicted.add(place)
        self._seen.setdefault(place, []).append(seen)
        self._predicted.setdefault(place, []).append(predicted)

    def first(self, place: int, seen: Number) -> Number:
        """The divisor of the window's first micro-batch; ``seen``: of this one, in case it is the first."""
        return self._seen[place][0] if place in self._seen else seen

    def is_unpredicted(self, place: int) -> bool:
        """Whether no rule counts a term in this window, so that it gets the plain mean over micro-batches."""
        return place in self._unpredicted

    @property
    def is_unlike(self) -> bool:
        """Whether a micro-batch has other terms than observed, or the window's first one other items than predicted."""
        return bool(self.other_terms or self._unpredicted)

    @property
    def latest(self) -> Mapping[int, Number]:
        """The divisors of the last micro-batch, by the place of their `TermSpec`."""
        return {place: each[-1] for place, each in self._seen.items()}

    @property
    def counted(self) -> bool:
        """Whether one count of the window was taken, which can correct its gradient."""
        return bool(self._seen) and self.contract.groups <= 1

    def counts(self, device: torch.device) -> Tensor:
        """Items seen, and items predicted, of this rank's window: [2] on ``device``."""
        place = next(iter(self._seen), None)
        if place is None or not self.counted:
            return torch.zeros(2, dtype=count_dtype(device), device=device)
        return torch.stack([_stacked(each[place], device).sum() for each in (self._seen, self._predicted)])

    def broken(self, device: torch.device) -> Tensor | None:
        """Whether terms divided by other items than predicted, 0-dim on the device; None: one count, or none."""
        corrected = self.counted and self.is_corrected
        flags = []
        for place in [*self._seen][int(corrected) :]:
            seen = _stacked(self._seen[place], device)
            wanted = _stacked(self._predicted[place], device)
            if corrected:
                # Terms of one weight have to divide by the same items in every micro-batch.
                first, ratio = next(iter(self._seen)), self.contract.terms[place].ratio
                wanted = _stacked(self._seen[first], device) * (ratio / self.contract.terms[first].ratio)
            if self.is_corrected and not corrected:
                seen, wanted = seen.sum(), wanted.sum()
            flags.append(((seen - wanted).abs() > 1e-6 * wanted.abs()).any())
        return torch.stack(flags).any() if flags else None


def _read(number: Number) -> Number:
    """A Python number, unless it is on a device, where reading waits."""
    return float(number) if on_host(number) else number


def _is_nan(number: Number) -> bool:
    """Whether a number is nan; False for one on a device, which is not read."""
    return on_host(number) and math.isnan(float(number))


def _differ(seen: Number, predicted: Number) -> bool:
    """Whether two counts differ, beyond rounding; False for numbers on a device, which are not read."""
    return on_host(seen) and on_host(predicted) and abs(float(seen) - float(predicted)) > 1e-6 * abs(float(predicted))


def _stacked(counts: Sequence[Number], device: torch.device) -> Tensor:
    dtype = count_dtype(device)
    if not any(isinstance(each, Tensor) for each in counts):
        return torch.tensor([float(each) for each in counts], dtype=dtype, device=device)
    tensors = [torch.as_tensor(each, device=device) for each in counts]
    alike = len({each.dtype for each in tensors}) == 1
    return torch.stack(tensors if alike else [each.to(dtype) for each in tensors]).to(dtype)


@dataclass(frozen=True)
class Weighed:
    """A micro-batch's weighted loss.

    Attributes:
        loss: for the engine's backward, 0-dim, with gradient.
        value: its part of the window's logged loss, 0-dim.
        keeps_scale: it keeps the stock Trainer's scale (see `scaled`).
        hooks: on the nodes of single terms.
    """

    loss: Tensor
    value: Tensor
    keeps_scale: bool = False
    hooks: Sequence[RemovableHandle] = ()

    def unhook(self) -> None:
        """Remove its hooks, before the loss is weighted again."""
        for hook in self.hooks:
            hook.remove()

    def scaled(self, stock: float, micro_batches: int) -> tuple[Tensor, Tensor]:
        """Loss and value with the stock Trainer's scale, ``stock``."""
        return self.loss * (stock * micro_batches), self.value * (stock * micro_batches)


@dataclass(frozen=True)
class Part:
    """The micro-batches of one loss in a window.

    Attributes:
        contract: how their loss is reduced.
        normalizer: n_mean, G and W.
        check: of their divisors.
    """

    contract: LossContract
    normalizer: Normalizer
    check: WindowCheck


@dataclass(frozen=True)
class Counted:
    """A micro-batch.

    Attributes:
        inputs: of its forward.
        items: by every rule, 0-dim; by the place of its `TermSpec` for a term that an earlier forward has counted.
        zero_weight: it counts nothing.
    """

    inputs: Mapping[str, Any]
    items: Mapping[Items | int, Tensor]
    zero_weight: bool = False

    def predicted(self, place: int, spec: TermSpec) -> Tensor | None:
        """The count of a term; None: it has no rule, or these are other inputs than the rules have counted."""
        if place in self.items or spec.rule is None:
            return self.items.get(place)
        return spec.scaled(self.items.get(spec.rule))


def weigh(loss: Tensor, part: Part, counted: Counted, captured: Captured) -> Weighed:
    """Weight the loss of a micro-batch, before its backward, and add its terms' divisors to the part's check.

    ``captured``: of its forward.
    """
    contract, normalizer, zero_weight = part.contract, part.normalizer, counted.zero_weight
    if (rule := contract.items) is not None and rule.per_sample:
        # The sum of sample means over n_mean samples.
        count = 0.0 if zero_weight else rule.count(counted.inputs, normalizer.mean.device)
        part.check.note(0, count, 0.0 if zero_weight else counted.items.get(rule, count))
        weight = math.inf if zero_weight else normalizer.means[rule]
        return _ready(sum_of_samples(loss, rule, counted.inputs), weight, normalizer)
    left = normalizer.remaining_divisor
    if normalizer.is_whole and not zero_weight and not any(each.own for each in contract.terms):
        return _ready(loss, left, normalizer)
    if contract.keeps_scale:
        return _ready(loss, math.inf if zero_weight else left, normalizer, keeps_scale=True)
    terms = without_nothing(read(loss, captured.routers, inside=contract.inside, deep=contract.deep))
    matched = _matched(terms, contract.terms)
    if matched is None and terms and all(term.is_nothing for term in terms):
        # As in `logits.sum() * 0`, where there is no target.
        matched = [(spec, []) for spec in contract.terms]
    if matched is None and zero_weight:
        return _ready(loss, math.inf, normalizer)
    if matched is None:
        names = sorted({each.name for each in terms}) or ["none with a gradient"]
        part.check.other_terms = tuple(each.shape for each in terms)
        part.check.changed = f"its loss has other terms than the observed one: {', '.join(names)}"
        # A trainer that scales its loss itself still does.
        scales = any(each.own or (each.how is How.NUMBER and contract.custom) for each in contract.terms)
        return _ready(loss, left, normalizer, keeps_scale=scales)
    weighing = _Weighing(loss, part, counted, captured.values, len(terms) == 1 and not contract.added)
    weights: list[tuple[Term, Number, TermSpec]] = []
    for place, (spec, found) in enumerate(matched):
        if found:
            weight = weighing.weight(place, spec, found)
            weights += [(term, weight, spec) for term in found]
        elif spec.how is How.MEAN:
            predicted = None if zero_weight else counted.predicted(place, spec)
            part.check.note(place, 0.0, 0.0 if predicted is None else predicted)
    if not weights:
        return _ready(loss, math.inf, normalizer)
    if contract.groups == 1 and not contract.added:
        return _ready(loss, weights[0][1], normalizer)
    part.check.plain_log = part.check.plain_log or captured.values is None
    return _hooked(loss, weights, None if part.check.plain_log else captured.values, normalizer, added=contract.added)


def unlike_declared(loss: Tensor, contract: LossContract, items: Number | None, normalizer: Normalizer) -> str:
    """How the graph of a loss of n ``items`` contradicts the contract given for it, in words; empty: it does not."""
    terms = read(loss)
    if contract.reduction not in (Reduction.MEAN, Reduction.NUMBER) or not terms:
        return ""
    if len(terms) > 1:
        return f"is a sum of {len(terms)} terms"
    term, count = terms[0], items if contract.reduction is Reduction.MEAN else normalizer.mean
    if not term.readable:
        # A custom autograd function cannot be read.
        is_own = isinstance(term.leaf, torch.autograd.function.BackwardCFunction)
        return "" if is_own else f"contains {term.name}"
    divisors = [each.value for each in term.factors if each.divides and on_host(each.value)]
    if count is None or not on_host(count) or len(divisors) < sum(each.divides for each in term.factors):
        return ""
    # A sum may be divided by its count below; a mean over classes divides by a multiple of the items.
    times = [float(each) / float(count) if float(count) else 1.0 for each in divisors]
    shows = not times or any(each > 0.5 and not _differ(each, round(each)) for each in times)
    return "" if shows else f"divides {term.name} by {', '.join(f'{float(each):g}' for each in divisors)}"


def _ready(loss: Tensor, weight: Number, normalizer: Normalizer, *, keeps_scale: bool = False) -> Weighed:
    """A loss divided by one weight, in a new tensor: DeepSpeed (stage 0) hangs hooks on the model's output."""
    weighed = loss / _cast(weight, loss)
    value = _settled(weighed.detach(), weight == math.inf)
    value = value if normalizer.engine_divisor == 1 else value / normalizer.engine_divisor
    return Weighed(weighed, value, keeps_scale)


def covers(specs: Sequence[TermSpec], shapes: Sequence[Any]) -> bool:
    """Whether terms of these shapes are those of a contract, or some of them."""
    found, known = Counter(shapes), Counter(spec.shape for spec in specs)
    one_by_one = {spec.shape for spec in specs if spec.place is not None}
    return bool(found) and all(
        shape in known and (shape not in one_by_one or count == known[shape]) for shape, count in found.items()
    )


def _matched(terms: Sequence[Term], specs: Sequence[TermSpec]) -> list[tuple[TermSpec, list[Term]]] | None:
    """The terms of every spec; None: some fit no spec, or cannot be distinguished."""
    if not covers(specs, [term.shape for term in terms]):
        return None
    by_shape: dict[Any, list[Term]] = {}
    for term in terms:
        by_shape.setdefault(term.shape, []).append(term)
    alike = [(spec, by_shape.get(spec.shape, [])) for spec in specs]
    return [(spec, found if spec.place is None else found[spec.place : spec.place + 1]) for spec, found in alike]


@dataclass(frozen=True)
class Counts:
    """The divisor of one mean of a micro-batch.

    Attributes:
        divisor: in its graph; ``seen``: the same, or its items where it divides by num_items_in_batch.
        is_custom: no torch loss function divides, so the gradient of a mean over no items is 0 / 0.
        unclear: a divisor of at least 1 hides whether there is one item or none.
    """

    divisor: Number
    seen: Number
    predicted: Number
    is_custom: bool
    unclear: bool = False


@dataclass(frozen=True)
class _Weighing:
    """The terms of one micro-batch's loss, as they are weighted.

    Attributes:
        values: of the terms; None: not captured.
        alone: the loss has one term.
    """

    loss: Tensor
    part: Part
    counted: Counted
    values: Values | None
    alone: bool

    def weight(self, place: int, spec: TermSpec, found: Sequence[Term]) -> Number:
        """What to divide a term, or its rows, by; ``place``: of its `TermSpec`."""
        check, term, zero_weight = self.part.check, found[0], self.counted.zero_weight
        counts = self._counts(place, spec, found) if spec.how is How.MEAN else None
        if counts is not None:
            noted = (0.0, 0.0) if zero_weight else (counts.seen, counts.predicted)
            check.note(place, *noted)
            if term.rows and _differ(*noted):
                check.changed = f"{term.name} is a mean over elements of a sample, not over the samples"
            if counts.unclear:
                check.changed = f"{term.name} divides by 1: it has one target, or none and a divisor of at least 1"
        if spec.how is How.ROUTER and spec.counts and spec.rule is not None:
            items = spec.rule.count(self.counted.inputs) * spec.ratio
            if _differ(_product(term, spec.counts), items):
                # In the observed batch it counted padding.
                check.changed = f"{term.name} is not over every position, as it was in the observed batch"
        if (constant := _constant(term, spec)) is not None and not zero_weight:
            check.note_constant(place, term, constant)
        for each in found:
            if spec.how is How.PLAIN and spec.counts:
                _keep_finite(each, _read(_product(each, spec.counts)))
            elif counts is not None and (counts.is_custom or each.path.learnt):
                _keep_finite(each, counts.divisor)
        return self._divisor(place, spec, term, counts)

    @property
    def device(self) -> torch.device:
        """Of counts."""
        return self.part.normalizer.mean.device

    def _rule(self, spec: TermSpec) -> Items | None:
        if spec.rule is not None:
            return spec.rule
        return None if self.part.normalizer.is_corrected else self.part.contract.items

    def _counts(self, place: int, spec: TermSpec, found: Sequence[Term]) -> Counts:
        """The divisor of a mean."""
        term, rule, counted = found[0], self._rule(spec), self.counted
        items = counted.predicted(place, spec)
        if items is None and rule is not None:
            known = counted.items.get(rule)
            items = spec.scaled(rule.count(counted.inputs, self.device) if known is None else known)
        by_rule: Number = spec.count if items is None else items
        divisor = _product(term, spec.counts) if spec.counts else by_rule
        is_function = term.divides and spec.counts == (len(term.factors) - 1,)
        if not is_function and term.divides and _is_nan(divisor) and not _is_nan(term.factors[-1].value):
            # A weight that is itself a mean over no items; the term has items.
            self.part.check.changed = f"{term.name} is weighted by a number that is nan in one of its micro-batches"
        if not is_function and isinstance(divisor, Tensor) and divisor.is_floating_point():
            # A divisor that is itself a mean over no items.
            divisor = divisor.nan_to_num(0.0)
        elif isinstance(divisor, float) and math.isnan(divisor):
            divisor = 0.0
        # 16 bits round the count.
        seen = by_rule if isinstance(divisor, Tensor) and divisor.dtype.itemsize < 4 else divisor
        if rule is not None and rule.entry is not None:
            # Heads with lists of targets divide by at least 1.
            seen = seen if float(rule.count(counted.inputs)) else 0.0
        elif not is_function and spec.counts:
            return self._clamped(Counts(divisor, seen, by_rule, is_custom=True), found, rule, items)
        return Counts(divisor, seen, by_rule, not is_function)

    def _clamped(self, counts: Counts, found: Sequence[Term], rule: Items | None, items: Number | None) -> Counts:
        """The divisor of a custom mean, which may be clamped to at least 1, and then counts 0 where it is 1."""
        term, seen = found[0], counts.seen
        value = None if len(found) > 1 else _value(term, self.values)
        is_own = value is not None or (self.alone and not term.path.added)
        hidden = nothing = (self.loss if value is None else value) == 0
        if rule is not None:
            of_rule = torch.as_tensor(counts.predicted, device=self.loss.device)
            # One item can have a loss of zero.
            hidden = nothing & (of_rule > 0)
            nothing = (nothing & (of_rule != 1)) if is_own else (of_rule == 0) | (nothing & (of_rule != 1))
        readable = on_host(hidden) and on_host(seen)
        # Without a rule a divisor of at least 1 hides whether there is one item or none, unless the value tells; a loss
        # that was changed in place has lost that.
        is_lost = not is_own and len(found) == 1
        unknown = rule is None and (is_lost or (items is None and not (readable and bool(nothing))))
        unclear = readable and float(seen) == 1 and (bool(hidden) or unknown)
        dtype = seen.dtype if isinstance(seen, Tensor) else count_dtype(self.loss.device)
        seen = torch.as_tensor(seen, dtype=dtype, device=self.loss.device)
        return replace(counts, seen=seen * ~(nothing & (seen == 1)), unclear=unclear)

    def _divisor(self, place: int, spec: TermSpec, term: Term, counts: Counts | None) -> Number:
        """What to divide a term by, so that its sum over micro-batches, averaged over ranks, is exact."""
        normalizer, contract = self.part.normalizer, self.part.contract
        if self.counted.zero_weight and spec.how in (How.MEAN, How.NUMBER, How.SUM):
            return math.inf
        own, left = _product(term, spec.own), normalizer.remaining_divisor
        if spec.how is How.NUMBER and contract.custom:
            # Already divided by the items of the global batch; only the engine's mean over ranks follows.
            return left / normalizer.micro_batches / own
        if spec.how is How.NUMBER:
            assert contract.items is not None
            return normalizer.means[contract.items] / _product(term, spec.counts) / own
        if counts is None:
            parts = normalizer.micro_batches * normalizer.world_size if spec.how is How.SUM else 1
            weight: Number = left / parts / own
            empty = _read(_product(term, spec.counts)) == 0 if spec.how is How.PLAIN and spec.counts else False
            return torch.where(empty, math.inf, weight) if isinstance(empty, Tensor) else math.inf if empty else weight
        if self.part.check.is_unpredicted(place):
            return left / own
        rule = self._rule(spec)
        by_rule = None if rule is None else spec.scaled(normalizer.means[rule])
        n_mean = normalizer.means.get(place, by_rule)
        mean: Number = spec.count * left if n_mean is None else n_mean
        # Without a correction at the end, weights have to use the predicted counts.
        count = counts.divisor if normalizer.is_corrected else counts.predicted
        weight = mean / count if isinstance(count, Tensor) or count else math.inf
        return weight / own if spec.own else weight


def _constant(term: Term, spec: TermSpec) -> float | None:
    """What a term is multiplied by, apart from counts and learnt factors; None: it is on a device, or zero."""
    counts = {*spec.counts, *spec.own}
    if term.divides:
        # Of a sum over rows each has its own.
        counts.add(len(term.factors) - 1)
    places = [place for place, each in enumerate(term.factors) if place not in counts and not each.learnt]
    if term.is_nothing or not all(on_host(term.factors[place].value) for place in places):
        return None
    divisor = float(_product(term, places))
    return 1 / divisor if divisor else None


def _product(term: Term, places: Sequence[int]) -> Number:
    """The product of a term's divisors in these places."""
    result: Number = 1.0
    for factor in (term.factors[at] for at in places):
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


def _keep_finite(term: Term, count: Number) -> None:
    """Zero the gradient through a mean over no items, which would be 0 / 0."""
    if not isinstance(count, Tensor) and count > 0:
        return

    def zero(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        nothing = count == 0 if isinstance(count, Tensor) else True
        return tuple(None if grad is None else _settled(grad, nothing) for grad in grads)

    term.leaf.register_prehook(zero)
    for node in term.path.learnt:
        # Only its outgoing gradients: other terms may have the same factor.
        node.register_hook(lambda grads, _: zero(grads))


def _hooked(
    loss: Tensor,
    weights: Sequence[tuple[Term, Number, TermSpec]],
    values: Values | None,
    normalizer: Normalizer,
    *,
    added: bool,
) -> Weighed:
    """Weight the loss by one base weight, and every term relative to that by a hook on its node."""
    rest, hooks = loss.detach(), list[RemovableHandle]()
    total, tops = torch.zeros_like(rest), set[Any]()
    blank: dict[Any, Number] = {}
    leaves = [term.leaf for term, *_ in weights]
    # A shared node cannot have a hook for one term, so the base is that term's weight.
    base = next((weight for term, weight, _ in weights if _is_shared(term.path.top)), normalizer.remaining_divisor)
    for term, weight, spec in weights:
        value = _value(term, values)
        if value is None:
            blank[spec.group] = weight
        else:
            rest = rest - value
            total = total + _settled(value / _cast(weight, value), weight == math.inf)
        is_base = isinstance(weight, float) and isinstance(base, float) and weight == base
        # A hook sees the gradients of all terms that share its node.
        top = term.leaf if leaves.count(term.leaf) > 1 else term.path.top
        if top not in tops and not is_base and not _is_shared(top):
            tops.add(top)
            relative = weight if isinstance(base, float) and base == 1 else weight / base
            hooks.append(top.register_prehook(_scaled(relative)))
    if added or blank:
        # The rest of the loss belongs to the terms without a value.
        [of_rest] = [base] if added else blank.values() if len(blank) == 1 else [normalizer.remaining_divisor]
        total = total + _settled(rest / _cast(of_rest, rest), of_rest == math.inf)
    total = total if normalizer.engine_divisor == 1 else total / normalizer.engine_divisor
    return Weighed(loss / _cast(base, loss), total, hooks=hooks)


def _is_parameter(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_shared(node: Any) -> bool:
    """Whether a node may get gradients of several terms: a parameter, or the parts of one."""
    return _is_parameter(node) or has_several_outputs(node)


def _value(term: Term, values: Values | None) -> Tensor | None:
    """A term's part of the loss, 0-dim."""
    top = term.path.top
    value = top.variable.detach() if _is_parameter(top) else None if values is None else values.of(top)
    if value is not None:
        for factor in term.factors[: term.path.above]:
            value = value / factor.value if factor.divides else value * factor.value
    return value


def _scaled(weight: Number) -> Any:
    def scale(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else (grad / _cast(weight, grad)).to(grad.dtype) for grad in grads)

    return scale


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
