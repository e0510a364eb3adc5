"""One loss in a window: the denominators of its micro-batches, and the divisors that were read from their graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.counting.items import Items, ZeroWeightBatch, as_weight, count_dtype
from hf_accum_fix.learning.contract import LossContract, Reduction, TermSpec
from hf_accum_fix.reading.nodes import Floor, on_host

#: A Python number, or a tensor of one element on the device.
Number = Tensor | float


@dataclass(eq=False)
class Part:
    """The micro-batches of one loss in a rank's window."""

    contract: LossContract  # how the loss is reduced
    #: N of the global batch, 0-dim: by rule, the one in use first; by the place of its `TermSpec` for a term that
    #: forwards have counted, which may be a sum of any weights.
    totals: Mapping[Items | int, Tensor]
    micro_batches: int  # G, of this rank's window; 1 where it has none
    world_size: int  # W
    #: the gradient is corrected at the end of the window by the sum of the divisors, so single ones may differ from the
    #: prediction; else a mean is weighted by its rule's items.
    is_corrected: bool = True
    engine_divisor: int = 1  # the number that the engine divides a loss by
    own: Mapping[Items | int, Tensor] = field(default_factory=dict)  # this rank's part of the totals
    #: how a micro-batch differed from the observed loss, in words; empty: it did not.
    changed: str = field(default="", init=False)
    mixed: bool = field(default=False, init=False)  # one had other terms
    share: float = field(default=1.0, init=False)  # of its micro-batch's samples, that now runs
    #: what each micro-batch divided a term by, and what that was planned to be, by the place of its `TermSpec`.
    counts: dict[int, list[tuple[Number, Number]]] = field(default_factory=dict, init=False)
    means: dict[int, Tensor] = field(default_factory=dict, init=False)  # as `mean_of` has found, by place
    #: the first micro-batch's constant factor of each term.
    constants: dict[int, float] = field(default_factory=dict, init=False)

    @cached_property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the global batch."""
        return self.micro_batches * self.world_size == 1

    @property
    def remaining_divisor(self) -> float:
        """Of what is averaged over micro-batches: the part of G that the engine does not divide a loss by."""
        return self.micro_batches / self.engine_divisor / self.share

    @cached_property
    def total(self) -> Tensor:
        """N of the rule in use, 0-dim."""
        return next(iter(self.totals.values()))

    @property
    def device(self) -> torch.device:
        """Of counts."""
        return self.total.device

    @cached_property
    def mean(self) -> Tensor:
        """n_mean = N / (G W) of the rule in use, 0-dim; N is at least 1, so that a loss over no items stays zero."""
        return self.total.clamp(min=1) / (self.micro_batches * self.world_size)

    @cached_property
    def number(self) -> Tensor:
        """num_items_in_batch for a loss that needs one: N / W, rounded up; it is multiplied by number / n_mean."""
        return (self.mean * self.micro_batches).ceil().long() if self.contract.hands_number else self.mean

    def mean_of(self, place: int, spec: TermSpec, rule: Items | int | None) -> Tensor:
        """n_mean of a term times `remaining_divisor`, as forwards have counted it or by ``rule``; None: as observed."""
        if place not in self.means:
            as_observed = (spec.counted[0] or 1.0) * self.micro_batches * self.world_size
            by_rule = torch.full_like(self.total, as_observed) if rule is None else self.totals[rule] * spec.ratio
            n = self.totals.get(place, by_rule)
            mean = kept(n, spec.floor) / (self.engine_divisor * self.world_size)
            self.means[place] = as_weight(mean, self.contract.dtype)
        return self.means[place]

    def scale_of(
        self, inputs: Mapping[str, Any], items: Mapping[Items | int, Tensor] | None, *, own_loss: bool = False
    ) -> tuple[Mapping[str, Any], Tensor | None, Tensor | float | None]:
        """How to run a micro-batch whose loss is not read (a contract given, compiled code): averaging is then exact.

        Args:
            inputs: the micro-batch; the scaled loss of a `ZeroWeightBatch` is zero, but for router terms.
            items: n by each rule, 0-dim; None: to be counted.
            own_loss: a compute_loss_func, which gets n_mean as the number, and a target where there is none.

        Returns:
            The inputs of its forward; num_items_in_batch, 0-dim (None: not passed); the factor of its loss (None: 1).
        """
        contract, mean, number = self.contract, self.mean, self.number
        if isinstance(inputs, ZeroWeightBatch):
            return *self.scale_of(dict(inputs), items, own_loss=own_loss)[:2], 0.0
        if contract.by_number and not own_loss:
            return inputs, number, number / mean
        if contract.reduction in (Reduction.PLAIN, Reduction.WINDOW):
            return inputs, number if contract.items else None, None
        if contract.reduction is Reduction.SUM:
            return inputs, number, self.micro_batches * self.world_size
        assert contract.items is not None
        n = (contract.items.count(inputs) if items is None else items[contract.items]).to(self.device)
        # Heads with lists of targets divide by at least 1.
        least = n if contract.items.entry is None else n.clamp(min=1.0)
        ratio = (n > 0) * 1.0 if contract.by_number else least / mean
        return contract.items.with_target(inputs, n), as_weight(mean, contract.dtype), ratio

    def note_constant(self, place: int, what: str, constant: float) -> None:
        """Compare a constant of a term with that of the window's first micro-batch; ``what``: it is, in words."""
        first = self.constants.setdefault(place, constant)
        if abs(constant - first) > 1e-6 * abs(first):
            self.changed = f"{what} {first:g} and {constant:g} in two of its micro-batches"

    def note(self, place: int, seen: Number, planned: Number) -> None:
        """Add the divisor of one term of a micro-batch, and what was planned; ``place``: of its `TermSpec`."""
        self.counts.setdefault(place, []).append((seen, planned))

    @property
    def latest(self) -> dict[int, Number]:
        """The divisors of the last micro-batch, by the place of their `TermSpec`."""
        return {place: seen for place, [*_, (seen, _)] in self.counts.items()}

    @property
    def counted(self) -> bool:
        """Whether one count of the window was taken, which can correct its gradient."""
        return bool(self.counts) and self.contract.groups <= 1

    def summed(self) -> Tensor:
        """Items seen, and items planned, of this rank's window: [2] on the device."""
        if not self.counted:
            return torch.zeros(2, dtype=count_dtype(self.device), device=self.device)
        place = next(iter(self.counts))
        counts, spec = self.divisors(place).sum(1), self.contract.terms[place] if self.contract.terms else TermSpec(())
        # A copy of a micro-batch may have other targets than were counted; one that has other terms is none of these.
        by_rule = None if spec.rule is None else self.own.get(spec.rule)
        planned = self.own.get(place, None if by_rule is None else scaled(by_rule, spec.ratio))
        if planned is None or len(self.counts[place]) < self.micro_batches:
            return counts
        return torch.stack([counts[0], planned])

    def broken(self) -> Tensor | None:
        """Whether terms divided by other items than planned, 0-dim on the device; None: one count, or none."""
        places, terms, flags = [*self.counts], self.contract.terms, list[Tensor]()
        for place in places[int(self.counted and self.is_corrected) :]:
            seen, planned = self.divisors(place)
            if self.counted and self.is_corrected:
                # Terms of one weight have to divide by the same items in every micro-batch.
                ratio, of_first = (terms[at].ratio if terms else 1.0 for at in (place, places[0]))
                planned = self.divisors(places[0])[0] * (ratio / of_first)
            elif self.is_corrected:
                seen, planned = seen.sum(), planned.sum()
            flags.append(((seen - planned).abs() > 1e-6 * planned.abs()).any())
        return torch.stack(flags).any() if flags else None

    def divisors(self, place: int) -> Tensor:
        """The divisors of a term in all micro-batches, and what they were planned to be: [2, micro-batches]."""
        return torch.stack([_stacked(each, self.device) for each in zip(*self.counts[place], strict=True)])


def scaled(count: Tensor, ratio: float) -> Tensor:
    """A count by a rule, times its ratio."""
    return count if ratio == 1.0 else count * ratio


def kept(count: Any, floor: Floor | None) -> Any:
    """What a loss divides by that counts so many; one over no items is weighted as one over a single item."""
    if not isinstance(count, Tensor):
        return (count if floor is None else floor.over(count)) or 1.0
    divisor = count if floor is None else (count + floor.more).clamp(min=floor.least)
    return torch.where(divisor == 0, 1.0, divisor)


def _stacked(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Numbers as one tensor, by as few operations as their dtypes allow."""
    dtype = count_dtype(device)
    if not any(isinstance(each, Tensor) for each in numbers):
        return torch.tensor(numbers, dtype=dtype, device=device)
    tensors = [torch.as_tensor(each, device=device) for each in numbers]
    alike = len({each.dtype for each in tensors}) == 1
    return torch.stack(tensors if alike else [each.to(dtype) for each in tensors]).to(dtype)


def differ(seen: Number, predicted: Number) -> bool:
    """Whether two counts differ, beyond rounding; False for numbers on a device, which are not read."""
    return on_host(seen) and on_host(predicted) and abs(float(seen) - float(predicted)) > 1e-6 * abs(float(predicted))
