"""One loss in a window: the denominators of its micro-batches, and the divisors that were read from their graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import LossContract
from hf_accum_fix.accumulation.items import Items, count_dtype, mean_item_count
from hf_accum_fix.accumulation.loss_graph import Term
from hf_accum_fix.accumulation.nodes import on_host

#: A Python number, or a tensor of one element on the device.
Number = Tensor | float


@dataclass(eq=False)
class Part:
    """The micro-batches of one loss in a rank's window.

    Attributes:
        contract: how the loss is reduced.
        totals: N of the global batch, 0-dim: by rule, the one in use first; by the place of its `TermSpec` for a term
            that forwards have counted, which may be a sum of any weights.
        micro_batches: G, of this rank's window; 1 where it has none.
        world_size: W.
        is_corrected: the gradient is corrected at the end of the window by the sum of the divisors, so single ones may
            differ from the prediction; else a mean is weighted by its rule's items.
        engine_divisor: the number that the engine divides a loss by.
        remaining_divisor: the part of G that the engine does not divide a loss by.
        is_whole: one micro-batch is the global batch.
        device: of counts.
        mean: n_mean, 0-dim.
        number: num_items_in_batch for a loss that needs one: N / W, rounded up; it is multiplied by number / n_mean.
        means: n_mean times `remaining_divisor`, by rule and place as ``totals``.
        changed: how a micro-batch differed from the observed loss, in words; empty: it did not.
        mixed: one had other terms.
    """

    contract: LossContract
    totals: Mapping[Items | int, Tensor]
    micro_batches: int
    world_size: int
    is_corrected: bool = True
    engine_divisor: int = 1
    changed: str = field(default="", init=False)
    mixed: bool = field(default=False, init=False)
    #: Divisor and prediction of each micro-batch, and the first one's constant factor, by the place of a `TermSpec`.
    _noted: dict[int, list[tuple[Number, Number]]] = field(default_factory=dict, init=False)
    _constants: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        steps = self.micro_batches = max(self.micro_batches, 1)
        self.is_whole, self.remaining_divisor = steps * self.world_size == 1, steps / self.engine_divisor
        rules = {key: n for key, n in self.totals.items() if isinstance(key, Items)}
        means = {rule: mean_item_count(n, steps, self.world_size) for rule, n in rules.items()}
        self.mean, left = next(iter(means.values())), self.remaining_divisor
        self.device = self.mean.device
        self.number = (self.mean * steps).ceil().long() if self.contract.hands_number else self.mean
        parts, places = self.engine_divisor * self.world_size, self.totals.keys() - rules.keys()
        self.means: dict[Items | int, Tensor] = {
            **{rule: self.contract.as_number(mean if left == 1 else mean * left) for rule, mean in means.items()},
            **{at: self.contract.as_number(torch.where((n := self.totals[at]) == 0, 1.0, n) / parts) for at in places},
        }

    def note_constant(self, place: int, term: Term, constant: float) -> None:
        """Compare a term's constant factors with those of the window's first micro-batch; ``place`` as for `note`."""
        first = self._constants.setdefault(place, constant)
        if abs(constant - first) > 1e-6 * abs(first):
            self.changed = f"{term.name} is multiplied by {first:g} and by {constant:g} in two of its micro-batches"

    def note(self, place: int, seen: Number, predicted: Number) -> None:
        """Add the divisor of one term of a micro-batch, and its prediction; ``place``: of its `TermSpec`."""
        self._noted.setdefault(place, []).append((seen, predicted))

    def plan(self, each: Sequence[Mapping[Items | int, Tensor]]) -> None:
        """Add what the predictions lack of the window's N, since copies of micro-batches may have other targets."""
        for place, noted in self._noted.items():
            spec = self.contract.terms[place] if self.contract.terms else None
            if spec is not None and spec.rule is not None:
                by_rule = torch.stack([items[spec.rule] for items in each]).sum() * spec.ratio
                by_place = [items[place] for items in each if place in items]
                planned = (torch.stack(by_place).sum() if by_place else by_rule).to(self.device)
                noted.append((0.0, planned - self._stacked(place, 1).sum()))

    @property
    def total(self) -> Tensor:
        """N of the rule in use, 0-dim."""
        return next(iter(self.totals.values()))

    @property
    def latest(self) -> Mapping[int, Number]:
        """The divisors of the last micro-batch, by the place of their `TermSpec`."""
        return {place: noted[-1][0] for place, noted in self._noted.items()}

    def is_unpredicted(self, place: int) -> bool:
        """Whether no rule counts a term in this window, so that it gets the plain mean over micro-batches.

        One number cannot correct several terms: the window's first micro-batch decides whether its rule fits.
        """
        return self.contract.groups > 1 and place in self._noted and differ(*self._noted[place][0])

    @property
    def counted(self) -> bool:
        """Whether one count of the window was taken, which can correct its gradient."""
        return bool(self._noted) and self.contract.groups <= 1

    def counts(self) -> Tensor:
        """Items seen, and items predicted, of this rank's window: [2] on the device."""
        if not self.counted:
            return torch.zeros(2, dtype=count_dtype(self.device), device=self.device)
        first = next(iter(self._noted))
        return torch.stack([self._stacked(first, of).sum() for of in (0, 1)])

    def broken(self) -> Tensor | None:
        """Whether terms divided by other items than predicted, 0-dim on the device; None: one count, or none."""
        corrected = self.counted and self.is_corrected
        places, terms, flags = [*self._noted], self.contract.terms, list[Tensor]()
        for place in places[int(corrected) :]:
            seen, wanted = self._stacked(place, 0), self._stacked(place, 1)
            if corrected:
                # Terms of one weight have to divide by the same items in every micro-batch.
                ratio, of_first = (terms[at].ratio if terms else 1.0 for at in (place, places[0]))
                wanted = self._stacked(places[0], 0) * (ratio / of_first)
            if self.is_corrected and not corrected:
                seen, wanted = seen.sum(), wanted.sum()
            flags.append(((seen - wanted).abs() > 1e-6 * wanted.abs()).any())
        return torch.stack(flags).any() if flags else None

    def _stacked(self, place: int, of: int) -> Tensor:
        """The divisors of a term in all micro-batches (``of``: 0), or their predictions (1)."""
        counts, dtype = [noted[of] for noted in self._noted[place]], count_dtype(self.device)
        if not any(isinstance(each, Tensor) for each in counts):
            return torch.tensor([float(each) for each in counts], dtype=dtype, device=self.device)
        tensors = [torch.as_tensor(each, device=self.device) for each in counts]
        alike = len({each.dtype for each in tensors}) == 1
        return torch.stack(tensors if alike else [each.to(dtype) for each in tensors]).to(dtype)


def differ(seen: Number, predicted: Number) -> bool:
    """Whether two counts differ, beyond rounding; False for numbers on a device, which are not read."""
    return on_host(seen) and on_host(predicted) and abs(float(seen) - float(predicted)) > 1e-6 * abs(float(predicted))
