"""The tests' own way to start ranks: every rank's result, or the traceback of the one that failed."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailedError, on_ranks


def summed(factor: int) -> tuple[str, int]:
    number = torch.tensor(factor * (dist.get_rank() + 1))
    dist.all_reduce(number)
    return os.environ["LOCAL_RANK"], int(number)


def fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()


def test_every_ranks_result_is_returned() -> None:
    assert on_ranks(summed, 2, ranks=3) == [("0", 12), ("1", 12), ("2", 12)]


def test_the_traceback_of_a_rank_that_fails_is_raised() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed:.*in fails_on_one.*ValueError: out of luck"):
        on_ranks(fails_on_one)
