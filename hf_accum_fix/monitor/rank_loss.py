"""One rank whose loss is not like the others': a bad data shard, a seed, a precision.

Symptom: the mean over the ranks looks plausible, and hides that one of them learns from something else.

Each rank's mean is compared with the mean of all others, in standard errors that follow from its own item count: a rank
with few items may be far off and yet be as usual as any.
"""

from __future__ import annotations

import math

from hf_accum_fix.monitor import thresholds as at
from hf_accum_fix.monitor.alarms import Alarm
from hf_accum_fix.monitor.deviation import OF_TWO, Deviation, Shifts
from hf_accum_fix.monitor.loss import LossReading, Moments

LOOK_AT = "look at this rank's data shard, its seed (sampler, dropout) and its precision or device"


class RankLoss:
    """Judge, reading by reading, whether a rank's loss has shifted against the others' for good.

    A single odd reading is no alarm, nor is a difference such as the other ranks have too (`Shifts`). Readings of
    fewer than 8 micro-batches a rank are put together until there are enough, because a deviation can only be judged
    by its noise.
    """

    def __init__(self) -> None:
        self._shifts = Shifts()
        self._carried: tuple[Moments, ...] = ()
        self._same, self._first = 0, 0.0

    def judge(self, reading: LossReading) -> Alarm | None:
        """The alarm that this reading completes, if any. Every rank judges alike, without communication."""
        measured = [rank for rank, moments in enumerate(reading.ranks) if moments.items]
        broken = [rank for rank in measured if not math.isfinite(reading.ranks[rank].loss + reading.ranks[rank].items)]
        if broken:
            self._carried = ()
            return _not_finite(broken, [rank for rank in measured if rank not in broken])
        if len(reading.ranks) < 2:
            return None
        self._carried = (
            tuple(carried + new for carried, new in zip(self._carried, reading.ranks, strict=True))
            if len(self._carried) == len(reading.ranks)
            else reading.ranks
        )
        measured = [rank for rank, moments in enumerate(self._carried) if moments.items]
        if len(measured) < 2 or any(self._carried[rank].micro_batches < at.FEWEST_MICRO_BATCHES for rank in measured):
            return None
        moments, self._carried = self._carried, ()
        return self._same_data(moments, measured) or self._shifted(moments, measured)

    def _same_data(self, moments: tuple[Moments, ...], measured: list[int]) -> Alarm | None:
        """Ranks whose losses are the same number: they were given the same samples."""
        groups: dict[tuple[float, ...], list[int]] = {}
        for rank in measured:
            its = moments[rank]
            if its.deviations_squared <= 1e-9 * its.loss_squared:
                continue  # a constant loss, such as zero, is no fingerprint of its samples
            # Six digits: the same samples give the same loss up to the order in which a kernel sums.
            groups.setdefault((its.items, float(f"{its.loss:.5e}"), float(f"{its.loss_squared:.5e}")), []).append(rank)
        same = max(groups.values(), key=len, default=[])
        self._same = self._same + 1 if len(same) > 1 else 0
        if self._same < at.SAME_IN_A_ROW:
            return None
        return Alarm(
            "ranks-see-the-same-data",
            f"ranks {_listed(same)} have the same loss and item count in every reading: they are given the same "
            "samples; look at the sampler (DistributedSampler, set_epoch, its seed and rank)",
        )

    def _shifted(self, moments: tuple[Moments, ...], measured: list[int]) -> Alarm | None:
        mean = abs(sum(moments, Moments()).mean)
        self._first = self._first or mean
        if not mean:
            return None
        tolerance = max(at.LOSS_TOLERANCE, at.LOSS_TOLERANCE_OF_FIRST * (self._first / mean) ** 2)
        found = deviations(moments, measured, tolerance * mean)
        named = self._shifts.add(found) if found else None
        if named is None:
            return None
        return Alarm(
            f"rank-loss-{named.rank}",
            f"rank {named.rank}: its mean loss less the others' is {named.difference:.4g} over the last {at.COMPARED}"
            f" logs, {abs(named.unusual):.1f} standard errors"
            f"{OF_TWO if len(measured) == 2 else ''}; {LOOK_AT}",
        )


def _not_finite(broken: list[int], others: list[int]) -> Alarm:
    if others:
        return Alarm(
            f"rank-loss-not-finite-{broken[0]}",
            f"the loss of rank {_listed(broken)} is not finite, that of rank {_listed(others)} is; "
            "look at its data (an empty micro-batch, an outlier) and its precision",
        )
    words = "the loss is not finite on any rank that has one; look at the learning rate and the precision"
    return Alarm("loss-not-finite", words)


def deviations(moments: tuple[Moments, ...], measured: list[int], tolerance: float = 0.0) -> list[Deviation]:
    """Every measured rank against all others together.

    With d = S - (rank's mean) n for every micro-batch of n items and D the sum of all d^2, the variance of a rank's
    mean is the larger of

        D / A * sum(n^2) / sum(n)^2     where a micro-batch's noise does not fall with its items, and
        D / B / sum(n)                  where it falls with their square root,

    A and B being the sums of n^2 and of n over all micro-batches, each rank's times 1 - 1 / m_eff for the mean that was
    taken from the same numbers. There are sum(m_eff - 1) degrees of freedom.

    Source: Cochran 1977, "Sampling Techniques", section 9A (both variances); the within-rank deviations as in a one-way
    analysis of variance, so that a rank that is off does not hide itself.
    """
    freedom = sum(moments[rank].effective_micro_batches - 1 for rank in measured)
    if freedom < 2:
        return []
    total, squares, by_squares, by_items = Moments(), 0.0, 0.0, 0.0
    for its in (moments[rank] for rank in measured):
        free = 1 - 1 / its.effective_micro_batches
        total += its
        squares += its.deviations_squared
        by_squares += free * its.items_squared
        by_items += free * its.items

    def variance(part: Moments) -> float:
        return max(squares / by_squares / part.effective_micro_batches, squares / by_items / part.items)

    found = []
    for rank in measured:
        its = moments[rank]
        others = total - its
        error = math.sqrt(variance(its) + variance(others))
        found.append(Deviation(rank, its.mean - others.mean, error, freedom, tolerance))
    return found


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
