"""What rides in a window's collective, and who looks at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_accum_fix.engines import ranks
from hf_accum_fix.errors import RankError

ZERO = torch.zeros((), dtype=torch.float64)


def summed(*lengths: int, failed: int = 0) -> torch.Tensor:
    """The marks of ranks that run so many micro-batches, the last ``failed`` of them in trouble."""
    troubles = [None] * (len(lengths) - failed) + [ValueError("theirs")] * failed
    each = zip(lengths, troubles, strict=True)
    return torch.stack([torch.stack(ranks.pack_status(length, trouble, ZERO)) for length, trouble in each]).sum(dim=0)


def check(
    sums: Any, mine: int, world_size: int, trouble: Exception | None = None, *others: Any, suspects: bool = False
) -> None:
    """``others``: what the other ranks gather."""
    place = {"fetched": mine, "rank": 0, "world_size": world_size}
    ranks.check_status(sums, mine, trouble, suspects=suspects, gather=lambda own: [*own, *others], **place)


def test_ranks_that_run_alike_go_on() -> None:
    check(summed(3, 3, 3), 3, 3)
    check(summed(0, 0), 0, 2)


def test_a_rank_whose_length_is_the_mean_of_the_others_sees_them_differ() -> None:
    with pytest.raises(RankError, match="rank 0 has 3, rank 1 has 2, rank 2 has 4"):
        check(summed(3, 2, 4), 3, 3, None, (None, 2), (None, 4))


def test_the_rank_at_fault_raises_its_own_error_and_the_others_name_it() -> None:
    with pytest.raises(ValueError, match="mine"):
        check(summed(1, 1, failed=1), 1, 2, ValueError("mine"), (None, 1))
    with pytest.raises(RankError, match="rank 0 stops, because of rank 1: ValueError: theirs"):
        check(summed(1, 1, failed=1), 1, 2, None, ("ValueError: theirs", 1))


def test_on_another_device_only_a_suspect_waits_for_it() -> None:
    read: list[str] = []

    def tolist() -> list[float]:
        read.append("read")
        return summed(3, 1).tolist()

    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), tolist=tolist)
    check(on_a_gpu, 3, 2)
    assert read == []
    with pytest.raises(RankError, match="rank 0 has 1"):
        check(on_a_gpu, 1, 2, suspects=True)


def test_alone_a_rank_raises_what_it_met() -> None:
    assert ranks.all_gather_or_raise("said", None, rank=0, world_size=1, gather=list) == ["said"]
    with pytest.raises(ValueError, match="mine"):
        ranks.all_gather_or_raise("said", ValueError("mine"), rank=0, world_size=1, gather=list)
