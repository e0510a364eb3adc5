"""Hold what was observed of a loss against every micro-batch that is trained, on the device and without waiting.

For a loss that is made of loss calls (`Composition`) two things are kept of each micro-batch: the items that its calls
counted, beside the items that the rule counted before the window was run; and what of the loss is not made of the
calls. The window is exact if that rest is the same in all micro-batches (nothing, or a penalty), and if the items seen
are the items predicted. Where they differ, the gradient is ``N seen / N predicted`` times the right one, and can be
divided by that before the optimizer sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.contract import Composition, LossContract
from hf_accum_fix.accumulation.loss_calls import LossCall
from hf_accum_fix.accumulation.window import Items, count_dtype


@dataclass
class Certificate:
    """What the micro-batches of one window on one rank have shown.

    Attributes:
        contract: what was observed of the loss.
        constant: a trainer adds something to the loss that no micro-batch weighs.
        changed: what a micro-batch did that the observation did not show, in words; empty: nothing that can be told
            without reading the device.
    """

    contract: LossContract
    constant: bool = False
    changed: str = ""
    _seen: list[Tensor] = field(default_factory=list)
    _predicted: list[Tensor] = field(default_factory=list)
    _rests: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    _unequal: list[Tensor] = field(default_factory=list)
    _by_rule: list[Tensor] = field(default_factory=list)
    _made: list[tuple[Tensor, Tensor, float, bool]] = field(default_factory=list)

    def items(self, calls: Sequence[LossCall], counts: Mapping[Items, Tensor], *, dummies: bool) -> Tensor:
        """Items that the calls of one micro-batch reduced over, 0-dim; as predicted where they do not tell.

        Args:
            calls: of its forward.
            counts: n by each of the contract's rules, as predicted.
            dummies: a micro-batch without a target is run with a dummy one, which weighs nothing.
        """
        made_of, items = self.contract.made_of, self.contract.items
        assert items is not None
        predicted = counts[items]
        if made_of is None or len(calls) != len(made_of.factors):
            if made_of is not None:
                self.changed = f"{len(calls)} loss calls in a micro-batch, {len(made_of.factors)} when it was observed"
            return predicted
        if made_of.has_terms:
            self._hold_terms(calls, made_of, counts)
            return predicted
        found = [
            torch.as_tensor(call.items, device=predicted.device).to(predicted.dtype)
            for call, factor in zip(calls, made_of.factors, strict=True)
            if factor
        ]
        self._unequal.extend(each != found[0] for each in found[1:])
        seen = found[0] if made_of.per_item == 1.0 else found[0] / made_of.per_item
        return seen * (predicted > 0) if dummies else seen

    def _hold_terms(self, calls: Sequence[LossCall], made_of: Composition, counts: Mapping[Items, Tensor]) -> None:
        """Hold what each term's call counted against its rule; one gradient cannot be corrected for several."""
        for call, factor, rules in zip(calls, made_of.factors, made_of.terms, strict=True):
            if factor and rules:
                predicted = counts[rules[0]]
                seen = torch.as_tensor(call.items, device=predicted.device).to(predicted.dtype)
                # Without a target one dummy is run, and weighs nothing.
                self._unequal.append((seen - predicted).abs() > 1e-6 * predicted + (predicted == 0))

    def note_items(self, seen: Tensor, predicted: Tensor) -> None:
        """Take the items of one micro-batch, as its loss and as the rule counted them."""
        contract = self.contract
        rest = contract.made_of is not None and contract.made_of.rest
        if len(contract.rules) > 1 or contract.extra or rest or self.constant or contract.has_router_loss:
            # One gradient cannot be corrected for several terms.
            self._unequal.append((seen - predicted).abs() > 1e-6 * predicted)
            return
        self._seen.append(seen)
        self._predicted.append(predicted)

    def note_weight(self, seen: Tensor, weight: Tensor) -> None:
        """Take the items of one micro-batch that is weighed by its rule's, and not corrected in the end."""
        # Weights of targets are added up in another order than their samples are counted.
        self._unequal.append((seen - weight).abs() > 1e-6 * weight)

    def note_counts(self, counts: Mapping[Items, Tensor], predicted: Mapping[Items, Tensor]) -> None:
        """Take the items of what was run, by every rule, beside the items of what was fetched for its window."""
        if counts is not predicted:
            self._unequal.extend(counts[rule] != predicted[rule] for rule in self.contract.rules[1:])

    def note_inputs(self, inputs: Mapping[str, Any], device: torch.device) -> None:
        """Take the inputs of a micro-batch that was changed after it was fetched.

        The rules that fit the part of a loss that no call shows may count it differently.

        Args:
            inputs: of the forward.
            device: where counts are.
        """
        made_of = self.contract.made_of
        rules = self.contract.alternatives if made_of is None else made_of.rest_terms
        if made_of is None and rules and self.contract.leaves_labels_out(inputs):
            # Labels masked on the way fit no rule that counts what was fetched; texts that keep one each fit "samples".
            rules = (*rules, Items(("labels",), shift=True))
        if len(rules) > 1 and all(rule.has_targets(inputs) for rule in rules):
            self._by_rule.append(torch.stack([rule.count(inputs, device) for rule in rules]))

    def note_loss(self, loss: Tensor, calls: Sequence[LossCall], number: Tensor | None) -> None:
        """Take what of a loss is not made of its calls.

        Args:
            loss: 0-dim, without router terms and before it is weighed.
            calls: of its forward.
            number: what it divides by; None: nothing.
        """
        made_of = self.contract.made_of
        if made_of is None or len(calls) != len(made_of.factors):
            return
        with torch.no_grad():
            rest = loss
            for call, factor in zip(calls, made_of.factors, strict=True):
                if factor:
                    value = call.mean.detach() if number is None else call.value.detach() / number
                    rest = rest - (value if factor == 1.0 else value * factor)
        if not made_of.rest_terms:
            self._rests.append(rest)
            # As precise as the loss, where its calls are more so.
            self._values.append(value.to(loss.dtype) if loss.dtype.itemsize < value.dtype.itemsize else value)

    def note_override(self, loss: Tensor, base: Tensor, factor: float, *, constant: bool) -> None:
        """Take what a trainer's own ``compute_loss`` made of the base's loss: ``factor`` times it, and a constant.

        Both may change from window to window (a schedule); within one they are the same.
        """
        self._made.append((loss.detach(), base.detach(), factor, constant))

    @property
    def counted(self) -> bool:
        """Whether items of a micro-batch were taken."""
        return bool(self._seen)

    def counts(self, device: torch.device) -> Tensor:
        """Items seen, and items predicted, of this rank's window: [2] on ``device``."""
        if not self._seen:
            return torch.zeros(2, dtype=count_dtype(device), device=device)
        return torch.stack([torch.stack(self._seen).sum(), torch.stack(self._predicted).sum()]).to(device)

    def broken(self) -> Tensor | None:
        """Whether the loss was made in another way than observed: 0-dim bool on the device; None: nothing was seen."""
        flags = [flag.any() for flag in (*self._unequal, *self._remade())]
        if self._by_rule:
            counts = torch.stack(self._by_rule)
            shares = counts / counts.sum(dim=0).clamp(min=1)
            flags.append(((shares - shares[:, :1]).abs() > 1e-9).any())
        made_of = self.contract.made_of
        if self._rests and made_of is not None:
            # A micro-batch without a finite loss shows nothing, and hides nothing of the others.
            both = torch.stack([*self._rests, *self._values]).abs().nan_to_num_(0.0, 0.0, 0.0)
            spread, value = both.view(2, -1).amax(dim=1)
            if made_of.rest:
                rests = torch.stack(self._rests)
                low, high = (rests.where(rests.isfinite(), end).aminmax() for end in (math.inf, -math.inf))
                spread = high.max - low.min
            flags.append(spread > made_of.rounding(self._values[0].dtype) * value)
        return torch.stack([flag.reshape(()) for flag in flags]).any() if flags else None

    def _remade(self) -> list[Tensor]:
        """Whether each micro-batch's loss was made of the base's in another way than the first one's."""
        if not self._made:
            return []
        first, first_base, factor, constant = self._made[0]
        limit = _tolerance(first.dtype)
        if constant:
            added = first - first_base * factor
            return [(loss - base * factor - added).abs() > limit * loss.abs() for loss, base, *_ in self._made[1:]]
        if len(self._made) == 1:
            return [(first - first_base * factor).abs() > limit * first.abs()]
        return [
            (loss * first_base - first * base).abs() > limit * (loss * first_base).abs()
            for loss, base, *_ in self._made[1:]
        ]


def _tolerance(dtype: torch.dtype) -> float:
    """Relative, of one loss computed twice."""
    return 2e-2 if dtype.itemsize < 4 else 1e-5 if dtype.itemsize == 4 else 1e-9
