"""What opening and closing a window ask of a training: the Trainer's, or a hand-written loop's."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Run(Protocol):
    """A training: its ranks, its engine, and how it warns."""

    @property
    def head(self) -> str:
        """The model's class, for words."""

    @property
    def steps(self) -> int:
        """G of a window that is not the short one at the end of an epoch."""

    @property
    def device(self) -> torch.device:
        """Where counts are."""

    @property
    def rank(self) -> int:
        """This process among all."""

    @property
    def world_size(self) -> int:
        """Processes that meet in a collective."""

    @property
    def data_ranks(self) -> int:
        """W: those that hold samples of their own."""

    @property
    def engine_divisor(self) -> int:
        """What the engine divides a loss by."""

    @property
    def shards(self) -> bool:
        """Whether the ranks meet in every micro-batch, not only in the last one of a window."""

    @property
    def readable(self) -> bool:
        """Whether a window's numbers are read as it ends."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether the engine has taken the step within the backward."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Numbers summed over ranks: a collective."""

    def gather(self, said: list[Any]) -> list[Any]:
        """One list of the ranks' lists, in their order: a collective."""

    def tell(self, why: str, windows: int = 1) -> None:
        """Say that a window is not exact, or so many since the last log."""

    def warn_once(self, kind: str, message: str) -> None:
        """Warn once for each kind."""
