"""The ranks' one contract: each observes its own samples, and all have to train by the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_accum_fix.accumulation.contract import LossContract, Reduction
from hf_accum_fix.accumulation.observe import NO_TARGET_SEEN
from hf_accum_fix.errors import ContractError


def agree(ranks: Sequence[LossContract]) -> LossContract:
    """The first rule that fits what every conclusive rank saw.

    Args:
        ranks: what each rank observed, in the order of ranks; empty: nobody had a micro-batch.

    Raises:
        ContractError: if conclusive ranks observed different losses.
    """
    if not ranks:
        return LossContract(Reduction.PLAIN, conclusive=False, reason=NO_TARGET_SEEN)
    if len(ranks) == 1:
        return ranks[0]
    conclusive = [each for each in ranks if each.conclusive]
    # One rank's samples that do not compose outweigh any number that do.
    plain = [each for each in conclusive if each.reduction is Reduction.PLAIN]
    if plain:
        return plain[0]
    seeing = [each for each in ranks if each.reason != NO_TARGET_SEEN]
    pool = conclusive or [each for each in seeing if each.reduction is not Reduction.PLAIN] or seeing or list(ranks)
    first = pool[0]
    common = tuple(rule for rule in first.alternatives if all(rule in each.alternatives for each in pool))
    same_kind = len({(each.reduction, each.owned_by_trainer) for each in pool}) == 1
    if same_kind and (first.items is None or common):
        return replace(first, items=common[0] if common else None, alternatives=common)
    if not conclusive:
        return replace(first, conclusive=False)
    told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(ranks))
    raise ContractError(
        f"the ranks observed different losses ({told}); needed is one loss on all of them: look at what differs "
        "between the ranks, or give the contract by hand: contract=LossContract(...)"
    )
