"""How a head reduces its loss, and what its items are: observed, or given by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.reduction import Reduction as Reduction
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError

#: Why a contract could not be observed yet: nothing was there to be learnt from.
NO_TARGET_SEEN = "no target was seen yet"

#: Why a loss is not weighed yet: its samples' losses are the same (a policy that is still its reference).
ALIKE = "all samples seen have the same loss, which does not show what weighs them"

#: Why a loss that no call shows is not settled: what fits counts the window's micro-batches differently.
SEVERAL_FIT = "several ways of counting fit the samples seen, and count the window's micro-batches differently"

#: Why a smoothed loss is not exact, however it is cut.
SHIFT_UNKNOWN = "the model's own loss does not show whether labels are shifted as they are smoothed"

#: Why a loss is not exact whose gradient is corrected by the items that its calls count.
SCALED_BESIDE = (
    "the loss adds a term to a mean whose items are counted only in the forward; correcting the gradient by that count "
    "scales the term, too"
)


class Divides(str, Enum):
    """When a trainer's own loss is divided for the accumulation window already, by the trainer.

    By the micro-batches of the window, or by ``gradient_accumulation_steps`` of the arguments, which a short window at
    the end of an epoch has not.
    """

    NEVER = "never"
    WITH_NUMBER = "where the item count is handed in"
    ALWAYS = "always"
    WITH_NUMBER_BY_ARGUMENT = "by the arguments' steps where the item count is handed in"
    BY_ARGUMENT = "always by the arguments' steps"
    UNKNOWN = "in a way that was not recognised"


class Coupling(str, Enum):
    """What another cut does to the plain mean of a loss over micro-batches."""

    SAMPLES = "each sample has a loss of its own, so that only micro-batches of unequal size change it"
    ITEMS = "it weighs items by the micro-batch they are in"
    COUPLED = "the samples of one micro-batch are coupled, so that another cut is another loss"
    UNKNOWN = "whether another cut changes it was not seen"


def router_loss(outputs: Any, kind: str) -> Tensor | None:
    """The router loss of one kind that a model's outputs carry, encoder's and decoder's together; None: none.

    Args:
        outputs: what the model returned.
        kind: "aux_loss" (load balancing) or "z_loss", as the library's output classes name them.
    """
    if not isinstance(outputs, Mapping):
        return None
    parts = [value for key, value in outputs.items() if key == kind or key.endswith(f"_{kind}")]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack([part.to(tensors[0]) for part in tensors]).sum() if tensors else None


@dataclass(frozen=True)
class Composition:
    """How a loss is made of the loss calls of torch in its forward, checked in every micro-batch that is trained.

        loss = sum over calls of  factor * value  [/ number, where it divides by one]  + rest

    Attributes:
        factors: one for each loss call of the forward; 0.0 for a call that the loss does not hold.
        rest: whether something beside the calls is in the loss, the same for every micro-batch (a weight penalty).
        counted: whether a rule counts from the inputs what the calls reduced over.
        per_item: elements that the calls reduced over for each item of that rule.
        terms: where the calls reduce over different items, for each the rules that count them, the first in use; no
            rule for a call with factor 0.0. Empty: they all reduce over the contract's items.
        rest_terms: the rules of a rest that is a mean over items of its own; empty: it is nothing, or a constant.
        graded: calls without a gradient are left out (see `LossCalls`).
    """

    factors: tuple[float, ...]
    rest: bool = False
    counted: bool = True
    per_item: float = 1.0
    terms: tuple[tuple[Items, ...], ...] = ()
    rest_terms: tuple[Items, ...] = ()
    graded: bool = False

    @property
    def has_terms(self) -> bool:
        """Whether its terms count items of their own."""
        return bool(self.terms or self.rest_terms)

    @property
    def has_several_calls(self) -> bool:
        """Whether it has several calls over the same items, as two draws of dropout make."""
        return len(self.factors) > 1 and not self.has_terms

    def rounding(self, dtype: torch.dtype) -> float:
        """Relative error of a loss that is made so: a few units in the last place, where factors were not estimated."""
        if all(factor in (0.0, 1.0) for factor in self.factors):
            return 16 * torch.finfo(dtype).eps
        return 2e-2 if dtype.itemsize < 4 else 1e-5 if dtype.itemsize == 4 else 1e-9


@dataclass(frozen=True)
class LossContract:
    """What has to be known of a loss to accumulate it exactly.

    Attributes:
        reduction: how the loss is reduced.
        items: what ``N`` counts; None only for `Reduction.SUM` and `Reduction.PLAIN`.
        router_coefficient: factor of the router's ``aux_loss`` (see `router_loss`) inside the loss, a mean per
            micro-batch that keeps its weight; 0.0: there is none.
        router_z_coefficient: the same of its ``z_loss``.
        alternatives: every rule that fits what was seen as well as ``items``, itself first; another rank's samples, or
            a later window's, may tell them apart.
        owned_by_trainer: a Trainer subclass computes the loss in a ``compute_loss`` that never calls the base.
        changed_by_trainer: a Trainer subclass makes another loss of the one the base computed.
        dtype: of the loss; the number is handed over in float64 only to a loss in float64.
        made_of: how the loss is made of loss calls of torch; None: they do not show it.
        divides: when an owned loss is divided for the accumulation window by the trainer itself.
        coupling: what another cut does to a loss that gets the plain mean over micro-batches.
        takes_world_size: an owned loss that divides by the number multiplies by the number of ranks; None: not seen.
        beside: an owned or changed loss, or a head's, holds a term that depends on the cut in another way.
        extra: what a trainer's own ``compute_loss`` adds to the base's loss is a mean over items of its own: the rules
            that count them, the first in use.
        least_rows: what a loss with listed targets divides by where a micro-batch has none of them.
        random: its forward draws at random, dropout aside, so that the parts of a batch do not show how it composes.
        odds: how many to one against its rules fitting by chance, where no loss call shows what weighs it (see
            `odds_of`); 1: unknown.
        counted: what each way of counting makes of the window observed: of this rank's or, once agreed, of them all.
        conclusive: False: settled by the loss call as watched alone, to be observed again in the next window.
        reason: one sentence on how it was found out.
    """

    reduction: Reduction
    items: Items | None = None
    router_coefficient: float = 0.0
    router_z_coefficient: float = 0.0
    alternatives: tuple[Items, ...] = ()
    owned_by_trainer: bool = False
    changed_by_trainer: bool = False
    dtype: torch.dtype = torch.float32
    made_of: Composition | None = None
    divides: Divides = Divides.NEVER
    coupling: Coupling = Coupling.UNKNOWN
    takes_world_size: bool | None = None
    beside: bool = False
    extra: tuple[Items, ...] = ()
    least_rows: float = 1.0
    random: bool = False
    odds: int = 1
    counted: tuple[tuple[Items, float], ...] = ()
    conclusive: bool = True
    reason: str = "given by hand"

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            known = ", ".join(f"Reduction.{each.name}" for each in Reduction)
            raise ContractError(f"got reduction={self.reduction!r}; expected one of {known}")
        if self.items is None and self.reduction in (Reduction.NUMBER, Reduction.INTEGER, Reduction.MEAN):
            raise ContractError(f"a loss that {self.reduction.words} needs its items; pass items=Items(...)")

    def carried(self, outputs: Any) -> Tensor | None:
        """The router losses inside the loss, weighed, 0-dim; None: the loss has none.

        Raises:
            ContractError: if the outputs do not carry a router loss that the contract names.
        """
        total: Tensor | None = None
        for kind, coefficient in (("aux_loss", self.router_coefficient), ("z_loss", self.router_z_coefficient)):
            if not coefficient:
                continue
            term = router_loss(outputs, kind)
            if term is None:
                found = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
                raise ContractError(
                    f"the contract names {coefficient:g} x {kind} inside the loss, but the outputs hold {found}; every "
                    "micro-batch's outputs need it: let the model return its router loss"
                )
            total = coefficient * term if total is None else total + coefficient * term
        return total

    def as_number(self, value: Tensor) -> Tensor:
        """A number as the loss is handed it, which knows float64 only where it is in float64 itself."""
        return value if self.dtype is torch.float64 else value.float()

    def without_calls(self) -> LossContract:
        """The same where loss calls are not seen in training (compiled code): what only they count is not counted."""
        made_of = self.made_of
        if made_of is None:
            return self
        if made_of.has_terms:
            reason = "its terms count items of their own, and its loss calls are compiled, and so not seen"
            return replace(self, reduction=Reduction.PLAIN, items=None, made_of=None, reason=reason)
        return replace(self, made_of=None, beside=not made_of.counted)

    @property
    def rules(self) -> tuple[Items, ...]:
        """Every way of counting that its terms need, ``items`` first."""
        main = () if self.items is None else (self.items,)
        terms = () if self.made_of is None else (*self.made_of.terms, self.made_of.rest_terms)
        return tuple(dict.fromkeys((*main, *(rules[0] for rules in (*terms, self.extra) if rules))))

    def leaves_labels_out(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a micro-batch has labels of tokens, and no rule counts any label."""
        of_tokens = getattr(inputs.get("labels"), "ndim", 0) > 1
        return of_tokens and not any("label" in key for rule in self.rules for key in rule.keys)

    @property
    def rest_terms(self) -> tuple[Items, ...]:
        """The rules of a rest, beside its loss calls, that is a mean over items of its own."""
        return () if self.made_of is None else self.made_of.rest_terms

    @property
    def by_hand_rules(self) -> tuple[Items, ...]:
        """The rules of what no loss call shows."""
        if self.made_of is not None:
            return self.rest_terms
        return self.alternatives if self.reduction is Reduction.MEAN else ()

    @property
    def open_rules(self) -> tuple[tuple[Items, ...], ...]:
        """Where several rules fit what no loss call shows: they."""
        return tuple(rules for rules in (self.by_hand_rules, self.extra) if len(rules) > 1)

    @property
    def graded(self) -> bool:
        """Whether it was made of calls with a gradient alone."""
        return self.made_of is not None and self.made_of.graded

    @property
    def has_router_loss(self) -> bool:
        """Whether router losses are inside the loss."""
        return bool(self.router_coefficient or self.router_z_coefficient)

    @property
    def by_number(self) -> bool:
        """Whether the loss divides by the number handed in."""
        return self.reduction in (Reduction.NUMBER, Reduction.INTEGER)

    @property
    def exact(self) -> bool:
        """Whether every cut of the global batch is known to give the same gradient (router terms by convention)."""
        return (
            self.reduction is not Reduction.PLAIN and self.conclusive and not (self.changed_by_trainer or self.beside)
        )

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
