"""How a head reduces its loss, and over which items: observed, or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from hf_accum_fix.counting.items import Items
from hf_accum_fix.counting.rules import is_near
from hf_accum_fix.errors import ContractError
from hf_accum_fix.reading.nodes import Floor

#: The reason of a contract that could not be observed yet.
NO_TARGET_SEEN = "no target was seen yet"


class Reduction(str, Enum):
    """What a loss does with the items of its micro-batch: the predicate of a sentence about it."""

    NUMBER = "divides by num_items_in_batch"
    MEAN = "is the mean over its own items"
    SUM = "is a sum"
    PLAIN = "is averaged over micro-batches"
    STOCK = "stays as the trainer scales it"
    WINDOW = "is computed over all samples of a step"


class How(str, Enum):
    """How one term of a loss is reduced over its micro-batch."""

    MEAN = "divided by a count"
    SUM = "a sum over items"
    NUMBER = "divided by num_items_in_batch"
    CONSTANT = "the same for every micro-batch"
    ROUTER = "a router's loss"
    PLAIN = "neither a mean, nor a sum, nor a constant"


class Cause(Enum):
    """What a doubt about a loss comes from; all but the last two may come from splitting rows that belong together."""

    COUNT = "a factor is neither a count nor a constant"
    TERMS = "a batch and its parts have other terms"
    PADDING = "padding, or coupled samples"
    COUPLED = "coupled samples"
    HIDDEN = "the graph hides it"
    LOG = "the log alone"


@dataclass(frozen=True)
class TermSpec:
    """How one term of a loss is reduced, as observed in the first window."""

    shape: tuple[Any, ...]  # equal for the same term of another micro-batch (`loss_graph.Term.shape`)
    place: int | None = 0  # which of the terms of that shape it is; None: all of them, the rows of one mean or sum
    how: How = How.MEAN
    counts: tuple[int, ...] = ()  # the places of the factors whose product is its divisor
    #: the place of a trainer's division by the steps, where another term divides by num_items_in_batch.
    own: tuple[int, ...] = ()
    #: every rule that predicts the count, and the ratio of the count to it; the first is in use.
    rules: Mapping[Items, float] = field(default_factory=dict)
    counted: tuple[float, ...] = (1.0,)  # the count in the observed batch and its parts, on every rank
    floor: Floor | None = None  # what keeps that count from zero; None: nothing that was seen

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal in every batch of one loss: all but counts."""
        return (self.shape, self.place, self.how, self.counts)

    def with_rules_of(self, other: TermSpec) -> TermSpec:
        """With the rules that the same term also has in another batch."""
        return replace(self, rules={rule: n for rule, n in self.rules.items() if is_near(n, other.rules.get(rule))})

    @cached_property
    def rule(self) -> Items | None:
        """The rule in use; None: no rule predicts the count."""
        return next(iter(self.rules), None)

    @cached_property
    def ratio(self) -> float:
        """Of the count to the rule in use."""
        return next(iter(self.rules.values()), 1.0)

    @cached_property
    def group(self) -> tuple[Any, ...]:
        """Equal for terms that are divided by the same count in every micro-batch."""
        counted_by = self.rule if self.how is not How.NUMBER else None
        return (self.how, counted_by or self.counted, len(self.own))


@dataclass(frozen=True)
class LossContract:
    """How a loss is reduced, as far as exact accumulation depends on it.

    Attributes:
        reduction: how the loss is reduced.
        items: what ``N`` counts; None for what is no mean over items.
        router_coefficient: factor of the ``aux_loss`` in the loss, which stays a mean over micro-batches; 0.0: there is
            none.
        router_z_coefficient: the same for the ``z_loss``.
    """

    reduction: Reduction
    items: Items | None = None
    router_coefficient: float = 0.0
    router_z_coefficient: float = 0.0
    #: how each term of the loss is reduced; empty: the loss was not read, and is weighted by ``items``.
    terms: tuple[TermSpec, ...] = ()
    #: what is added to its terms without a gradient; 0.0: it is no constant; None: nothing is.
    added: float | None = None
    deep: bool = False  # its sums contain factors
    custom: bool = False  # a Trainer subclass computes or changes the loss in a ``compute_loss``
    #: the model or the compute_loss_func gets num_items_in_batch; else it returns its own mean.
    hands_number: bool = True
    dtype: torch.dtype = torch.float32  # of the loss, in which its weights are computed
    #: a custom loss that divides by the number multiplies by the number of ranks; None: unknown.
    takes_world_size: bool | None = None
    doubt: str = ""  # why it is reported as not exact; empty: it is exact
    #: what the doubt comes from, as far as splits of the samples show it; coupled samples before others.
    cause: Cause | None = None
    grows: bool = False  # it is nearer to the sum of its parts than to their mean, as far as it can be read
    unchecked: str = ""  # why coupled samples would not be detected; empty: they would
    #: blocks of rows, and rows of one that belong together, by which a batch can be cut; 0: it was not seen to add up.
    cut_by: tuple[int, int] = (0, 0)
    conclusive: bool = True  # False: it is observed again in the next window
    reason: str = "given"  # how it was found, in one sentence

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, Reduction):
            known = ", ".join(f"Reduction.{each.name}" for each in Reduction)
            raise ContractError(f"got reduction={self.reduction!r}; expected one of {known}")
        counts = self.items is not None or self.reduction in (Reduction.NUMBER, Reduction.MEAN)
        if counts and not isinstance(self.items, Items):
            words = f"a loss that {self.reduction.value}, with items={self.items!r}"
            raise ContractError(f"got {words}; expected items=Items(...), such as Items(('labels',))")

    def by_rule(self) -> LossContract:
        """The contract where the graph hides the terms (compiled code): the loss is weighted by its rule."""
        others = [each for each in self.terms if each.how is not How.ROUTER]
        # A router loss is taken from the outputs.
        unnamed = len(self.terms) - len(others) - sum(map(bool, (self.router_coefficient, self.router_z_coefficient)))
        if len({each.group for each in others}) > 1 or unnamed or (self.terms and not self.is_counted):
            return self.averaged("its terms count different items, and compiled code hides them")
        return replace(self, terms=())

    def with_one_rule(self) -> LossContract:
        """With the likeliest rule of each mean: what its divisors are is compared with what that predicts."""
        terms = (replace(t, rules=dict([*t.rules.items()][:1])) if t.how is How.MEAN else t for t in self.terms)
        return replace(self, terms=tuple(terms))

    @cached_property
    def rules(self) -> tuple[Items, ...]:
        """Every rule that its terms need, ``items`` first."""
        counted = (each for each in self.terms if each.how in (How.MEAN, How.NUMBER))
        rules = (self.items, *(rule for each in counted for rule in each.rules))
        return tuple(dict.fromkeys(rule for rule in rules if rule is not None))

    @cached_property
    def rules_of_number(self) -> tuple[Items, ...]:
        """The rules that may count num_items_in_batch, the one in use first."""
        return next((tuple(each.rules) for each in self.terms if each.how is How.NUMBER), ())

    def with_rules_of_number(self, rules: Sequence[Items]) -> LossContract:
        """With the rules that count num_items_in_batch."""
        of_number = dict.fromkeys(rules, 1.0)
        terms = (replace(each, rules=of_number) if each.how is How.NUMBER else each for each in self.terms)
        return replace(self, items=rules[0], terms=tuple(terms))

    def fitting_as_well(self, other: LossContract) -> LossContract:
        """With the rules that also counted each term in another batch; what was a router's loss there is one here."""
        counted = {each.form: each for each in other.terms if each.how is How.MEAN and each.counted[0]}
        routers = {each.form: each for each in other.terms if each.how is How.ROUTER and not other.doubt}
        terms = (each if each.form not in counted else each.with_rules_of(counted[each.form]) for each in self.terms)
        return replace(self, terms=tuple(routers.get(replace(each, how=How.ROUTER).form, each) for each in terms))

    @cached_property
    def groups(self) -> int:
        """Number of different weights of its terms."""
        return len({each.group for each in self.terms})

    @cached_property
    def is_counted(self) -> bool:
        """Whether a rule predicts the count of every mean in it."""
        return all(each.rules for each in self.terms if each.how is How.MEAN)

    @cached_property
    def needs_forwards(self) -> bool:
        """Whether a term has no rule, and no correction at the end of a window, since other terms count otherwise."""
        return self.groups > 1 and not self.is_counted

    def yields_to(self, later: LossContract) -> bool:
        """Whether what a later window shows replaces it: of the same terms, only that they do not add up after all."""
        if later.reason == NO_TARGET_SEEN or not (later.conclusive or not self.conclusive):
            return False
        terms, others = ([(each.shape, each.place) for each in its.terms] for its in (self, later))
        if not self.conclusive or terms != others:
            return True
        # Terms that count other items are of another loss.
        both = zip(self.terms, later.terms, strict=True)
        is_other = any(one.rules and other.rules and not one.with_rules_of(other).rules for one, other in both)
        return self.adds_up > later.adds_up or (later.exact and is_other)

    @cached_property
    def captures(self) -> Mapping[str, bool]:
        """What `reading.values.capture` keeps of a forward; empty: nothing."""
        routers = any(each.how is How.ROUTER for each in self.terms)
        values = self.groups > 1 or self.added is not None or any(each.floor for each in self.terms)
        return {"values": values, "routers": routers} if values or routers else {}

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss has a router loss."""
        return bool(self.router_coefficient or self.router_z_coefficient)

    @property
    def adds_up(self) -> bool:
        """Whether its split has shown that its terms add up, or the graph hides them."""
        return self.cause in (None, Cause.HIDDEN, Cause.LOG)

    @property
    def coupled(self) -> bool:
        """Whether the loss of a batch is no weighted mean over its parts."""
        return self.cause is Cause.COUPLED

    @cached_property
    def by_number(self) -> bool:
        """Whether the loss divides by num_items_in_batch."""
        return self.reduction is Reduction.NUMBER

    @cached_property
    def exact(self) -> bool:
        """Whether every split of the global batch gives the same gradient (router terms by convention)."""
        return self.is_weighed and self.conclusive and not self.doubt

    @cached_property
    def is_weighed(self) -> bool:
        """Whether it is neither averaged nor stock's, to the bit."""
        return self.reduction not in (Reduction.PLAIN, Reduction.STOCK)

    def averaged(self, reason: str, *, stays: bool = False) -> LossContract:
        """Its micro-batches are averaged, or it ``stays`` stock's, for this reason."""
        items, reduction = self.items if self.hands_number else None, Reduction.STOCK if stays else Reduction.PLAIN
        return replace(self, reduction=reduction, items=items, terms=(), doubt=reason, reason=reason)

    def of_two_fates(self, *, takes_number: bool) -> LossContract:
        """What is not exact is the stock Trainer's if it ``takes_number``, else its micro-batches are averaged."""
        if self.exact or self.cause is Cause.LOG or (self.is_weighed and not self.doubt):
            return self
        return self.averaged(self.doubt or self.reason, stays=takes_number)

    def facts(self) -> dict[str, Any]:
        """Its entries in a report."""
        return {
            "loss": str(self),
            "reduction": self.reduction.name.lower(),
            "items": None if self.items is None else str(self.items),
            "router_coefficient": self.router_coefficient,
            "router_z_coefficient": self.router_z_coefficient,
            "exact": self.exact,
            "checked": f"not: {self.unchecked}" if self.unchecked else "yes",
            "reason": self.reason,
        }

    def __str__(self) -> str:
        of = f" ({self.items})" if self.items is not None else ""
        router = f", plus {self.router_coefficient:g} x router loss" if self.router_coefficient else ""
        router += f", plus {self.router_z_coefficient:g} x router z-loss" if self.router_z_coefficient else ""
        return f"{self.reduction.value}{of}{router}"
