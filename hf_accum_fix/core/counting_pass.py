"""Count a window by its own forwards, where its inputs do not tell what a term of its loss divides by.

Every micro-batch's loss is run once more, with its graph and without a backward, and read. State is restored, random
generators too, so that the training's forwards draw the same masks and noise. It costs one forward a micro-batch and
one collective, in such windows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_accum_fix.accumulation.conclude import NUMBERS
from hf_accum_fix.accumulation.contract import How
from hf_accum_fix.accumulation.declared import holds_shards
from hf_accum_fix.accumulation.preserve import Preserved, preserved_state
from hf_accum_fix.accumulation.reading import ForgottenError, LossRun, run_with_graph
from hf_accum_fix.accumulation.weigh import Counted, Part, WindowCheck, weigh
from hf_accum_fix.accumulation.window import Counts, ZeroWeightBatch, count_dtype
from hf_accum_fix.core.host import Host


def count_by_forwards(
    host: Host, batches: Sequence[Any], parts: Sequence[Part], counts: Sequence[Counts]
) -> list[dict[int, Tensor]]:
    """Add to ``counts`` the divisor of each term of each micro-batch, as read; sum them over all ranks.

    Args:
        host: the training.
        batches: the micro-batches of this rank.
        parts: one for each loss.
        counts: of each micro-batch, by rule.

    Returns:
        N of each term, by its place, for each loss; 0-dim.
    """
    zero = torch.zeros((), dtype=count_dtype(host.device), device=host.device)
    totals = [dict.fromkeys(_counted(part), zero) for part in parts]
    if batches:
        with host.loss_run(batches) as run, _preserved(run):
            for batch, its in zip(batches, counts, strict=True):
                contract = host.state.contract_of(batch)
                at = next(place for place, part in enumerate(parts) if part.contract is contract)
                for place, divisor in _divisors(run, batch, parts[at]).items():
                    if place in totals[at]:
                        its[place] = torch.as_tensor(divisor, dtype=zero.dtype, device=host.device)
                        totals[at][place] = totals[at][place] + its[place]
    if host.world_size > 1 and any(totals):
        flat = torch.stack([each for of_loss in totals for each in of_loss.values()])
        summed = iter((host.summed(flat) * host.data_ranks / host.world_size).unbind())
        totals = [{place: next(summed) for place in of_loss} for of_loss in totals]
    return totals


def _preserved(run: LossRun) -> AbstractContextManager[Preserved]:
    return preserved_state(run.model, *run.others, leave=run.leave, sharded=holds_shards(run.model))


def _counted(part: Part) -> list[int]:
    """The places of the terms that are means over their own items."""
    contract = part.contract
    return [place for place, each in enumerate(contract.terms) if each.how is How.MEAN]


def _divisors(run: LossRun, batch: Any, part: Part) -> dict[int, Any]:
    """What the terms of one micro-batch divide by, as `weigh` reads it."""
    contract = part.contract
    normalizer, check = replace(part.normalizer, is_corrected=True), WindowCheck(contract)
    takes_number = contract.hands_number or contract.depends_on_number
    number = NUMBERS[0] if takes_number else None
    zero_weight = isinstance(batch, ZeroWeightBatch)

    def read(keep: bool) -> None:
        loss, captured = run_with_graph(run, batch, number, keep=keep)
        weigh(loss, Part(contract, normalizer, check), Counted(dict(batch), {}, zero_weight), captured)

    try:
        read(keep=False)
    except ForgottenError:
        # It takes a gradient inside the forward, or its loss is checkpointed.
        read(keep=True)
    return dict(check.latest)
