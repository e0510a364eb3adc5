"""What the ranks have to tell one another, so that none waits for ever for one that has failed or has nothing to run.

A rank that meets an error before a collective keeps it, joins the collective, and raises it afterwards; the others
raise a `RankError` that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object as gather_object
from torch import Tensor

from hf_accum_fix.errors import RankError, UnevenRanksError

logger = logging.getLogger("hf_accum_fix")

Said = TypeVar("Said")
Gather = Callable[[list[Any]], list[Any]]


def agreed(
    said: Said, trouble: Exception | None, *, rank: int, world_size: int, gather: Gather | None = None
) -> list[Said]:
    """What every rank says, in their order, unless one of them is in trouble; every rank calls this alike.

    Args:
        said: what this rank says; it is pickled.
        trouble: what this rank failed with; None: nothing.
        rank: of this process.
        world_size: processes.
        gather: makes one list of the ranks' lists, in their order; None: accelerate does.

    Raises:
        Exception: ``trouble`` itself.
        RankError: on the other ranks, where one is in trouble.
    """
    if world_size == 1:
        if trouble is not None:
            raise trouble
        return [said]
    told = None if trouble is None else f"{type(trouble).__name__}: {trouble}"
    gathered: list[tuple[str | None, Said]] = (gather or gather_object)([(told, said)])
    failed = by_rank([each for each, _ in gathered])
    if trouble is not None:
        # The others' messages name this rank; its own error is what it was.
        logger.error("rank %d stops: %s", rank, told)
        raise trouble
    if failed:
        raise RankError(
            f"rank {rank} stops, because of {failed}; no rank can go on alone; look at that rank's traceback"
        )
    return [each for _, each in gathered]


def by_rank(said: Sequence[object]) -> str:
    """``rank 0: ...; rank 1: ...``, without those that have nothing to say."""
    return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each is not None)


def marks(runs: int, trouble: Exception | None, like: Tensor) -> list[Tensor]:
    """Three numbers that ride in a sum over ranks, for `check_marks` to read.

    Args:
        runs: what must be the same on every rank, such as its micro-batches.
        trouble: what this rank failed with; None: nothing.
        like: 0-dim tensor of the dtype and device wanted.
    """
    return [torch.full_like(like, value) for value in (runs, runs * runs, trouble is not None)]


def check_marks(
    summed: Tensor,
    runs: int,
    trouble: Exception | None,
    *,
    fetched: int,
    rank: int,
    world_size: int,
    suspects: bool,
    gather: Gather | None = None,
) -> None:
    """Raise where a rank is in trouble or runs another number of micro-batches than the others.

    On a CPU every rank reads what was summed, and all of them raise. On another device reading it would wait for the
    device, so that only a rank with a reason to suspect something reads it; the launcher ends the others when it ends.

    Args:
        summed: the three numbers of `marks`, summed over ranks.
        runs: as given to `marks`.
        trouble: as given to `marks`.
        fetched: micro-batches of this rank, for the error to tell.
        rank: of this process.
        world_size: processes.
        suspects: whether this rank has a reason.
        gather: as in `agreed`.

    Raises:
        Exception: ``trouble`` itself.
        RankError: otherwise.
    """
    together = summed.device.type == "cpu"
    if not (together or suspects or trouble is not None):
        return
    total, squares, failed = summed.tolist()
    # By Cauchy and Schwarz, equality holds where all are alike.
    alike = total * total == world_size * squares
    if alike and not failed:
        return
    if not together:
        raise trouble or uneven({rank: fetched})
    raise uneven(dict(enumerate(agreed(fetched, trouble, rank=rank, world_size=world_size, gather=gather))))


def uneven(runs: dict[int, int]) -> UnevenRanksError:
    """The refusal of ranks that do not run alike, by what each of them has."""
    told = ", ".join(f"rank {rank} has {count}" for rank, count in runs.items())
    return UnevenRanksError(
        f"the ranks do not have the same number of micro-batches in this window ({told}), so that some would wait for "
        "ever; every rank needs one, and under FSDP and DeepSpeed as many as the others: let accelerate even the "
        "batches out (even_batches=True), or drop the rest"
    )
