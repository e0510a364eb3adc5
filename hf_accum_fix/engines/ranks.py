"""Raise errors on every rank, so that none waits for ever for one that failed or has nothing to run.

A rank with an error before a collective keeps it, joins the collective, and raises it afterwards; the others raise a
`RankError` that names the rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_accum_fix.errors import RankError, UnevenRanksError
from hf_accum_fix.learning.contract import LossContract
from hf_accum_fix.learning.look import LossRun
from hf_accum_fix.options import Options

logger = logging.getLogger("hf_accum_fix")

Value = TypeVar("Value")
#: The attribute of an error that the other ranks were told of.
_TOLD = "_hf_accum_fix_told"
Gather = Callable[[list[Any]], list[Any]]
#: How long a rank that failed waits to hear that the others did; below the ten minutes in which NCCL gives up.
PATIENCE: Final = timedelta(minutes=5)
_failures = count()


@dataclass(eq=False)
class World:
    """The processes of a training, as this one sees them."""

    rank: int  # this process among all
    size: int  # processes in a collective
    data_ranks: int  # W, data-parallel ranks
    shards: bool  # the ranks meet in every micro-batch, not only in the last one of a window
    device: torch.device  # of counts
    cuts_samples: bool = False  # several ranks hold a part of each sample
    #: what the engine divides the sum over W ranks by, of W, where they share samples; None: not measured.
    over_ranks: float | None = None


class Training(Protocol):
    """What engines, data, router and coupled losses ask of a training (`window.host.Host`)."""

    options: Options
    world: World
    name: str  # of the trainer
    accelerator: Any  # the ``accelerate.Accelerator``; None: there is none
    warned: set[str]  # names of the warnings that were given
    state: Any  # of its windows
    context_parallel: bool  # its step would cut samples
    in_pieces: Any = None  # a `pieces.in_pieces.InPieces`; None: its options are off

    @property
    def model(self) -> nn.Module:
        """The model, but for DDP."""

    @property
    def rounds_products(self) -> bool:
        """Whether matrix products are less precise than float32."""

    @property
    def zero(self) -> Tensor:
        """A count of nothing, 0-dim."""

    @property
    def head(self) -> str:
        """The model's class, for messages."""

    @property
    def where(self) -> str:
        """The open window, for messages."""

    @property
    def steps(self) -> int:
        """G of a full window."""

    @property
    def contract(self) -> LossContract | None:
        """How the loss is reduced; None: it was not observed yet."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Sum numbers over ranks: a collective."""

    def gather(self, values: list[Any]) -> list[Any]:
        """Concatenate the ranks' lists in order: a collective."""

    def run_counting(self, batches: Sequence[Any]) -> AbstractContextManager[LossRun]:
        """The trained loss, to be run on micro-batches of a window while the context is open."""

    def all_of(self, value: Value, error: Exception | None) -> list[Value]:
        """The value of every rank, in order; the error of one is raised on all."""

    def contained(self, what: str, look: Callable[[], Value], instead: Value) -> Value:
        """The result of looking at something, or ``instead`` if that fails."""

    def note_trouble(self, what: str, error: Exception) -> None:
        """Warn once that a look failed; from the next window on the training is stock's, on every rank."""

    def warn_once(self, name: str, message: str) -> None:
        """Warn once for each name."""

    def warn_inexact(self, name: str, message: str) -> None:
        """Warn once, and count this window as inexact."""

    def note(self, **facts: Any) -> None:
        """Keep more facts for report()."""

    def bare(self, model: nn.Module) -> nn.Module:
        """The model without the engine's wrappers."""


def all_gather_or_raise(
    value: Value, error: Exception | None, *, rank: int, world_size: int, gather: Gather
) -> list[Value]:
    """Gather a value from every rank, in their order, or raise if one has an error; every rank must call this.

    ``gather`` concatenates the ranks' lists in order. The values are pickled.

    Raises:
        Exception: ``error`` itself.
        RankError: on the other ranks, if one has an error.
    """
    if world_size == 1:
        if error is not None:
            raise error
        return [value]
    message = None if error is None else f"{type(error).__name__}: {error}"
    gathered: list[tuple[str | None, Value]] = gather([(message, value)])
    failed = by_rank([each for each, _ in gathered])
    if error is not None:
        # The others' messages name this rank; its own error is unchanged.
        logger.error("rank %d stops: %s", rank, message)
        vars(error)[_TOLD] = True
        raise error
    if failed:
        raise RankError(
            f"rank {rank} stops, because of {failed}; no rank can continue alone; look at that rank's traceback"
        )
    return [each for _, each in gathered]


def is_told(error: Exception) -> bool:
    """Whether the other ranks stop because of this error, so that this one must not go on alone."""
    return _TOLD in vars(error)


def fails_everywhere(rank: int, world_size: int) -> bool:
    """Whether every rank comes here, with an error of its own; False: others wait in a collective for this one.

    Not by a collective, which could meet the one that they wait in.
    """
    if world_size == 1:
        return True
    store = dist.distributed_c10d._get_default_store()
    number = next(_failures)
    keys = [f"hf_accum_fix/failed/{number}/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError:
        logger.error("rank %d failed alone; the others wait for it", rank)
        return False
    return True


def by_rank(messages: Sequence[object]) -> str:
    """``rank 0: ...; rank 1: ...``, without those that are None."""
    return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(messages) if each is not None)


def pack_status(runs: int, error: Exception | None, like: Tensor) -> list[Tensor]:
    """Three numbers to add to a sum over ranks, for `check_status` to read.

    ``runs`` must be the same on every rank, such as its micro-batches; ``like``: 0-dim, of the dtype and device wanted.
    """
    return [torch.full_like(like, value) for value in (runs, runs * runs, error is not None)]


def check_status(
    summed: Tensor,
    runs: int,
    error: Exception | None,
    *,
    fetched: int,
    rank: int,
    world_size: int,
    suspects: bool,
    gather: Gather,
) -> None:
    """Raise if a rank has an error or runs another number of micro-batches than the others.

    On a CPU every rank reads the sums, and all of them raise. On another device reading would wait for the device, so
    that only a rank with a reason to suspect something reads them; the launcher ends the others when it ends.

    ``summed``: `pack_status` of ``runs`` and ``error``, summed over ranks; ``fetched``: micro-batches of this rank, for
    the error message; ``suspects``: this rank has a reason to read.

    Raises:
        Exception: ``error`` itself.
        RankError: otherwise.
    """
    together = summed.device.type == "cpu"
    if not (together or suspects or error is not None):
        return
    total, squares, failed = summed.tolist()
    # By Cauchy-Schwarz, equality holds if all ranks run equally many.
    alike = total * total == world_size * squares
    if alike and not failed:
        return
    if not together:
        error = error or uneven({rank: fetched})
        vars(error)[_TOLD] = True
        raise error
    raise uneven(dict(enumerate(all_gather_or_raise(fetched, error, rank=rank, world_size=world_size, gather=gather))))


def uneven(runs: dict[int, int]) -> UnevenRanksError:
    """The error for ranks with unequal numbers of micro-batches."""
    counts = ", ".join(f"rank {rank} has {count}" for rank, count in runs.items())
    return UnevenRanksError(
        f"got unequal numbers of micro-batches in this window ({counts}); expected at least one on every rank, and "
        "under FSDP and DeepSpeed equally many, since others would wait for ever; set even_batches=True in accelerate, "
        "or drop the rest"
    )
