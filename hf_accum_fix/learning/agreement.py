"""One contract for all ranks, from what each observed on its own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from hf_accum_fix.errors import ContractError
from hf_accum_fix.learning.contract import NO_TARGET_SEEN, LossContract, Reduction

#: Concatenate the ranks' lists in order: a collective.
Gather: TypeAlias = "Callable[[list[Any]], list[Any]]"


class SyncedRanks:
    """Keep ranks in step: `any` is a collective, and on exit a rank joins it until all have left.

    Without ``gather`` there is one rank.
    """

    def __init__(self, gather: Gather | None = None) -> None:
        self._gather = gather

    def any(self, wanted: bool) -> bool:
        """Whether it holds on any rank."""
        return wanted if self._gather is None else any(wants for wants, _ in self._gather([(wanted, False)]))

    def __enter__(self) -> SyncedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        while self._gather is not None and not all(left for _, left in self._gather([(False, True)])):
            pass


def agree(ranks: Sequence[LossContract]) -> LossContract:
    """The first rank's contract that shows something, with the rules that fit on every such rank.

    ``ranks``: what each observed, in order; empty: no rank had a micro-batch.

    Raises:
        ContractError: if ranks observed losses with different reductions.
    """
    if not ranks:
        return LossContract(Reduction.PLAIN, conclusive=False, reason=NO_TARGET_SEEN)
    conclusive = [each for each in ranks if each.conclusive]
    # One rank that shows coupled samples is proof; ranks that show none are not.
    plain = [each for each in conclusive if not each.is_weighed]
    pool = plain or conclusive or [each for each in ranks if each.reason != NO_TARGET_SEEN] or list(ranks)
    first, doubt = pool[0], next((each.doubt for each in pool if each.doubt), "")
    stays = any(each.reduction is Reduction.STOCK for each in pool)
    forms = [_form(each) for each in pool]
    if any(form != forms[0] for form in forms):
        by_rank = "; ".join(f"rank {rank}: {each}; {len(each.terms)} terms" for rank, each in enumerate(ranks))
        if conclusive and any(form[:2] != forms[0][:2] for form in forms):
            raise ContractError(
                f"got different losses on the ranks ({by_rank}); expected the same loss on all; look at what differs "
                "between them, or pass contract=LossContract(...)"
            )
        reason = f"the ranks train different losses ({by_rank})"
        return replace(first.averaged(reason, stays=stays), items=None)
    # Where no rule fits on all ranks, every window is corrected.
    terms = first.terms
    for each in pool[1:]:
        both = zip(terms, each.terms, strict=True)
        terms = tuple(replace(a.with_rules_of(b), counted=a.counted + b.counted) for a, b in both)
    if any(not term.rules and all(each.terms[at].rules for each in pool) for at, term in enumerate(terms)):
        doubt = doubt or "it counts other items on another rank"
    of_items = (new for old, new in zip(first.terms, terms, strict=True) if first.items == old.rule)
    items = next((each.rule for each in of_items if each.rule is not None), first.items)
    takes = next((each.takes_world_size for each in pool if each.takes_world_size is not None), None)
    found = replace(first, terms=terms, items=items, doubt=doubt, cut_by=max(each.cut_by for each in pool))
    found = replace(found, takes_world_size=takes, hands_number=any(each.hands_number for each in pool))
    return found.of_two_fates(takes_number=stays or (found.custom and found.by_number))


def _form(found: LossContract) -> tuple[Any, ...]:
    """Equal for contracts of one loss."""
    return found.is_weighed and found.reduction, found.custom, [(each.shape, each.how) for each in found.terms]
