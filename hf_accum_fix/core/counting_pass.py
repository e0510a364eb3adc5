"""Count a window by its own forwards, where its inputs do not tell what a term of its loss divides by.

Every micro-batch's loss is run once more, with its graph and without a backward, and read. State is restored, random
generators too, so that the training's forwards draw the same masks and noise. It costs one forward a micro-batch and
one collective, in such windows only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.conclude import NUMBERS
from hf_accum_fix.accumulation.contract import How, LossContract
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.items import Counts, ZeroWeightBatch, count_dtype
from hf_accum_fix.accumulation.preserve import preserved_state
from hf_accum_fix.accumulation.reading import ForgottenError, LossRun, run_with_graph
from hf_accum_fix.accumulation.weigh import Counted, Part, WindowCheck, weigh
from hf_accum_fix.core.host import Host


def count_by_forwards(
    host: Host, batches: Sequence[Any], parts: Sequence[Part], counts: Sequence[Counts], *, handed: bool
) -> list[dict[int, Tensor]]:
    """Add to ``counts`` the divisor of each term of each micro-batch, as read; sum them over all ranks.

    Args:
        host: the training.
        batches: the micro-batches of this rank.
        parts: one for each loss.
        counts: of each micro-batch, by rule.
        handed: a custom loss is handed num_items_in_batch.

    Returns:
        N of each term, by its place, for each loss; 0-dim.
    """
    zero = torch.zeros((), dtype=count_dtype(host.device), device=host.device)
    totals = [dict.fromkeys(_counted(part.contract), zero) for part in parts]
    if batches:
        with ExitStack() as stack:
            run = stack.enter_context(host.loss_run(batches))
            sharded = holds_shards(run.model)
            stack.enter_context(preserved_state(run.model, *run.others, leave=run.leave, sharded=sharded))
            for batch, its in zip(batches, counts, strict=True):
                contract = host.state.contract_of(batch)
                part, total = next(each for each in zip(parts, totals, strict=True) if each[0].contract is contract)
                takes_number = contract.hands_number or (contract.custom and handed)
                for place, divisor in _divisors(run, batch, part, takes_number=takes_number).items():
                    if place in total:
                        its[place] = torch.as_tensor(divisor, dtype=zero.dtype, device=host.device)
                        total[place] = total[place] + its[place]
    if host.world_size > 1 and any(totals):
        flat = torch.stack([each for of_loss in totals for each in of_loss.values()])
        summed = iter((host.summed(flat) * host.data_ranks / host.world_size).unbind())
        totals = [{place: next(summed) for place in of_loss} for of_loss in totals]
    return totals


def _counted(contract: LossContract) -> list[int]:
    """The places of the terms that are means over their own items."""
    return [place for place, each in enumerate(contract.terms) if each.how is How.MEAN]


def _divisors(run: LossRun, batch: Any, part: Part, *, takes_number: bool) -> Mapping[int, Any]:
    """What the terms of one micro-batch divide by, as `weigh` reads it."""
    check = WindowCheck(part.contract)
    as_read = replace(part, normalizer=replace(part.normalizer, is_corrected=True), check=check)
    counted = Counted(dict(batch), {}, isinstance(batch, ZeroWeightBatch))
    # Once more if it takes a gradient inside the forward, or its loss is checkpointed.
    for keep in (False, True):
        with suppress(*() if keep else (ForgottenError,)):
            loss, captured = run_with_graph(run, batch, NUMBERS[0] if takes_number else None, keep=keep)
            weigh(loss, as_read, counted, captured)
            break
    return check.latest
