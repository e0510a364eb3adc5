"""The ranks' one contract: each observes its own samples, and all have to train by the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_accum_fix.accumulation.contract import (
    NO_TARGET_SEEN,
    SEVERAL_FIT,
    Composition,
    Divides,
    LossContract,
    Reduction,
)
from hf_accum_fix.accumulation.evidence.rules import in_proportion
from hf_accum_fix.accumulation.window import Items
from hf_accum_fix.errors import ContractError


def agree(ranks: Sequence[LossContract]) -> LossContract:
    """The first rule that fits what every conclusive rank saw.

    Args:
        ranks: what each rank observed, in the order of ranks; empty: nobody had a micro-batch.

    Raises:
        ContractError: if conclusive ranks observed losses that are reduced in different ways.
    """
    if not ranks:
        return LossContract(Reduction.PLAIN, conclusive=False, reason=NO_TARGET_SEEN)
    if len(ranks) == 1:
        return replace(ranks[0], counted=())
    conclusive = [each for each in ranks if each.conclusive]
    # One rank's samples that do not compose outweigh any number that do.
    plain = [each for each in conclusive if each.reduction is Reduction.PLAIN]
    if plain:
        return plain[0]
    seeing = [each for each in ranks if each.reason != NO_TARGET_SEEN]
    several_fit = [each for each in ranks if each.reason == SEVERAL_FIT]
    pool = (
        conclusive + several_fit
        or [each for each in seeing if each.reduction is not Reduction.PLAIN]
        or seeing
        or list(ranks)
    )
    # A term that is the same for all samples of one rank is a constant there; every window tells if it is none.
    first = next((each for each in pool if each.made_of is not None and each.made_of.has_terms), pool[0])
    common = tuple(rule for rule in first.alternatives if all(rule in each.alternatives for each in pool))
    same_kind = len({(each.reduction, each.owned_by_trainer) for each in pool}) == 1
    if same_kind and (first.items is None or common):
        several = several_fit[0] if several_fit and len(common) > 1 else first
        agreed = replace(
            first,
            conclusive=several.conclusive,
            reason=several.reason,
            items=common[0] if common else None,
            alternatives=common,
            made_of=_composed_alike(first, pool),
            divides=first.divides if len({each.divides for each in pool}) == 1 else Divides.UNKNOWN,
            takes_world_size=next((each.takes_world_size for each in pool if each.takes_world_size is not None), None),
            beside=any(each.beside for each in pool),
            extra=() if any(each.changed_by_trainer for each in pool) else _common([each.extra for each in pool]),
            changed_by_trainer=any(each.changed_by_trainer for each in pool),
        )
        return _held_together(agreed, [dict(each.counted) for each in ranks])
    if not conclusive:
        return replace(first, conclusive=False)
    told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(ranks))
    if not same_kind:
        raise ContractError(
            f"the ranks observed different losses ({told}); expected one kind of loss on all of them: look at what "
            "differs between the ranks, or give the contract by hand: contract=LossContract(...)"
        )
    return LossContract(
        Reduction.PLAIN,
        owned_by_trainer=any(each.owned_by_trainer for each in pool),
        divides=Divides.UNKNOWN,
        reason=f"the ranks train different losses ({told})",
    )


def _held_together(agreed: LossContract, counted: Sequence[Mapping[Items, float]]) -> LossContract:
    """What was agreed on, unless ways of counting that fit on every rank count the ranks' windows differently."""
    known = [rules for rules in agreed.open_rules if all(rule in each for each in counted for rule in rules)]
    if agreed.conclusive and not all(
        in_proportion([[each[rule] for each in counted] for rule in rules]) for rules in known
    ):
        agreed = replace(agreed, conclusive=False, reason=SEVERAL_FIT)
    open_rules = dict.fromkeys(rule for rules in known for rule in rules)
    return replace(agreed, counted=tuple((rule, sum(each[rule] for each in counted)) for rule in open_rules))


def _composed_alike(one: LossContract, pool: Sequence[LossContract]) -> Composition | None:
    """One rank's composition, where all have one of as many calls; counted by a rule if all are."""
    first, several = one.made_of, [each.made_of for each in pool if each.made_of is not None]
    if first is None or len(several) < len(pool) or len({len(each.factors) for each in several}) > 1:
        return None
    alike = [each for each in several if each.has_terms == first.has_terms]
    return replace(
        first,
        counted=all(each.counted for each in several),
        terms=tuple(_common([each.terms[place] for each in alike if each.terms]) for place in range(len(first.terms))),
        rest_terms=_common([each.rest_terms for each in alike if bool(each.rest_terms) == bool(first.rest_terms)]),
    )


def _common(rules: Sequence[tuple[Items, ...]]) -> tuple[Items, ...]:
    """The rules that every rank found; the first rank's first, which windows are held against, where there is none."""
    return tuple(rule for rule in rules[0] if all(rule in each for each in rules)) or rules[0][:1] if rules else ()
