"""Ranks that are given one another's samples, in another order or some steps later.

Symptom: twice the ranks, and no faster learning: a sampler without rank or seed, a stream that every rank reads from
its beginning. `RankLoss` finds ranks with equal losses; here the samples themselves are compared.

Of each rank's samples the 64 with the smallest hashes are kept, which are the same ones on every rank that saw them. A
sample that is augmented, or padded to another length, has another hash. For such data pass indices.

Source: bottom-k sketches, Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from hf_accum_fix.monitor.alarms import Alarm, Gathered
from hf_accum_fix.monitor.ranks import Ranks, TorchRanks
from hf_accum_fix.monitor.thresholds import FEWEST_HASHES, HASHES, REPEATS, SHARED, SHARED_IN_A_ROW

#: No hash; bits of one: float64 holds them all.
_NONE, _BITS = -1.0, 52


@dataclass(frozen=True)
class SharedSamplesReading:
    """The smallest hashes of each rank's samples since the last reading, and of those before it."""

    now: tuple[tuple[int, ...], ...]  # of each rank
    before: tuple[tuple[int, ...], ...]  # of each rank

    def share(self, rank: int, other: int) -> float:
        """Share of a rank's samples since the last reading that another rank had then or in the reading before."""
        mine, theirs = set(self.now[rank]), {*self.now[other], *self.before[other]}
        return len(mine & theirs) / len(mine) if mine else 0.0

    def repeats(self, rank: int) -> bool:
        """Whether a rank had samples of its own twice: an epoch shorter than two readings, in which ranks may too."""
        seen = self.now[rank] + self.before[rank]
        return len(set(seen)) < (1 - REPEATS) * len(seen)


class SharedSamples(Gathered[SharedSamplesReading]):
    """Compare the ranks' samples of the last two readings.

    Args:
        ranks: the data-parallel ranks; None: torch.distributed.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or TorchRanks()
        self._now: Tensor | None = None
        self._before = torch.full((HASHES,), _NONE, dtype=torch.float64)
        self._weights = torch.empty(0, dtype=torch.int64)
        self._times = 0

    def update(self, samples: Tensor) -> None:
        """Take one micro-batch into account; no device sync.

        Args:
            samples: [samples, ...], of any type: inputs as the model gets them, or indices.
        """
        if not samples.numel():
            return
        rows = samples.detach().reshape(len(samples), -1)
        rows = (rows.float().view(torch.int32) if rows.is_floating_point() else rows).long()
        if self._weights.numel() < rows.shape[1] or self._weights.device != rows.device:
            draw = torch.Generator().manual_seed(0)
            self._weights = (
                torch.randint(1, torch.iinfo(torch.int64).max, (rows.shape[1],), generator=draw).to(rows.device) | 1
            )
        hashes = _mixed((rows * self._weights[: rows.shape[1]]).sum(1)) & (2**_BITS - 1)
        hashes = hashes if self._now is None else torch.cat([self._now.to(hashes.device), hashes])
        self._now = hashes.topk(min(HASHES, len(hashes)), largest=False, sorted=False).values

    def row(self) -> Tensor:
        now = torch.full((HASHES,), _NONE, dtype=torch.float64)
        if self._now is not None:
            now[: len(self._now)] = self._now.cpu()
        row = torch.cat([now, self._before])
        self._now, self._before = None, now
        return row

    def reading(self, table: Tensor) -> SharedSamplesReading:
        halves = table.view(-1, 2, HASHES).tolist()
        kept = [[tuple(int(value) for value in half if value != _NONE) for half in of_rank] for of_rank in halves]
        return SharedSamplesReading(tuple(its[0] for its in kept), tuple(its[1] for its in kept))

    def judge(self, reading: SharedSamplesReading) -> Alarm | None:
        """An alarm where a rank had half of another's samples, twice in a row. Every rank judges alike."""
        ranks = [
            rank for rank, its in enumerate(reading.now) if len(its) >= FEWEST_HASHES and not reading.repeats(rank)
        ]
        share, one, other = max(
            ((max(reading.share(a, b), reading.share(b, a)), a, b) for a, b in combinations(ranks, 2)),
            default=(0.0, -1, -1),
        )
        self._times = self._times + 1 if share > SHARED else 0
        if self._times < SHARED_IN_A_ROW:
            return None
        return Alarm(
            "ranks-share-samples",
            f"ranks {one} and {other} are given {share:.0%} of the same samples, at once or some steps apart; look at "
            "the sampler (DistributedSampler, set_epoch, its seed and rank) and at how a stream is split",
        )


def _mixed(hashes: Tensor) -> Tensor:
    """Every bit depends on every other (the finaliser of MurmurHash3)."""
    for factor in (-49064778989728563, -4265267296055464877):
        hashes = (hashes ^ ((hashes >> 33) & 0x7FFFFFFF)) * factor
    return hashes ^ ((hashes >> 33) & 0x7FFFFFFF)
