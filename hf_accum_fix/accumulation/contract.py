"""How a head reduces its loss, and what its items are: observed, or given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.reduction import Reduction as Reduction
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError

#: Why a contract could not be observed yet: nothing was there to be learnt from.
NO_TARGET_SEEN = "no target was seen yet"

#: Why a smoothed loss is not exact, however it is split.
SHIFT_UNKNOWN = "the model's own loss does not show whether labels are shifted as they are smoothed"


class Coupling(str, Enum):
    """What another split does to the plain mean of a loss over micro-batches."""

    COUPLED = "the samples of one micro-batch are coupled, so that another split is another loss"
    UNKNOWN = "whether another split changes it is not known"


class How(str, Enum):
    """How one term of a loss is reduced over its micro-batch."""

    MEAN = "divided by a count"
    SUM = "a sum over items"
    CONSTANT = "the same for every micro-batch"
    ROUTER = "a router's loss"
    PLAIN = "neither a mean, nor a sum, nor a constant"


@dataclass(frozen=True)
class TermSpec:
    """How one term of a loss is reduced, as the first window's forwards have shown it.

    Attributes:
        shape: what the term has in common with the same term of another micro-batch (`loss_graph.Term.shape`).
        place: which of the terms of that shape it is; None: all of them, the rows of one mean or sum.
        counts: the places of the factors whose product it is divided by, for `How.MEAN`.
        own: the places of factors by which a trainer has divided it for the accumulation window already.
        number: the places of the number that a custom ``compute_loss`` was handed, which counts the global batch.
        rules: every rule that predicts the count; the first is in use.
        times: the count is so many times what the rules count.
        count: in the batch that was observed.
        handed: the loss divides by the number that it is handed; ``whole``: by its integer.
        as_stock: a constant may be the trainer's own 1/G or 1/W: the term keeps the scale that stock hands over.
    """

    shape: tuple[Any, ...]
    place: int | None = 0
    how: How = How.MEAN
    counts: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    number: tuple[int, ...] = ()
    rules: tuple[Items, ...] = ()
    times: float = 1.0
    count: float = 1.0
    handed: bool = False
    whole: bool = False
    as_stock: bool = False

    @property
    def form(self) -> tuple[Any, ...]:
        """What is the same in every batch of one loss: all but counts."""
        return (self.shape, self.place, self.how, self.counts)

    @property
    def is_guess(self) -> bool:
        """Whether values alone tell how it is reduced: a sum, or a mean over a count that no rule knows for sure."""
        by_chance = self.shape[0].startswith("Sum") and self.times != 1.0 and self.rules[:1] == (Items(),)
        return self.how is How.SUM or (self.how is How.MEAN and not self.handed and (not self.rules or by_chance))

    @property
    def group(self) -> tuple[Any, ...]:
        """Terms of one group are divided by the same count in every micro-batch."""
        return (self.how, self.own, self.number, self.as_stock, self.handed, self.rules[:1] or self.count)


def router_loss(outputs: Any, kind: str) -> Tensor | None:
    """The router loss of one kind that a model's outputs carry, encoder's and decoder's together; None: none.

    ``kind`` is "aux_loss" (load balancing) or "z_loss", as the library's output classes name them.
    """
    parts = outputs.items() if isinstance(outputs, Mapping) else ()
    tensors = [part for key, part in parts if f"_{key}".endswith(f"_{kind}") and isinstance(part, Tensor)]
    return torch.stack([part.to(tensors[0]) for part in tensors]).sum() if tensors else None


@dataclass(frozen=True)
class LossContract:
    """What has to be known of a loss to accumulate it exactly.

    Attributes:
        reduction: how the loss is reduced.
        items: what ``N`` counts; None only for `Reduction.SUM` and `Reduction.PLAIN`.
        router_coefficient: factor of the router's ``aux_loss`` (see `router_loss`) inside the loss, a mean per
            micro-batch that keeps its weight; 0.0: there is none.
        router_z_coefficient: the same of its ``z_loss``.
        terms: how each term of the loss is reduced; empty: the loss was not read, and is weighed by ``items``.
        shift: the loss drops position 0 of its labels; None: its graph does not show it.
        inside: means of stacked numbers are several terms, not rows.
        added: something without a gradient is added to its terms.
        deep: numbers stand inside of its sums.
        custom: a Trainer subclass computes or changes the loss in a ``compute_loss``.
        hands_number: the loss is handed the number; else it returns the mean over its own items.
        dtype: of the loss; the number is handed over in float64 only to a loss in float64.
        coupling: what another split does to a loss that gets the plain mean over micro-batches.
        is_corrected: the gradient of a window is corrected, so that one rule of a loss of one term will do.
        hides_number: it depends on the number that it is handed in a way that cannot be read (looked for where one
            micro-batch is the global batch).
        takes_world_size: a custom loss that divides by the number multiplies by the number of ranks; None: not seen.
        doubt: why it is not called exact, although it is weighed; empty: nothing.
        conclusive: False: it is observed again in the next window.
        reason: one sentence on how it was found out.
    """

    reduction: Reduction
    items: Items | None = None
    router_coefficient: float = 0.0
    router_z_coefficient: float = 0.0
    terms: tuple[TermSpec, ...] = ()
    shift: bool | None = None
    inside: bool = False
    added: bool = False
    deep: bool = False
    custom: bool = False
    hands_number: bool = True
    dtype: torch.dtype = torch.float32
    coupling: Coupling = Coupling.UNKNOWN
    is_corrected: bool = True
    hides_number: bool = False
    takes_world_size: bool | None = None
    doubt: str = ""
    conclusive: bool = True
    reason: str = "given by hand"

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            known = ", ".join(f"Reduction.{each.name}" for each in Reduction)
            raise ContractError(f"got reduction={self.reduction!r}; expected one of {known}")
        if self.items is None and self.reduction in (Reduction.NUMBER, Reduction.INTEGER, Reduction.MEAN):
            raise ContractError(f"a loss that {self.reduction.words} needs its items; pass items=Items(...)")

    def weighted_router_loss(self, outputs: Any) -> Tensor | None:
        """The router losses inside the loss, weighed, 0-dim; None: the loss has none.

        Raises:
            ContractError: if the outputs do not carry a router loss that the contract names.
        """
        named = {"aux_loss": self.router_coefficient, "z_loss": self.router_z_coefficient}
        terms = [(kind, factor, router_loss(outputs, kind)) for kind, factor in named.items() if factor]
        for kind, factor, term in terms:
            if term is None:
                found = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
                raise ContractError(
                    f"the contract names {factor:g} x {kind} inside the loss, but the outputs hold {found}; every "
                    "micro-batch's outputs need it: let the model return its router loss"
                )
        weighed = [factor * term for _, factor, term in terms if term is not None]
        return sum(weighed[1:], start=weighed[0]) if weighed else None

    def as_number(self, value: Tensor) -> Tensor:
        """A number as the loss is handed it, which knows float64 only where it is in float64 itself."""
        return value if self.dtype is torch.float64 else value.float()

    def by_rule(self) -> LossContract:
        """The same where the graph hides the terms (compiled code): the loss is weighed by its rule."""
        if self.groups > 1 or (self.terms and not self.is_counted):
            reason = "its terms count items of their own, and compiled code hides them"
            return replace(self, reduction=Reduction.PLAIN, items=None, terms=(), reason=reason)
        return replace(self, terms=())

    @property
    def rules(self) -> tuple[Items, ...]:
        """Every way of counting that its terms need, ``items`` first."""
        rules = (self.items, *(rule for each in self.terms for rule in self._rules_of(each)))
        return tuple(dict.fromkeys(rule for rule in rules if rule is not None))

    def _rules_of(self, term: TermSpec) -> tuple[Items, ...]:
        """Those that may count one term; a loss of one term is corrected, so that the first will do."""
        # A cross entropy keeps the weight of its targets, also where it divides by a number that the base was handed.
        kept = not term.handed or (not term.number and term.shape[0].startswith("NllLoss"))
        corrected = self.is_corrected and len(self.terms) == 1 and kept
        return term.rules[:1] if corrected or term.how is not How.MEAN else term.rules

    @property
    def has_rules_to_compare(self) -> bool:
        """Whether several rules fit a term of which one number does not correct a window."""
        return any(len(self._rules_of(each)) > 1 for each in self.terms)

    def is_ambiguous(self, totals: Mapping[Items, float]) -> bool:
        """Whether two rules fit one term so far, and count a window differently; ``totals``: N by each of `rules`."""
        counted = ([totals[rule] for rule in self._rules_of(each)] for each in self.terms)
        return any(max(each) - min(each) > 1e-6 * max(each) for each in counted if len(each) > 1)

    def distinguishing(self, window: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """A micro-batch that rules of one term count differently, and one that they do not; none: the window."""
        rules = [self._rules_of(each) for each in self.terms if len(self._rules_of(each)) > 1]
        differ = [
            batch for batch in window if any(len({float(rule.count(batch)) for rule in each}) > 1 for each in rules)
        ]
        others = [batch for batch in window if all(batch is not each for each in differ)]
        others.sort(key=lambda batch: -float(rules[0][0].count(batch)))
        return [*differ[:1], *(others or differ[1:])[:1]] if differ else window

    def narrowed(self, before: LossContract | None) -> LossContract:
        """The same with the rules that fit both now and ``before``, where any do."""
        if before is None or [each.form for each in self.terms] != [each.form for each in before.terms]:
            return self
        terms = [
            replace(now, rules=tuple(rule for rule in now.rules if rule in then.rules) or now.rules)
            for now, then in zip(self.terms, before.terms, strict=True)
        ]
        counted = next((each.rules[0] for each in terms if each.how is How.MEAN and each.rules), self.items)
        return replace(self, terms=tuple(terms), items=None if self.items is None else counted)

    @property
    def is_guess(self) -> bool:
        """Whether values alone tell how one of its terms is reduced."""
        return any(each.is_guess for each in self.terms)

    @property
    def is_read(self) -> bool:
        """Whether its terms are read from the graph in every micro-batch; else it is weighed by its rule."""
        return bool(self.terms)

    @cached_property
    def groups(self) -> int:
        """How many different weights the terms of a micro-batch have."""
        return len({each.group for each in self.terms})

    @property
    def is_counted(self) -> bool:
        """Whether rules predict the count of every mean inside it."""
        return all(each.rules for each in self.terms if each.how is How.MEAN)

    @property
    def has_router_loss(self) -> bool:
        """Whether router losses are inside the loss."""
        return bool(self.router_coefficient or self.router_z_coefficient)

    @property
    def by_number(self) -> bool:
        """Whether the loss divides by the number handed in."""
        return self.reduction in (Reduction.NUMBER, Reduction.INTEGER)

    @property
    def depends_on_number(self) -> bool:
        """Whether the loss depends on the number handed in, though nothing may be known of how."""
        return self.by_number or self.hides_number

    @property
    def exact(self) -> bool:
        """Whether every split of the global batch is known to give the same gradient (router terms by convention)."""
        return self.reduction is not Reduction.PLAIN and self.conclusive and not self.doubt

    def facts(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "reduction": self.reduction.value,
            "items": None if self.items is None else str(self.items),
            "router_coefficient": self.router_coefficient,
            "router_z_coefficient": self.router_z_coefficient,
            "exact": self.exact,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        of = f" ({self.items})" if self.items is not None else ""
        router = f", plus {self.router_coefficient:g} x router loss" if self.router_coefficient else ""
        router += f", plus {self.router_z_coefficient:g} x router z-loss" if self.router_z_coefficient else ""
        return f"{self.reduction.words}{of}{router}"
